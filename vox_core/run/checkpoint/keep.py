"""Which checkpoints are kept.

What goes is renamed first, so that no half-removed folder ever has a checkpoint's name: after a
crash it is a left-over, which the next start removes.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from vox_core import disk, files
from vox_core.run.folder import numbered, step_of

KEPT = 2


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept: the newest `last`, and every step that `every` divides (0: none)."""

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


def set_aside(folder: Path) -> None:
    """Take a damaged checkpoint out of the way, under a name that does not count.

    Raises:
        StorageError: it stays where it is.
    """
    aside = folder.with_name(f"damaged-{folder.name}-{uuid.uuid4().hex[:8]}")
    with files.storage_errors(folder):
        disk.calls.rename(folder, aside)


def _renamed(folder: Path) -> Path:
    going = files.temporary_beside(folder)
    disk.calls.rename(folder, going)
    return going
