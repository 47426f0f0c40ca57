"""Facts out of a wheel or a project's folder, without installing or building it.

Archives may come from strangers: a bundle, and the wheels in it. `member` and `text` read stored or
deflated members only (an LZMA stream names the memory that it wants), `text` at most `LONGEST_TEXT`
bytes of one, and whatever the standard library raises over damage becomes `Unreadable`.
"""

from __future__ import annotations

import tomllib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import IO, Any

from vox_core.errors import InputError
from vox_core.hookspecs import ENTRY_POINTS
from vox_core.host.manifest import FILE_NAME

LONGEST_TEXT = 1 << 22
"""Bytes; the lock of thousands of wheels is far below it, as are manifests and metadata."""

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


def plugin_ids(source: Path) -> set[str] | None:
    """Ids of the plugins in a wheel or folder; None where only a build tells them.

    Raises:
        InputError: I003, the wheel cannot be read.
    """
    if not source.is_dir():
        return _ids_in_wheel(source) if source.suffix == ".whl" else None
    declared = project_table(source).get("entry-points", {})
    named = declared.get(ENTRY_POINTS, {}) if isinstance(declared, Mapping) else {}
    ids = {*named} if isinstance(named, Mapping) else set()
    return ids or _ids_of_manifests(source) or None


def project_table(folder: Path) -> Mapping[str, Any]:
    """`[project]` of the pyproject.toml in a folder; empty if there is none that can be read."""
    try:
        document = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # tables in tables in tables
        return {}
    project = document.get("project", {})
    return project if isinstance(project, dict) else {}


def needs_build(folder: Path) -> bool:
    """Whether only a build tells what the project in a folder requires."""
    project = project_table(folder)
    dynamic = {"version", "dependencies", "optional-dependencies"}
    return "name" not in project or not dynamic.isdisjoint(project.get("dynamic", ()))


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
    if info.flag_bits & _ENCRYPTED:
        raise Unreadable("it is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Unreadable(f"it is compressed by method {info.compress_type}, expected 0 or 8")
    try:
        with archive.open(info) as content:
            yield content
    except _DAMAGE as error:
        raise Unreadable(str(error) or type(error).__name__) from error


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


def metadata_text(archive: zipfile.ZipFile, name: str) -> str:
    """A file of the .dist-info folder of a wheel; empty if it is not there.

    Raises:
        Unreadable: it cannot be read, or there is not one such folder.
    """
    tops = {each.partition("/")[0] for each in archive.namelist()}
    infos = [each for each in tops if each.endswith(".dist-info")]
    if len(infos) != 1:
        raise Unreadable(f"expected one .dist-info folder, found {len(infos)}")
    path = f"{infos[0]}/{name}"
    return text(archive, path) if path in archive.NameToInfo else ""


def _ids_in_wheel(wheel: Path) -> set[str]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            points = _Points(metadata_text(archive, "entry_points.txt")).entry_points
            return {each.name for each in points.select(group=ENTRY_POINTS)}
    # importlib raises TypeError over a line of entry_points.txt without a `=`
    except (*_DAMAGE, TypeError, Unreadable) as error:
        raise InputError(
            "I003",
            "the wheel cannot be read",
            where=wheel,
            found=f"{type(error).__name__}: {error}",
            remedy="build it again, or fetch it again",
        ) from error


def _ids_of_manifests(folder: Path) -> set[str]:
    found = set()
    for file in (file for place in ("*", "src/*") for file in folder.glob(f"{place}/{FILE_NAME}")):
        with suppress(OSError, ValueError, RecursionError):  # discovery words what is wrong
            found.add(tomllib.loads(file.read_text(encoding="utf-8")).get("id"))
    return {id for id in found if isinstance(id, str)}


class _Points(metadata.Distribution):
    """A distribution of which only the entry points are there."""

    def __init__(self, points: str) -> None:
        self._points = points

    def read_text(self, filename: str) -> str | None:
        return self._points if filename == "entry_points.txt" else None

    def locate_file(self, path: str | PathLike[str]) -> Path:
        raise NotImplementedError("it is not installed")
