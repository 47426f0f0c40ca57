"""Which distribution owns a file of an environment, and who would lose one, or has lost it.

Installers write over the files of others without a word: a wheel with a `torch/__init__.py` in it
replaces torch's, and its removal deletes it. What is owned is told by the RECORDs (PEP 376); in the
folder of commands a file that nobody owns counts as well, for an interpreter is one. The same file
with the same content is nobody's loss: some packages share an `__init__.py`.

Bytecode is not looked at. Nothing here changes anything.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from packaging.utils import canonicalize_name

from vox_core.errors import InputError
from vox_core.host.contents import held_files
from vox_core.host.environment import Environment
from vox_core.host.origin import file_name, local_path

if TYPE_CHECKING:
    from vox_core.host.resolve import Change

Digests: TypeAlias = Mapping[str, str]
"""Canonical name of a distribution -> digest of a file as RECORD has it; empty if it has none."""

_CORE, _CORE_PACKAGE = "vox-ml", "vox_core"


@dataclass(frozen=True, slots=True)
class Owners:
    """Who owned what before an installation.

    Args:
        files: path, resolved -> those that list it.
        packages: the folders, resolved, that packages go to.
        commands: the folder, resolved, that commands go to.
    """

    files: Mapping[Path, Digests]
    packages: tuple[Path, ...]
    commands: Path

    def losers(self, path: Path, digest: str | None, but: Collection[str]) -> list[str]:
        """Whose file it was, if a file with this content is not the one that they had.

        Args:
            digest: as RECORD has it; None for content that nobody knows.
            but: canonical names of those that are changed anyway.
        """
        owned = self.files.get(path, {})
        others = {name: had for name, had in owned.items() if name not in but}
        if not owned and path.parent == self.commands:
            return ["no package"]
        return sorted(name for name, had in others.items() if not had or had != digest)


def owners(environment: Environment) -> Owners:
    """What the RECORDs in the folders of an environment say."""
    folders = tuple(folder.resolve() for folder in environment.folders)
    files: dict[Path, dict[str, str]] = {}
    for distribution in metadata.distributions(path=[*map(str, folders)]):
        for path, name, digest in _recorded(distribution):
            files.setdefault(path, {})[name] = digest
    return Owners(files, folders[:-1], folders[-1])


def changed_of_others(had: Owners, changed: Iterable[Path], touched: Collection[str]) -> list[str]:
    """Each of these files that was changed and belongs to none of `touched`, with its owner.

    Args:
        changed: files that are there, with other content or another time than before.
    """
    return [
        f"changed {path}, which belongs to {' and '.join(losers)}"
        for path in sorted(changed)
        if (losers := had.losers(path, _digest(path), touched))
    ]


def added_to_core(had: Owners, added: Iterable[Path], touched: Collection[str]) -> list[str]:
    """Each new file in the core's package; an editable core owns no folder that could tell."""
    if _CORE in touched:
        return []
    cores = {folder / _CORE_PACKAGE for folder in had.packages}
    return [
        f"added {path}, which belongs to {_CORE}"
        for path in sorted(added)
        if not cores.isdisjoint(path.parents) and path.parent.name != "__pycache__"
    ]


def require_own_files(changes: Iterable[Change], environment: Environment) -> None:
    """Raises InputError I003 if a wheel that is at hand would write over files of others."""
    changes = [*changes]
    wheels = [(change, path) for change in changes if (path := _wheel(change)) is not None]
    if not wheels:
        return
    had, touched = owners(environment), {change.name for change in changes if change.before}
    faults = [
        f"{change.name} brings {path}, which belongs to {' and '.join(losers)}"
        for change, file in wheels
        for path, digest in _destinations(file, environment, had)
        if path.exists() and (losers := had.losers(path, digest, {*touched, change.name}))
    ]
    if faults:
        raise InputError(
            "I003",
            "a wheel would write over files that are not its own",
            where=environment,
            faults=faults,
            remedy="do not install it; tell its authors what it brings",
        )


def _recorded(distribution: metadata.Distribution) -> Iterator[tuple[Path, str, str]]:
    try:
        name = canonicalize_name(distribution.metadata["Name"] or "")
        rows = [*csv.reader((distribution.read_text("RECORD") or "").splitlines())]
    except (OSError, ValueError, KeyError, TypeError, csv.Error):  # somebody else's damage
        return
    place = str(distribution.locate_file(""))
    for row in filter(None, rows):
        path = os.path.normpath(os.path.join(place, row[0]))  # noqa: PTH118 - thousands of them
        yield Path(path), name, row[1] if len(row) > 1 else ""


def _destinations(
    wheel: Path, environment: Environment, had: Owners
) -> Iterator[tuple[Path, str | None]]:
    """Where the files of a wheel go, and their digests."""
    places = {
        "purelib": had.packages[0],
        "platlib": had.packages[-1],
        "scripts": had.commands,
        "data": environment.prefix.resolve(),
    }
    for held in held_files(wheel):
        if held.scheme in places:
            path = os.path.normpath(places[held.scheme] / held.path)
            yield Path(path), held.digest


def _wheel(change: Change) -> Path | None:
    path = local_path(change.source)
    is_wheel = path is not None and file_name(change.source).endswith(".whl")
    return path if is_wheel and path is not None and path.is_file() else None


def _digest(path: Path) -> str | None:
    """As RECORD has it."""
    try:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").digest()
    except OSError:
        return None
    return f"sha256={base64.urlsafe_b64encode(found).rstrip(b'=').decode()}"
