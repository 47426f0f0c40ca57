"""A bundle file held against its lock, and both against the catalog."""

from __future__ import annotations

import zipfile
from pathlib import Path

from packaging.utils import canonicalize_name

from vox_core.catalog import Catalog, PluginEntry
from vox_core.errors import BackendError
from vox_core.host.bundle.archive import About, Bundle, Wheel
from vox_core.host.bundle.members import Unreadable, archive_in, text
from vox_core.host.bundle.needs import strangers
from vox_core.host.bundle.parts import parts_of
from vox_core.host.bundle.read import Contents, inspect, invalid, opened
from vox_core.host.manifest import FILE_NAME, parse_manifest


def verify(file: Path, catalog: Catalog) -> Bundle:
    """Hold every member of a bundle file against its lock, and both against the catalog.

    Raises:
        BackendError: B008, with every fault.
        StorageError: the file cannot be read.
    """
    with opened(file) as archive:
        return verified(file, archive, catalog)


def verified(file: Path, archive: zipfile.ZipFile, catalog: Catalog) -> Bundle:
    """`verify`, for a file that is open already."""
    contents = inspect(archive)
    faults = [*contents.faults]
    if contents.about is not None:
        faults += _catalog_faults(archive, contents, contents.about, catalog)
    if faults or contents.about is None:
        raise invalid(file, faults)
    return Bundle(file, contents.about, contents.wheels)


def _catalog_faults(
    archive: zipfile.ZipFile, contents: Contents, about: About, catalog: Catalog
) -> list[str]:
    if about.id not in catalog.bundles:
        return [f"BUNDLE.toml: the catalog has no bundle {about.id!r}"]
    faults = []
    plugins = catalog.resolve(about.id)
    if about.plugins != (ids := [plugin.id for plugin in plugins]):
        said, wanted = ", ".join(about.plugins) or "none", ", ".join(ids) or "none"
        faults.append(f"BUNDLE.toml: plugins {said}, the catalog has {wanted}")
    parts = parts_of(about.id, catalog)
    locked = {wheel.name: wheel for wheel in contents.wheels}
    faults += [f"{name}: no wheel of it" for name in parts if name not in locked]
    for name, wheel in locked.items():
        if name in parts:
            faults += parts[name].faults(wheel)
        elif not about.dependencies:
            faults.append(f"{wheel.file}: the catalog's bundle does not hold it")
    if about.dependencies:
        unasked = strangers(archive, contents.sound, parts, faults)
        faults += [f"{wheel.file}: nothing in the bundle requires it" for wheel in unasked]
    sound = {wheel.name: wheel for wheel in contents.sound}
    for plugin in plugins:
        if wheel_of_it := sound.get(canonicalize_name(plugin.distribution)):
            faults += _manifest_faults(archive, wheel_of_it, plugin)
    return faults


def _manifest_faults(archive: zipfile.ZipFile, wheel: Wheel, plugin: PluginEntry) -> list[str]:
    """What the manifest in a plugin's wheel says otherwise than the catalog."""
    member = f"{plugin.import_package}/{FILE_NAME}"
    try:
        with archive_in(archive, wheel.member) as unpacked:
            said = text(unpacked, member)
        manifest = parse_manifest(said, f"{wheel.file}: {member}")
    except BackendError as error:
        return [f"{wheel.file}: {member}: {fault}" for fault in error.faults]
    except (Unreadable, RecursionError) as error:  # TOML may nest without end
        return [f"{wheel.file}: {member} cannot be read: {error}"]
    pairs = {
        "id": (manifest.id, plugin.id),
        "api": (manifest.api, plugin.api or manifest.api),
        "hardware-tag": (
            manifest.requires.hardware_tag,
            plugin.requires_tag or manifest.requires.hardware_tag,
        ),
        "provides": (manifest.provided, {**plugin.provides}),
    }
    return [
        f"{wheel.file}: the manifest's {key} is {said!r}, the catalog has {wanted!r}"
        for key, (said, wanted) in pairs.items()
        if said != wanted
    ]
