"""Find the plugins: those of the catalog, and the installed ones from metadata alone.

`known` is the catalog with the user's additional files (`VOX_CATALOG`, `vox.toml`, or the file of
`--config`); every command looks up plugins, models and bundles there.

An installed plugin is an entry point in group `vox_core.plugins`. Its manifest is found beside the
top-level package that the entry point names (`find_spec` does not import a top-level package, and
asks the finders of editable installs too), or else among the distribution's files. No plugin is
imported.

A faulty plugin gets a `fault` and does not affect the others. This module does not look at the
machine, and chooses no plugin. Nothing is cached: see docs/adr/0004-no-discovery-cache.md.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vox_core.catalog import Catalog, PluginEntry, load_catalog
from vox_core.config import PluginSettings, load_settings
from vox_core.errors import BackendError, command
from vox_core.hookspecs import ENTRY_POINTS
from vox_core.host.manifest import FILE_NAME, ID, Manifest, parse_manifest

UNKNOWN = "unknown"
"""Placeholder for a name or version that a damaged installation lacks."""


@dataclass(frozen=True, slots=True)
class Found:
    """An installed plugin, with its manifest and folder or else its fault.

    `id` is the entry point's name. `version` is the distribution's.
    """

    id: str
    distribution: str
    version: str
    entry_point: metadata.EntryPoint
    manifest: Manifest | None = None
    folder: Path | None = None
    fault: BackendError | None = None

    @property
    def shown_version(self) -> str:
        """The manifest's version, or without one the distribution's."""
        return self.manifest.version if self.manifest else self.version

    @property
    def mismatch(self) -> str:
        """Says that manifest and distribution have different versions; empty if they agree.

        Such a plugin stays in use: its author forgot to update one of the two numbers, and the
        code works.
        """
        if self.manifest is None or self.version == UNKNOWN:
            return ""
        with suppress(InvalidVersion):
            if Version(self.version) == Version(self.manifest.version):
                return ""
        return f"its manifest says {self.manifest.version}, {self.distribution} is {self.version}"

    @property
    def reinstall(self) -> str:
        """The remedy for a damaged installation; the id may be in no catalog."""
        return f"install it again, or remove it: vox plugin remove {self.id}"

    @property
    def upgrade_or_report(self) -> str:
        """The remedy for a fault of the plugin itself, which a reinstallation would not fix."""
        homepage = self.manifest.homepage if self.manifest else None
        where = f"at {homepage}" if homepage else f"to the authors of {self.distribution}"
        return f"upgrade it: vox plugin upgrade {self.id}; if that does not help, report it {where}"


def discover(path: Sequence[str] | None = None) -> tuple[Found, ...]:
    """Return every installed plugin, sorted by id; a broken one has a `fault`.

    Args:
        path: folders to search instead of `sys.path` and the import system's finders.
    """
    found = [
        _examine(distribution, entry_point, path)
        for distribution in _with_plugins(path)
        for entry_point in _entry_points(distribution)
    ]
    return _without_namesakes(sorted(found, key=lambda plugin: (plugin.id, plugin.distribution)))


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, None if it is not installed or is damaged."""
    with suppress(metadata.PackageNotFoundError):
        version = _field(metadata.distribution(name), "Version")
        return None if version == UNKNOWN else version
    return None


def _with_plugins(path: Sequence[str] | None) -> Iterator[metadata.Distribution]:
    """Yield distributions with a `vox_core.plugins` group; the first of a name on the path wins."""
    seen: set[str] = set()
    everything = metadata.distributions() if path is None else metadata.distributions(path=[*path])
    for distribution in everything:
        try:
            text = distribution.read_text("entry_points.txt") or ""
        except (OSError, UnicodeDecodeError):  # the damaged distribution has no plugin of vox
            continue
        name = canonicalize_name(_field(distribution, "Name")) if ENTRY_POINTS in text else ""
        if name and name not in seen:
            seen.add(name)
            yield distribution


def _field(distribution: metadata.Distribution, key: str) -> str:
    """Read a field of METADATA, which a damaged installation may lack."""
    try:
        known = distribution.metadata  # has no `get` before Python 3.12
        return known[key] if key in known else UNKNOWN  # noqa: SIM401
    except (OSError, UnicodeDecodeError):
        return UNKNOWN


def _entry_points(distribution: metadata.Distribution) -> list[metadata.EntryPoint]:
    """Return the entry points of plugins; an unparsable file gives one that fails `_examine`."""
    try:
        return list(distribution.entry_points.select(group=ENTRY_POINTS))
    except Exception:  # noqa: BLE001 - the parser may raise anything
        return [metadata.EntryPoint(_field(distribution, "Name"), "", ENTRY_POINTS)]


def _examine(
    distribution: metadata.Distribution,
    entry_point: metadata.EntryPoint,
    path: Sequence[str] | None,
) -> Found:
    name, version = _field(distribution, "Name"), _field(distribution, "Version")
    plugin = Found(entry_point.name, name, version, entry_point)
    try:
        if not re.fullmatch(ID, plugin.id):
            raise BackendError(
                "B006",
                "an entry point has a name that no plugin can have",
                where=f"{name} {version}",
                found=repr(plugin.id),
                expected="lower-case letters, digits, - and _, beginning with a letter",
                remedy="the plugin's author has to rename it; to remove it: "
                + command("vox", "plugin", "remove", name),
            )
        file = _manifest_file(plugin, distribution, path)
        manifest = parse_manifest(file.read_text(encoding="utf-8"), file)
        if manifest.id != plugin.id:
            raise BackendError(
                "B006",
                "a plugin's manifest and its entry point disagree about the id",
                where=file,
                found=f"id {manifest.id!r}",
                expected=f"id {plugin.id!r}, the name of the entry point in {name}",
                remedy="the plugin's author has to give both the same name",
            )
    except BackendError as fault:
        return replace(plugin, fault=fault)
    except Exception as error:  # noqa: BLE001 - import finders may raise anything
        unreadable = BackendError(
            "B006",
            f"the manifest of plugin {plugin.id!r} cannot be read",
            where=f"{name} {version}, entry point {entry_point.value!r}",
            found=f"{type(error).__name__}: {error}",
            remedy=plugin.reinstall,
        )
        return replace(plugin, fault=unreadable)
    return replace(plugin, manifest=manifest, folder=file.parent)


def _manifest_file(
    plugin: Found, distribution: metadata.Distribution, path: Sequence[str] | None
) -> Path:
    package = plugin.entry_point.module.partition(".")[0]
    spec = (
        importlib.util.find_spec(package) if path is None else PathFinder.find_spec(package, path)
    )
    folders = spec.submodule_search_locations if spec else None
    beside = [Path(folder) / FILE_NAME for folder in folders or ()]
    listed = [file for file in distribution.files or () if file.name == FILE_NAME]
    listed.sort(key=lambda file: len(file.parts))  # a package may hold templates further down
    for file in (*beside, *(Path(str(distribution.locate_file(file))) for file in listed)):
        if file.is_file():
            return file
    raise BackendError(
        "B006",
        f"plugin {plugin.id!r} has no manifest",
        where=f"{plugin.distribution} {plugin.version}",
        found=f"no {FILE_NAME} in package {package!r}" if spec else f"no package {package!r}",
        expected=f"{FILE_NAME} as package data beside {package}/__init__.py",
        remedy=plugin.upgrade_or_report if spec else plugin.reinstall,
    )


def _without_namesakes(found: Sequence[Found]) -> tuple[Found, ...]:
    """Give every plugin that shares its id with another a fault."""
    alone = []
    for plugin in found:
        owners = [each.distribution for each in found if each.id == plugin.id]
        if len(owners) > 1:
            each_one = " or ".join(command("vox", "plugin", "remove", name) for name in owners)
            fault = BackendError(
                "B006",
                f"plugin id {plugin.id!r} is defined more than once",
                found=f"distributions {' and '.join(owners)}",
                remedy=f"remove all but one: {each_one}",
            )
            plugin = replace(plugin, manifest=None, folder=None, fault=fault)  # noqa: PLW2901
        alone.append(plugin)
    return tuple(alone)


def known() -> Catalog:
    """Return the catalog with the user's additional files.

    Raises:
        ConfigError: a catalog, `vox.toml` or a variable about plugins is wrong.
    """
    return load_catalog(load_settings(PluginSettings, {}).catalogs)


def known_plugins() -> Mapping[str, PluginEntry]:
    """Return id -> plugin of the catalog; errors as for `known`."""
    return known().plugins
