"""Check the rules between the entries of a catalog.

The rules read unvalidated tables, so that a malformed key hides no other fault and a reference to a
malformed entry is not reported as dangling.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vox_core.catalog.entries import near

_NO_PLUGINS = ("vox-ml", "torch")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in one file."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """An unvalidated entry of a file."""

    section: str
    number: int
    keys: Mapping[str, Any]
    path: Path

    @property
    def id(self) -> str:
        return str(self.keys.get("id", ""))

    def names(self, key: str) -> list[str]:
        """The texts under `key`; none if the value has another type."""
        value = self.keys.get(key)
        return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []

    def fault(self, text: str) -> Fault:
        name = self.keys.get("id", f"number {self.number}")
        return Fault(self.path, f"{self.section} {name}: {text}")


def cross_faults(tables: Sequence[Table]) -> list[Fault]:
    """Return every breach of every rule."""
    plugins = [table for table in tables if table.section == "plugin"]
    bundles = [table for table in tables if table.section == "bundle"]
    return [
        *_repeated_ids(tables),
        *_other_distributions(plugins),
        *_other_sources([*plugins, *bundles]),
        *_dangling(bundles, "extends", "bundle", bundles),
        *_dangling(bundles, "plugins", "plugin", plugins),
        *_cycles(bundles),
        *_without_source([table for table in tables if table.section == "model"]),
    ]


def lineage(bundle_id: str, extends: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a bundle after all bundles that it extends, each once; cycles are followed once."""
    ordered: list[str] = []
    seen: set[str] = set()

    def visit(id: str) -> None:
        if id not in seen:
            seen.add(id)
            for base in extends.get(id, ()):
                visit(base)
            ordered.append(id)

    visit(bundle_id)
    return ordered


def _repeated_ids(tables: Sequence[Table]) -> Iterator[Fault]:
    owners: defaultdict[tuple[str, str], list[Table]] = defaultdict(list)
    for table in tables:
        if table.id:
            owners[table.section, table.id].append(table)
    for first, *others in owners.values():
        for other in others:
            same = first.path == other.path
            yield other.fault(
                "the id stands twice"
                if same
                else f"the id is defined by two catalogs: {first.path} and {other.path}"
            )


def _other_distributions(plugins: Iterable[Table]) -> Iterator[Fault]:
    """Require that each distribution belongs to one plugin and is not in the list of packages that
    never change."""
    from packaging.utils import canonicalize_name

    owners: dict[str, str] = {}
    for plugin in plugins:
        if not isinstance(distribution := plugin.keys.get("distribution"), str):
            continue
        name = canonicalize_name(distribution)
        if name in _NO_PLUGINS:
            yield plugin.fault(
                f"distribution: {distribution!r} is what plugins work with, and is none itself"
            )
        elif (owner := owners.setdefault(name, plugin.id)) != plugin.id:
            yield plugin.fault(f"distribution: {distribution!r} is that of plugin {owner!r}")


def _other_sources(owners: Iterable[Table]) -> Iterator[Fault]:
    """Require that a release or wheel is of its plugin's distribution.

    A plugin's source must have a version that the entry allows, or it could not be installed.
    """
    for owner in owners:
        libraries = owner.keys.get("libraries")
        for name, source in libraries.items() if isinstance(libraries, dict) else ():
            yield from (owner.fault(f"libraries: {each}") for each in _misnamed(source, name))
        source, name = owner.keys.get("default-source"), owner.keys.get("distribution")
        specifier = owner.keys.get("specifier", "")
        yield from (
            owner.fault(f"default-source: {each}") for each in _misnamed(source, name, specifier)
        )


def _misnamed(source: object, distribution: object, specifier: object = "") -> Iterator[str]:
    """Return the faults of a source; none if a key has the wrong type, which is reported
    elsewhere."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version

    if not isinstance(source, str) or not isinstance(distribution, str):
        return
    if (names := _named_by(source)) is None:
        return
    name, version = names
    if canonicalize_name(name) != canonicalize_name(distribution):
        yield f"names {name!r}, but the distribution is {distribution!r}"
        return
    with suppress(InvalidSpecifier, InvalidVersion):
        wanted = SpecifierSet(specifier if isinstance(specifier, str) else "")
        if not wanted.contains(Version(version), prereleases=True):
            yield f"names version {version}, but the specifier is {str(specifier)!r}"


def _named_by(source: str) -> tuple[str, str] | None:
    """Return distribution and version named in a source; None if only the archive has them."""
    from urllib.parse import unquote, urlsplit

    kind, _, value = source.partition(":")
    if kind == "pypi":
        name, _, version = value.partition("==")
        return name, version
    if kind == "wheel":
        file = unquote(urlsplit(value).path).rpartition("/")[2]
        name, version, *_ = [*file.split("-"), "", ""]
        return name, version
    return None


def _dangling(
    tables: Iterable[Table], key: str, section: str, targets: Iterable[Table]
) -> Iterator[Fault]:
    known = [target.id for target in targets]
    for table in tables:
        for name in table.names(key):
            if name not in known:
                yield table.fault(f"{key}: there is no {section} {name!r}{near(name, known)}")


def _cycles(bundles: Sequence[Table]) -> Iterator[Fault]:
    """Return each cycle once, from its first bundle in file order."""
    extends = {bundle.id: bundle.names("extends") for bundle in bundles}
    seen: set[str] = set()
    for bundle in bundles:
        if bundle.id not in seen and (way := _way_back(bundle.id, extends)):
            seen.update(way)
            yield bundle.fault(f"extends: a cycle: {' -> '.join(way)}")


def _way_back(start: str, extends: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the shortest path from a bundle to itself; empty if there is none."""
    ways, seen = [[start]], set()
    for way in ways:
        for base in extends.get(way[-1], ()):
            if base == start:
                return [*way, base]
            if base not in seen:
                seen.add(base)
                ways.append([*way, base])
    return []


def _without_source(models: Iterable[Table]) -> Iterator[Fault]:
    """Require that a model has either pinned wheels or a hub repository."""
    for model in models:
        pinned = {"parts", "sha256"} & {*model.keys}
        if len(pinned) == 1 or not (pinned or "hub" in model.keys):
            yield model.fault(
                f"found {', '.join(pinned) or 'no source'}, expected parts and sha256, or hub"
            )
