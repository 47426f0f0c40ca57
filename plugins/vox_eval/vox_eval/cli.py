"""`vox eval`, `vox promote` and `vox registry`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.api.commands import (
    Command,
    Group,
    json_option,
    options_of,
    print_columns,
    print_json,
    printable,
    settings_from,
)
from vox_core.api.progress import display
from vox_core.errors import ConfigError
from vox_eval.settings import EvalSettings

if TYPE_CHECKING:
    from vox_eval.evaluation import Report
    from vox_eval.gate import Decision
    from vox_eval.promotion import Promotion
    from vox_eval.scorecard import TaskComparison, TaskScore
    from vox_eval.statistics import Interval


@click.command(
    "eval",
    cls=Command,
    params=[
        click.Argument(["reference"], metavar="RUN|MODEL"),
        *options_of(EvalSettings),
        click.Option(["--harness"], help="Evaluate with another harness: lm-eval."),
        click.Option(["--tasks"], help="Tasks of the harness, separated by commas."),
        json_option(),
    ],
)
def eval_(
    reference: str,
    harness: str | None,
    tasks: str | None,
    as_json: bool,
    **flags: Any,
) -> Report:
    """Score RUN|MODEL on suites of tasks, and compare it with another.

    RUN|MODEL is a run folder, an adapter saved by PEFT or mlx-lm, a merged folder, or a base
    model, here or on the hub (OWNER/NAME). The same command continues an interrupted evaluation.
    --against says for each task whether RUN|MODEL is better or worse than the other, or that no
    difference is shown.
    """
    settings = settings_from(EvalSettings, flags)
    if bool(harness) != bool(tasks) or (harness and settings.suite):
        raise click.UsageError("give --suite, or --harness with --tasks")
    from vox_eval.evaluation import evaluate_and_compare

    evaluate = _harness(harness, tasks) if harness and tasks else evaluate_and_compare
    with display() as shown:
        report = evaluate(
            reference, settings=settings, observe=shown.observe, progress=shown.transfer
        )
    if as_json:
        print_json(_facts(report))
    else:
        _show(report)
    return report


def _harness(name: str, tasks: str) -> Callable[..., Report]:
    """Return the harness that a package provides as an entry point of its name.

    Raises:
        ConfigError: C009, no package does.
    """
    group = "vox_eval.harnesses"
    found = [each for each in entry_points(group=group) if each.name == name]
    if not found:
        known = ", ".join(sorted(each.name for each in entry_points(group=group)))
        raise ConfigError(
            "C009",
            f"no installed package has the harness {name!r}",
            where="--harness",
            expected=known or None,
            remedy="vox plugin install scorers; it has lm-eval",
        )
    names = [task for part in tasks.split(",") if (task := part.strip())]
    return partial(found[0].load(), tasks=names)


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
            where = f"  {each.folder}" if report.other else ""
            click.echo(printable(f"suite score {each.card.score:.4f}  {each.name}{where}"))
    from vox_eval.page import PAGE
    from vox_eval.scorecard import SAMPLES

    folder, page = report.own.folder, report.own.folder / PAGE
    shown = page if page.is_file() else folder
    click.echo(printable(f"scorecard  {shown}   answers  {folder / SAMPLES}"))


def _scores(report: Report) -> Iterator[Sequence[str]]:
    for id, task in report.own.card.tasks.items():
        more = ", ".join(f"{name} {value:.4f}" for name, value in task.metrics.items())
        yield id, str(task.examples), task.shown, _range(task.interval), more


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
    return f"{task.shown} ({_range(task.interval)})"


def _range(interval: Interval | None) -> str:
    return "{:.4f} to {:.4f}".format(*interval) if interval else "equal values"


# --- vox promote ----------------------------------------------------------------------------------

SHOWN_LEAKS = 10
REFUSED = 1
"""Exit code of any answer but yes."""


@click.command(
    "promote",
    cls=Command,
    params=[
        click.Argument(["reference"], metavar="RUN|MODEL"),
        click.Option(
            ["--gate", "gate_file"],
            type=click.Path(path_type=Path),
            help="Gate file (TOML): suites, requirements, limits.",
        ),
        click.Option(
            ["--over"],
            metavar="RUN|MODEL",
            help="Model to compare with.  [default: the promoted model, or else the base]",
        ),
        click.Option(
            ["--verify"],
            is_flag=True,
            help="Recompute a promotion from its records; RUN|MODEL is its name or folder.",
        ),
        json_option(),
    ],
)
@click.pass_context
def promote(
    context: click.Context,
    reference: str,
    gate_file: Path | None,
    over: str | None,
    verify: bool,
    as_json: bool,
) -> None:
    """Promote RUN|MODEL to a name such as production if its evaluations meet a gate.

    The answer is yes (exit code 0), no, or not enough evidence (both 1). After a yes, the gate's
    name refers to RUN|MODEL in the registry; every command that takes a run accepts the name.
    """
    from vox_eval import promotion

    if (gate_file is None) != verify or (over and verify):
        raise click.UsageError("give --gate FILE, or --verify alone")
    if verify or gate_file is None:
        decision, folder = promotion.verify(reference)
        facts: dict[str, Any] = {"folder": folder}
    else:
        with display() as shown:
            done = promotion.promote(
                reference, gate_file, over=over, observe=shown.observe, progress=shown.transfer
            )
        decision, facts = done.decision, asdict(done)
    if as_json:
        print_json({**facts, "decision": asdict(decision)})
    else:
        _show_decision(decision)
        if verify:
            click.echo(_answer(decision))
            click.echo(printable(f"the records in {folder} give this decision"))
        else:
            _show_promotion(done)
    if decision.answer != "yes":
        context.exit(REFUSED)


def _show_decision(decision: Decision) -> None:
    heads = "task", "to show", "rows", "gain", "in each cycle", "p", ""
    rows = [
        (
            " ".join(filter(None, (each.task, each.backend))),
            each.demand,
            str(each.rows),
            f"{each.gain:+.4f} ({_range(each.interval)})",
            " ".join(f"{gain:+.4f}" for gain in each.cycles),
            f"{each.p:.2g}",
            each.state,
        )
        for each in decision.findings
    ]
    if rows:
        print_columns([heads, *rows])
    for check in decision.checks:
        limit = "no limit" if check.limit is None else f"limit {check.limit:g}, {check.state}"
        found = "not known" if check.found is None else f"{check.found:.4g}"
        click.echo(f"{check.name} {found} ({limit})")


def _show_promotion(done: Promotion) -> None:
    leaks = done.leakage.leaks
    for leak in leaks[:SHOWN_LEAKS]:
        click.echo(printable(f"leaked: {leak.row} ({leak.task}) is {leak.place}"))
    if len(leaks) > SHOWN_LEAKS:
        click.echo(f"and {len(leaks) - SHOWN_LEAKS} more; --json lists all")
    for each in done.decision.findings:
        if each.state == "undecided":
            click.echo(f"{each.task}: {each.would_decide}")
    click.echo(_answer(done.decision))
    if done.folder:
        uncompared = done.uncompared
        instead = f", instead of {uncompared}, which was not compared" if uncompared else ""
        click.echo(printable(f"{done.name} is {done.references['candidate']} from now on{instead}"))
        click.echo(printable(f"records  {done.folder}"))
    click.echo(printable(f"next: {done.next}"))


def _answer(decision: Decision) -> str:
    """Return the answer with the tasks and checks that it follows from, unless it is a yes."""
    state = "failed" if decision.answer == "no" else "undecided"
    why = [each.task for each in decision.findings if each.state == state]
    why += [each.name for each in decision.checks if each.state == state]
    return f"answer: {decision.answer}" + (f" ({state}: {', '.join(why)})" if why else "")


# --- vox registry ---------------------------------------------------------------------------------


def _registry() -> Any:
    from vox_eval import registry

    return registry


def _name() -> click.Argument:
    return click.Argument(["name"], metavar="NAME")


@click.group("registry", cls=Group)
def registry() -> None:
    """List promoted models, and roll back."""


@registry.command("list", params=[json_option()])
def list_names(as_json: bool) -> None:
    """List the names in the registry with their models."""
    own = _registry()
    found = {name: own.listed(name) for name in own.names()}
    if as_json:
        print_json(found)
    else:
        keys = "reference", "title", "time"
        rows = [(n, *(e.get(k, "") for k in keys), e.get("error", "")) for n, e in found.items()]
        print_columns([("name", *keys, ""), *rows])


@registry.command("show", params=[_name(), json_option()])
def show(name: str, as_json: bool) -> None:
    """List every change of NAME, oldest first."""
    own = _registry()
    found = own.history(name)
    if not found:
        own.require_name(name)
        there = ", ".join(own.names()) or "no name"
        raise own.fault(name, "the registry has no such name", there, "name or promote one")
    if as_json:
        print_json(found)
    else:
        how = {True: "rolled back to", False: "promoted"}
        rows = [(e["time"], how["rolled_back" in e], e["reference"], e["promotion"]) for e in found]
        print_columns([("time", "", "reference", "records"), *rows])


@registry.command("rollback", params=[_name()])
def roll_back(name: str) -> None:
    """Point NAME to the model before the last promotion."""
    own = _registry()
    click.echo(printable(f"{name} is {own.roll_back(name)} from now on"))
