"""The file format of a bundle, and the distributions that a bundle of the catalog consists of.

    pylock.toml          name, version, SHA-256 and size of every wheel (PEP 751); [tool.vox] has
                         the bundle's id and the version of vox that made it
    wheels/NAME.whl      the wheels themselves

A zip archive. Members are stored without compression (wheels are compressed already) in the order
of their names and without times, so equal content makes equal bytes. Unpacked, it serves every
installer that reads `pylock.toml`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

from vox_core.api.files import atomic_file, storage_errors
from vox_core.api.installing import Catalog, Source

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.tags import Tag

LOCK, WHEELS = "pylock.toml", "wheels/"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment that a zip archive can tell
_FILE_MODE, _UNIX = 0o100644, 3


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel's entry in the lock. `name` is canonical, `sha256` in hex, `size` in bytes."""

    name: str
    version: str
    file: str
    sha256: str
    size: int

    @classmethod
    def of(cls, path: Path) -> Wheel:
        """Return the lock's entry for the wheel at `path`.

        Raises:
            StorageError: it cannot be read.
        """
        name, version, _, _ = parse_wheel_filename(path.name)
        return cls(name, str(version), path.name, sha256_of(path), path.stat().st_size)

    @property
    def tags(self) -> frozenset[Tag]:
        return parse_wheel_filename(self.file)[3]

    @property
    def member(self) -> str:
        return f"{WHEELS}{self.file}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle file.

    Args:
        id: of the catalog.
        vox: version of the vox that made it.
        needs: name -> requirements of its wheel, whatever their markers.
    """

    file: Path
    id: str
    vox: str
    wheels: tuple[Wheel, ...]
    needs: Mapping[str, Sequence[Requirement]]

    def dependencies(self, catalog: Catalog) -> list[str]:
        """Return `NAME VERSION` of the wheels that the catalog has no rules for."""
        parts = parts_of(self.id, catalog)
        return [f"{each.name} {each.version}" for each in self.wheels if each.name not in parts]


@dataclass(frozen=True, slots=True)
class Part:
    """A distribution that belongs to a bundle, with the catalog's rules for it."""

    distribution: str
    source: Source
    specifier: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)

    def faults(self, wheel: Wheel) -> list[str]:
        """Return how a wheel differs from what the catalog allows."""
        faults = []
        if not SpecifierSet(self.specifier).contains(wheel.version, prereleases=True):
            faults.append(f"{wheel.file}: the catalog wants {self.specifier}")
        if self.sha256 and wheel.file not in self.sha256:
            faults.append(f"{wheel.file}: not one of the files that the catalog pins")
        elif self.sha256 and (pinned := self.sha256[wheel.file]) != wheel.sha256:
            faults.append(f"{wheel.file}: SHA-256 {wheel.sha256}, the catalog has {pinned}")
        return faults


def parts_of(bundle_id: str, catalog: Catalog) -> dict[str, Part]:
    """Return canonical name -> part: libraries of the bundles, then plugins behind theirs.

    Raises:
        ConfigError: C007, there is no such bundle.
    """
    plugins = catalog.resolve(bundle_id)
    libraries = [(each.libraries, each.catalog) for each in catalog.lineage(bundle_id)]
    libraries += [(each.libraries, each.catalog) for each in plugins]
    parts = [
        Part(name, Source.parse(text, file.parent))
        for sources, file in libraries
        for name, text in sources.items()
    ]
    parts += [Part(each.distribution, each.source, each.specifier, each.sha256) for each in plugins]
    return {canonicalize_name(part.distribution): part for part in parts}


def write(path: Path, bundle_id: str, vox: str, wheels: Mapping[Wheel, Path]) -> None:
    """Write a bundle, whole or not at all.

    Raises:
        StorageError: an I/O error.
    """
    lock = f"{lock_text(wheels)}\n[tool.vox]\nbundle = {_text(bundle_id)}\nvox = {_text(vox)}\n"
    with atomic_file(path) as out, zipfile.ZipFile(out, "w") as archive:
        archive.writestr(_info(LOCK), lock)
        for wheel in sorted(wheels, key=lambda each: each.member):
            info = _info(wheel.member)
            info.file_size = wheel.size  # decides between zip and zip64
            with wheels[wheel].open("rb") as file, archive.open(info, "w") as member:
                shutil.copyfileobj(file, member)


def lock_text(wheels: Iterable[Wheel]) -> str:
    """Return `pylock.toml` of wheels that lie in the folder `wheels` beside it."""
    text = 'lock-version = "1.0"\ncreated-by = "vox-ml-bundle"\n'
    for each in sorted(wheels, key=lambda wheel: wheel.name):
        text += f"\n[[packages]]\nname = {_text(each.name)}\nversion = {_text(each.version)}\n"
        text += f"[[packages.wheels]]\npath = {_text(each.member)}\nsize = {each.size}\n"
        text += f"hashes = {{ sha256 = {_text(each.sha256)} }}\n"
    return text


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex.

    Raises:
        StorageError: it cannot be read.
    """
    with storage_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.create_system, info.external_attr = _UNIX, _FILE_MODE << 16
    return info


def _text(value: Any) -> str:
    return json.dumps(value)  # a TOML string, too
