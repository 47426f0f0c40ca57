"""`vox train`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from vox_core import library
from vox_core.cli.failures import STOPPED
from vox_core.cli.lazy import Command, json_option
from vox_core.cli.options import files_argument, options_of, settings_from, with_files
from vox_core.cli.output import duration, losses, print_json, print_table, printable, say, silence
from vox_core.config import TrainSettings
from vox_core.contract import LaunchJob, LaunchResult
from vox_core.display import SHORT_RUN
from vox_core.errors import ConfigError, command
from vox_core.host.load import call_hook, provider, require_example_each, world_of

if TYPE_CHECKING:
    from vox_core.run.artifacts import TrainReport

TRAIN_SECTIONS: dict[str, tuple[str, ...]] = {
    heading: tuple(names.split())
    for heading, names in {
        "Model": "model revision template backend dtype quant allow_cpu allow_overcommit",
        "Data": "data valid valid_share seq_len fields source curriculum",
        "Data filters": "malformed_rows max_skipped min_rating unrated category lane tag min_chars "
        "max_chars dedup near_threshold",
        "Objective": "objective objective_options reward teacher rollouts rollout_tokens "
        "rollout_temperature updates",
        "Adapter": "method rank alpha dropout targets modules_to_save adapter",
        "Optimisation": "epochs max_steps batch_size lr schedule warmup optimizer weight_decay "
        "clip seed micro_batch_tokens gradient_checkpointing tune tune_budget",
        "Processes": "processes shard launcher max_restarts emit image",
        "Run": "out eval_every eval_suite plan_file config_file as_json",
        "Checkpoints": "save_every save_minutes save_epochs keep keep_every",
        "Stopping and resuming": "max_time patience load_best_at_end max_bad_steps resume "
        "allow_change",
    }.items()
}


PLAN_OPTION = click.Option(
    ["--plan", "plan_file"],
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Run the plan that `vox plan --json > FILE` wrote; fail if it cannot be met.",
)


JOB_OPTIONS = (
    click.Option(
        ["--emit"],
        metavar="KIND",
        help="Print a job that runs this command (slurm, kubernetes or skypilot) instead of "
        "running it.",
    ),
    click.Option(["--image"], help="Container image that has vox, for --emit."),
)


@click.command(
    "train",
    cls=Command,
    params=[files_argument(), *options_of(TrainSettings), PLAN_OPTION, *JOB_OPTIONS, json_option()],
    sections=TRAIN_SECTIONS,
    epilog="Example: vox train train.jsonl --model smollm2-135m --out runs/first",
)
@click.pass_context
def train(
    ctx: click.Context,
    /,
    files: tuple[Path, ...],
    plan_file: Path | None,
    emit: str | None,
    image: str | None,
    as_json: bool,
    **flags: Any,
) -> TrainReport:
    """Fine-tune a model on your data; writes an adapter, or with --method full a model.

    FILES are data files, as for --data. vox chooses an installed backend and prints why. Ctrl-C
    finishes the current step and saves everything; --resume continues the run.
    """
    from vox_core.run.session import StoppedAtOnce

    settings = settings_from(TrainSettings, with_files(files, flags))
    if emit:
        click.echo(_emitted(emit, settings, image), nl=False)
        ctx.exit()
    if settings.processes > 1 and world_of().size == 1:
        ctx.exit(_launched(settings))
    try:
        report = library.train(plan=plan_file, progress=True, **with_files(files, flags)).report
    except StoppedAtOnce as stop:
        kept = "nothing was saved" if stop.step is None else f"saved up to step {stop.step}"
        _stop(ctx, f"stopped at once, {kept}", stop.run, settings)
    try:
        (print_json if as_json else _show)(report)
    except OSError:
        if not report.stopped:
            raise
        silence(sys.stdout)  # the terminal was closed
    if report.stopped:
        _stop(ctx, "stopped", report.run, settings)
    return report


def _launched(settings: TrainSettings) -> int:
    """Run this command in several processes; return its exit code."""
    arguments = sys.argv[1:]
    if "-" in arguments:
        what = "several processes cannot read the same stdin"
        remedy = "save the rows to a file, and name it"
        raise ConfigError("C004", what, where="--data -", remedy=remedy)
    if settings.resume is None:
        require_example_each(settings.processes, settings.batch_size)
    run = settings.resume if isinstance(settings.resume, Path) else settings.out
    job = LaunchJob(
        tuple(arguments), settings.processes, settings.launcher, _resume(run or "RUN", settings)
    )
    plugin = provider("launchers", settings.launcher)
    result: LaunchResult = call_hook(plugin, "vox_launch", LaunchResult, job=job, settings=settings)
    return result.exit_code


def _emitted(kind: str, settings: TrainSettings, image: str | None) -> str:
    """Return the job that runs this command."""
    flags, arguments = {"--emit": kind, "--image": image}, sys.argv[1:]
    given = [
        each
        for before, each in zip(["", *arguments], arguments, strict=False)
        if each.partition("=")[0] not in flags and flags.get(before) != each
    ]
    job = LaunchJob(tuple(given), settings.processes, settings.launcher)
    asked = {"kind": kind, "job": job, "settings": settings, "image": image}
    text: str = call_hook(provider("job-formats", kind), "vox_write_job", str, **asked)
    return text


def _stop(ctx: click.Context, how: str, run: Path, settings: TrainSettings) -> NoReturn:
    say(f"{how}; resume with: {_resume(run, settings)}")
    ctx.exit(STOPPED)


def _resume(run: Path | str, settings: TrainSettings) -> str:
    """Return the command that continues a run in as many processes."""
    flags: list[object] = []
    if settings.processes > 1:
        flags += ["--processes", settings.processes]
        if "shard" in settings.model_fields_set:
            flags.append("--shard" if settings.shard else "--no-shard")
        flags += ["--launcher", settings.launcher] if settings.launcher != "torchrun" else []
    return command("vox", "train", "--resume", run, *flags)


def _show(report: TrainReport) -> None:
    seconds = report.startup_seconds
    startup = "" if seconds is None else f" (startup {seconds:.1f} s)"
    rewards = library.runs(report.run)[0].metrics.get("reward", []) if report.rewarded else []
    known = [reward for _, reward in rewards if reward is not None]
    rows = {
        "run": str(report.run),
        "steps": f"{report.steps} of {report.total_steps} in {duration(report.seconds)}{startup}",
        "loss": "" if report.loss is None else f"{report.loss:z.4f}",
        "reward": losses(-known[0], -known[-1], rewarded=True) if known else "",
        f"validation {'reward' if report.rewarded else 'loss'}": losses(
            report.valid_before, report.valid_after, rewarded=report.rewarded
        ),
        "best": _best(report),
    }
    print_table({label: text for label, text in rows.items() if text})
    if hint := _hint(report):
        click.echo(hint)
    if not report.stopped and report.learned:
        steps = [command("vox", step, report.run) for step in ("chat", "serve", "merge")]
        steps[2:] = [f"load the checkpoint {report.model}"] if report.model else steps[2:]
        click.echo(printable(f"next: {'   or   '.join(steps)}"))


def _hint(report: TrainReport) -> str:
    """Suggest settings that train longer, after a short run that was still improving."""
    best = report.best_step in (None, report.steps) and report.steps == report.total_steps
    if not (best and report.learned and report.epochs and report.rows and report.steps < SHORT_RUN):
        return ""
    epochs = max(3 * report.epochs, math.ceil(60 * 4 / report.rows))  # sixty steps of four
    of_adapter = not report.model and report.objective == "sft"  # it wrecks others
    rate = " --lr 1e-3" if of_adapter and (report.lr or 0) < 1e-3 else ""
    return (
        f"hint: few steps ({report.steps}). Try --epochs {epochs:g} --batch-size 4{rate} "
        f"(about {report.rows * epochs / 4:.0f} steps), or more examples than {report.rows}"
    )


def _best(report: TrainReport) -> str:
    """Describe the best validation, unless it was the last one."""
    if report.best_loss is None or report.best_step == report.steps:
        return ""
    written = report.adapter_step == report.best_step
    what = "model" if report.model else "adapter"
    which = f"this {what}" if written else f"--load-best-at-end would have written its {what}"
    best = -report.best_loss if report.rewarded else report.best_loss
    return f"{best:z.4f} after step {report.best_step}; {which}"
