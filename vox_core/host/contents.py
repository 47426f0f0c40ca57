"""What a wheel or a folder holds, read without installing or building it.

A wheel tells which plugins it brings and the digest of each of its files; a folder tells its
plugins where its metadata is static, or else by the manifests that lie in it. What cannot be read
without running somebody's code is not known here, and is looked at after the installation
(inspection.py).
"""

from __future__ import annotations

import csv
import hashlib
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vox_core.errors import InputError
from vox_core.hookspecs import ENTRY_POINTS
from vox_core.host.bundle.members import Unreadable, text
from vox_core.host.manifest import FILE_NAME
from vox_core.host.origin import origin

_PLACES = ("*", "src/*")
"""Where the packages of a checkout are."""
_COMMANDS = ("console_scripts", "gui_scripts")


@dataclass(frozen=True, slots=True)
class HeldFile:
    """One file that a wheel brings.

    Args:
        scheme: key of `sysconfig.get_paths` for the place that it goes to.
        path: below that place.
        digest: as RECORD has it; None for a command that is made on the way in.
    """

    scheme: str
    path: PurePosixPath
    digest: str | None


def plugin_ids(source: Path) -> set[str] | None:
    """Ids of the plugins that a wheel or a folder brings; None where they cannot be known.

    Raises:
        InputError: I003, the wheel cannot be read.
    """
    if source.is_dir():
        declared = project_table(source).get("entry-points", {})
        named = declared.get(ENTRY_POINTS, {}) if isinstance(declared, Mapping) else {}
        declared_ids = {*named} if isinstance(named, Mapping) else set()
        return declared_ids or _ids_of_manifests(source) or None
    if source.suffix != ".whl":
        return None
    with _opened(source) as distribution:
        return {each.name for each in distribution.entry_points.select(group=ENTRY_POINTS)}


def held_files(wheel: Path) -> tuple[HeldFile, ...]:
    """What a wheel brings, and the commands that an installer makes for it.

    Raises:
        InputError: I003, the wheel cannot be read.
    """
    with _opened(wheel) as distribution:
        digests = dict(_rows(distribution))
        commands = [
            each for group in _COMMANDS for each in distribution.entry_points.select(group=group)
        ]
        files = [_held(name, digests.get(name)) for name in distribution.names]
        made = [HeldFile("scripts", PurePosixPath(each.name), None) for each in commands]
    return (*files, *made)


def project_table(folder: Path) -> Mapping[str, Any]:
    """`[project]` of the pyproject.toml in a folder; empty if there is none that can be read."""
    try:
        document = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # tables in tables in tables
        return {}
    project = document.get("project", {})
    return project if isinstance(project, dict) else {}


def digest(file: Path) -> str:
    """SHA-256 in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_installed(wheel: Path, distribution: str) -> bool:
    """Whether the installed `distribution` has the content of this wheel.

    It has if it was installed from this archive, or if both RECORDs (PEP 376) give the same files
    the same digests. Scripts and data are changed on their way in: a wheel with some is another one
    unless the archive is known to be the same.

    Raises:
        InputError: I003, the wheel cannot be read.
    """
    if _archive_digest(distribution) == digest(wheel):
        return True
    with _opened(wheel) as held:
        brought = _record(held)
    there = _record(metadata.distribution(distribution))
    about = {path for path in there if path.partition("/")[0].endswith(".dist-info")}
    left = there.keys() - brought.keys() - about  # in `about`, installers leave notes of their own
    return brought.items() <= there.items() and not left


def _ids_of_manifests(folder: Path) -> set[str]:
    found = set()
    for file in (file for place in _PLACES for file in folder.glob(f"{place}/{FILE_NAME}")):
        with suppress(
            OSError, ValueError, RecursionError
        ):  # discovery words what is wrong with a manifest
            found.add(tomllib.loads(file.read_text(encoding="utf-8")).get("id"))
    return {id for id in found if isinstance(id, str)}


def _archive_digest(distribution: str) -> str | None:
    """Of the archive that it was installed from. pip notes it; uv keeps that of the URL."""
    source = origin(distribution)
    noted = source.get("archive_info", {}).get("hashes", {}).get("sha256")
    asked = parse_qs(urlsplit(source.get("url", "")).fragment).get("sha256", [None])[0]
    return str(noted) if noted else asked


def _record(distribution: metadata.Distribution) -> dict[str, str]:
    """Path -> digest as RECORD has it, of what is part of the package and not made from it."""
    return {
        path: value
        for path, value in _rows(distribution)
        if "__pycache__" not in path and not path.startswith("../")
    }


def _rows(distribution: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """The files that RECORD has a digest of, with it."""
    for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        if len(row) > 1 and row[1]:
            yield row[0], row[1]


def _held(name: str, digest: str | None) -> HeldFile:
    """`x-1.0.data/scripts/vox` goes where commands go, all but that data to the packages."""
    first, _, rest = name.partition("/")
    if first.endswith(".data") and "/" in rest:
        scheme, _, rest = rest.partition("/")
        return HeldFile(scheme, PurePosixPath(rest), digest)
    return HeldFile("purelib", PurePosixPath(name), digest)


class _Held(metadata.Distribution):
    """The distribution in a wheel."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self.names = [name for name in archive.namelist() if not name.endswith("/")]
        folders = {name.partition("/")[0] for name in self.names}
        info = next((name for name in sorted(folders) if name.endswith(".dist-info")), None)
        if info is None:
            raise zipfile.BadZipFile("no .dist-info folder in it")
        self._archive, self._info = archive, info

    def read_text(self, filename: str) -> str | None:
        name = f"{self._info}/{filename}"
        return text(self._archive, name) if name in self.names else None

    def locate_file(self, path: str | PathLike[str]) -> Path:
        raise NotImplementedError("it is not installed")


@contextmanager
def _opened(wheel: Path) -> Iterator[_Held]:
    """The metadata in a wheel, without importing or unpacking anything."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield _Held(archive)
    # TypeError: what importlib raises over a line of entry_points.txt without a `=`; RuntimeError
    # and NotImplementedError: what zipfile raises over an archive that it does not know.
    except (OSError, zipfile.BadZipFile, ValueError, TypeError, RuntimeError, Unreadable) as error:
        raise InputError(
            "I003",
            "the wheel cannot be read",
            where=wheel,
            found=f"{type(error).__name__}: {error}",
            remedy="build it again, or fetch it again",
        ) from error
