"""Checkpoints: a `TrainState` on the disk, the same for every backend, whole or not there.

    step-N/adapter.safetensors     float32, canonical names
    step-N/moments.safetensors     float32, `<canonical name>.exp_avg` and `.exp_avg_sq`
    step-N/state.json              step, contract digest, backend, the adapter's structure
    step-N/MANIFEST.json           size and SHA-256 of the three

A checkpoint counts only if every file is what the manifest says. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core.contract import AdapterState, LowRank, TrainState
from vox_core.errors import PlanError, VoxError
from vox_core.files import atomic_folder, storage_errors, write_json
from vox_core.weights import SafetensorsFile, write_safetensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ADAPTER = "adapter.safetensors"
MOMENTS = "moments.safetensors"
STATE = "state.json"
MANIFEST = "MANIFEST.json"
KEPT = 2
_STEP = re.compile(r"step-(\d+)")


def save(
    parent: Path, state: TrainState, contract: str, backend: str, keep: Collection[int] = ()
) -> Path:
    """Write `parent/step-N`, then prune all but the newest ones and those of the steps in `keep`.
    Returns the new folder.

    A step that is there already is left alone: it was verified when it was resumed from.

    Raises:
        StorageError: it could not be written.
    """
    with storage_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"step-{state.step}"
    if not folder.exists():
        with atomic_folder(folder) as temporary:
            _fill(temporary, state, contract, backend)
    for old in numbered(parent)[KEPT:]:
        if _step_of(old) not in keep:
            shutil.rmtree(old)
    return folder


def numbered(parent: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first."""
    found = [p for p in parent.glob("step-*") if _STEP.fullmatch(p.name)]
    return sorted(found, key=_step_of, reverse=True)


def load_newest(parent: Path) -> tuple[TrainState, list[str]]:
    """The newest checkpoint that verifies, and why newer ones were passed over.

    Those are set aside under another name, so that they neither count nor stand in the way.

    Raises:
        PlanError: P003, none verifies.
    """
    skipped: list[str] = []
    damaged: list[Path] = []
    for folder in numbered(parent):
        if fault := _fault(folder):
            skipped.append(f"{folder.name}: {fault}")
            damaged.append(folder)
            continue
        for bad in damaged:
            bad.rename(_aside(bad))
        return _load(folder), skipped
    raise PlanError(
        "P003",
        "the run has no checkpoint to go on from",
        where=parent,
        found="none" if not skipped else None,
        faults=skipped,
        remedy=f"remove it and train again: rm -r {parent.parent}",
    )


def load_step(parent: Path, step: int) -> TrainState | None:
    """The checkpoint of that step; None if it is not there, or does not verify."""
    folder = parent / f"step-{step}"
    return None if _fault(folder) else _load(folder)


def _fill(folder: Path, state: TrainState, contract: str, backend: str) -> None:
    _write(folder / ADAPTER, state.adapter.tensors())
    moments = {
        f"{name}.{kind}": moment
        for name, pair in state.moments.items()
        for kind, moment in zip(("exp_avg", "exp_avg_sq"), pair, strict=True)
    }
    _write(folder / MOMENTS, moments)
    write_json(folder / STATE, _describe(state, contract, backend))
    files = {name: _entry(folder / name) for name in (ADAPTER, MOMENTS, STATE)}
    write_json(folder / MANIFEST, {"files": files})


def _describe(state: TrainState, contract: str, backend: str) -> dict[str, Any]:
    return {
        "step": state.step,
        "skipped": state.skipped,
        "contract": contract,
        "backend": backend,
        "method": state.adapter.method,
        "alpha": {path: module.alpha for path, module in state.adapter.modules.items()},
        "saved": sorted(state.adapter.saved),
    }


def _write(path: Path, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    specs = {name: ("F32", value.shape) for name, value in tensors.items()}
    write_safetensors(path, specs, tensors.items())


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    # Not `digests.file_sha256`: its memory of hashes would hide a file that changed on the disk.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fault(folder: Path) -> str | None:
    """Why the checkpoint cannot be trusted; None if it can."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        wrong = [name for name in (ADAPTER, MOMENTS, STATE) if files[name] != _entry(folder / name)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    except VoxError as error:
        return error.what
    return f"{', '.join(wrong)} is not what {MANIFEST} says" if wrong else None


def _load(folder: Path) -> TrainState:
    described = json.loads((folder / STATE).read_text())
    named = _read(folder / ADAPTER)
    modules = {
        path: LowRank(
            A_RI=named[f"{path}.lora_A.weight"],
            B_OR=named[f"{path}.lora_B.weight"],
            alpha=float(alpha),
            magnitude_O=named.get(f"{path}.lora_magnitude_vector"),
        )
        for path, alpha in described["alpha"].items()
    }
    saved = {name: named[name] for name in described["saved"]}
    halves = _read(folder / MOMENTS)
    moments = {
        name: (halves[f"{name}.exp_avg"], halves[f"{name}.exp_avg_sq"])
        for name in named
        if f"{name}.exp_avg" in halves
    }
    adapter = AdapterState(described["method"], modules, saved)
    return TrainState(described["step"], adapter, moments, described.get("skipped", 0))


def _read(path: Path) -> dict[str, NDArray[np.float32]]:
    import numpy as np

    file = SafetensorsFile(path)
    return {name: np.array(file.read(name), np.float32) for name in file.tensors}


def _aside(folder: Path) -> Path:
    return folder.with_name(f"damaged-{folder.name}-{uuid.uuid4().hex[:8]}")


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
