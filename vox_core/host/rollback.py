"""An environment that is as it was when something in it fails.

    with restored_on_failure(environment, ["vox-ml-cpu"]):
        …                       # an installer, and the check of what it made

Before: which files the environment has, and a copy of those that belong to the distributions named,
as their RECORDs list them. On any exception, Ctrl-C and SIGTERM included: what is new is deleted,
what was copied is put back. A file that was changed though it belongs to none of these cannot be
put back, and is named.

The copy lies in the environment, outside the folders that Python searches, so that putting back
needs no second disk. A process that is killed outright leaves it there. Nothing here knows
installers.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from vox_core.cache import cache_folder
from vox_core.errors import InputError, WorkError
from vox_core.files import storage_errors
from vox_core.host.environment import Environment

_COPY_PREFIX = ".vox-before-"

Stamp: TypeAlias = tuple[int, int]
"""Size and time of modification, in ns."""


@contextmanager
def restored_on_failure(environment: Environment, distributions: Iterable[str]) -> Iterator[None]:
    """Undo all changes in `environment` if the block raises. One such block at a time.

    Args:
        distributions: names of those that may be changed or removed.

    Raises:
        InputError: I011, another process is at it.
        WorkError: I009, something could not be put back.
    """
    beside = environment.site_packages.parent
    with _alone(environment), _signals_raise(), storage_errors(environment.prefix):
        copies = Path(tempfile.mkdtemp(prefix=_COPY_PREFIX, dir=beside))
        before = _take(environment, distributions, copies)
        try:
            yield
        except BaseException as error:
            with _signals_wait():
                lost = _restore(before)
            if lost:  # then the copies stay, for hands to put back
                raise _not_whole(environment, lost, copies) from error
            shutil.rmtree(copies, ignore_errors=True)
            raise
        shutil.rmtree(copies, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Before:
    """Every file and folder of the environment, and the copies of some files."""

    roots: tuple[Path, ...]
    folders: frozenset[Path]
    stamps: Mapping[Path, Stamp]
    copies: Mapping[Path, Path]


def _take(environment: Environment, distributions: Iterable[str], folder: Path) -> _Before:
    # A lib64 that is a link to lib is one folder, not two.
    roots = tuple({root.resolve(): root for root in environment.roots()}.values())
    stamps = dict(_stamps(roots))
    copies: dict[Path, Path] = {}
    for name in distributions:
        for file in _files_of(name, roots):
            if file in stamps and file not in copies:
                copies[file] = folder / str(file).lstrip(os.sep)
                copies[file].parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, copies[file], follow_symlinks=False)
    return _Before(roots, frozenset(_folders(roots)), stamps, copies)


def _stamps(roots: Sequence[Path]) -> Iterator[tuple[Path, Stamp]]:
    """Every file below `roots`; a link to a folder counts as a file."""
    for root in roots:
        for parent, folders, names in os.walk(root):
            for name in (*names, *folders):
                path = Path(parent, name)
                with suppress(FileNotFoundError):  # another process has removed it
                    status = path.lstat()
                    if not stat.S_ISDIR(status.st_mode):
                        yield path, (status.st_size, status.st_mtime_ns)


def _folders(roots: Sequence[Path]) -> Iterator[Path]:
    return (Path(parent) for root in roots for parent, _, _ in os.walk(root))


def _files_of(name: str, roots: Sequence[Path]) -> Iterator[Path]:
    """What RECORD lists, and the bytecode that Python made of it, which installers remove too.

    The environment need not be that of this process, so `sys.path` is not asked.
    """
    for distribution in metadata.distributions(name=name, path=[*map(str, roots)]):
        for listed in distribution.files or ():
            file = Path(os.path.normpath(str(distribution.locate_file(listed))))
            yield file
            if file.suffix == ".py":
                yield Path(importlib.util.cache_from_source(str(file)))


def _restore(before: _Before) -> list[Path]:
    """Put back what was there, then take away what was not; the files that differ all the same."""
    after = dict(_stamps(before.roots))
    for path, copy in before.copies.items():
        if after.get(path) != before.stamps[path]:
            with suppress(OSError):  # told below, as a file that differs
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                shutil.copy2(copy, path, follow_symlinks=False)
    for path in after.keys() - before.stamps.keys():
        with suppress(OSError):
            path.unlink(missing_ok=True)
    for folder in sorted(set(_folders(before.roots)) - before.folders, reverse=True):
        with suppress(OSError):  # somebody's file has come into it meanwhile
            folder.rmdir()
    after = dict(_stamps(before.roots))
    return sorted(
        path
        for path, stamp in before.stamps.items()
        if after.get(path) != stamp and path.parent.name != "__pycache__"
    )


def _not_whole(environment: Environment, lost: Sequence[Path], copies: Path) -> WorkError:
    return WorkError(
        "I009",
        "the environment could not be restored entirely",
        where=environment,
        faults=[f"changed or gone: {path}" for path in lost],
        remedy=f"install again what these files belong to, or take them from {copies}",
    )


# --- alone, and not cut off ----------------------------------------------------------------------


@contextmanager
def _alone(environment: Environment) -> Iterator[None]:
    """Two at once would each take the other's packages for leftovers."""
    import hashlib

    from filelock import FileLock, Timeout

    key = hashlib.sha256(str(environment.prefix).encode()).hexdigest()
    lock = FileLock(cache_folder("environments") / f"{key}.lock", timeout=0)
    try:
        with lock:
            yield
    except Timeout as error:
        raise InputError(
            "I011",
            "another vox is changing this Python environment",
            where=environment,
            remedy="wait until it is done, and run again",
        ) from error


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and a closed terminal end a block as Ctrl-C does, so that it is undone."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handling([signal.SIGTERM, signal.SIGHUP], stop):
        yield


@contextmanager
def _signals_wait() -> Iterator[None]:
    """No signal cuts putting back off."""
    with _handling([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], signal.SIG_IGN):
        yield


@contextmanager
def _handling(numbers: Sequence[signal.Signals], handler: signal._HANDLER) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handled in previous.items():
            signal.signal(number, handled)
