"""GGUF files as Hugging Face folders in the cache, each made once.

A folder is named after the model and the SHA-256 of what it was made from. It appears whole or not
at all, and two processes that want it at the same time make it once: the second one waits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core import files
from vox_core.cache import cache_folder

if TYPE_CHECKING:
    from vox_core.models import Progress


def made_once(name: str, sha256: str, obtain: Callable[[Path], Path], report: Progress) -> Path:
    """The folder of the model `name`, converted now if that has not been done before.

    Args:
        sha256: of what the model is made from.
        obtain: given a scratch folder, which is removed afterwards, it gives the GGUF file.

    Raises:
        ModelError: whatever `obtain` raises; M008, the file cannot be converted.
        StorageError: the disk is full, or an I/O error.
    """
    from filelock import FileLock

    models = cache_folder("models")
    folder = models / f"{name}-{sha256[:12]}"
    if folder.is_dir():
        return folder
    with files.storage_errors(folder), FileLock(models / f".{folder.name}.lock"):
        if not folder.is_dir():
            with _scratch_beside(folder) as scratch:
                _convert(obtain(scratch), folder, report)
    return folder


def from_file(path: Path, name: str, sha256: str, report: Progress) -> Path:
    """The folder of the GGUF file at `path`."""
    return made_once(name, sha256, lambda _: path, report)


@contextmanager
def _scratch_beside(folder: Path) -> Iterator[Path]:
    """A folder to work in; what a killed process left of its own goes, for we hold its lock."""
    for left in folder.parent.glob(f"{files.TEMPORARY_PREFIX}{folder.name}*"):
        shutil.rmtree(left, ignore_errors=True)
    scratch = folder.with_name(f"{files.TEMPORARY_PREFIX}{folder.name}")
    files.make_folder(scratch)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(path: Path, folder: Path, report: Progress) -> None:
    from vox_core.gguf import convert_gguf

    convert_gguf(path, folder, progress=lambda done, total: report("converting", done, total))
