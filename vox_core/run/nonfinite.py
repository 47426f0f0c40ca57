"""Steps whose loss or gradient is not finite: log their rows, and end the run after several.

    bad_batches.jsonl    {"step", "loss", "grad_norm", "documents": [{"document", "file", "line"}]}

`document` counts from 0 in the data set, `line` from 1 in its file. A number that is not finite is
the text "nan", "inf" or "-inf". The file is written anew for each step, since there are few.

A resumed run counts on: the steps in a row before it are those of the file. What an earlier process
wrote of steps that are now taken again is left out first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from vox_core import files
from vox_core.contract import Notice, StepSkipped, TrainState
from vox_core.data.batching import documents_in_step
from vox_core.data.dataset import Dataset
from vox_core.errors import StorageError, TrainingError, command

SHOWN = 3
_LOWER = ("--allow-change", "lr", "--lr", "LOWER")


class NonFiniteSteps:
    """The steps of a run that were skipped.

    Args:
        path: `bad_batches.jsonl`.
        limit: so many in a row end the run.
        batch_size, seed: of the contract; they decide which documents a step has.
        after: the step that the run goes on after.

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(
        self, path: Path, limit: int, dataset: Dataset, batch_size: int, seed: int, *, after: int
    ) -> None:
        self._path, self._limit = path, limit
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        there = _read(path)
        self._lines = [line for line in there if line["step"] <= after]
        if len(self._lines) != len(there):
            self._write()
        skipped, self._row = {line["step"] for line in self._lines}, list[int]()
        while after - len(self._row) in skipped:
            self._row.append(after - len(self._row))

    def applied(self) -> None:
        """A step was applied."""
        self._row.clear()

    def skipped(
        self, event: StepSkipped, checkpoints: Callable[[], list[Path]]
    ) -> Iterator[Notice]:
        """Write the step down, and say so.

        Args:
            checkpoints: those to go on from, newest first.

        Raises:
            TrainingError: T001, there were too many in a row.
        """
        self._row.append(event.step)
        self._lines.append({**_numbers(event), "documents": self._documents(event.step)})
        yield Notice(self._words(event), "warning")
        try:
            self._write()
        except StorageError as error:
            yield Notice(f"{self._path.name} cannot be written: {error.what}", "warning")
        if len(self._row) >= self._limit:
            raise self._too_many(event, checkpoints())

    def _documents(self, step: int) -> list[dict[str, Any]]:
        chosen = documents_in_step(self._dataset, self._batch_size, self._seed, step)
        found = ((index, self._dataset[index]) for index in chosen.tolist())
        return [{"document": n, "file": str(d.source), "line": d.line} for n, d in found]

    def _words(self, event: StepSkipped) -> str:
        of = self._lines[-1]["documents"]
        places = [f"{each['file']}:{each['line']}" for each in of[:SHOWN]]
        more = f" and {len(of) - SHOWN} more" if len(of) > SHOWN else ""
        return f"step {event.step} was not applied: {_fault(event)}; rows {', '.join(places)}{more}"

    def _write(self) -> None:
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines)
        files.write_text(self._path, "".join(lines))

    def _too_many(self, event: StepSkipped, checkpoints: list[Path]) -> TrainingError:
        count, run = len(self._row), self._path.parent
        going_on = command("vox", "train", "--resume", run, *_LOWER)
        return TrainingError(
            "T001",
            f"{count} steps in a row were not finite"
            if count > 1
            else "the loss or the gradient of a step is not finite",
            where=self._path,
            found=f"{_fault(event)}; the last good checkpoint is "
            + (str(checkpoints[0]) if checkpoints else "none yet"),
            remedy=f"look at these rows; go on with {going_on}, or train again with a lower --lr, "
            "or with --dtype fp32",
        )


def require_finite(state: TrainState, checkpoints: Path) -> None:
    """Refuse to keep an adapter that holds no numbers, and leave the checkpoints before it.

    Raises:
        TrainingError: T001.
    """
    import numpy as np

    bad = [name for name, value in state.adapter.tensors().items() if not np.isfinite(value).all()]
    if bad:
        raise TrainingError(
            "T001",
            "the adapter is not finite",
            where=checkpoints,
            found=f"after step {state.step}: {bad[0]}, and {len(bad) - 1} more tensors",
            remedy="go on from the checkpoint before it: "
            + command("vox", "train", "--resume", checkpoints.parent, *_LOWER),
        )


def _read(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    lines.append(line)
    return lines


def _numbers(event: StepSkipped) -> dict[str, Any]:
    numbers = {"loss": event.loss, "grad_norm": event.grad_norm}
    told = {name: _plain(value) for name, value in numbers.items()}
    return {"step": event.step, **told}


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _fault(event: StepSkipped) -> str:
    if event.loss is not None and math.isfinite(event.loss):
        return f"the gradient norm is {event.grad_norm}, the loss {event.loss:.4g}"
    return f"the loss is {event.loss}"
