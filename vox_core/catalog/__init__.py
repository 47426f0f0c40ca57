"""The catalog: plugins, bundles of them, and models that vox knows by name.

    catalog = load_catalog()
    catalog.plugins["cpu"].distribution       # the only place where an id becomes a package name
    catalog.resolve("vox-dev")                # the plugins of a bundle and of those it extends

`catalog.toml` lies at the root of a source checkout and inside the package in a wheel. Further
files are named by `VOX_CATALOG` and by `[plugin] catalogs` in `vox.toml`; the caller hands on the
latter. Every fault of every file comes in one report: entries.py has the types of an entry's keys,
rules.py the rules between entries.

Nothing here fetches or installs anything, and no name that the catalog lacks is guessed.
"""

from __future__ import annotations

import difflib
import hashlib
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
    """Entries by id, in the order of the files.

    Args:
        digest: SHA-256, in hex, of the files' contents in the order in which they were read.
    """

    plugins: Mapping[str, PluginEntry] = field(default_factory=dict)
    models: Mapping[str, ModelEntry] = field(default_factory=dict)
    bundles: Mapping[str, BundleEntry] = field(default_factory=dict)
    digest: str = ""

    def bundle(self, id: str) -> BundleEntry:
        """The bundle of that id.

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
        """A bundle after all those that it extends, each once.

        Raises:
            ConfigError: C007, there is no such bundle.
        """
        self.bundle(bundle_id)
        extends = {id: bundle.extends for id, bundle in self.bundles.items()}
        return tuple(self.bundles[id] for id in lineage(bundle_id, extends))

    def resolve(self, bundle_id: str) -> tuple[PluginEntry, ...]:
        """The plugins of a bundle: first those of the bundles it extends, each once.

        Raises:
            ConfigError: C007, there is no such bundle.
        """
        ids = dict.fromkeys(id for bundle in self.lineage(bundle_id) for id in bundle.plugins)
        return tuple(self.plugins[id] for id in ids)


def load_catalog(
    further: Sequence[Path] = (), *, environ: Mapping[str, str] = os.environ
) -> Catalog:
    """The catalog of this vox, with those that `VOX_CATALOG` and `further` name.

    Raises:
        ConfigError: C005, a file cannot be read, or has faults; all of them are listed.
    """
    named = [Path(name) for name in environ.get(VARIABLE, "").split(os.pathsep) if name]
    paths = [_own_file(), *named, *further]
    return read_catalogs(list({path.resolve(): path for path in paths}.values()))


def read_catalogs(paths: Sequence[Path]) -> Catalog:
    """The catalog that these files, and no others, make together.

    Raises:
        ConfigError: C005, a file cannot be read, or has faults; all of them are listed.
    """
    faults: list[Fault] = []
    tables: list[Table] = []
    digest = hashlib.sha256()
    for path in paths:
        content = _read(path, faults)
        digest.update(hashlib.sha256(content).digest())
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
    return Catalog(made["plugin"], made["model"], made["bundle"], digest.hexdigest())


def _own_file() -> Path:
    """In a wheel the catalog lies in the package, in a checkout beside it."""
    packaged = _PACKAGE / "catalog.toml"
    return packaged if packaged.is_file() else _PACKAGE.parent / "catalog.toml"


def _read(path: Path, faults: list[Fault]) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        faults.append(Fault(path, f"cannot be read: {error.strerror}"))
        return b""


def _tables(content: bytes, path: Path, faults: list[Fault]) -> list[Table]:
    """The entries of one file as they stand there."""
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
    """One report; the file is named once if all faults are in it, else with each of them."""
    paths = list(dict.fromkeys(fault.path for fault in faults))
    several = len(paths) > 1
    return ConfigError(
        "C005",
        "the catalog is not valid",
        where=", ".join(map(str, paths)),
        faults=[f"{fault.path}: {fault.text}" if several else fault.text for fault in faults],
        remedy="correct the catalog, or install vox again if you did not change it",
    )
