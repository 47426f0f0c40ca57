"""Write files and folders atomically: each is complete or absent.

Every file and folder that vox makes goes through this module: written under a temporary name in
the same folder, flushed to the disk, renamed into place, and the rename itself flushed. A failure
leaves what was there before. `OSError` becomes a `StorageError` here and nowhere else. File modes
follow the user's umask.

Every system call that changes the disk goes through `calls`. A test puts another `Calls` in its
place: one that fails at the third write, that kills the process at the fourth rename, or that keeps
a record of what was flushed.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import io
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vox_core.errors import OutputError, StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
# The user's umask restricts these.
_MODE = 0o666


class Calls:
    """The system's calls; each raises `OSError`."""

    def create(self, path: Path) -> int:
        """Return a descriptor of a new file."""
        return os.open(path, _NEW | os.O_CLOEXEC, _MODE)

    def append(self, path: Path) -> int:
        """Return a descriptor that always writes at the current end of the file."""
        return os.open(path, _APPEND | os.O_CLOEXEC, _MODE)

    def open_folder(self, path: Path) -> int:
        """Return a descriptor for `fsync` of the folder's entries."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def write(self, descriptor: int, data: ReadableBuffer) -> int:
        """Write part of `data`; return the number of bytes written."""
        return os.write(descriptor, data)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` with `source`, atomically."""
        source.replace(target)

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def unlink(self, path: Path) -> None:
        path.unlink()

    def rmdir(self, path: Path) -> None:
        path.rmdir()


calls = Calls()


_FULL = {errno.ENOSPC, errno.EDQUOT}
TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}.+-[0-9a-f]{{12}}", re.DOTALL)


@contextmanager
def storage_errors(where: Path) -> Iterator[None]:
    """Map an `OSError` raised while working on `where` to a `StorageError`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, where) from error


def storage_error(error: OSError, where: Path | str) -> StorageError:
    if error.errno in _FULL:
        return StorageError(
            "S001",
            "the disk is full",
            where=where,
            found=error.strerror,
            remedy="free space on that disk, or choose another one with --out, and run again",
        )
    return StorageError(
        "S002",
        "a file could not be read or written",
        where=error.filename or where,
        found=error.strerror or error,
        remedy="check the disk, and that you may read and write there",
    )


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Create a binary file that is flushed to disk when the block ends.

    Not atomic: use it within `atomic_folder`.
    """
    with storage_errors(path), io.BufferedWriter(_New(path)) as file:
        yield file
        file.flush()
        calls.fsync(file.fileno())


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a binary file that appears at `path`, complete, when the block ends without an
    exception."""
    temporary = temporary_beside(path)
    with storage_errors(path):
        try:
            with new_file(temporary) as file:
                yield file
            calls.rename(temporary, path)
            sync_folder(path.parent)
        finally:
            remove(temporary)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, atomically."""
    with atomic_file(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically. Escapes surrogates, as in names of files."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with a final newline, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def atomic_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Fill a folder that appears at `path`, complete, when the block ends without an exception.

    Yields the temporary folder to fill, with any files and folders.

    Args:
        replace: replace a folder that may be there; the parent must exist. A crash between the two
            renames leaves no folder at `path`, never a part of one.

    Raises:
        OutputError: without `replace`, `path` exists, or its parent cannot be written.
        StorageError: any other I/O error.
    """
    temporary, before = temporary_beside(path), temporary_beside(path)
    if not replace:
        require_absent(path)
        remove_abandoned(path)
        make_folder(temporary)
    try:
        with storage_errors(path):
            if replace:
                calls.mkdir(temporary)
            with _locked(temporary):
                yield temporary
                for folder, _, names in os.walk(temporary):
                    for name in names:
                        with Path(folder, name).open("rb") as file:
                            calls.fsync(file.fileno())
                    sync_folder(Path(folder))
                if replace and path.exists():
                    calls.rename(path, before)
                _put_in_place(temporary, path)
    except BaseException:
        if before.exists():
            with suppress(OSError):
                calls.rename(before, path)
        raise
    finally:
        remove(temporary)
        if path.exists():  # or what was there before could not be put back
            remove(before)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; any I/O error of the block is a StorageError."""
    temporary = temporary_beside(path)
    with storage_errors(path):
        try:
            calls.mkdir(temporary)
            with _locked(temporary):
                yield temporary
        finally:
            remove(temporary)


def _put_in_place(temporary: Path, path: Path) -> None:
    calls.rename(temporary, path)
    try:
        sync_folder(path.parent)
    except OSError:
        # It may not survive a power cut, so it must not appear to exist.
        with suppress(OSError):
            calls.rename(path, temporary)
        raise


def append(path: Path, data: bytes) -> None:
    """Append `data` to the file, created if needed: all of it or nothing.

    The data survives a crash of the process, not a power cut, as it is not flushed to disk.

    Raises:
        StorageError: the file is unchanged, unless truncating it failed, too.
    """
    with storage_errors(path):
        descriptor = calls.append(path)
        try:
            size = os.fstat(descriptor).st_size
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[calls.write(descriptor, rest) :]
            except OSError:
                with suppress(OSError):
                    calls.truncate(descriptor, size)
                raise
        finally:
            calls.close(descriptor)


def make_folder(path: Path) -> None:
    """Create `path` and its parents (O002 if that fails, S001 on a full disk)."""
    for folder in (*reversed(path.parents), path):
        try:
            if not folder.is_dir():
                calls.mkdir(folder)
        except OSError as error:
            if not (isinstance(error, FileExistsError) and folder.is_dir()):  # made meanwhile
                raise unwritable(path, error) from error


def free_space(path: Path) -> tuple[Path, int]:
    """Return the nearest folder above `path` that exists, and the bytes free on its disk."""
    parent = existing(path.absolute().parent)
    return parent, shutil.disk_usage(parent).free


def existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def require_space(path: Path, needed: int, what: str) -> None:
    """Refuse to begin what would not fit on the disk of `path` (S001); `needed` is in bytes."""
    remove_abandoned(path)
    parent, free = free_space(path)
    if free < needed:
        raise StorageError(
            "S001",
            f"there is not enough room for {what}",
            where=parent,
            found=f"{free / 1e6:,.0f} MB free",
            expected=f"{needed / 1e6:,.0f} MB",
            remedy="free space on that disk, or choose another one with --out",
        )


def unwritable(path: Path, error: OSError) -> OutputError | StorageError:
    """Return the error for a folder `path` that could not be created."""
    if error.errno in _FULL:
        return storage_error(error, path)
    what = "the output folder cannot be written"
    remedy = "choose a folder that you can write to, with --out"
    return OutputError("O002", what, where=path, found=error.strerror, remedy=remedy)


def require_writable(file: Path) -> None:
    """Refuse a file that cannot be created or continued (O002), before any work for it."""
    if file.is_dir() or not os.access(existing(file.absolute()), os.W_OK):
        what, remedy = "the output file cannot be written", "choose another one with --out"
        found = "a folder" if file.is_dir() else "no permission to write"
        raise OutputError("O002", what, where=file, found=found, remedy=remedy)


def default_out(reference: str, suffix: str) -> Path:
    """Return `REFERENCE-SUFFIX`, for a result without --out; `NAME-SUFFIX` for OWNER/NAME on the
    hub, since a folder OWNER here would be looked into instead of the hub."""
    here = reference.rstrip("/")
    return Path(f"{here if Path(here).exists() else Path(here).name}-{suffix}")


def require_absent(path: Path, remedy: str = "choose another one with --out") -> None:
    """Refuse to overwrite an existing path (O001)."""
    if path.exists() or path.is_symlink():
        raise OutputError(
            "O001",
            "the output path exists",
            where=path,
            found="a folder" if path.is_dir() else "a file",
            remedy=remedy,
        )


def require_apart(out: Path, inputs: Iterable[tuple[str, Path]]) -> None:
    """Refuse an output path that equals, contains or lies within an input (O004).

    An input folder that contains the working folder may also contain the output, since every
    relative path lies in it.

    Args:
        inputs: the flag, such as `--data`, and the path.
    """
    place, here = out.resolve(), Path.cwd()
    for flag, path in inputs:
        read = path.resolve()
        inside = read in place.parents and read not in (here, *here.parents)
        if place == read or inside or place in read.parents:
            how = "is" if place == read else "lies inside" if inside else "contains"
            raise OutputError(
                "O004",
                f"the output path {how} one that is read",
                where=f"--out {out}",
                found=f"{flag} {path}",
                remedy="choose another one with --out",
            )


def sync_folder(path: Path) -> None:
    """Flush the folder itself, so that a rename in it survives a power cut."""
    descriptor = calls.open_folder(path)
    try:
        calls.fsync(descriptor)
    finally:
        calls.close(descriptor)


def remove(path: Path) -> None:
    """Remove the file or folder if it exists, as far as possible."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            for child in list(path.iterdir()):
                remove(child)
            calls.rmdir(path)
        else:
            calls.unlink(path)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed processes left in `folder`.

    Only for a folder that no other process works in.
    """
    for left in filter(is_temporary, folder.glob(f"{TEMPORARY_PREFIX}*")):
        remove(left)


def remove_abandoned(path: Path) -> None:
    """Remove the temporary folders for `path`, and copies beside them, that killed processes of
    this machine left: a living one holds a lock, which another machine may not see."""
    for left in path.parent.glob(f"{TEMPORARY_PREFIX}{glob.escape(path.name)}-{_machine()}??????"):
        copies = left.parent.glob(f"{TEMPORARY_PREFIX}{glob.escape(left.name)}-*")
        with suppress(OSError), _locked(left) as locked:
            for each in (*copies, left) if locked else ():
                remove(each)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock; yield whether it is: another may have it, or the disk have no locks."""
    descriptor, locked = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), False
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        yield locked
    finally:
        os.close(descriptor)


def is_temporary(path: Path) -> bool:
    """Whether the name is one of `temporary_beside`."""
    return bool(_TEMPORARY.fullmatch(path.name))


def temporary_beside(path: Path) -> Path:
    """Return a unique name in the same folder, for a file being written or deleted."""
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{_machine()}{uuid.uuid4().hex[:6]}")


def _machine() -> str:
    """Return six hex digits for this machine's name."""
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"[:6]


class _New(io.FileIO):
    """A new file that is written through `calls`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "xb", opener=lambda name, _flags: calls.create(Path(name)))

    def write(self, data: ReadableBuffer) -> int:
        return calls.write(self.fileno(), data)


_TEMPLATES = "additional_chat_templates"  # the one folder within a model that is read


def strays(folder: Path) -> list[str]:
    """List the links in `folder` that lead out of it, each with its target.

    Raises:
        OSError: the folder cannot be listed.
    """
    home = folder.resolve()
    homes = (home, *_blobs(home))
    return [
        f"{path.relative_to(folder)}: a link to {target}"
        for path in _links(folder)
        if not any((target := path.resolve()).is_relative_to(place) for place in homes)
    ]


def _links(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            yield path
        elif path.name == _TEMPLATES and path.is_dir():
            yield from _links(path)


def _blobs(home: Path) -> Iterator[Path]:
    """Return the folders that a snapshot's links may lead to: HUB/models--O--N/snapshots/COMMIT ->
    …/blobs."""
    repository = home.parent.parent
    if home.parent.name == "snapshots" and repository.name.startswith("models--"):
        yield repository / "blobs"
        yield repository.parent / "blobs"
