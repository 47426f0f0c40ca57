"""Load the catalog of plugins, bundles and models.

    catalog = load_catalog()
    catalog.plugins["cpu"].distribution       # the only mapping of ids to package names
    catalog.resolve("vox-dev")                # the plugins of a bundle and of those it extends

`catalog.toml` lies at the root of a source checkout and inside the package in a wheel.
`VOX_CATALOG` and `[plugin] catalogs` in `vox.toml` name additional files; callers pass the latter.
All faults of all files are reported together: entries.py has the types of an entry's keys and the
rules within an entry; this module has those between entries.

This package downloads and installs nothing, and guesses no names.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from pydantic import ValidationError

from vox_core.catalog.entries import (
    SECTIONS,
    BundleEntry as BundleEntry,
    ModelEntry as ModelEntry,
    ModelPart as ModelPart,
    PluginEntry as PluginEntry,
    Source as Source,
    faults_of,
    hint,
    objections as objections,
)
from vox_core.errors import ConfigError
from vox_core.text import did_you_mean

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
        raise ConfigError(
            "C007",
            f"the catalog has no bundle {id!r}",
            expected=f"one of: {', '.join(self.bundles)}",
            remedy=did_you_mean(id, self.bundles) or "`vox bundle list` shows them",
        )

    def lineage(self, bundle_id: str) -> tuple[BundleEntry, ...]:
        """Return a bundle after all bundles that it extends, each once.

        Raises:
            ConfigError: C007, there is no such bundle.
        """
        bundle = self.bundle(bundle_id)
        bases = (each for id in bundle.extends for each in self.lineage(id))
        return tuple({each.id: each for each in (*bases, bundle)}.values())

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
    faults: list[tuple[Path, str]] = []
    made: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    ids: list[tuple[str, str]] = []  # those of malformed entries, too
    for path in paths:
        content = _read(path, faults)
        for section, number, table in _tables(content, path, faults):
            id = str(table.get("id", f"number {number}"))
            told = []
            try:
                entry = SECTIONS[section].read(table, path)
                first = made[section].setdefault(entry.id, entry)
                if first is not entry:
                    told = [_repeated(first.catalog, path)]
            except ValidationError as error:
                told = faults_of(section, table, error)
            faults += [(path, f"{section} {id}: {fault}") for fault in told]
            ids.append((section, id))
    faults += _between(made["plugin"], made["bundle"], ids)
    if faults:
        raise _invalid(faults)
    return Catalog(made["plugin"], made["model"], made["bundle"])


def _repeated(first: Path, path: Path) -> str:
    if first == path:
        return "the id stands twice"
    return f"the id is defined by two catalogs: {first} and {path}"


def _between(
    plugins: Mapping[str, PluginEntry],
    bundles: Mapping[str, BundleEntry],
    ids: Collection[tuple[str, str]],
) -> Iterator[tuple[Path, str]]:
    """Yield breaches of the rules between entries: one plugin for a distribution, and references
    that exist, without a cycle."""
    owners: dict[str, str] = {}
    for plugin in plugins.values():
        owner = owners.setdefault(canonicalize_name(plugin.distribution), plugin.id)
        if owner != plugin.id:
            what = f"distribution: {plugin.distribution!r} is that of plugin {owner!r}"
            yield plugin.catalog, f"plugin {plugin.id}: {what}"
    for bundle in bundles.values():
        for key, section, names in (
            ("extends", "bundle", bundle.extends),
            ("plugins", "plugin", bundle.plugins),
        ):
            known = [id for its, id in ids if its == section]
            for name in names:
                if name not in known:
                    what = f"{key}: there is no {section} {name!r}{hint(name, known)}"
                    yield bundle.catalog, f"bundle {bundle.id}: {what}"
    seen: set[str] = set()
    for bundle in bundles.values():
        if bundle.id not in seen and (way := _way_back(bundle.id, bundles)):
            seen.update(way)
            yield bundle.catalog, f"bundle {bundle.id}: extends: a cycle: {' -> '.join(way)}"


def _way_back(start: str, bundles: Mapping[str, BundleEntry]) -> list[str]:
    """Return the shortest path from a bundle to itself; empty if there is none."""
    ways, seen = [[start]], set[str]()
    for way in ways:
        for base in bundles[way[-1]].extends if way[-1] in bundles else ():
            if base == start:
                return [*way, base]
            if base not in seen:
                seen.add(base)
                ways.append([*way, base])
    return []


def _own_file() -> Path:
    """Return vox's catalog file: inside the package in a wheel, beside it in a checkout."""
    packaged = _PACKAGE / "catalog.toml"
    return packaged if packaged.is_file() else _PACKAGE.parent / "catalog.toml"


def _read(path: Path, faults: list[tuple[Path, str]]) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        faults.append((path, f"cannot be read: {error.strerror}"))
        return b""


def _tables(
    content: bytes, path: Path, faults: list[tuple[Path, str]]
) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield section, number and keys of each entry of one file, unvalidated."""
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        faults.append((path, f"not TOML: {error}"))
        return
    for section, listed in document.items():
        if section not in SECTIONS:
            sections = ", ".join(f"[[{name}]]" for name in SECTIONS)
            text = f"{section}: unknown; expected {sections}{hint(section, SECTIONS)}"
            faults.append((path, text))
        elif not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            faults.append((path, f"{section}: expected [[{section}]] tables"))
        else:
            yield from ((section, number, each) for number, each in enumerate(listed, 1))


def _invalid(faults: Sequence[tuple[Path, str]]) -> ConfigError:
    """Return one error for all faults; it names the file once if there is only one."""
    paths = list(dict.fromkeys(path for path, _ in faults))
    several = len(paths) > 1
    return ConfigError(
        "C005",
        "the catalog is not valid",
        where=", ".join(map(str, paths)),
        faults=[f"{path}: {text}" if several else text for path, text in faults],
        remedy="correct the catalog, or install vox again if you did not change it",
    )
