"""Going on with a run: its settings, its contract, its newest checkpoint. Nothing here writes.

`plan.json` holds what a run was made of (`metadata`); `vox plan --json` keeps the same of a run
that is yet to begin. Both are checked before anything is made of them.

`--plan` holds a new run against such a plan:

    vox plan --data train.jsonl --json > plan.json
    vox train --plan plan.json

A run is held against the plan's `exact`, which has the keys of a run's `plan.json`: the settings,
the contract, the backend with its version, the files by their SHA-256. Settings come from there and
from nowhere else: not from `vox.toml`, not from the environment, not from flags other than `FREE`.
How many tokens are computed at once, and the backend's knobs, are the plan's too, whatever has been
measured since. The machine is no part of it: a plan may be run on another one, if the backend is
the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_core import bounded_json
from vox_core.bounded_json import differences, schema_faults
from vox_core.config import Change, DataSource, TrainSettings, validate
from vox_core.config.sections import RewardSource, kebab
from vox_core.contract import ExecutionPlan
from vox_core.contract.spec import digest_of as digest_of
from vox_core.data.formats import is_remote
from vox_core.data.tokenizer import TEMPLATE
from vox_core.errors import SOURCES, AdapterError, ConfigError, PlanError, command
from vox_core.files import is_temporary
from vox_core.run import checkpoint
from vox_core.run.folder import (
    CHECKPOINTS,
    LOCK,
    MANIFEST,
    OWNER,
    PLAN,
    PREFLIGHT,
    RECORD,
    SKIPPED,
    START,
    RunFolder,
    numbered,
    step_of,
)
from vox_core.run.progress import Progress
from vox_core.run.reference import Sources, other_files

if TYPE_CHECKING:
    from vox_core.run.run_plan import RunPlan


# What changed, in the words in which it can be changed back.
_FLAGS_OF = {
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
    "adapter.start": "--adapter",
    "objective.name": "--objective",
    "rollouts.answers": "--rollouts",
    "rollouts.rewards": "--reward: the functions, their files or weights",
    "rollouts.tokens": "--rollout-tokens",
    "rollouts.temperature": "--rollout-temperature",
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
    "reward": "rollouts.rewards",
    "schedule": "optimizer.schedule",
    "valid": "data.valid_digest",
    "warmup": "optimizer.warmup",
    "weight-decay": "optimizer.weight_decay",
}
# Which files a digest is of.
_FILES_OF = {
    "data.digest": "data",
    "data.valid_digest": "valid",
    **{f"model.{what}_digest": what for what in ("weights", "tokenizer", "config")},
}
_OF_THIS_CALL = {
    *("resume", "out", "config", "allow_cpu", "allow_overcommit", "allow_change", "max_time"),
    *("tune", "processes", "shard", "launcher", "max_restarts"),
}


@dataclass(frozen=True)
class PreviousRun:
    """A run that is there: its folder, and what `plan.json` says."""

    run: RunFolder
    plan: Mapping[str, Any]

    @cached_property
    def newest(self) -> checkpoint.StateRecord | None:
        """Read the record of the newest readable checkpoint; None before the first."""
        for folder in numbered(self.run.checkpoints):
            try:
                return checkpoint.read_record(folder)
            except PlanError:
                continue
        return None

    @property
    def backend(self) -> str:
        """Id of the backend that worked on it last."""
        used = self.newest.backends if self.newest else ()
        return used[-1].backend if used else str(self.plan["backend"])

    def ended(self, total: int, patience: int) -> str | None:
        """Say how the run has ended; None if it can go on.

        Args:
            total, patience: of the run as it is to go on.
        """
        if not (self.run.path / MANIFEST).is_file():
            return None
        last = last_step(self.run)
        if last >= total:
            return f"{last} of {total} steps"
        if (progress := self.progress_at(last, patience)).exhausted:
            best = progress.best_step
            return f"early stopping after step {last} of {total}; the best was step {best}"
        return None

    def progress_at(self, step: int, patience: int = 0) -> Progress:
        """Losses and validations up to a step, if the newest checkpoint is of that step."""
        newest = self.newest
        if newest is None or newest.step != step:
            return Progress(patience)
        return Progress(patience, newest.losses, newest.validations)

    def require_unfinished(self, total: int, patience: int) -> None:
        """Refuse to go on with a run that has ended (P003)."""
        if how := self.ended(total, patience):
            length = "max-steps" if self.plan["settings"].get("max_steps") else "epochs"
            raise PlanError(
                "P003",
                "the run has finished already",
                where=self.run.path,
                found=how,
                remedy=f"{command('vox', 'chat', self.run.path)}; after early stopping go on with "
                f"--patience 0; or longer with --allow-change {length} --{length} MORE",
            )

    def require_checkpoints(self, total: int) -> None:
        """Refuse to begin anew what has been trained already, or to end before what has been
        (P003)."""
        there = numbered(self.run.checkpoints)
        last = step_of(there[0]) if there else 0
        if last > total:
            raise PlanError(
                "P003",
                "the run is further than it is to go",
                where=there[0],
                found=f"step {last} is done",
                expected=f"more than that; --max-steps or --epochs says {total}",
                remedy="say more, or train anew with another --out",
            )
        had_some = any((self.run.path / name).is_file() for name in (MANIFEST, RECORD))
        if not there and had_some:
            what, where = "the run's checkpoints are gone", self.run.checkpoints
            remedy = "put them back, or train anew with another --out"
            raise PlanError("P003", what, where=where, remedy=remedy)


# --- settings ---------------------------------------------------------------------------------


def load_previous(settings: TrainSettings) -> PreviousRun | None:
    """The run that `--resume` names, or for `--resume auto` the one in `--out`, if there is one.

    Raises:
        InputError: A001, the folder is not a run, or its plan is broken; C004, `--out` is missing
            or does not belong.
    """
    auto = settings.resume == "auto"
    if settings.resume is None:
        return None
    if auto and settings.out is None:
        what = "--resume auto does not know which run"
        remedy = "name it: vox train --resume auto --out RUN ..., or vox train --resume RUN"
        raise ConfigError("C004", what, where="--resume auto", remedy=remedy)
    run = RunFolder(Path((settings.out if auto else None) or settings.resume))
    if auto and is_new(run):
        return None
    if not auto:
        _require_no_checkpoint(run.path)
    previous = PreviousRun(run, plan_of(run))
    if not auto and settings.out is not None:
        what = "a resumed run goes on in its own folder"
        remedy = "leave out --out"
        raise ConfigError("C004", what, where="--out", found=settings.out, remedy=remedy)
    return previous


def merge_settings(settings: TrainSettings, previous: PreviousRun | None) -> TrainSettings:
    """Settings of a run that may go on: those given, over its own. With `--resume auto` the command
    has all of them, and is held against the run."""
    given = settings.model_dump(include=settings.model_fields_set)
    if previous is None:
        if settings.resume is None:
            return settings
        return validate(TrainSettings, {**given, "resume": None})
    # Another backend may call another dtype the best; the run's is the one it began with. So is
    # the number of tokens at once, which may have been measured.
    kept = {key: previous.plan[key] for key in ("dtype", "micro_batch_tokens")}
    if settings.resume == "auto":
        values = {**kept, **given, "resume": previous.run.path, "out": None}
        return validate(TrainSettings, values)
    kept = {**previous.plan["settings"], **kept}
    if "template" in kept and (own := previous.run.path / TEMPLATE).is_file():
        kept["template"] = own  # whatever became of the file that it was copied from
    if "adapter" in kept and (own := previous.run.path / START).is_dir():
        kept["adapter"] = str(own)
    if "epochs" in given and "max_steps" not in given:
        kept.pop("max_steps", None)  # it would win
    if "data" in given and "source" not in given:
        kept.pop("source", None)
    return validate(TrainSettings, {**kept, **given})


def metadata(plan: RunPlan, *, whole: bool = False) -> dict[str, Any]:
    """`plan.json`: contract, backend, the settings that were given, files by SHA-256.

    Args:
        whole: with the settings that concern one call alone.
    """
    return {
        **plan.execution.to_json(),
        "settings": recorded(plan.settings, whole=whole),
        "sources": {
            what: [{"path": str(file.path), "sha256": file.sha256} for file in some]
            for what, some in plan.sources.items()
        },
    }


def recorded(settings: TrainSettings, *, whole: bool = False) -> dict[str, Any]:
    """The settings that were given, with absolute paths; see `metadata`."""
    kept = settings.model_fields_set - (set() if whole else _OF_THIS_CALL)
    return {name: value for name, value in in_force(settings).items() if name in kept}


def in_force(settings: TrainSettings) -> dict[str, Any]:
    """Every setting as JSON; paths are absolute."""
    values = {name: _absolute(value) for name, value in settings}
    named = {name: Path(values[name]) for name in ("model", "adapter", "teacher") if values[name]}
    values |= {name: str(path.resolve()) for name, path in named.items() if path.exists()}
    rewards = map(RewardSource.of, settings.reward)
    values["reward"] = tuple(
        str(each._replace(file=each.file.resolve()) if each.file else each) for each in rewards
    )
    values["eval_suite"] = tuple(  # an installed suite has a name, and no path
        suite.resolve() if suite.is_file() else suite for suite in settings.eval_suite
    )
    return settings.model_copy(update=values).model_dump(mode="json", by_alias=False)


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):  # a data set of the hub lies in no folder
        return value if is_remote(value) else value.resolve()
    if isinstance(value, DataSource):
        return value.model_copy(update={"path": _absolute(value.path)})
    return tuple(map(_absolute, value)) if isinstance(value, tuple) else value


def _require_no_checkpoint(path: Path) -> None:
    """Refuse a folder inside a run, and name the run (A001)."""
    for run in path.absolute().parents[:2]:
        inside = path.absolute().relative_to(run).parts
        if inside[0] == CHECKPOINTS and (run / PLAN).is_file():
            raise AdapterError(
                "A001",
                "this is inside a run, and not the run",
                where=path,
                remedy=f"{command('vox', 'train', '--resume', run)}, which goes on from its newest "
                "good checkpoint",
            )


def is_new(run: RunFolder) -> bool:
    """Nothing is there, or what a process left that died before it had written its plan."""
    if not run.path.exists():
        return True
    left = (LOCK, OWNER, PREFLIGHT, SKIPPED, START)  # the plan comes after it
    return run.path.is_dir() and all(
        path.name in left or is_temporary(path) for path in run.path.iterdir()
    )


# --- the contract -----------------------------------------------------------------------------


def require_same(
    made: ExecutionPlan,
    recorded: Mapping[str, Any],
    files: Sources,
    allowed: Collection[Change] = (),
) -> tuple[str, ...]:
    """Refuse to go on under another contract.

    Args:
        files: those of today.

    Returns:
        What has changed and may, in words.

    Raises:
        PlanError: P003, naming each setting that changed, and each file.
    """
    changes = [*differences(recorded["contract"], made.contract.to_json())]
    now: dict[str, Any] = {"dtype": made.dtype}
    if made.contract.adapter.dropout:  # it drops others in each micro-batch
        now["micro_batch_tokens"] = made.micro_batch_tokens
    changes += other_values(recorded, now)
    fields = {_MAY_CHANGE[name] for name in allowed}
    refused = [change for change in changes if change[0] not in fields]
    if refused:
        names = [n for n, field in _MAY_CHANGE.items() if any(field == f for f, *_ in refused)]
        if any(field not in _MAY_CHANGE.values() for field, *_ in refused):
            names = []  # the run could not go on with them either
        other = "epochs" if recorded["settings"].get("max_steps") else "max-steps"
        allow = " ".join(f"--allow-change {name}" for name in names if name != other)
        raise PlanError(
            "P003",
            "the run cannot be resumed under this contract",
            faults=describe_changes(refused, recorded, files),
            remedy="undo these changes, or train anew with another --out"
            + (f"; {allow} would let this run go on otherwise than it began" if allow else ""),
        )
    return tuple(_described(change, "when it began") for change in changes)


def other_values(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value then, value now) of each value that differs."""
    return [(key, then[key], now[key]) for key in now if then[key] != now[key]]


def describe_changes(
    changes: Collection[tuple[str, Any, Any]],
    recorded: Mapping[str, Any],
    files: Sources,
    *,
    since: str = "the run began",
    then: str = "when it began",
) -> list[str]:
    """Describe changes: the files first, then each field of the contract.

    Args:
        recorded: what has `sources`, as `plan.json`.
        files: those of today.
    """
    found: list[str] = []
    for field, was, now in changes:
        if field not in _FILES_OF or None in (was, now) or "sources" not in recorded:
            continue
        what = _FILES_OF[field]
        found += other_files(recorded["sources"], files, what, since) or [
            f"no file of the {what} has changed: the tokenizer, or another version of vox or "
            "of a library, makes other tokens of them"
        ]
    return [*found, *(_described(change, then) for change in changes)]


def _described(change: tuple[str, Any, Any], then: str) -> str:
    field, was, now = change
    parent, _, name = field.rpartition(".")
    flag = f"-O {name}" if parent == "objective.options" else "--" + name.replace("_", "-")
    what = _FLAGS_OF.get(field, flag)
    return f"{what}: {_short(was)} {then}, {_short(now)} now"


def _short(value: Any) -> str:
    """The value as it is written; of a digest its beginning."""
    digest = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
    return f"{value[:12]}…" if digest else repr(value)


# --- the run's own files ----------------------------------------------------------------------


class _Json(BaseModel):
    """Keys of a JSON file that are read; it may have more."""

    model_config = ConfigDict(strict=True)


class _File(_Json):
    path: str
    sha256: str


class _Contract(_Json):
    total_steps: Annotated[int, Field(ge=0)]


class _Metadata(_Json):
    settings: dict[str, Any]
    contract: _Contract
    digest: str
    dtype: str
    backend: str
    backend_version: str
    micro_batch_tokens: Annotated[int, Field(ge=0)]
    packing: str
    tuning: dict[str, str]
    sources: dict[str, list[_File]] = {}
    changes: list[Any] = []


class _Ended(_Json):
    last_step: Annotated[int, Field(ge=0)]


def plan_of(run: RunFolder) -> dict[str, Any]:
    """`plan.json`; A001 unless every key that is read is there, and of its type."""
    return _read(run, PLAN, _Metadata)


def last_step(run: RunFolder) -> int:
    """The step with which a run ended, as its manifest says (A001 if it does not)."""
    return int(_read(run, MANIFEST, _Ended)["last_step"])


def faults_of(value: Any, kind: type[BaseModel] = _Metadata) -> list[str]:
    """`key: fault` for each key that is read; none if all are right."""
    try:
        kind.model_validate(value)
    except ValidationError as error:
        return schema_faults(error)
    return []


def _read(run: RunFolder, name: str, kind: type[BaseModel]) -> dict[str, Any]:
    value = run.read(name)
    if faults := faults_of(value, kind):
        what = "a run's own file does not say what a resume needs"
        remedy = "put the file back, or train anew with another --out"
        raise AdapterError("A001", what, where=run.path / name, faults=faults, remedy=remedy)
    return value


FORMAT = "vox-plan/2"
FREE = ("out", "max_time", "resume", "allow_overcommit")
"""Settings that may be given beside a plan."""


@dataclass(frozen=True, slots=True)
class PinnedPlan:
    """A plan to run.

    Args:
        settings: the plan's, and those given beside it.
        exact: what the run has to be.
        digest: of `exact`, the identity of a plan.
    """

    path: Path
    settings: TrainSettings
    exact: Mapping[str, Any]
    digest: str

    def asked(self, settings: TrainSettings) -> TrainSettings:
        """The settings to prepare with: they name the plan's backend."""
        return settings.model_copy(update={"backend": self.exact["backend"]})

    def applied(self, plan: RunPlan) -> RunPlan:
        """With the micro-batches and knobs of this plan."""
        tokens, tuning = self.exact["micro_batch_tokens"], self.exact["tuning"]
        execution = replace(plan.execution, micro_batch_tokens=tokens, tuning=tuning)
        return replace(plan, execution=execution)

    def require(self, plan: RunPlan) -> None:
        """Refuse another run than the one that was planned, with every difference (P011)."""
        made, then = plan.execution, self.exact
        now = {"backend_version": made.backend_version, "dtype": made.dtype}
        changes = [*differences(then["contract"], made.contract.to_json())]
        changes += other_values(then, now)
        if changes:
            raise PlanError(
                "P011",
                "the run would not be the one that was planned",
                where=self.path,
                faults=describe_changes(
                    changes, then, plan.sources, since="the plan was made", then="planned"
                ),
                remedy="undo these changes, or plan anew: vox plan ... --json > plan.json",
            )


def read_plan(path: Path, flags: Mapping[str, Any]) -> PinnedPlan:
    """Read the plan in a file, with the flags that may stand beside it.

    Args:
        flags: those that stand on the command line, by field name.

    Raises:
        PlanError: P010, it is none that can be run; P012, a flag may not stand beside it.
        ConfigError: C002, a setting of the plan or a flag has no value that vox takes.
    """
    then, digest = _read_exact(path)
    planned = dict.fromkeys(then["settings"], str(path)) | {"backend": "--plan"}
    SOURCES.set({name: said for name, said in planned.items() if name not in flags})
    said = validate(TrainSettings, flags)
    wrong = [f"--{kebab(name)}" for name in sorted(said.model_fields_set - {*FREE})]
    if said.resume not in (None, "auto"):
        wrong.append(f"--resume {said.resume}: a run goes on by itself, without a plan")
    if wrong:
        raise PlanError(
            "P012",
            "a plan holds every setting",
            where=path,
            faults=wrong,
            expected=f"beside it {', '.join(f'--{kebab(name)}' for name in FREE)} alone",
            remedy="leave these flags out, or plan anew with them",
        )
    beside = {name: getattr(said, name) for name in said.model_fields_set}
    # What has been measured since has no influence, and nothing is measured.
    values = {**then["settings"], **beside, "tune": "ignore"}
    settings = validate(TrainSettings, values, SOURCES.get())
    return PinnedPlan(path, settings, then, digest)


def _read_exact(path: Path) -> tuple[Mapping[str, Any], str]:
    """Read a plan's `exact` part and its digest; P010 if the file is no such plan."""
    try:
        read = bounded_json.read(path)
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise _none(path, "the file cannot be read", str(words)) from error
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        found = read.get("format") if isinstance(read, dict) else type(read).__name__
        raise _none(path, "it is not what `vox plan --json` prints", f"format {found!r}")
    if (then := read.get("exact")) is None:
        raise _none(path, "it was made without data", "nothing to train")
    if faults := faults_of(then):
        named = "; ".join(f"exact.{fault}" for fault in faults)
        raise _none(path, "it does not say what a run needs", named)
    if (digest := digest_of(then)) != read.get("digest"):
        raise _none(path, "it is not as it was made: its digest is another one", digest)
    return then, digest


def _none(path: Path, why: str, found: str) -> PlanError:
    what = f"the plan is none that can be run: {why}"
    remedy = "vox plan --data DATA --json > plan.json; vox train --plan plan.json"
    return PlanError("P010", what, where=path, found=found, remedy=remedy)
