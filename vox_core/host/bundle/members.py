"""Members of archives that come from strangers: a bundle, and the wheels in it.

What is read is limited before it is decompressed, so an archive that says little and unpacks to
much costs no memory. Only members that are stored or deflated are read: a stream of LZMA names the
memory that it wants, and no tool that makes wheels writes one. Whatever the standard library raises
over a damaged or hostile archive comes out as `Unreadable`.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

LONGEST_TEXT = 1 << 22
"""Bytes; a lock of thousands of wheels is far below it, as are manifests and metadata."""

_DAMAGE = (
    zipfile.BadZipFile,
    NotImplementedError,  # a version of the format that Python does not know
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    zlib.error,
)
_ENCRYPTED = 1


class Unreadable(Exception):
    """Why a member cannot be read, in words that follow `cannot be read: `."""


@contextmanager
def member(archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
    """The content of one member.

    Raises:
        Unreadable: it cannot be read, now or while the block reads it.
    """
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise Unreadable("it is not there") from None
    _require_plain(info)
    with _damage_told(), archive.open(info) as content:
        yield content


@contextmanager
def archive_in(archive: zipfile.ZipFile, name: str) -> Iterator[zipfile.ZipFile]:
    """The archive that a member is.

    Raises:
        Unreadable: it is none, or cannot be read.
    """
    with member(archive, name) as content, zipfile.ZipFile(content) as inner:
        yield inner


def text(archive: zipfile.ZipFile, name: str) -> str:
    """A member as UTF-8 text of at most `LONGEST_TEXT` bytes.

    Raises:
        Unreadable: it is none, longer, or cannot be read.
    """
    with member(archive, name) as content:
        data = content.read(LONGEST_TEXT + 1)
        if len(data) > LONGEST_TEXT:
            raise Unreadable(f"it is longer than {LONGEST_TEXT} bytes")
        return data.decode()


def _require_plain(info: zipfile.ZipInfo) -> None:
    if info.flag_bits & _ENCRYPTED:
        raise Unreadable("it is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Unreadable(f"it is compressed by method {info.compress_type}, expected 0 or 8")


@contextmanager
def _damage_told() -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise Unreadable(str(error) or type(error).__name__) from error
