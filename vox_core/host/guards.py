"""What stands against changing an environment; each function raises if it is so.

Whether the environment is vox's to change at all is for environment.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vox_core.errors import InputError
from vox_core.host.contents import plugin_ids
from vox_core.host.discover import discover, installed_versions
from vox_core.host.environment import Environment
from vox_core.host.held import require_needs_kept
from vox_core.host.inspection import Row, intruders
from vox_core.host.origin import file_name, local_path
from vox_core.host.resolve import Change
from vox_core.host.targets import Target

CORE = "vox-ml"
KEPT = (CORE, "torch")
"""What never changes on the way: training depends on them as they are."""


def require_no_intruder(environment: Environment) -> None:
    """Raises InputError I006 if something else calls itself vox here."""
    if found := intruders():
        raise InputError(
            "I006",
            "the vox command or the vox_core package belongs to another distribution",
            where=environment,
            found=", ".join(found),
            expected=f"only {CORE} brings them",
            remedy=f"use an environment without it, or remove it and install {CORE} again",
        )


def require_kept(changes: Iterable[Change], environment: Environment) -> None:
    """Raises InputError I005 if one of `KEPT` would change, or what an installed plugin needs."""
    changes = [*changes]
    changed = [each for each in changes if each.name in KEPT and each.before is not None]
    if changed:
        raise InputError(
            "I005",
            f"this would change {' and '.join(each.name for each in changed)}",
            where=environment,
            faults=[f"{each.name} {each.before} -> {each.after}" for each in changed],
            remedy="if you want that, install that version yourself first, and run again",
        )
    require_needs_kept(changes, environment)


def require_pinned(changes: Sequence[Change], wanted: Iterable[Target]) -> None:
    """Raises InputError I007 if an archive is not one that the catalog pins.

    Where a plugin has pins, no other file will do: not its source, not another build of it. Folders
    and commits have no file that could be pinned.
    """
    faults = []
    for target in wanted:
        plugin = _change_of(target, changes)
        for change in changes:
            file = file_name(change.source)
            if file in target.sha256 and change.sha256 != target.sha256[file]:
                faults.append(
                    f"{change.source}: found {change.sha256}, expected {target.sha256[file]}"
                )
            elif change is plugin and _is_unpinned(change, target):
                faults.append(
                    f"{change.source or change.pin}: not one of the files that the catalog pins: "
                    f"{', '.join(target.sha256)}"
                )
    if faults:
        raise InputError(
            "I007",
            "an archive does not have the SHA-256 of the catalog",
            faults=faults,
            remedy="do not install it; get a file that the catalog pins from a place that you "
            "trust: vox plugin install --from-wheel FILE",
        )


def require_as_named(changes: Sequence[Change], wanted: Iterable[Target]) -> None:
    """Raises InputError I003 if a package is not the plugin, or the version, that it should be.

    As far as that can be told beforehand; `misfits` tells the rest.
    """
    for target in wanted:
        faults = [*_other_version(target, _version(target, changes))]
        ids = _ids(target, changes)
        if ids is not None and target.id not in (None, *ids):
            faults += [_other_plugin(target, ids)]
        if faults:
            raise InputError(
                "I003",
                "the package is not the plugin that is asked for",
                where=target.requirement,
                faults=faults,
                remedy="name the version that the catalog takes, and the id that the package has "
                "or none",
            )


def misfits(target: Target, plugins: Sequence[Row]) -> list[str]:
    """What is wrong with the plugins that the distribution of `target` has brought."""
    faults = [f"{row.id}: {row.fault}" for row in plugins if row.fault]
    ids = [row.id for row in plugins]
    if not plugins or target.id not in (None, *ids):
        faults.append(_other_plugin(target, ids))
    versions = {row.version for row in plugins}
    return [*faults, *(fault for each in versions for fault in _other_version(target, each))]


def require_inside(name: str, environment: Environment) -> None:
    """Raises InputError I010 if another environment lends a distribution to this one.

    Installers would leave it there without a word.
    """
    place = Path(str(metadata.distribution(name).locate_file("")))
    if place.resolve() not in {folder.resolve() for folder in environment.folders}:
        raise InputError(
            "I010",
            f"{name} is not in this environment",
            where=environment,
            found=f"it is in {place}, which this environment sees",
            remedy="remove it with the Python that it was installed with",
        )


def _change_of(target: Target, changes: Iterable[Change]) -> Change | None:
    """By name, or, where only a build would tell the name, by folder."""
    folder = Path(target.requirement)
    for change in changes:
        if change.name == target.distribution or local_path(change.source) == folder:
            return change
    return None


def _is_unpinned(change: Change, target: Target) -> bool:
    path = local_path(change.source)
    has_file = "+" not in urlsplit(change.source).scheme and not (path and path.is_dir())
    return bool(target.sha256) and has_file and file_name(change.source) not in target.sha256


def _ids(target: Target, changes: Iterable[Change]) -> Collection[str] | None:
    """Of the plugins that the package brings, or has brought; None where nobody knows yet."""
    if change := _change_of(target, changes):
        path = local_path(change.source)
        return plugin_ids(path) if path and path.exists() else None
    found = [
        each for each in discover() if canonicalize_name(each.distribution) == target.distribution
    ]
    return [plugin.id for plugin in found]


def _version(target: Target, changes: Iterable[Change]) -> str | None:
    if change := _change_of(target, changes):
        return change.after
    return installed_versions(filter(None, [target.distribution])).get(target.distribution or "")


def _other_version(target: Target, version: str | None) -> Iterator[str]:
    with suppress(InvalidVersion):  # only a build would tell
        if not SpecifierSet(target.specifier).contains(Version(version or ""), prereleases=True):
            yield f"{target.distribution} {version}: the catalog wants {target.specifier}"


def _other_plugin(target: Target, ids: Collection[str]) -> str:
    name = target.distribution or target.requirement
    brings = f"plugin {' and '.join(map(repr, sorted(ids)))}" if ids else "no plugin"
    return f"{name} brings {brings}" + (f", not {target.id!r}" if target.id else "")
