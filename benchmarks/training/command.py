"""The command line, the same for every device."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.training import machine, report
from benchmarks.training.cells import Cell
from benchmarks.training.result import Measured, to_json
from benchmarks.training.rounds import Bench
from benchmarks.training.table import notes, terminal

Cells = Callable[..., list[Cell]]


def main(module: str, device: str, cells: Cells) -> None:
    """Measure, print, write `benchmarks/results/NAME.json`, and from all such `docs/benchmarks.md`.

    Args:
        module: how it was called: `python -m MODULE`.
        device: the device of its cells, unless `--device` says another.
        cells: makes them, with `quick` or without.
    """
    given = _parser(module, device).parse_args()
    chosen = _chosen(cells(quick=given.quick), given)
    if given.list:
        print("\n".join(cell.id for cell in chosen))
        return
    result = {
        "benchmark": report.KIND,
        "name": given.name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "machine": machine.describe(given.device, given.threads),
        "versions": machine.versions(),
        "cells": [],
    }
    file = given.results / f"{given.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vox-bench-") as scratch:
        work = given.keep or Path(scratch)
        bench = Bench(given.device, given.models, work, given.threads, _say)
        for cell in chosen:
            measured = to_json(_tell(bench.measure(cell)))
            result["cells"].append(measured)
            # After each cell: a run that is cut short has what it measured.
            file.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    # A trial, whose results go elsewhere, leaves the page as it is.
    page = f" and {report.write()}" if given.results == report.RESULTS else ""
    print(f"wrote {file}{page}")


def _parser(module: str, device: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=__doc__)
    add = parser.add_argument
    add("--name", default=device, help="of the result's file")
    add("--device", default=device, choices=("cpu", "cuda"))
    add("--quick", action="store_true", help="fewer cells, rounds and steps")
    add("--cell", action="append", default=[], help="only cells whose id has this in it")
    add("--trainer", action="append", default=[], help="only these")
    add("--rounds", type=int, help="instead of the cells' own")
    add("--steps", type=int, help="instead of the cells' own")
    add("--per-step", type=int, help="documents of a step, instead of the cells' own")
    add("--model", help="instead of the cells' own, such as tiny")
    add("--threads", type=int, default=_cores())
    add("--results", type=Path, default=report.RESULTS, help="folder for the result")
    add("--models", type=Path, default=report.ROOT / ".bench", help="where made models are kept")
    add("--keep", type=Path, help="keep tasks, answers and logs of all runs in this folder")
    add("--list", action="store_true", help="name the cells and end")
    return parser


def _chosen(cells: list[Cell], given: argparse.Namespace) -> list[Cell]:
    """Select the cells of the command line, with its changes."""
    named = {key: getattr(given, key) for key in ("model", "rounds", "steps", "per_step")}
    changes = {key: value for key, value in named.items() if value is not None}
    if given.trainer:
        changes["trainers"] = tuple(given.trainer)
    changed = [replace(cell, **changes) for cell in cells if _asked_for(cell, given.cell)]
    return list({cell.id: cell for cell in changed}.values())


def _asked_for(cell: Cell, parts: list[str]) -> bool:
    return not parts or any(part in cell.id for part in parts)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell(measured: Measured) -> Measured:
    rows = to_json(measured)["rows"]
    print(f"\n{measured.cell.id}\n{terminal(rows)}\n\n{notes(rows)}\n", flush=True)
    return measured
