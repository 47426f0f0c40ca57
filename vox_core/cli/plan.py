"""`vox plan`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.cli.lazy import Command
from vox_core.cli.options import backend_origin, json_option, options_of, settings_from
from vox_core.cli.output import (
    duration,
    megabytes,
    print_columns,
    print_json,
    print_table,
    printable,
)
from vox_core.cli.progress import display
from vox_core.cli.train import SECTIONS as TRAIN_SECTIONS
from vox_core.config import TrainSettings

if TYPE_CHECKING:
    from vox_core.memory import Option
    from vox_core.run.planning import PlanReport

PRESETS = "presets"
PRESET_SIZES = tuple(size * 10**9 for size in (8, 16, 24, 48, 80))
SECTIONS = {**TRAIN_SECTIONS, "Plan": ("memory",)}

_UNITS = {"": 10**9, "mb": 10**6, "gb": 10**9, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def _sizes(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> list[int]:
    """The sizes in bytes, in the order in which they were given."""
    sizes: list[int] = []
    for text in given:
        sizes += PRESET_SIZES if text == PRESETS else [_size(text)]
    return list(dict.fromkeys(sizes))


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip().lower())
    unit = _UNITS.get(found[2]) if found else None
    if found is None or unit is None or not float(found[1]):
        raise click.BadParameter(f"{text!r} is not a size such as 24GB, 512MB or 24GiB")
    return round(float(found[1]) * unit)


def _memory_option() -> click.Option:
    return click.Option(
        ["--memory"],
        metavar="SIZE",
        multiple=True,
        callback=_sizes,
        help="Suggest settings for a device with so much memory, such as 24GB, in place of the one "
        f"that is here; `{PRESETS}`: 8, 16, 24, 48 and 80 GB. Repeatable.",
    )


@click.command(
    "plan",
    cls=Command,
    params=[*options_of(TrainSettings), _memory_option(), json_option()],
    sections=SECTIONS,
    epilog="Example: vox plan --model smollm2-135m --memory presets",
)
def plan(config_file: Path | None, as_json: bool, memory: list[int], **flags: Any) -> PlanReport:
    """What train would do, and the memory that it would need.

    Takes the settings of `vox train`, from the same places, and stops where it would begin. Works
    without --data too: then documents of --seq-len tokens are assumed. Writes nothing; a model that
    is not on this machine is fetched, as train would.
    """
    settings = settings_from(TrainSettings, config_file, flags)
    from vox_core.contract import Notice
    from vox_core.run.planning import plan as make_plan

    with display() as shown:
        report = make_plan(
            settings,
            memory=memory,
            backend_origin=backend_origin(TrainSettings, config_file, flags),
            progress=shown.transfer,
            tell=lambda text: shown.observe(Notice(text)),
        )
    if as_json:
        print_json(report)
    else:
        _show(report)
    return report


def _show(report: PlanReport) -> None:
    print_table(dict(_rows(report)))
    _show_options(report)
    for warning in report.warnings:
        click.echo(printable(f"warning: {warning}", lines=True), err=True)


def _rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    yield "backend", report.backend.why.removeprefix("backend ")
    yield "model", _model(report)
    yield "numbers", f"{report.dtype}, quantisation {report.quant}"
    yield from _data(report)
    yield "steps", _steps(report)
    adapter = report.adapter
    yield (
        "adapter",
        f"{adapter.method}, rank {adapter.rank}, {adapter.modules} modules, "
        f"{adapter.trainable_parameters:,} parameters",
    )
    yield from _speed(report)
    yield "peak memory", _peak(report)
    for name, size in report.memory.parts.items():
        yield f"  {name}", megabytes(size)
    disk = report.disk
    yield "disk", f"up to {megabytes(disk.needed)} of {megabytes(disk.free)} free in {disk.where}"
    yield "would write", f"{report.run}: {', '.join(report.writes)}"


def _model(report: PlanReport) -> str:
    model = report.model
    fetched = "; fetched just now, as train would" if model.fetched else ""
    return f"{model.id} ({model.model_type}), licence {model.licence or 'unknown'}{fetched}"


def _data(report: PlanReport) -> Iterator[tuple[str, str]]:
    if report.assumed:
        documents, tokens = report.assumed["documents"], report.assumed["tokens"]
        yield "data", f"none given; assumed: {documents} documents of {tokens} tokens a step"
    for label, data in (("data", report.data), ("held-out data", report.valid)):
        if data is None:
            continue
        yield (
            label,
            f"{data['rows']} rows, {data['documents']} documents, {data['tokens']:,} tokens, "
            f"{data['trained_tokens']:,} trained; longest {data['longest']}",
        )
        for what in ("left_out", "truncated", "dropped"):
            if data.get(what):
                told = ", ".join(f"{count} {reason}" for reason, count in data[what].items())
                yield f"  {what.replace('_', ' ')}", told


def _steps(report: PlanReport) -> str:
    steps = report.steps
    number = "as many as the data gives" if steps.total is None else str(steps.total)
    return (
        f"{number}, of {steps.batch_size} conversations, about {steps.tokens:,} tokens; "
        f"at most {steps.largest['laid']:,} tokens at once"
    )


def _speed(report: PlanReport) -> Iterator[tuple[str, str]]:
    speed = report.speed
    if speed is None:
        yield "speed", "not measured here; --tune refresh measures it, and what is fastest"
        return
    took = "" if speed.seconds is None else f", about {duration(speed.seconds)} for all steps"
    yield "speed", f"{speed.tokens_per_second:,.0f} tokens/s{took}"
    yield "  with", f"{speed.chosen}; {speed.gain:.2f} times as fast as the defaults"
    for what, reason in speed.refused.items():
        yield "  thrown out", f"{what}: {reason}"
    if speed.fast:
        yield "  fast", ", ".join(f"{count} {kind}" for kind, count in speed.fast.items())
    if speed.own:
        yield "  not fast", ", ".join(f"{count} {reason}" for reason, count in speed.own.items())


def _peak(report: PlanReport) -> str:
    memory = report.memory
    text = f"about {megabytes(memory.peak)}"
    if memory.free is not None:
        text += f" of {megabytes(memory.free)} free"
    if memory.total is not None:
        text += f", {megabytes(memory.total)} in all"
    return text + ("" if memory.fits is not False else ": more than there is")


def _show_options(report: PlanReport) -> None:
    """The grid as far as it fits the largest memory in question, and what to begin with in each."""
    if not report.suggested:
        click.echo("what the device has is unknown; --memory SIZE suggests settings for a size")
        return
    limit = max(suggestion.memory for suggestion in report.suggested)
    click.echo(f"\nwhat fits in {megabytes(limit)}, with a tenth to spare:\n")
    print_columns(_grid(report.options, limit))
    click.echo()
    for suggestion in report.suggested:
        option = suggestion.option
        least = min(each.peak for each in report.options)
        click.echo(
            f"{megabytes(suggestion.memory)}: "
            + (
                f"{option.flags(report.quant)}   ({megabytes(option.peak)})"
                if option
                else f"too little; the least is {megabytes(least)}"
            )
        )


def _grid(options: tuple[Option, ...], limit: int) -> Iterator[list[str]]:
    from vox_core.memory.fit import fitting

    budgets = sorted({option.micro_batch_tokens for option in options})
    yield ["--quant", "--gradient-checkpointing", *map(str, budgets)]
    fits = set(fitting(options, limit))
    for key in dict.fromkeys((option.quant, option.gradient_checkpointing) for option in options):
        row = [each for each in options if (each.quant, each.gradient_checkpointing) == key]
        cells = [megabytes(each.peak) if each in fits else "-" for each in row]
        yield [key[0], "on" if key[1] else "off", *cells]
