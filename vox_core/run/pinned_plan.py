"""A plan that was kept, and the run that is held against it.

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

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core import bounded_json
from vox_core.bounded_json import differences
from vox_core.config import TrainSettings, validate
from vox_core.config.values import kebab
from vox_core.errors import PlanError
from vox_core.run.resume import describe_changes, faults_of, other_values

if TYPE_CHECKING:
    from vox_core.run.run_plan import RunPlan

FORMAT = "vox-plan/2"
FREE = ("out", "max_time", "resume", "allow_overcommit")
"""Settings that may be given beside a plan."""


@dataclass(frozen=True, slots=True)
class PinnedPlan:
    """A plan to run.

    Args:
        settings: the plan's, and those given beside it.
        exact: what the run has to be.
        digest: of `exact`.
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


def digest_of(exact: Mapping[str, Any]) -> str:
    """SHA-256 over canonical JSON, in hex: the identity of a plan."""
    text = json.dumps(exact, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_plan(path: Path, flags: Mapping[str, Any]) -> PinnedPlan:
    """Read the plan in a file, with the flags that may stand beside it.

    Args:
        flags: those that stand on the command line, by field name.

    Raises:
        PlanError: P010, it is none that can be run; P012, a flag may not stand beside it.
        ConfigError: C002, a setting of the plan or a flag has no value that vox takes.
    """
    then, digest = _read(path)
    said = validate(TrainSettings, flags, dict.fromkeys(flags, "the command line"))
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
    settings = validate(TrainSettings, values, dict.fromkeys(values, str(path)))
    return PinnedPlan(path, settings, then, digest)


def _read(path: Path) -> tuple[Mapping[str, Any], str]:
    """What the run has to be, and its digest; P010 if the file is no such plan."""
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
    return PlanError(
        "P010",
        f"the plan is none that can be run: {why}",
        where=path,
        found=found,
        expected="a file made by `vox plan --data DATA --json`",
        remedy="vox plan --data DATA --json > plan.json; vox train --plan plan.json",
    )
