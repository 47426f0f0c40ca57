"""Name, version and licence of a project, by the nearest pyproject.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vox_extract.licence import FOLDERS_ABOVE, of_project

_NAME = "pyproject.toml"


@dataclass(frozen=True, slots=True)
class Project:
    """None for what is not known."""

    name: str | None
    version: str | None
    licence: str | None


def project_of(folder: Path) -> Project:
    """What the pyproject.toml in the folder or the nearest above it says; it may say nothing."""
    for each in [folder, *folder.parents][: FOLDERS_ABOVE + 1]:
        if (each / _NAME).is_file():
            return _read(each / _NAME)
        if (each / ".git").exists():
            break
    return Project(None, None, None)


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
