"""`vox eval`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.api.commands import (
    Command,
    EvalSettings,
    backend_origin,
    given,
    json_option,
    options_of,
    print_columns,
    print_json,
    printable,
    settings_from,
)
from vox_core.api.progress import display

if TYPE_CHECKING:
    from vox_eval.evaluation import Report
    from vox_eval.scorecard import TaskComparison, TaskScore
    from vox_eval.statistics import Interval


@click.command(
    "eval",
    cls=Command,
    params=[
        click.Argument(["reference"], metavar="RUN|MODEL"),
        *options_of(EvalSettings),
        json_option(),
    ],
)
def eval_(reference: str, config_file: Path | None, as_json: bool, **flags: Any) -> Report:
    """Score RUN|MODEL on suites of tasks, and compare it with another.

    RUN|MODEL is a run folder, an adapter saved by PEFT, a merged folder, or a base model. The same
    command continues an interrupted evaluation. --against says for each task whether RUN|MODEL is
    better or worse than the other, or that no difference is shown.
    """
    settings = settings_from(EvalSettings, config_file, flags)
    from vox_eval.evaluation import evaluate_and_compare

    origin = backend_origin(EvalSettings, config_file, given(flags))
    with display() as shown:
        report = evaluate_and_compare(
            reference, settings, observe=shown.observe, origin=origin, progress=shown.transfer
        )
    if as_json:
        print_json(_facts(report))
    else:
        _show(report)
    return report


def _facts(report: Report) -> dict[str, Any]:
    compared = {id: asdict(each) for id, each in (report.comparison or {}).items()}
    other = report.other and {"folder": report.other.folder, **report.other.card.to_json()}
    facts = {"folder": report.own.folder, **report.own.card.to_json()}
    return {**facts, **({"against": other, "comparison": compared} if other else {})}


def _show(report: Report) -> None:
    if report.comparison is None:
        print_columns([("task", "examples", "score", "95 % interval", ""), *_scores(report)])
    else:
        heads = "task", "score", "against", "difference", "p", "verdict"
        rows = [_compared(id, each) for id, each in report.comparison.items()]
        print_columns([heads, *rows])
        click.echo("intervals at 95 %; p-values are two-sided, adjusted by Holm's method")
    for each in filter(None, (report.own, report.other)):
        if each.card.score is not None:
            click.echo(printable(f"suite score {each.card.score:.4f}  {each.card.model}"))
    click.echo(printable(f"scorecard  {report.own.folder}"))


def _scores(report: Report) -> Iterator[Sequence[str]]:
    for id, task in report.own.card.tasks.items():
        more = ", ".join(f"{name} {value:.4f}" for name, value in task.metrics.items())
        yield id, str(task.examples), f"{task.score:.4f}", _range(task.interval), more


def _compared(id: str, each: TaskComparison) -> Sequence[str]:
    return (
        id,
        _with_range(each.first),
        _with_range(each.second),
        f"{each.difference:+.4f} ({_range(each.interval)})",
        f"{each.adjusted:.2g}",
        each.verdict,
    )


def _with_range(task: TaskScore) -> str:
    return f"{task.score:.4f} ({_range(task.interval)})"


def _range(interval: Interval) -> str:
    low, high = interval
    return f"{low:.4f} to {high:.4f}"
