"""What was measured to be fastest, kept in the cache: one small file for each question.

A question is a machine, a model's shape, what is trained, and the versions of what computes. An
answer that cannot be read is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from pydantic import ConfigDict, TypeAdapter, ValidationError

from vox_core import files
from vox_core.cache import cache_folder, cache_root
from vox_core.config import TrainSettings
from vox_core.contract import ExecutionPlan

if TYPE_CHECKING:
    from vox_core.run.prepare import Prepared

_FOLDER = "tuned"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""What a user may have set, and which changes how many there are."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The fastest of what was measured.

    Args:
        micro_batch_tokens: tokens computed at once.
        tuning: values of the backend's knobs that are not their first.
        tokens_per_second: of training steps, validation and checkpoints left out.
        untuned: the same of the defaults.
        measured: when, in seconds since the epoch.
        refused: candidates that were thrown out, each with the reason.
        fast: modules in the backend's own functions, by kind, if the backend tells.
        own: modules that keep their library's way, by the reason.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    micro_batch_tokens: int
    tuning: dict[str, str]
    tokens_per_second: float
    untuned: float
    measured: float = field(default_factory=time.time)
    refused: dict[str, str] = field(default_factory=dict)
    fast: dict[str, int] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """How many times as fast as the defaults."""
        return self.tokens_per_second / self.untuned

    def __str__(self) -> str:
        """What was chosen, in words."""
        knobs = "".join(f", {name} {value}" for name, value in sorted(self.tuning.items()))
        return f"{self.micro_batch_tokens} tokens at once{knobs}"


def recall(question: str) -> Answer | None:
    """The answer, if there is one."""
    try:
        return TypeAdapter(Answer).validate_json(
            _file(cache_root() / _FOLDER, question).read_bytes()
        )
    except (OSError, ValidationError):
        return None


def keep(question: str, answer: Answer) -> None:
    """Write the answer down, in place of an older one.

    Raises:
        OutputError: O002, the cache cannot be written.
        StorageError: the file cannot be written.
    """
    files.write_json(_file(cache_folder(_FOLDER), question), asdict(answer))


def question(prepared: Prepared, settings: TrainSettings) -> str:
    """What is asked, as a digest. The data are no part of it, nor what memory is free just now."""
    plan = prepared.plan
    given = plan.micro_batch_tokens if tokens_given(settings, plan) else None
    asked = {
        "machine": _machine(prepared),
        "versions": _versions(prepared),
        "shape": sorted(_shape(prepared).items()),
        "trained": _trained(plan),
        "tokens at once": given,
        "packing": plan.packing,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def tokens_given(settings: TrainSettings, plan: ExecutionPlan) -> bool:
    """Whether no other number of tokens at once may be taken: somebody said how many, or dropout is
    another one with other micro-batches."""
    return "micro_batch_tokens" in settings.model_fields_set or plan.contract.adapter.dropout > 0


def _machine(prepared: Prepared) -> dict[str, Any]:
    device = next(iter(prepared.selection.hardware.devices), None)
    return {
        "device": [device.name, *device.features, device.memory_bytes] if device else None,
        "cores": _cores(),
        "threads": {name: os.environ.get(name) for name in _THREADS},
    }


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _versions(prepared: Prepared) -> dict[str, str | None]:
    """Of vox, the plugin and the distributions that it needs."""
    found = prepared.backend.found
    needed = found.manifest.requires.distributions if found.manifest else ()
    names = ["vox-ml", found.distribution, *(Requirement(each).name for each in needed)]
    return {name: _version(name) for name in names}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _shape(prepared: Prepared) -> Mapping[str, int]:
    """How many tensors there are of each dtype and shape."""
    tensors = prepared.weights.tensors.values()
    kinds = Counter(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
    return kinds + Counter({str(prepared.config.get("model_type")): 1})


def _trained(plan: ExecutionPlan) -> dict[str, Any]:
    adapter = plan.contract.adapter
    return {
        "dtype": plan.dtype,
        "quant": plan.contract.quant,
        "gradient_checkpointing": plan.gradient_checkpointing,
        "method": adapter.method,
        "rank": adapter.rank,
        "dropout": adapter.dropout > 0,
        "modules": len(plan.modules),
        "saved": sorted(plan.saved),
    }


def _file(folder: Path, question: str) -> Path:
    return folder / f"{question}.json"
