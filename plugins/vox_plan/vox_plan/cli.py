"""`vox plan`: the command, and a plan as tables, what decides first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.api.commands import (
    TRAIN_SECTIONS,
    Command,
    counted,
    duration,
    files_argument,
    json_option,
    megabytes,
    options_of,
    print_columns,
    print_json,
    print_table,
    printable,
    settings_from,
    with_files,
)
from vox_core.api.progress import display
from vox_core.api.settings import TrainSettings
from vox_core.contract import SFT

if TYPE_CHECKING:
    from vox_plan.memory_forecast import Option
    from vox_plan.report import DiskPlan, MemoryPlan, PlanReport, ProcessesPlan, Suggestion

PRESETS = "presets"
_KEY = re.compile(r"[a-z]+(_[a-z]+)*")
PRESET_SIZES = tuple(size * 10**9 for size in (8, 16, 24, 48, 80))
SECTIONS = {
    **{
        title: tuple(name for name in names if name not in ("plan_file", "emit", "image"))
        for title, names in TRAIN_SECTIONS.items()
    },
    "Plan": ("memory", "measure"),
}

_HEADLINE = ("rows", "documents", "tokens", "trained_tokens", "longest")
_UNITS = {"": 10**9, "mb": 10**6, "gb": 10**9, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([a-z]*)")


def _sizes(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> list[int]:
    """Sizes in bytes, in the order of the flags."""
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


@click.command(
    "plan",
    cls=Command,
    params=[
        files_argument(),
        *options_of(TrainSettings),
        click.Option(
            ["--memory"],
            metavar="SIZE",
            multiple=True,
            callback=_sizes,
            help="Suggest settings for a device with this much memory, such as 24GB, instead of "
            f"this machine's; `{PRESETS}`: 8, 16, 24, 48 and 80 GB. Repeatable.",
        ),
        click.Option(
            ["--measure"],
            is_flag=True,
            help="Measure a few steps, without training, to estimate the run's time.",
        ),
        json_option(),
    ],
    sections=SECTIONS,
    epilog="Example: vox plan train.jsonl --model smollm2-135m --memory presets",
)
def plan(
    files: tuple[Path, ...],
    as_json: bool,
    memory: list[int],
    measure: bool,
    **flags: Any,
) -> PlanReport:
    """Predict what `vox train` would do: memory, time, disk.

    Takes the settings of `vox train`, from the same places, and stops where it would begin. FILES
    are data files, as --data names them; without data, documents of --seq-len tokens are assumed.
    Writes nothing; a model that is not on this machine is downloaded, as train would. `vox train
    --plan FILE` runs exactly what --json printed into FILE.
    """
    flags = with_files(files, flags)
    settings = settings_from(TrainSettings, flags)
    from vox_core.contract import Notice
    from vox_plan import planner

    with display() as shown:
        report = planner.plan(
            settings,
            memory=memory,
            to_be_run=as_json,
            measured=measure,
            progress=shown.transfer,
            tell=lambda text: shown.observe(Notice(text)),
        )
    if as_json:
        print_json(report)
    else:
        show(report)
    return report


def show(report: PlanReport) -> None:
    """Print all of it; warnings go to stderr."""
    print_table(_rows(report))
    _show_options(report)
    for warning in report.warnings:
        click.echo(printable(f"warning: {warning}", lines=True), err=True)


def _rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    if report.refused:
        yield "refused", report.refused
    yield "peak memory", _peak(report.memory, report.processes)
    if report.memory.measured is not None:
        yield "  so far", f"{megabytes(report.memory.measured)}, in the steps that were measured"
    full = report.adapter.method == "full"
    for name, size in report.memory.parts.items():
        if size:
            yield f"  {'optimizer' if full and name == 'adapter' else name}", megabytes(size)
    if processes := report.processes:
        yield (
            "processes",
            f"{processes.count}, on one machine: {megabytes(processes.memory)} together",
        )
        yield "  on the wire", f"{megabytes(processes.wire)} from each in a step, on average"
    yield from _speed(report)
    yield "backend", report.backend.why.removeprefix("backend ")
    yield "model", _model(report)
    yield (
        "precision",
        f"{report.dtype}, "
        + ("no quantization" if report.quant == "none" else f"quantized to {report.quant}"),
    )
    yield from _data(report)
    yield "steps", _steps(report)
    adapter = report.adapter
    parameters = f"{adapter.trainable_parameters:,} parameters"
    if full:
        yield "full fine-tuning", parameters
    else:
        kind = f"{adapter.method}, rank {adapter.rank}, {parameters}"
        modules = counted(adapter.modules, "module")
        yield "adapter", f"{kind}, {modules}: {', '.join(adapter.targets)}"
    yield "disk", _room(report.disk)
    if merge := report.merge:
        yield "to merge it", f"{_peak(merge.memory)}; disk {_room(merge.disk)}"
    yield "would write", f"{report.run}: {', '.join(report.writes)}"


def _model(report: PlanReport) -> str:
    model = report.model
    fetched = "; downloaded just now, as train would" if model.fetched else ""
    return f"{model.id} ({model.model_type}), licence {model.licence or 'unknown'}{fetched}"


def _data(report: PlanReport) -> Iterator[tuple[str, str]]:
    if report.assumed:
        documents = counted(report.assumed["documents"], "example")
        tokens = report.assumed["tokens"]
        yield "data", f"none given; assumed: {documents} of {tokens} tokens per step"
    sides = ("data", report.data, "training"), ("validation", report.valid, "validation")
    for label, data, what in sides:
        if data is None:
            continue
        audit = report.audit.get(what, {})
        unit = "prompt" if "prompts" in audit else "example"
        yield (
            label,
            f"{counted(data['rows'], 'row')}, {counted(data['documents'], unit)}, "
            f"{counted(data['tokens'], 'token')}"
            + (f", {trained:,} trained" if (trained := data["trained_tokens"]) else "")
            + f"; longest {data['longest']}",
        )
        for key in [each for each in data if each not in _HEADLINE]:
            yield from ((f"  {_words(key)}", line) for line in account_lines(data[key]))
        if audit:
            yield "  masks", _masks(audit)
    yield from (("rows", line) for line in report.chosen)
    for key in [each for each in report.found if each != "rows"]:
        yield from ((_words(key), line) for line in account_lines(report.found[key]))


def _masks(audit: Mapping[str, Any]) -> str:
    """Counts; the audit's findings are among the warnings."""
    if prompts := audit.get("prompts"):
        return f"{counted(prompts, 'prompt')}, which the model answers"
    ended, others = audit["rows_with_trained_end"], audit["rows_without_trained_end"]
    return (
        f"{audit['trained_share']:.1%} of the tokens are trained; {ended:,} of "
        f"{counted(ended + others, 'row')} with a trained end-of-turn token"
    )


def _steps(report: PlanReport) -> str:
    steps = report.steps
    number = "as many as the data gives" if steps.total is None else str(steps.total)
    text = f"{number}, of {counted(steps.batch_size, 'example')} each"
    if steps.answers:
        asked = counted(steps.batch_size, "prompt")
        text = f"{number}, of {counted(steps.answers, 'answer')} to each of {asked}"
    elif (work := steps.work) is None:
        text += f", about {steps.tokens:,} tokens"
    else:
        text += (
            f": {counted(work.epochs, 'epoch')}, or {counted(work.documents, 'example')} with "
            f"{work.tokens:,} tokens, {work.trained_tokens:,} of them trained"
        )
    return f"{text}; at most {steps.largest['laid']:,} tokens at once"


def _speed(report: PlanReport) -> Iterator[tuple[str, str]]:
    speed = report.speed
    if speed is None:
        why = "no earlier run of this model here; --measure runs a few steps"
        if report.objective != SFT.name or report.processes:
            why = "vox predicts that of supervised training in one process alone"
        yield "time", f"unknown: {why}"
        return
    steps = counted(speed.steps, "step")
    how = {
        "measured": f"{steps} measured now",
        "tuned": "as it was tuned",
        "earlier": f"as in {speed.run} ({steps}); --measure runs a few of this run",
    }
    yield "speed", f"{speed.tokens_per_second:,.0f} tokens/s, {how[speed.how]}"
    if speed.whole is not None and speed.seconds is not None:
        parts = {"loading": speed.loading, "validations": speed.validating}
        known = [f"{name} {duration(each)}" for name, each in parts.items() if each is not None]
        yield (
            "time",
            f"about {duration(speed.whole)}: "
            + ", ".join([f"steps {duration(speed.seconds)}", *known]),
        )
    if speed.chosen:
        yield "  with", f"{speed.chosen}; {speed.gain:.2f} times as fast as the defaults"
    for what, reason in speed.refused.items():
        yield "  thrown out", f"{what}: {reason}"
    if speed.fast:
        yield "  fast", ", ".join(f"{count} {kind}" for kind, count in speed.fast.items())
    if speed.own:
        yield "  not fast", ", ".join(f"{count} {reason}" for reason, count in speed.own.items())


def _peak(memory: MemoryPlan, processes: ProcessesPlan | None = None) -> str:
    text = f"about {megabytes(memory.peak)}"
    if memory.free is not None:
        text += f" of {megabytes(memory.free)} free"
    if memory.total is not None:
        text += f", {megabytes(memory.total)} in all"
    text += f", for each of {processes.count} processes" if processes else ""
    return text + ("" if memory.fits is not False else ": more than there is")


def _room(disk: DiskPlan) -> str:
    return f"up to {megabytes(disk.needed)} of {megabytes(disk.free)} free in {disk.where}"


def _show_options(report: PlanReport) -> None:
    """The grid as far as it fits the largest memory in question, and a suggestion for each."""
    if not report.suggested:
        click.echo("the device's memory is unknown; --memory SIZE suggests settings for a size")
        return
    limit = max(suggestion.memory for suggestion in report.suggested)
    click.echo(
        f"\nsettings that fit in {megabytes(limit)} with a 10 % margin, by --micro-batch-tokens:\n"
    )
    print_columns(_grid(report.options, limit))
    click.echo()
    for suggestion in report.suggested:
        click.echo(f"{megabytes(suggestion.memory)}: {_suggested(report, suggestion)}")


def _suggested(report: PlanReport, suggestion: Suggestion) -> str:
    option, steps = suggestion.option, report.steps
    if option is None:
        return f"too little; the least is {megabytes(min(each.peak for each in report.options))}"
    measured = ", measured to be the fastest here" if suggestion.measured else ""
    planned = (report.quant, steps.gradient_checkpointing, steps.micro_batch_tokens)
    if (option.quant, option.gradient_checkpointing, option.micro_batch_tokens) == planned:
        return f"these settings fit   ({megabytes(option.peak)}){measured}"
    return f"try {option.flags(report.quant)}   ({megabytes(option.peak)}){measured}"


def _grid(options: tuple[Option, ...], limit: int) -> Iterator[list[str]]:
    from vox_plan.memory_forecast import fitting

    fits, rows = set(fitting(options, limit)), dict[tuple[str, bool], list["Option"]]()
    for option in options:
        rows.setdefault((option.quant, option.gradient_checkpointing), []).append(option)
    columns = list(zip(*rows.values(), strict=True))
    # Beyond the largest step of the data, more tokens at once change nothing.
    columns = [
        column
        for before, column in zip([None, *columns], columns, strict=False)
        if before is None or [each.peak for each in before] != [each.peak for each in column]
    ]
    tokens = [str(column[0].micro_batch_tokens) for column in columns]
    yield ["--quant", "--gradient-checkpointing", *tokens]
    for number, (quant, recompute) in enumerate(rows):
        row = [column[number] for column in columns]
        cells = [megabytes(each.peak) if each in fits else "-" for each in row]
        yield [quant, "on" if recompute else "off", *cells]


def account_lines(found: Any) -> Iterator[str]:
    """Facts about rows as lines: counts, texts, and lists and mappings of either."""
    if isinstance(found, Mapping):
        nested = {k: v for k, v in found.items() if isinstance(v, Mapping | list | tuple)}
        if flat := ", ".join(_fact(k, v) for k, v in found.items() if k not in nested):
            yield flat
        for key, value in nested.items():
            yield from (f"{_words(key)}: {line}" for line in account_lines(value))
    elif found and isinstance(found, list | tuple) and all(type(each) is int for each in found):
        yield ", ".join(map(str, found))
    elif isinstance(found, list | tuple):
        yield from ("; ".join(account_lines(each)) for each in found)
    elif found not in (None, ""):
        yield f"{found:,}" if type(found) is int else str(found)


def _fact(key: object, value: object) -> str:
    """`2 no rating`; `side by content`."""
    return f"{value:,} {_words(key)}" if type(value) is int else f"{_words(key)} {value}"


def _words(key: object) -> str:
    """A key as words; the name of a file stays as it is."""
    return str(key).replace("_", " ") if _KEY.fullmatch(str(key)) else str(key)
