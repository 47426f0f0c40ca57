"""Ids and sources -> requirements for uv.

Only the catalog turns an id into a package. A source that the user names is installed as it is, but
an id of the catalog keeps its distribution: `cpu` cannot come from somebody else's package. The
catalog's platforms, hardware, versions and yanks hold for every source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from vox_core.catalog import PluginEntry, Source, objections
from vox_core.errors import InputError
from vox_core.host.discover import known_plugins
from vox_core.host.probe import device_tags
from vox_core.install.environment import Installed, is_editable
from vox_core.text import hint


@dataclass(frozen=True, slots=True)
class Target:
    """A plugin to install.

    Args:
        id: None if the user named a source and no id.
        distribution: canonical name; None where a folder's metadata does not tell without a build.
        requirement: for uv.
        libraries: requirements of the plugin's own libraries that no package index has.
        sha256: file name -> digest in hex, of the files that the catalog pins.
        specifier: PEP 440, the versions that the catalog takes; empty for any.
    """

    id: str | None
    distribution: str | None
    requirement: str
    libraries: tuple[str, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)
    specifier: str = ""

    def misnamed(self, ids: Collection[str]) -> Iterator[str]:
        """The fault of a package that brings plugins of these ids, if none is the one wanted."""
        if self.id not in (None, *ids) or not ids:
            name = self.distribution or self.requirement
            brings = f"plugin {' and '.join(map(repr, sorted(ids)))}" if ids else "no plugin"
            yield f"{name} brings {brings}" + (f", not {self.id!r}" if self.id else "")

    def mismatched(self, version: str) -> Iterator[str]:
        """The fault of a version that the catalog does not allow."""
        with suppress(InvalidVersion):  # only a build tells it
            if not SpecifierSet(self.specifier).contains(Version(version), prereleases=True):
                yield f"{self.distribution} {version}: the catalog wants {self.specifier}"


def misfit(faults: Sequence[str], where: object) -> InputError:
    """The error over packages that are not what was to be installed."""
    return InputError(
        "I003",
        "the package is not the plugin to install",
        where=where,
        faults=faults,
        remedy="give the package's id or none, and the catalog's version; a wrong manifest or "
        "entry point (group vox_core.plugins) is its author's to correct; nothing was changed",
    )


def from_catalog(ids: Sequence[str], there: Installed, *, upgrade: bool = False) -> list[Target]:
    """The plugins of these ids.

    Raises:
        InputError: I002, ids that the catalog does not have; I003, plugins that are yanked or not
            for this machine, or whose sources are not there.
    """
    catalog = known_plugins()
    if unknown := [id for id in ids if id not in catalog]:
        raise InputError(
            "I002",
            "the catalog has no such plugin",
            faults=[f"{id!r}{_hint(id)}" for id in unknown],
            expected=f"some of: {', '.join(catalog)}",
            remedy="`vox plugin list` shows them; --from-path FOLDER, --from-wheel FILE and "
            "--from-pypi NAME==VERSION install others",
        )
    entries = [catalog[id] for id in dict.fromkeys(ids)]
    _require_no_objection(entries)
    return [
        _target(entry, _requirement(entry, entry.source, entry.distribution), there, upgrade)
        for entry in entries
    ]


def from_source(source: Path | str, id: str | None, there: Installed) -> Target:
    """The plugin in a folder or wheel, or the release `NAME==VERSION`, that the user names.

    Raises:
        InputError: I003, it is none, or the catalog has something against it.
    """
    named, name, requirement = False, None, str(source)
    if isinstance(source, str):
        with suppress(InvalidRequirement):
            need = Requirement(source)
            exact = [each.operator == "==" and "*" not in each.version for each in need.specifier]
            named, name = exact == [True] and not need.url and not need.marker, need.name
    else:
        requirement = str(source.resolve())
        if any((source / each).is_file() for each in ("pyproject.toml", "setup.py")):
            name = project_table(source).get("name")  # which only a build may tell
            named = isinstance(name, str | None)
        elif source.is_file():
            with suppress(InvalidWheelFilename):
                named, name = True, parse_wheel_filename(source.name)[0]
    if named:
        return _named(requirement, name, id, there)
    missing = isinstance(source, Path) and not source.exists()
    raise InputError(
        "I003",
        "this is no source of a plugin",
        where=source,
        found="nothing there" if missing else None,
        expected="a folder with a pyproject.toml that has a name, a wheel with the name it was "
        "built under, or NAME==VERSION with one version",
        remedy="correct the path, or the name and the version",
    )


def project_table(folder: Path) -> Mapping[str, Any]:
    """`[project]` of the pyproject.toml in a folder; empty if there is none that can be read."""
    try:
        document = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # tables in tables in tables
        return {}
    project = document.get("project", {})
    return project if isinstance(project, dict) else {}


def needs_build(folder: Path) -> bool:
    """Whether the project in a folder must be built to know its requirements."""
    project = project_table(folder)
    dynamic = {"version", "dependencies", "optional-dependencies"}
    return "name" not in project or not dynamic.isdisjoint(project.get("dynamic", ()))


def _named(requirement: str, name: str | None, id: str | None, there: Installed) -> Target:
    """A source of the user's; the catalog's rules for its plugin still hold."""
    distribution = canonicalize_name(name) if name else None
    entry = known_plugins().get(id) if id else _entry_of(distribution)
    if entry is None:
        return Target(id, distribution, requirement)
    if distribution not in (None, canonicalize_name(entry.distribution)):
        raise InputError(
            "I003",
            f"{id!r} is another plugin's id",
            where=requirement,
            found=f"distribution {distribution}",
            expected=f"distribution {entry.distribution}, as the catalog has it",
            remedy="leave the id out, if you mean to install this package",
        )
    _require_no_objection([entry])
    return _target(entry, requirement, there)


def _target(
    entry: PluginEntry, requirement: str, there: Installed, upgrade: bool = False
) -> Target:
    """With the libraries that are missing; in an upgrade also those that are not editable."""
    libraries = []
    for name, text in entry.libraries.items():
        found = there.distributions.get(canonicalize_name(name))
        if found is None or (upgrade and not is_editable(found)):
            libraries.append(_requirement(entry, Source.parse(text, entry.catalog.parent), name))
    return Target(
        entry.id,
        canonicalize_name(entry.distribution),
        requirement,
        tuple(libraries),
        entry.sha256,
        entry.specifier,
    )


def _require_no_objection(entries: Sequence[PluginEntry]) -> None:
    tags = device_tags()
    if faults := [fault for entry in entries for fault in objections(entry, tags)]:
        what = "the catalog rules this out here"
        remedy = "leave it out, or choose another one: vox plugin list"
        raise InputError("I003", what, faults=faults, remedy=remedy)


def _entry_of(distribution: str | None) -> PluginEntry | None:
    plugins = known_plugins().values()
    return next((p for p in plugins if canonicalize_name(p.distribution) == distribution), None)


def _requirement(entry: PluginEntry, source: Source, distribution: str) -> str:
    """The source as uv takes it. Raises InputError I003 if it is not there."""
    if source.path is not None and not source.path.exists():
        raise InputError(
            "I003",
            f"the source of {entry.id!r} is not here",
            where=entry.catalog,
            found=f"no {source.path}",
            expected="a checkout of vox, which its catalog's local sources belong to",
            remedy=f"name a source: vox plugin install {entry.id} --from-path DIR, "
            f"--from-wheel FILE or --from-pypi {entry.distribution}==VERSION",
        )
    return source.requirement(distribution)


def _hint(id: str) -> str:
    if entry := _entry_of(canonicalize_name(id)):
        return f" is the package of plugin {entry.id!r}"
    return hint(id, known_plugins())
