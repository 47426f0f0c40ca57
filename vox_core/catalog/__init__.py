"""Load the catalog of plugins, bundles and models.

    catalog = load_catalog()
    catalog.plugins["cpu"].distribution       # the only mapping of ids to package names
    catalog.resolve("vox-dev")                # the plugins of a bundle and of those it extends

`catalog.toml` lies at the root of a source checkout and inside the package in a wheel.
`VOX_CATALOG` and `[plugin] catalogs` in `vox.toml` name additional files; callers pass the latter.
All faults of all files are reported together: entries.py has the types of an entry's keys, rules.py
the rules between entries.

This package downloads and installs nothing, and guesses no names.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vox_core.catalog.entries import (
    SECTIONS,
    BundleEntry,
    ModelEntry,
    ModelPart,
    PluginEntry,
    Source,
    faults_of,
    near,
    objections,
)
from vox_core.catalog.rules import Fault, Table, cross_faults, lineage
from vox_core.errors import ConfigError

__all__ = [
    "BundleEntry",
    "Catalog",
    "ModelEntry",
    "ModelPart",
    "PluginEntry",
    "Source",
    "load_catalog",
    "objections",
    "read_catalogs",
]

VARIABLE = "VOX_CATALOG"
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Catalog:
    """Catalog entries by id, in the order of the files."""

    plugins: Mapping[str, PluginEntry] = field(default_factory=dict)
    models: Mapping[str, ModelEntry] = field(default_factory=dict)
    bundles: Mapping[str, BundleEntry] = field(default_factory=dict)

    def bundle(self, id: str) -> BundleEntry:
        """Return the bundle of an id.

        Raises:
            ConfigError: C007, there is none.
        """
        if id in self.bundles:
            return self.bundles[id]
        close = difflib.get_close_matches(id, self.bundles, n=1)
        raise ConfigError(
            "C007",
            f"the catalog has no bundle {id!r}",
            expected=f"one of: {', '.join(self.bundles)}",
            remedy=f"did you mean {close[0]}?" if close else "`vox bundle list` shows them",
        )

    def lineage(self, bundle_id: str) -> tuple[BundleEntry, ...]:
        """Return a bundle after all bundles that it extends, each once.

        Raises:
            ConfigError: C007, there is no such bundle.
        """
        self.bundle(bundle_id)
        extends = {id: bundle.extends for id, bundle in self.bundles.items()}
        return tuple(self.bundles[id] for id in lineage(bundle_id, extends))

    def resolve(self, bundle_id: str) -> tuple[PluginEntry, ...]:
        """Return the plugins of a bundle, after those of the bundles it extends, each once.

        Raises:
            ConfigError: C007, there is no such bundle.
        """
        ids = dict.fromkeys(id for bundle in self.lineage(bundle_id) for id in bundle.plugins)
        return tuple(self.plugins[id] for id in ids)


def load_catalog(
    further: Sequence[Path] = (), *, environ: Mapping[str, str] = os.environ
) -> Catalog:
    """Load vox's catalog, with the files of `VOX_CATALOG` and `further`.

    Raises:
        ConfigError: C005, a file cannot be read, or has faults; all of them are listed.
    """
    named = [Path(name) for name in environ.get(VARIABLE, "").split(os.pathsep) if name]
    paths = [_own_file(), *named, *further]
    return read_catalogs(list({path.resolve(): path for path in paths}.values()))


def read_catalogs(paths: Sequence[Path]) -> Catalog:
    """Load a catalog from exactly these files.

    Raises:
        ConfigError: C005, a file cannot be read, or has faults; all of them are listed.
    """
    faults: list[Fault] = []
    tables: list[Table] = []
    for path in paths:
        content = _read(path, faults)
        tables += _tables(content, path, faults)
    made: dict[str, Any] = {section: {} for section in SECTIONS}
    for table in tables:
        try:
            made[table.section][table.id] = SECTIONS[table.section].read(table.keys, table.path)
        except ValidationError as error:
            faults += map(table.fault, faults_of(table.section, table.keys, error))
    faults += cross_faults(tables)
    if faults:
        raise _invalid(faults)
    return Catalog(made["plugin"], made["model"], made["bundle"])


def _own_file() -> Path:
    """Return vox's catalog file: inside the package in a wheel, beside it in a checkout."""
    packaged = _PACKAGE / "catalog.toml"
    return packaged if packaged.is_file() else _PACKAGE.parent / "catalog.toml"


def _read(path: Path, faults: list[Fault]) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        faults.append(Fault(path, f"cannot be read: {error.strerror}"))
        return b""


def _tables(content: bytes, path: Path, faults: list[Fault]) -> list[Table]:
    """Return the entries of one file, unvalidated."""
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        faults.append(Fault(path, f"not TOML: {error}"))
        return []
    tables: list[Table] = []
    for section, listed in document.items():
        if section not in SECTIONS:
            sections = ", ".join(f"[[{name}]]" for name in SECTIONS)
            hint = near(section, SECTIONS)
            faults.append(Fault(path, f"{section}: unknown; expected {sections}{hint}"))
        elif not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            faults.append(Fault(path, f"{section}: expected [[{section}]] tables"))
        else:
            tables += [Table(section, number, each, path) for number, each in enumerate(listed, 1)]
    return tables


def _invalid(faults: Sequence[Fault]) -> ConfigError:
    """Return one error for all faults; it names the file once if there is only one."""
    paths = list(dict.fromkeys(fault.path for fault in faults))
    several = len(paths) > 1
    return ConfigError(
        "C005",
        "the catalog is not valid",
        where=", ".join(map(str, paths)),
        faults=[f"{fault.path}: {fault.text}" if several else fault.text for fault in faults],
        remedy="correct the catalog, or install vox again if you did not change it",
    )
