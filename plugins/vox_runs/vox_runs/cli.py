"""`vox runs`: list, show, watch, compare, plot."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.api.commands import (
    STOPPED,
    Group,
    counted,
    duration,
    json_option,
    losses,
    megabytes,
    print_columns,
    print_json,
    print_table,
    printable,
)
from vox_core.errors import command

if TYPE_CHECKING:
    from vox_core.api.runs import Curve, Summary
    from vox_runs.compare import Comparison

MARGIN = 18
"""Columns for a sparkline's label and end values."""
SHOWN = 8
"""Validation losses, checkpoints and warnings that `show` prints; `--json` has them all."""
LONGEST = 60
"""Maximum length of a printed contract value."""
BARS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-~=+*#"
GAP = " "
_CURVES = ("losses", "metrics")


def _path(name: str, **given: Any) -> click.Argument:
    return click.Argument([name], type=click.Path(path_type=Path), **given)


@click.group("runs", cls=Group)
def runs() -> None:
    """List, show, watch, compare and plot runs."""


@runs.command("list", params=[_path("folder", default="runs", metavar="[FOLDER]"), json_option()])
def list_runs(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER (default: runs/); FOLDER may also be a run."""
    from vox_core.api.runs import RUNS, read_runs

    found = [] if folder == RUNS and not folder.exists() else read_runs(folder)
    if as_json:
        print_json([_without_curves(each) for each in found])
    elif found:
        heads = ("run", "status", "steps", "loss", "validation", "model", "started")
        found.sort(key=lambda each: each.started or 0.0)
        print_columns([heads, *map(_row, found)])
    else:
        click.echo(f"no runs in {printable(folder)}")


@runs.command("show", params=[_path("run"), json_option()])
def show(run: Path, as_json: bool) -> None:
    """Show losses, speed and checkpoints of RUN."""
    from vox_core.api.runs import read_run

    summary = read_run(run)
    if as_json:
        print_json(summary)
    else:
        print_table(dict(_facts(summary)))


@runs.command("watch", params=[_path("run")])
@click.pass_context
def watch(ctx: click.Context, run: Path) -> None:
    """Watch the progress of RUN, in another terminal, until it ends.

    Ctrl-C stops watching; the run continues.
    """
    from vox_runs.watch import shown_until_the_end

    try:
        summary = shown_until_the_end(run)
    except KeyboardInterrupt:
        click.echo("stopped watching; the run continues", err=True)
        ctx.exit(STOPPED)
    print_table(dict(_facts(summary)))


@runs.command("compare", params=[_path("a"), _path("b"), json_option()])
def compare(a: Path, b: Path, as_json: bool) -> None:
    """Compare the settings and validations of runs A and B."""
    from vox_runs.compare import compare as compared

    found = compared(a, b)
    if as_json:
        told = asdict(found)
        print_json({**told, "a": _without_curves(found.a), "b": _without_curves(found.b)})
    else:
        _show_comparison(found)


@runs.command(
    "plot",
    params=[
        _path("run", nargs=-1, required=True, metavar="RUN..."),
        click.Option(
            ["--out"],
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="PNG file to write; an earlier plot of vox is replaced.  "
            "[default: NAME-losses.png, of several runs losses.png]",
        ),
    ],
)
def plot(run: tuple[Path, ...], out: Path | None) -> None:
    """Plot the loss curves of each RUN.

    Needs matplotlib: pip install 'vox-ml-runs[plot]'.
    """
    from vox_runs.plot import default_out
    from vox_runs.plot import plot as drawn

    out = out or default_out(run)
    click.echo(f"{printable(out)}: {counted(len(drawn(run, out)), 'curve')}")


def _without_curves(summary: Summary) -> dict[str, Any]:
    return {key: value for key, value in asdict(summary).items() if key not in _CURVES}


def _row(summary: Summary) -> Sequence[str]:
    if summary.status == "unreadable":
        return summary.run, summary.status, "", "", "", "", summary.error or ""
    judged = summary.judged or (summary.held_out[-1] if summary.held_out else None)
    return (
        summary.run,
        summary.status,
        _steps(summary),
        _loss(summary.loss),
        _validation(summary, judged[1]) if judged else "",
        _short(summary.model or ""),
        _when(summary.started),
    )


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield label and text of each available fact."""
    resumed = command("vox", "train", "--resume", summary.run)
    known = {
        "run": summary.run,
        "status": summary.status + (", stopped early" if summary.early else ""),
        "error": _short(" ".join((summary.error or "").split()), 600),
        "model": _short(summary.model or ""),
        **_objective(Path(summary.run)),
        "backend": _backend(summary),
        "started": _when(summary.started),
        "steps": f"{_steps(summary)} in {duration(summary.seconds)}",
        "loss": _first_and_last(summary.losses),
        "": _curve(summary.losses),
        **{_short(name): _ends(curve) for name, curve in summary.metrics.items()},
        f"validation {'reward' if summary.rewarded else 'loss'}": _first_and_last(
            summary.held_out, rewarded=summary.rewarded
        ),
        "best": _best(summary),
        "after steps": _some(
            f"{step}: {_validation(summary, loss)}" for step, loss in summary.held_out
        ),
        "tokens/s": f"{summary.tokens_per_second or 0:,.0f}" if summary.tokens_per_second else "",
        "memory": megabytes(summary.memory) if summary.memory else "",
        "checkpoints": _some(f"step {each}" for each in summary.checkpoints)
        or _no_checkpoints(summary),
        "resumed": f"{summary.resumes} times" if summary.resumes > 1 else "once" * summary.resumes,
        "warnings": "\n".join(_short(each, 300) for each in summary.warnings[-SHOWN:]),
        "passed over": f"{counted(summary.passed_over, 'line')} of telemetry that cannot be read"
        if summary.passed_over
        else "",
        "next": resumed if summary.status in _RESUMABLE and not _lost(summary) else "",
    }
    yield from ((label, text) for label, text in known.items() if text)


_RESUMABLE = ("stopped", "failed", "died")


def _lost(summary: Summary) -> bool:
    """Whether all checkpoints of a run were removed."""
    from vox_core.api.runs import RECORD

    had_some = (Path(summary.run) / RECORD).is_file() or summary.adapter_step is not None
    return not summary.checkpoints and had_some


def _no_checkpoints(summary: Summary) -> str:
    """Say what the lack of checkpoints means for the run."""
    if summary.status == "running":
        return "none yet"
    if _lost(summary):
        return "none: they were removed" + ", so it cannot be resumed" * (summary.status != "done")
    return "none: a resume begins at step 1" if summary.status in _RESUMABLE else "none"


def _show_comparison(found: Comparison) -> None:
    if found.differences is None:
        click.echo("the contract of one of them cannot be read")
    elif found.differences:
        heads = ("contract", printable(found.a.run), printable(found.b.run))
        rows = [(each.field, _value(each.a), _value(each.b)) for each in found.differences]
        print_columns([heads, *rows])
    else:
        click.echo("the contracts are the same")
    click.echo(printable(found.verdict.why))


def _objective(run: Path) -> dict[str, str]:
    """Describe the objective with its options, and the teacher, as far as they were given."""
    from vox_runs.compare import plan_part

    settings = plan_part(run, "settings") or {}
    options = settings.get("objective_options")
    options = options.items() if isinstance(options, dict) else ()
    parts = [settings.get("objective", ""), *(f"{name}={value}" for name, value in options)]
    told = {"objective": " ".join(map(str, parts)), "teacher": str(settings.get("teacher") or "")}
    return {label: _short(text) for label, text in told.items()}


def _backend(summary: Summary) -> str:
    if not summary.backend:
        return ""
    base = f", base in {summary.quant}" if summary.quant not in (None, "none") else ""
    return f"{_short(summary.backend)} on {_short(summary.device or '?')}, {summary.dtype}{base}"


def _steps(summary: Summary) -> str:
    if summary.total_steps == 0:  # a client of `vox tinker serve` decides when it ends
        return str(summary.step)
    return f"{summary.step} of {'?' if summary.total_steps is None else summary.total_steps}"


def _best(summary: Summary) -> str:
    """Describe the best validation of a finished run, unless it was the last."""
    if (best := summary.best) is None or summary.adapter_step is None or best[0] == summary.step:
        return ""
    which = "which" if summary.adapter_step == best[0] else "a later step"
    return f"{_validation(summary, best[1])} after step {best[0]}; {which} was written"


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:z.4f}" if abs(loss) < 1e6 else f"{loss:.1e}"


def _validation(summary: Summary, loss: float | None) -> str:
    return _loss(loss) if loss is None or not summary.rewarded else f"reward {_loss(-loss)}"


def _first_and_last(curve: Curve, *, rewarded: bool = False) -> str:
    known = [loss for _, loss in curve if loss is not None]
    if len(known) < 2:
        return _loss((-1 if rewarded else 1) * known[0] if known else None)
    return losses(known[0], known[-1], rewarded=rewarded)


def _ends(curve: Curve) -> str:
    """Format the first value and the last, once if they are equal."""
    return " -> ".join(dict.fromkeys(_loss(value) for _, value in curve[:1] + curve[-1:]))


def _curve(curve: Curve) -> str:
    width = shutil.get_terminal_size().columns - MARGIN
    return sparkline([loss for _, loss in curve], width, sys.stdout.encoding)


def _some(texts: Iterator[str]) -> str:
    told = [*texts]
    return ("… " if len(told) > SHOWN else "") + ", ".join(told[-SHOWN:])


def _when(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _value(value: object) -> str:
    return "-" if value is None else _short(str(value))


def _short(text: str, longest: int = LONGEST) -> str:
    """Shorten a value to one line of limited length."""
    text = printable(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


# --- curves as text -------------------------------------------------------------------------------


def sparkline(values: Sequence[float | None], width: int, encoding: str | None = "utf-8") -> str:
    """Draw the values as at most `width` bars, left to right.

    A bar is the mean of its values, or a gap if they are all missing. The lowest bar is the
    smallest mean. ASCII characters if the encoding has no bars.
    """
    width = max(min(width, len(values)), 1)
    cuts = [len(values) * at // width for at in range(width + 1)]
    parts = [values[start:stop] for start, stop in pairwise(cuts)]
    means = [_mean([value for value in part if value is not None]) for part in parts]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    bars = _bars(encoding)
    return "".join(
        GAP if mean is None else bars[round((mean - low) / span * (len(bars) - 1)) if span else 0]
        for mean in means
    )


def _mean(values: Sequence[float]) -> float | None:
    # Halved, so that even the difference of the two largest floats is finite.
    return sum(value / 2 / len(values) for value in values) if values else None


def _bars(encoding: str | None) -> str:
    try:
        BARS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN
    return BARS
