"""Going on with a run: its settings, its contract, its newest good checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vox_core.config import TrainSettings, validate
from vox_core.contract import ExecutionPlan, Notice, RunStart
from vox_core.errors import ConfigError, PlanError
from vox_core.run import telemetry
from vox_core.run.folder import MANIFEST, PLAN, RunFolder

# What changed, in the words in which it can be changed back.
_SAID_WITH = {
    "total_steps": "--max-steps or --epochs",
    "data.digest": "--data: the rows",
    "data.rows": "--data: the number of documents",
    "data.tokens": "--data: the number of tokens",
    "data.trained_tokens": "--data: the number of trained tokens",
    "data.valid_digest": "--valid: the rows",
    "model.weights_digest": "--model: the weights",
    "model.tokenizer_digest": "--model: the tokenizer",
    "optimizer.name": "--optimizer",
}
_OF_THIS_CALL = {"resume", "out", "config", "allow_cpu"}


def recorded(settings: TrainSettings) -> dict[str, Any]:
    """The settings as `plan.json` keeps them: those given, with paths made absolute."""
    given = settings.model_dump(
        mode="json", include=settings.model_fields_set - _OF_THIS_CALL, by_alias=False
    )
    paths = {key: given[key] for key in ("data", "valid") if given.get(key)}
    if Path(settings.model).exists():
        given["model"] = str(Path(settings.model).resolve())
    for key, value in paths.items():
        kept = getattr(settings, key)
        given[key] = (
            [str(p.resolve()) for p in kept] if isinstance(value, list) else str(kept.resolve())
        )
    return given


def settings_of(settings: TrainSettings) -> tuple[TrainSettings, dict[str, Any] | None]:
    """With `--resume`, the run's own settings under those given now; and the run's plan.

    Raises:
        InputError: A001, the folder is not a run.
    """
    if settings.resume is None:
        return settings, None
    plan = RunFolder(settings.resume).read(PLAN)
    if settings.out is not None:
        raise ConfigError(
            "C004",
            "a resumed run goes on in its own folder",
            where="--out",
            found=settings.out,
            remedy="leave out --out",
        )
    given = settings.model_dump(include=settings.model_fields_set)
    # Another backend may call another dtype the best; the run's is the one it began with.
    # So is the number of tokens at once, which may have been measured.
    as_begun = {key: plan[key] for key in ("dtype", "micro_batch_tokens")}
    kept = {**plan["settings"], **as_begun}
    return validate(TrainSettings, {**kept, **given}), plan


def backends(run: RunFolder) -> list[dict[str, Any]]:
    """The backends that worked on a run, in order: each with the first step it was to take."""
    starts = [line for line in telemetry.read(run.telemetry) if line["event"] == RunStart.name]
    fields = ("first_step", "backend", "device", "dtype")
    worked = [{field: line[field] for field in fields} for line in starts]
    return [
        each
        for index, each in enumerate(worked)
        if index == 0 or each["backend"] != worked[index - 1]["backend"]
    ]


def moved(run: RunFolder, backend: str, step: int) -> Notice | None:
    """What to say where a run goes on with another backend than before."""
    before = backends(run)
    if not before or before[-1]["backend"] == backend:
        return None
    was = before[-1]["backend"]
    return Notice(f"going on with {backend} after step {step}; until there it was {was}")


def require_unfinished(run: RunFolder, plan: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that has ended.

    Raises:
        PlanError: P003.
    """
    total = plan["contract"]["total_steps"]
    if not (run.path / MANIFEST).is_file() or run.read(MANIFEST)["step"] < total:
        return
    raise PlanError(
        "P003",
        "the run has finished already",
        where=run.path,
        found=f"{total} of {total} steps",
        remedy=f"vox chat {run.path}; to train longer, train again with more --epochs, or "
        "--max-steps where that was given",
    )


def require_same(made: ExecutionPlan, recorded: Mapping[str, Any]) -> None:
    """Refuse to go on under another contract.

    Raises:
        PlanError: P003, naming each setting that changed.
    """
    changed = [
        f"{_SAID_WITH.get(field, _flag(field))}: {was!r} when it began, {now!r} now"
        for field, was, now in _changes(recorded["contract"], made.contract.to_json())
    ]
    if recorded["dtype"] != made.dtype:
        changed.append(f"--dtype: {recorded['dtype']!r} when it began, {made.dtype!r} now")
    if changed:
        raise PlanError(
            "P003",
            "the run cannot be resumed under this contract",
            faults=changed,
            remedy="undo these changes, or train anew with another --out",
        )


def tuned_as_before(made: ExecutionPlan, recorded: Mapping[str, Any]) -> ExecutionPlan:
    """With the knobs of a run that goes on with the same backend."""
    same = recorded["backend"] == made.backend
    return replace(made, tuning=recorded.get("tuning", {})) if same else made


def _flag(field: str) -> str:
    return "--" + field.rpartition(".")[2].replace("_", "-")


def _changes(was: Any, now: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted field, value then, value now) of every difference."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            yield from _changes(was.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif was != now:
        yield where, was, now
