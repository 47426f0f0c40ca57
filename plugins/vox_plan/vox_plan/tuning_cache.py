"""Settings that were measured to be fastest, in vox's cache: one small file for each key.

The key is the machine, the model's shape, what is trained, and the versions of what computes. An
unreadable entry is a cache miss.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from vox_core.api.files import cache_folder, cache_root, write_json
from vox_core.api.host import cpus
from vox_core.api.plans import RunPlan, fixed_micro_batch, versions
from vox_core.contract import ExecutionPlan

_FOLDER = "tuned"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Set by users; each changes how many threads compute."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The fastest of the candidates that were measured.

    Args:
        micro_batch_tokens: tokens computed at once.
        tuning: values of the backend's knobs that are not the defaults.
        tokens_per_second: of training steps, without validation and checkpoints.
        untuned: the same of the defaults.
        measured: when, in seconds since the epoch.
        refused: candidates that were thrown out -> the reason.
        fast: modules in the backend's own functions, by kind, if the backend reports them.
        own: modules that keep their library's forward, by the reason.
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
        """Speed-up over the defaults."""
        return self.tokens_per_second / self.untuned

    def __str__(self) -> str:
        knobs = "".join(f", {name} {value}" for name, value in sorted(self.tuning.items()))
        return f"{self.micro_batch_tokens} tokens at once{knobs}"


def load(key: str) -> Tuned | None:
    """The entry, if there is one."""
    try:
        return TypeAdapter(Tuned).validate_json(_file(cache_root() / _FOLDER, key).read_bytes())
    except (OSError, ValidationError):
        return None


def store(key: str, tuned: Tuned) -> None:
    """Write the entry, in place of an older one.

    Raises:
        OutputError: O002, the cache cannot be written.
        StorageError: the file cannot be written.
    """
    write_json(_file(cache_folder(_FOLDER), key), asdict(tuned))


def cache_key(run: RunPlan) -> str:
    """SHA-256 of everything that decides which settings are fastest; not of data or free memory."""
    plan = run.execution
    tensors = run.inputs.weights.tensors.values()
    shape = Counter(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
    facts = {
        "machine": _machine(run),
        "versions": versions(run.inputs.backend),
        "shape": sorted(shape.items()),
        "model type": str(run.inputs.config.get("model_type")),
        "trained": _trained(plan),
        "tokens": plan.micro_batch_tokens if fixed_micro_batch(run.settings, plan) else None,
        "packing": plan.packing,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _machine(run: RunPlan) -> dict[str, Any]:
    device = run.inputs.selection.hardware.devices[0]
    return {
        "device": [device.name, *device.features, device.memory_bytes],
        "cores": cpus(),
        "threads": {name: os.environ.get(name) for name in _THREADS},
    }


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


def _file(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def cached(plan: RunPlan) -> Tuned | None:
    """Return the cached tuning for this run; None if there is none, or the run cannot be tuned."""
    if not tunable(plan):
        return None
    tuned = load(cache_key(plan))
    if tuned and fixed_micro_batch(plan.settings, plan.execution):
        return replace(tuned, micro_batch_tokens=plan.execution.micro_batch_tokens)
    return tuned


def tunable(plan: RunPlan) -> bool:
    """Not a run that goes on, nor one that follows a pinned plan."""
    return plan.fresh and plan.pinned is None and plan.settings.tune != "ignore"
