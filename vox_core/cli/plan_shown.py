"""A plan for a person: a table, what fits, and what to be warned of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from vox_core.cli.account import told
from vox_core.cli.output import duration, megabytes, print_columns, print_table, printable

if TYPE_CHECKING:
    from vox_core.memory import Option
    from vox_core.run.planning import DiskPlan, MemoryPlan, PlanReport

_HEADLINE = ("rows", "documents", "tokens", "trained_tokens", "longest")


def show(report: PlanReport) -> None:
    """All of it; warnings go to stderr."""
    print_table(_rows(report))
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
    yield "peak memory", _peak(report.memory)
    if report.memory.measured is not None:
        yield "  so far", f"{megabytes(report.memory.measured)}, in the steps that were measured"
    for name, size in report.memory.parts.items():
        yield f"  {name}", megabytes(size)
    yield "disk", _room(report.disk)
    yield "to merge it", f"{_peak(report.merge.memory)}; disk {_room(report.merge.disk)}"
    yield "would write", f"{report.run}: {', '.join(report.writes)}"


def _model(report: PlanReport) -> str:
    model = report.model
    fetched = "; fetched just now, as train would" if model.fetched else ""
    return f"{model.id} ({model.model_type}), licence {model.licence or 'unknown'}{fetched}"


def _data(report: PlanReport) -> Iterator[tuple[str, str]]:
    if report.assumed:
        documents, tokens = report.assumed["documents"], report.assumed["tokens"]
        yield "data", f"none given; assumed: {documents} documents of {tokens} tokens a step"
    sides = ("data", report.data, "training"), ("held-out data", report.valid, "validation")
    for label, data, what in sides:
        if data is None:
            continue
        yield (
            label,
            f"{data['rows']} rows, {data['documents']} documents, {data['tokens']:,} tokens, "
            f"{data['trained_tokens']:,} trained; longest {data['longest']}",
        )
        yield from _beside(data)
        if audit := report.audit.get(what):
            yield "  masks", _masks(audit)
    yield from (("rows", line) for line in report.chosen)
    for what, found in report.found.items():
        if what != "rows":
            yield from ((_label(what), line) for line in told(found))


def _beside(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What else is in the account of some rows, whatever it is."""
    for what, found in data.items():
        if what not in _HEADLINE:
            yield from ((f"  {_label(what)}", line) for line in told(found))


def _masks(audit: Mapping[str, Any]) -> str:
    """Counts; what the audit warns of stands among the warnings."""
    ended, others = audit["rows_with_trained_end"], audit["rows_without_trained_end"]
    return (
        f"{audit['trained_share']:.1%} of the tokens are trained; {ended:,} of {ended + others:,} "
        "rows end with a trained end-of-turn token"
    )


def _label(key: str) -> str:
    return key.replace("_", " ")


def _steps(report: PlanReport) -> str:
    steps = report.steps
    number = "as many as the data gives" if steps.total is None else str(steps.total)
    text = f"{number}, of {steps.batch_size} conversations"
    if (work := steps.work) is None:
        text += f", about {steps.tokens:,} tokens"
    else:
        text += (
            f"; in all {work.documents:,} documents ({work.epochs:.4g} epochs), {work.tokens:,} "
            f"tokens, {work.trained_tokens:,} trained"
        )
    return f"{text}; at most {steps.largest['laid']:,} tokens at once"


def _speed(report: PlanReport) -> Iterator[tuple[str, str]]:
    speed = report.speed
    if speed is None:
        yield (
            "time",
            "unknown: no earlier run of this model here; --measure takes some steps",
        )
        return
    how = {
        "measured": f"{speed.steps} steps measured now",
        "tuned": "as it was tuned",
        "earlier": f"as in {speed.run} ({speed.steps} steps); --measure takes some of this run",
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


def _peak(memory: MemoryPlan) -> str:
    text = f"about {megabytes(memory.peak)}"
    if memory.free is not None:
        text += f" of {megabytes(memory.free)} free"
    if memory.total is not None:
        text += f", {megabytes(memory.total)} in all"
    return text + ("" if memory.fits is not False else ": more than there is")


def _room(disk: DiskPlan) -> str:
    return f"up to {megabytes(disk.needed)} of {megabytes(disk.free)} free in {disk.where}"


def _show_options(report: PlanReport) -> None:
    """The grid as far as it fits the largest memory in question, and what to begin with in each."""
    if not report.suggested:
        click.echo("what the device has is unknown; --memory SIZE suggests settings for a size")
        return
    limit = max(suggestion.memory for suggestion in report.suggested)
    click.echo(
        f"\nwhat fits in {megabytes(limit)}, with a tenth to spare, by --micro-batch-tokens:\n"
    )
    print_columns(_grid(report.options, limit))
    click.echo()
    for suggestion in report.suggested:
        option = suggestion.option
        least = min(each.peak for each in report.options)
        click.echo(
            f"{megabytes(suggestion.memory)}: "
            + (
                f"try {option.flags(report.quant)}   ({megabytes(option.peak)})"
                + (", measured to be the fastest here" if suggestion.measured else "")
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
