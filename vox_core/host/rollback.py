"""An environment that is as it was when something in it fails.

    with restored_on_failure(environment, ["vox-ml-cpu"]) as before:
        …                       # an installer
        before.difference()     # and the check of what it made

Before: which files the environment has, a copy of those that belong to the distributions named, as
their RECORDs list them, and a second name, a hard link, for each other file. On any exception,
Ctrl-C and SIGTERM included: what is new is deleted, what is kept is put back. Installers replace
files; one that was written into under both its names cannot be put back, and is named. Neither can
one that could not be linked, or bytecode, which Python makes again.

What is kept lies in the environment, outside the folders that Python searches, so that putting back
needs no second disk. A process that is killed outright leaves it there: `leftovers` finds it.
Nothing here knows installers.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
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

from vox_core.errors import InputError, WorkError
from vox_core.files import storage_errors
from vox_core.host.alone import alone
from vox_core.host.environment import Environment

_COPY_PREFIX = ".vox-before-"
_NAMES = "DISTRIBUTIONS"
"""In the folder of copies: whose they are, for whoever finds them."""

Stamp: TypeAlias = tuple[int, int]
"""Size and time of modification, in ns."""


@contextmanager
def restored_on_failure(environment: Environment, distributions: Iterable[str]) -> Iterator[Before]:
    """Undo all changes in `environment` if the block raises. One such block at a time.

    Args:
        distributions: names of those that may come, be changed or be removed.

    Raises:
        InputError: I011, another process is at it.
        WorkError: I009, something could not be put back.
    """
    beside = environment.site_packages.parent
    with alone(environment), _signals_raise(), storage_errors(environment.prefix):
        copies = Path(tempfile.mkdtemp(prefix=_COPY_PREFIX, dir=beside))
        before = _take(environment, distributions, copies)
        try:
            yield before
        except BaseException as error:
            with _signals_wait():
                lost = _restore(before)
            if lost:  # then the copies stay, for hands to put back
                raise _not_whole(environment, lost, before, copies) from error
            shutil.rmtree(copies, ignore_errors=True)
            raise
        shutil.rmtree(copies, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Before:
    """Every file and folder of the environment, and what was kept of the files."""

    roots: tuple[Path, ...]
    folders: frozenset[Path]
    stamps: Mapping[Path, Stamp]
    copies: Mapping[Path, Path]

    def difference(self) -> Difference:
        """What is not as it was, bytecode aside."""
        after = dict(_stamps(self.roots))
        differing = [path for path, stamp in self.stamps.items() if after.get(path) != stamp]
        told = sorted(path for path in differing if path.parent.name != "__pycache__")
        return Difference(
            [path for path in told if path in after],
            [path for path in told if path not in after],
            sorted(after.keys() - self.stamps.keys()),
        )

    def put_back(self, paths: Iterable[Path]) -> None:
        """As they were, those of which there is a copy that is still what it was."""
        for path in paths:
            with suppress(OSError):  # whoever asked finds it still differs
                if self.has_copy(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.unlink(missing_ok=True)
                    shutil.move(self.copies[path], path)

    def has_copy(self, path: Path) -> bool:
        """Whether what was kept of it is still what it was; a link shares what is written."""
        with suppress(KeyError, OSError):
            return _stamp(self.copies[path].lstat()) == self.stamps[path]
        return False


@dataclass(frozen=True, slots=True)
class Difference:
    """Files that are there and not as they were, that are not there any more, and that were not."""

    changed: list[Path]
    gone: list[Path]
    added: list[Path]


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder of copies that a change left which was killed, or not undone entirely."""

    folder: Path
    distributions: tuple[str, ...]

    @property
    def told(self) -> str:
        """What happened, in words."""
        whose = f" of {', '.join(self.distributions)}" if self.distributions else ""
        return f"a change{whose} was cut off, or not undone entirely"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        names = shlex.join(self.distributions) or "what was to change"
        remove = shlex.join(["rm", "-r", str(self.folder)])
        return f"install or remove {names} again, then delete the files from before: {remove}"


def leftovers(environment: Environment) -> list[Leftover]:
    """What changes of this environment have left; none while one is under way."""
    beside = environment.site_packages.resolve().parent
    folders = sorted(beside.glob(f"{_COPY_PREFIX}*"))
    if not folders:
        return []
    try:
        with alone(environment):
            pass
    except InputError:
        return []
    except OSError:  # somebody else's environment: it is told all the same
        pass
    return [Leftover(folder, _names_in(folder)) for folder in folders]


def _names_in(folder: Path) -> tuple[str, ...]:
    with suppress(OSError, ValueError):
        return tuple((folder / _NAMES).read_text(encoding="utf-8").split())
    return ()


def _take(environment: Environment, distributions: Iterable[str], folder: Path) -> Before:
    # A lib64 that is a link to lib is one folder, not two.
    roots = tuple(dict.fromkeys(root.resolve() for root in environment.roots()))
    stamps = dict(_stamps(roots))
    names = [*distributions]
    (folder / _NAMES).write_text("\n".join(names), encoding="utf-8")
    changing = {file for name in names for file in _files_of(name, roots)}
    copies = {
        path: folder / str(path).lstrip(os.sep)
        for path in stamps
        if path in changing or path.parent.name != "__pycache__"
    }
    for parent in {copy.parent for copy in copies.values()}:
        parent.mkdir(parents=True, exist_ok=True)
    kept = {path: copy for path, copy in copies.items() if _keep(path, copy, path in changing)}
    return Before(roots, frozenset(_folders(roots)), stamps, kept)


def _keep(path: Path, copy: Path, is_changing: bool) -> bool:
    """Whether the file could be kept: whole if it is to change, else under a second name."""
    if is_changing or path.is_symlink():
        shutil.copy2(path, copy, follow_symlinks=False)
        return True
    with suppress(OSError):  # another disk, or a file system without links
        os.link(path, copy)
        return True
    return False


def _stamps(roots: Sequence[Path]) -> Iterator[tuple[Path, Stamp]]:
    """Every file below `roots`; a link to a folder counts as a file."""
    for root in roots:
        for parent, folders, names in os.walk(root):
            for name in (*names, *folders):
                path = Path(parent, name)
                with suppress(FileNotFoundError):  # another process has removed it
                    status = path.lstat()
                    if not stat.S_ISDIR(status.st_mode):
                        yield path, _stamp(status)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns


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


def _restore(before: Before) -> list[Path]:
    """Put back what was there, then take away what was not; the files that differ all the same."""
    after = dict(_stamps(before.roots))
    before.put_back(path for path in before.copies if after.get(path) != before.stamps[path])
    for path in after.keys() - before.stamps.keys():
        with suppress(OSError):
            path.unlink(missing_ok=True)
    for folder in sorted(set(_folders(before.roots)) - before.folders, reverse=True):
        with suppress(OSError):  # somebody's file has come into it meanwhile
            folder.rmdir()
    left = before.difference()
    return sorted([*left.changed, *left.gone])


def _not_whole(
    environment: Environment, lost: Sequence[Path], before: Before, copies: Path
) -> WorkError:
    kept = [path for path in lost if before.has_copy(path)]
    from_copies = f"; there are copies of {', '.join(map(str, kept))} in {copies}" if kept else ""
    return WorkError(
        "I009",
        "the environment could not be restored entirely",
        where=environment,
        faults=[f"changed or gone: {path}" for path in lost],
        remedy=f"install again what these files belong to{from_copies}",
    )


# --- not cut off ---------------------------------------------------------------------------------


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
