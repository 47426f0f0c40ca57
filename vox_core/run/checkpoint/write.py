"""Write a checkpoint, and remove those that need not be kept.

Each file goes into a temporary folder and is flushed; then the manifest, with the digests of what
was meant to be written; then the folder is flushed, renamed, and its parent flushed. What is there
by then is read back and held against the manifest: only then does `save` return.

What goes is renamed first, so that no half-removed folder ever has a checkpoint's name: after a
crash it is a left-over, which the next start removes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from vox_core import disk, files
from vox_core.contract import TrainState
from vox_core.errors import StorageError
from vox_core.run.checkpoint.read import fault, set_aside
from vox_core.run.checkpoint.record import (
    ADAPTER,
    MANIFEST,
    MOMENTS,
    STATE,
    Entry,
    Manifest,
    Origin,
    Record,
)
from vox_core.run.folder import numbered, step_of
from vox_core.weights.file import safetensors_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Part: TypeAlias = bytes | memoryview


def save(parent: Path, state: TrainState, origin: Origin) -> Path:
    """Write `parent/step-N`, flush it, and read it back. Returns the new folder.

    A step that is there already and verifies is left alone; if it does not, it is set aside.

    Raises:
        StorageError: it could not be written; nothing of it is left.
    """
    folder = parent / f"step-{state.step}"
    with files.storage_errors(folder):
        if not parent.is_dir():
            _make_parent(parent)
        if folder.exists() and fault(folder) is None:
            files.sync_folder(parent)
            return folder
    if folder.exists():
        set_aside(folder)
    with files.atomic_flat_folder(folder) as temporary:
        _fill(temporary, state, origin)
    _require_whole(folder)
    return folder


def _make_parent(parent: Path) -> None:
    disk.calls.mkdir(parent)
    files.sync_folder(parent.parent)


def _require_whole(folder: Path) -> None:
    why = fault(folder)
    if why is None:
        return
    set_aside(folder)
    raise StorageError(
        "S002",
        "a checkpoint is not on the disk as it was written",
        where=folder,
        found=why,
        remedy="check the disk; the checkpoints before it are as they were",
    )


def _fill(folder: Path, state: TrainState, origin: Origin) -> None:
    moments = {
        f"{name}.{kind}": moment
        for name, pair in state.moments.items()
        for kind, moment in zip(("exp_avg", "exp_avg_sq"), pair, strict=True)
    }
    record = _record(state, origin).model_dump_json(indent=2).encode()
    entries = {
        ADAPTER: _write(folder / ADAPTER, _tensors(state.adapter.tensors())),
        MOMENTS: _write(folder / MOMENTS, _tensors(moments)),
        STATE: _write(folder / STATE, [record, b"\n"]),
    }
    _write(folder / MANIFEST, [Manifest(files=entries).model_dump_json(indent=2).encode(), b"\n"])


def _record(state: TrainState, origin: Origin) -> Record:
    return Record(
        step=state.step,
        skipped=state.skipped,
        method=state.adapter.method,
        alpha={path: float(module.alpha) for path, module in state.adapter.modules.items()},
        saved=sorted(state.adapter.saved),
        **{field.name: getattr(origin, field.name) for field in fields(Origin)},
    )


def _tensors(tensors: Mapping[str, NDArray[np.float32]]) -> Iterable[Part]:
    specs = {name: ("F32", value.shape) for name, value in tensors.items()}
    return safetensors_bytes(specs, tensors.items())


def _write(path: Path, parts: Iterable[Part]) -> Entry:
    """Write a file, with the digest of what it should hold: reading it back proves the disk."""
    digest, size = hashlib.sha256(), 0
    with files.new_file(path) as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
    return Entry(size=size, sha256=digest.hexdigest())


# --- retention --------------------------------------------------------------------------------

KEPT = 2


@dataclass(frozen=True, slots=True)
class Retention:
    """Checkpoints to keep: the newest `last`, and every step that `every` divides (0: none)."""

    last: int = KEPT
    every: int = 0

    def keeps(self, step: int) -> bool:
        """Whether the step is kept for good."""
        return bool(self.every) and step % self.every == 0


def prune(parent: Path, retention: Retention, best: int | None = None) -> None:
    """Remove what need not be kept. Only to be called when the newest one has been verified.

    Args:
        best: a step to keep whatever its age.

    Raises:
        StorageError: a checkpoint could not be taken away; none is there in part.
    """
    old = [
        folder
        for folder in numbered(parent)[retention.last :]
        if not retention.keeps(step_of(folder)) and step_of(folder) != best
    ]
    if not old:
        return
    with files.storage_errors(parent):
        gone = [_renamed(folder) for folder in old]
        files.sync_folder(parent)
    for folder in gone:
        files.remove(folder)


def _renamed(folder: Path) -> Path:
    going = files.temporary_beside(folder)
    disk.calls.rename(folder, going)
    return going
