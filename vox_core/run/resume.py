"""Going on with a run: its settings, its contract, its newest good checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vox_core.config import Change, TrainSettings, validate
from vox_core.contract import CheckpointWritten, ExecutionPlan, Notice, RunStart
from vox_core.data.readers import is_remote
from vox_core.data.templated import TEMPLATE
from vox_core.errors import AdapterError, ConfigError, PlanError, command
from vox_core.files import TEMPORARY_PREFIX
from vox_core.run import checkpoint, telemetry
from vox_core.run.best import Best, validations
from vox_core.run.differences import contract_differences
from vox_core.run.folder import (
    CHECKPOINTS,
    LOCK,
    MANIFEST,
    OWNER,
    PLAN,
    PREFLIGHT,
    SKIPPED,
    RunFolder,
)
from vox_core.run.recorded import last_step, plan_of
from vox_core.run.sources import Sources, other_files

# What changed, in the words in which it can be changed back.
_SAID_WITH = {
    "total_steps": "--max-steps or --epochs",
    "data.digest": "--data: the rows",
    "data.rows": "--data: the number of documents",
    "data.tokens": "--data: the number of tokens",
    "data.trained_tokens": "--data: the number of trained tokens",
    "data.valid_digest": "--valid: the rows",
    "model.weights_digest": "--model: the weights",
    "model.tokenizer_digest": "--model or --template: the tokenizer",
    "model.config_digest": "--model: config.json",
    "optimizer.name": "--optimizer",
    "order": "--source or --curriculum",
    "order.curriculum": "--curriculum",
    "order.weights": "--source: the weights",
    "order.documents": "--data: the sources or the difficulty of the documents",
}
# What may be changed on the way, as --allow-change says it -> the fields of the contract. The order
# of the documents is a function of rows, seed and batch size, so those may not.
_MAY_CHANGE: dict[Change, str] = {
    "clip": "optimizer.clip",
    "dropout": "adapter.dropout",
    "dtype": "dtype",
    "epochs": "total_steps",
    "lr": "optimizer.lr",
    "max-steps": "total_steps",
    "schedule": "optimizer.schedule",
    "valid": "data.valid_digest",
    "warmup": "optimizer.warmup",
    "weight-decay": "optimizer.weight_decay",
}
# Which files a digest is of.
_FILES_OF = {
    "data.digest": "data",
    "data.valid_digest": "valid",
    "model.weights_digest": "weights",
    "model.tokenizer_digest": "tokenizer",
    "model.config_digest": "config",
}
_OF_THIS_CALL = {
    *("resume", "out", "config", "allow_cpu", "allow_overcommit", "allow_change", "max_time"),
    "tune",
}


def recorded(settings: TrainSettings) -> dict[str, Any]:
    """The settings as `plan.json` keeps them: those given, with paths made absolute."""
    given = settings.model_dump(
        mode="json", include=settings.model_fields_set - _OF_THIS_CALL, by_alias=False
    )
    paths = {key: given[key] for key in ("data", "valid") if given.get(key)}
    if isinstance(settings.template, Path):
        given["template"] = absolute(settings.template)
    if Path(settings.model).exists():
        given["model"] = str(Path(settings.model).resolve())
    for key, value in paths.items():
        kept = getattr(settings, key)
        given[key] = (
            [absolute(path) for path in kept] if isinstance(value, list) else absolute(kept)
        )
    for source, kept in zip(given.get("source", ()), settings.source, strict=True):
        source["path"] = absolute(kept.path)
    return given


def absolute(path: Path) -> str:
    """A path as it holds in any folder; a data set of the hub lies in none."""
    return str(path if is_remote(path) else path.resolve())


def settings_of(settings: TrainSettings) -> tuple[TrainSettings, dict[str, Any] | None]:
    """With `--resume RUN`, the run's own settings under those given now, and the run's plan.

    With `--resume auto` the command is the whole of it, so what it says is held against the run;
    where `--out` names no run yet, one begins.

    Raises:
        InputError: A001, the folder is not a run, or its plan is broken.
    """
    if settings.resume is None:
        return settings, None
    if settings.resume == "auto":
        return _same_command(settings)
    _require_no_checkpoint(Path(settings.resume))
    plan = plan_of(RunFolder(Path(settings.resume)))
    if settings.out is not None:
        raise ConfigError(
            "C004",
            "a resumed run goes on in its own folder",
            where="--out",
            found=settings.out,
            remedy="leave out --out",
        )
    given = settings.model_dump(include=settings.model_fields_set)
    kept = _kept(plan, plan["settings"])
    if "template" in kept and (own := Path(settings.resume) / TEMPLATE).is_file():
        kept["template"] = own  # whatever became of the file that it was copied from
    if "epochs" in given and "max_steps" not in given:
        kept.pop("max_steps", None)  # it would win
    if "data" in given and "source" not in given:
        kept.pop("source", None)
    return validate(TrainSettings, {**kept, **given}), plan


def _require_no_checkpoint(path: Path) -> None:
    """Refuse a folder inside a run, and name the run.

    Raises:
        AdapterError: A001.
    """
    for run in path.absolute().parents[:2]:
        inside = path.absolute().relative_to(run).parts
        if inside[0] == CHECKPOINTS and (run / PLAN).is_file():
            raise AdapterError(
                "A001",
                "this is inside a run, and not the run",
                where=path,
                expected=f"the run folder: {run}",
                remedy=f"{command('vox', 'train', '--resume', run)}, which goes on from its newest "
                "good checkpoint",
            )


def _same_command(settings: TrainSettings) -> tuple[TrainSettings, dict[str, Any] | None]:
    if settings.out is None:
        raise ConfigError(
            "C004",
            "--resume auto does not know which run",
            where="--resume auto",
            expected="the run folder of this command, in --out",
            remedy="name it: vox train --resume auto --out RUN ..., or vox train --resume RUN",
        )
    run, given = RunFolder(settings.out), settings.model_dump(include=settings.model_fields_set)
    if is_new(run):
        return validate(TrainSettings, {**given, "resume": None}), None
    plan = plan_of(run)
    values = {**_kept(plan, {}), **given, "resume": run.path, "out": None}
    return validate(TrainSettings, values), plan


def _kept(plan: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What holds unless it is said otherwise."""
    # Another backend may call another dtype the best; the run's is the one it began with. So is
    # the number of tokens at once, which may have been measured.
    return {**settings, **{key: plan[key] for key in ("dtype", "micro_batch_tokens")}}


def is_new(run: RunFolder) -> bool:
    """Nothing is there, or what a process left that died before it had written its plan."""
    if not run.path.exists():
        return True
    left = (LOCK, OWNER, PREFLIGHT, SKIPPED)  # the plan comes after it
    return run.path.is_dir() and all(
        path.name in left or path.name.startswith(TEMPORARY_PREFIX) for path in run.path.iterdir()
    )


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


def ended(run: RunFolder, total: int, patience: int) -> str | None:
    """How a run has ended, in words; None if it can go on.

    Args:
        total: the steps that it is to have.
        patience: the one that it is to have.

    Raises:
        AdapterError: A001, its manifest is broken.
    """
    if not (run.path / MANIFEST).is_file():
        return None
    last = last_step(run)
    if last >= total:
        return f"{last} of {total} steps"
    best = Best(patience, validations(run.telemetry, last))
    if best.exhausted:
        return f"early stopping after step {last} of {total}; the best was step {best.step}"
    return None


def require_going_on(run: RunFolder, total: int) -> None:
    """Refuse to begin anew what has been trained already, or to end before what has been.

    Raises:
        PlanError: P003.
    """
    there = checkpoint.numbered(run.checkpoints)
    last = checkpoint.step_of(there[0]) if there else 0
    if last > total:
        raise PlanError(
            "P003",
            "the run is further than it is to go",
            where=there[0],
            found=f"{last} steps are done",
            expected=f"more than that; --max-steps or --epochs says {total}",
            remedy="say more, or train anew with another --out",
        )
    written = (line["event"] == CheckpointWritten.name for line in telemetry.read(run.telemetry))
    if not there and ((run.path / MANIFEST).is_file() or any(written)):
        raise PlanError(
            "P003",
            "the run's checkpoints are gone",
            where=run.checkpoints,
            found="none, and the run had some",
            remedy="put them back, or train anew with another --out",
        )


def finished(run: RunFolder, how: str) -> PlanError:
    """The error for a run that has ended."""
    return PlanError(
        "P003",
        "the run has finished already",
        where=run.path,
        found=how,
        remedy=f"{command('vox', 'chat', run.path)}; to go on after early stopping: --patience 0; "
        "to train longer, train again with more --epochs or --max-steps, or go on under another "
        "schedule: --allow-change epochs --epochs MORE",
    )


def require_same(
    made: ExecutionPlan,
    recorded: Mapping[str, Any],
    sources: Sources,
    allowed: Collection[Change] = (),
) -> tuple[str, ...]:
    """Refuse to go on under another contract.

    Args:
        sources: the files of today.
        allowed: what may have changed.

    Returns:
        What has changed and may, in words.

    Raises:
        PlanError: P003, naming each setting that changed, and each file.
    """
    changes = [*contract_differences(recorded["contract"], made.contract.to_json())]
    if recorded["dtype"] != made.dtype:
        changes.append(("dtype", recorded["dtype"], made.dtype))
    cut = recorded["micro_batch_tokens"], made.micro_batch_tokens
    if made.contract.adapter.dropout and cut[0] != cut[1]:  # it drops others in each micro-batch
        changes.append(("micro_batch_tokens", *cut))
    fields = {_MAY_CHANGE[name] for name in allowed}
    refused = [change for change in changes if change[0] not in fields]
    if refused:
        names = [n for n, field in _MAY_CHANGE.items() if any(field == f for f, *_ in refused)]
        if any(field not in _MAY_CHANGE.values() for field, *_ in refused):
            names = []  # the run could not go on with them either
        allow = " ".join(f"--allow-change {name}" for name in names if name != "max-steps")
        raise PlanError(
            "P003",
            "the run cannot be resumed under this contract",
            faults=said(refused, recorded, sources),
            remedy="undo these changes, or train anew with another --out"
            + (f"; {allow} would let this run go on otherwise than it began" if allow else ""),
        )
    return tuple(_said(change, "when it began") for change in changes)


def said(
    changes: Collection[tuple[str, Any, Any]],
    recorded: Mapping[str, Any],
    sources: Sources,
    *,
    since: str = "the run began",
    then: str = "when it began",
) -> list[str]:
    """What has changed, in words: the files first, then each field of the contract.

    Args:
        recorded: what has `sources`, as `plan.json`.
        sources: the files of today.
    """
    files = _of_files(changes, recorded, sources, since)
    return [*files, *(_said(change, then) for change in changes)]


def _said(change: tuple[str, Any, Any], then: str) -> str:
    field, was, now = change
    what = _SAID_WITH.get(field, _flag(field))
    return f"{what}: {_short(was)} {then}, {_short(now)} now"


def _short(value: Any) -> str:
    """The value as it is written; of a digest its beginning."""
    digest = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
    return f"{value[:12]}…" if digest else repr(value)


def _of_files(
    changes: Iterable[tuple[str, Any, Any]],
    recorded: Mapping[str, Any],
    sources: Sources,
    since: str,
) -> Iterator[str]:
    """Which files have changed, for the digests that have."""
    for field, was, now in changes:
        if field not in _FILES_OF or None in (was, now) or "sources" not in recorded:
            continue
        what = _FILES_OF[field]
        found = other_files(recorded["sources"], sources, what, since)
        yield from found
        if not found:
            yield (
                f"no file of the {what} has changed: the tokenizer, or another version of vox or "
                "of a library, makes other tokens of them"
            )


def tuned_as_before(made: ExecutionPlan, recorded: Mapping[str, Any]) -> ExecutionPlan:
    """With the knobs of a run that goes on with the same backend, and cut as it was."""
    if recorded["backend"] != made.backend:
        return made
    tuning, packing = recorded.get("tuning", {}), recorded.get("packing", "rows")
    return replace(made, tuning=tuning, packing=packing)


def _flag(field: str) -> str:
    return "--" + field.rpartition(".")[2].replace("_", "-")
