"""Name, version and licence of sources, as metadata or a file beside them declares.

Of a folder the nearest pyproject.toml counts. The licence is, in this order: `License-Expression`,
`License`, the classifiers; then LICENSE, LICENCE, COPYING or UNLICENSE in the folder or above it,
recognised by the words of common licences. Anything else is "unknown": no licence is guessed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from itertools import chain
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
STANDARD_LIBRARY = "PSF-2.0"
FOLDERS_ABOVE = 3

_NAMES = re.compile(r"(?i)^(un)?licen[cs]e([.-].*)?$|^copying([.-].*)?$")
_MAX_BYTES = 200_000
_MAX_CHARACTERS = 120
# The words by which a licence is known; where two begin alike, the longer one first.
_KNOWN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Apache-2.0", ("apache license", "version 2.0")),
    ("AGPL-3.0", ("gnu affero general public license", "version 3")),
    ("LGPL-3.0", ("gnu lesser general public license", "version 3")),
    ("LGPL-2.1", ("gnu lesser general public license", "version 2.1")),
    ("GPL-3.0", ("gnu general public license", "version 3")),
    ("GPL-2.0", ("gnu general public license", "version 2")),
    ("MPL-2.0", ("mozilla public license", "2.0")),
    ("PSF-2.0", ("python software foundation license version 2",)),
    ("CC0-1.0", ("cc0 1.0 universal",)),
    ("CC-BY-SA-4.0", ("attribution-sharealike 4.0 international",)),
    ("CC-BY-4.0", ("attribution 4.0 international",)),
    ("Unlicense", ("this is free and unencumbered software",)),
    ("BSL-1.0", ("boost software license",)),
    ("ISC", ("permission to use, copy, modify, and/or distribute this software",)),
    (
        "BSD-3-Clause",
        (
            "redistribution and use in source and binary forms",
            "contributors may be used to endorse",
        ),
    ),
    ("BSD-2-Clause", ("redistribution and use in source and binary forms",)),
    ("MIT", ("permission is hereby granted, free of charge", "without restriction")),
)


def of_metadata(metadata: Message) -> str | None:
    """Return the licence in a distribution's metadata."""
    expression = _line(metadata.get("License-Expression"))
    declared = _line(metadata.get("License"))
    return expression or declared or _of_classifiers(metadata.get_all("Classifier", []))


def of_project(project: Mapping[str, Any]) -> str | None:
    """Return the licence in the `[project]` of a pyproject.toml."""
    given = project.get("license")
    if isinstance(given, Mapping):
        given = given.get("text")
    classifiers = project.get("classifiers")
    return _line(given) or _of_classifiers(classifiers if isinstance(classifiers, list) else [])


def nearby(folder: Path) -> str | None:
    """Recognise the licence file in the folder, or in the nearest folder above that has one.

    The search ends at the root of a repository.
    """
    found = (map(_of_file, _licence_files(each)) for each in _upwards(folder))
    return next(filter(None, chain.from_iterable(found)), None)


def _upwards(folder: Path) -> Iterator[Path]:
    """The folder and some of those above it, no further than the root of a repository."""
    for each in [folder, *folder.parents][: FOLDERS_ABOVE + 1]:
        yield each
        if (each / ".git").exists():
            return


def named_by(text: str) -> str | None:
    """The licence whose words these are; of several, the one that comes first in the text."""
    words = " ".join(text.lower().split())
    found = [
        (words.index(marks[0]), order, name)
        for order, (name, marks) in enumerate(_KNOWN)
        if all(mark in words for mark in marks)
    ]
    return min(found)[2] if found else None


def _licence_files(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if _NAMES.match(each.name))
    except OSError:
        return []


def _of_file(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return named_by(file.read(_MAX_BYTES).decode(errors="replace"))
    except OSError:
        return None


def _line(value: object) -> str | None:
    """A declaration; a whole licence in its place is identified by its words."""
    if not isinstance(value, str) or not value.strip() or value.strip().upper() == "UNKNOWN":
        return None
    value = value.strip()
    if "\n" in value or len(value) > _MAX_CHARACTERS:
        return named_by(value)
    return value


def _of_classifiers(classifiers: Sequence[object]) -> str | None:
    found = [
        each.split("::")[-1].strip()
        for each in classifiers
        if isinstance(each, str) and each.startswith("License ::")
    ]
    return " AND ".join(each for each in found if each != "OSI Approved") or None


_NAME = "pyproject.toml"


@dataclass(frozen=True, slots=True)
class Project:
    """Declared facts of a project; None for those it lacks."""

    name: str | None
    version: str | None
    licence: str | None


def project_of(folder: Path) -> Project:
    """Read the nearest pyproject.toml, in the folder or above; fields it lacks are None."""
    files = (each / _NAME for each in _upwards(folder))
    file = next((file for file in files if file.is_file()), None)
    return _read(file) if file else Project(None, None, None)


def _read(path: Path) -> Project:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("project")
    except (OSError, ValueError, RecursionError):
        table = None
    if not isinstance(table, Mapping):
        return Project(None, None, None)
    return Project(_text(table.get("name")), _text(table.get("version")), of_project(table))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
