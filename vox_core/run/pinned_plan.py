"""A plan that was kept, and the run that is held against it.

    vox plan --data train.jsonl --json > plan.json
    vox train --plan plan.json

What a run is held against is the plan's `exact`: every setting, the contract, the backend with its
version, the files by their SHA-256. Its digest is the plan's. Settings come from there and from
nowhere else: not from `vox.toml`, not from the environment; a flag may repeat what the plan says.
How many tokens are computed at once, and the backend's knobs, are the plan's too, whatever has been
measured since.

Where the results go, when to stop and whether memory may be overcommitted (`FREE`) is no part of
it. Nor is the machine: a plan may be run on another one, if the backend is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from vox_core import bounded_json
from vox_core.config import TrainSettings, validate
from vox_core.config.values import kebab
from vox_core.errors import PlanError
from vox_core.run.resume import describe_changes, differences, in_force
from vox_core.run.sources import to_json

if TYPE_CHECKING:
    from vox_core.run.run_plan import RunPlan

FORMAT = "vox-plan/1"
FREE = ("out", "max_time", "resume", "allow_overcommit")
"""What may be said beside a plan."""


class _Backend(BaseModel):
    model_config = ConfigDict(strict=True)
    id: str
    version: str
    device: str


class _File(BaseModel):
    model_config = ConfigDict(strict=True)
    path: str
    sha256: str


class _Exact(BaseModel):
    """The keys of a plan's `exact` that are read."""

    model_config = ConfigDict(strict=True)
    settings: dict[str, Any]
    given: list[str]
    contract: dict[str, Any]
    contract_digest: str
    backend: _Backend
    dtype: str
    micro_batch_tokens: int
    tuning: dict[str, str]
    sources: dict[str, list[_File]]


@dataclass(frozen=True, slots=True)
class PinnedPlan:
    """A plan to run.

    Args:
        settings: all of them as the plan has them, and what was said beside it.
        exact: what the run has to be.
        digest: of `exact`.
    """

    path: Path
    settings: TrainSettings
    exact: Mapping[str, Any]
    digest: str

    def asked(self, settings: TrainSettings) -> TrainSettings:
        """The settings to prepare with: they name the plan's backend."""
        return settings.model_copy(update={"backend": self.exact["backend"]["id"]})

    def applied(self, plan: RunPlan) -> RunPlan:
        """With the micro-batches and knobs of this plan."""
        tokens, tuning = self.exact["micro_batch_tokens"], self.exact["tuning"]
        execution = replace(plan.execution, micro_batch_tokens=tokens, tuning=tuning)
        return replace(plan, execution=execution)

    def require(self, plan: RunPlan) -> None:
        """Refuse another run than the one that was planned.

        Raises:
            PlanError: P011, with every difference.
        """
        made, then = plan.execution, self.exact
        changes = [*differences(then["contract"], made.contract.to_json())]
        now = {"backend version": made.backend_version, "dtype": made.dtype}
        was = {"backend version": then["backend"]["version"], "dtype": then["dtype"]}
        changes += [(key, was[key], now[key]) for key in was if was[key] != now[key]]
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


def exact(run: RunPlan) -> dict[str, Any]:
    """What a run of this plan is held against; the model has to be hashed."""
    settings, plan = run.settings, run.execution
    return {
        "settings": in_force(settings),
        "given": sorted(settings.model_fields_set),
        "contract": plan.contract.to_json(),
        "contract_digest": plan.contract.digest,
        "backend": {
            "id": plan.backend,
            "version": plan.backend_version,
            "device": plan.device,
        },
        "dtype": plan.dtype,
        "micro_batch_tokens": plan.micro_batch_tokens,
        "tuning": dict(plan.tuning),
        "sources": to_json(run.sources),
    }


def digest_of(exact: Mapping[str, Any]) -> str:
    """SHA-256 over canonical JSON, in hex: the identity of a plan."""
    text = json.dumps(exact, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_plan(path: Path, flags: Mapping[str, Any]) -> PinnedPlan:
    """Read the plan in a file, with the flags that may stand beside it.

    Args:
        flags: those that stand on the command line, by field name.

    Raises:
        PlanError: P010, it is none that can be run; P012, a flag says something else.
        ConfigError: C002, a setting of the plan or a flag has no value that vox takes.
    """
    read = _read(path)
    then = _checked(path, read.get("exact"))
    digest = digest_of(then)
    if digest != read.get("digest"):
        raise _none(path, "it is not as it was made: its digest is another one", str(digest))
    whole = validate(TrainSettings, then["settings"], dict.fromkeys(then["settings"], str(path)))
    said = validate(TrainSettings, flags, dict.fromkeys(flags, "the command line"))
    _require_agreement(path, then, said)
    beside = {name: getattr(said, name) for name in FREE if name in said.model_fields_set}
    # What has been measured since is nobody's business, and is measured no more.
    values = {**dict(whole), **beside, "tune": "ignore"}
    given = {*then["given"], *beside} & set(TrainSettings.model_fields)
    return PinnedPlan(path, TrainSettings.model_construct(given, **values), then, digest)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        read = bounded_json.read(path)
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise _none(path, "the file cannot be read", str(words)) from error
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        found = read.get("format") if isinstance(read, dict) else type(read).__name__
        raise _none(path, "it is not what `vox plan --json` prints", f"format {found!r}")
    return read


def _checked(path: Path, then: Any) -> dict[str, Any]:
    if then is None:
        raise _none(path, "it was made without data", "nothing to train")
    try:
        _Exact.model_validate(then)
    except ValidationError as error:
        each = error.errors(include_url=False, include_input=False)
        faults = [f"exact.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in each]
        raise _none(path, "it does not say what a run needs", "; ".join(faults)) from error
    return dict(then)


def _none(path: Path, why: str, found: str) -> PlanError:
    return PlanError(
        "P010",
        f"the plan is none that can be run: {why}",
        where=path,
        found=found,
        expected="a file made by `vox plan --data DATA --json`",
        remedy="vox plan --data DATA --json > plan.json; vox train --plan plan.json",
    )


def _require_agreement(path: Path, then: Mapping[str, Any], said: TrainSettings) -> None:
    faults = list(_contradictions(then, said))
    if faults:
        raise PlanError(
            "P012",
            "a flag says something else than the plan",
            where=path,
            faults=faults,
            remedy="leave these flags out, or plan anew with them",
        )


def _contradictions(then: Mapping[str, Any], said: TrainSettings) -> Iterator[str]:
    told, planned = in_force(said), then["settings"]
    came_to = {
        "backend": then["backend"]["id"],
        "dtype": then["dtype"],
        "micro_batch_tokens": then["micro_batch_tokens"],
    }
    for name in sorted(said.model_fields_set - {*FREE}):
        same = (planned.get(name), came_to.get(name, planned.get(name)))
        if told[name] not in same:
            was = came_to.get(name, planned.get(name))
            yield f"--{kebab(name)} {_shown(told[name])}: the plan has {_shown(was)}"
    if "resume" in said.model_fields_set and said.resume != "auto":
        yield f"--resume {said.resume}: a run goes on by itself, without a plan"


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
