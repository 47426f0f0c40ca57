"""The file format of a bundle, and the distributions that a bundle of the catalog consists of.

    BUNDLE.toml          which bundle of the catalog it is, and what it is for
    pylock.toml          name, version, SHA-256 and size of every wheel (PEP 751)
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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from pydantic import ConfigDict, StrictBool

from vox_core import files
from vox_core.catalog import BundleEntry, Catalog, PluginEntry, Source

if TYPE_CHECKING:
    from packaging.tags import Tag

ABOUT, LOCK, WHEELS = "BUNDLE.toml", "pylock.toml", "wheels/"
ANY = "any"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment that a zip archive can tell
_FILE_MODE, _UNIX = 0o100644, 3


@dataclass(frozen=True, slots=True)
class About:
    """`BUNDLE.toml`.

    Args:
        vox: the version of vox that made it.
        python: `3.12`, or `any`; the one it is for.
        platform: `linux-x86_64`, …, or `any`.
        catalog: `Catalog.digest` of the catalog it was made from.
        dependencies: whether it holds everything that its own distributions need.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    id: str
    description: str
    plugins: list[str]
    vox: str
    python: str
    platform: str
    catalog: str
    dependencies: StrictBool


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel as the lock has it. `name` is canonical, `sha256` in hex, `size` in bytes."""

    name: str
    version: str
    file: str
    sha256: str
    size: int

    @classmethod
    def of(cls, path: Path) -> Wheel:
        """The lock's entry for the wheel at `path`.

        Raises:
            StorageError: it cannot be read.
        """
        name, version, _, _ = parse_wheel_filename(path.name)
        with files.storage_errors(path), path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(name, str(version), path.name, sha256, path.stat().st_size)

    @property
    def tags(self) -> frozenset[Tag]:
        return parse_wheel_filename(self.file)[3]

    @property
    def member(self) -> str:
        return f"{WHEELS}{self.file}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle file."""

    file: Path
    about: About
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A distribution that belongs to a bundle, with the catalog's rules for it."""

    distribution: str
    source: Source
    specifier: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)

    def faults(self, wheel: Wheel) -> list[str]:
        """How a wheel differs from what the catalog allows."""
        faults = []
        if not SpecifierSet(self.specifier).contains(wheel.version, prereleases=True):
            faults.append(f"{wheel.file}: the catalog wants {self.specifier}")
        if self.sha256 and wheel.file not in self.sha256:
            faults.append(f"{wheel.file}: not one of the files that the catalog pins")
        elif self.sha256 and (pinned := self.sha256[wheel.file]) != wheel.sha256:
            faults.append(f"{wheel.file}: SHA-256 {wheel.sha256}, the catalog has {pinned}")
        return faults


def parts_of(bundle_id: str, catalog: Catalog) -> dict[str, Part]:
    """Canonical name -> part: the libraries of the bundles, then plugins behind their libraries.

    Raises:
        ConfigError: C007, there is no such bundle.
    """
    parts = [part for bundle in catalog.lineage(bundle_id) for part in _libraries(bundle)]
    for plugin in catalog.resolve(bundle_id):
        parts += _libraries(plugin)
        parts.append(Part(plugin.distribution, plugin.source, plugin.specifier, plugin.sha256))
    return {canonicalize_name(part.distribution): part for part in parts}


def beyond_parts(bundle: Bundle, catalog: Catalog) -> tuple[Wheel, ...]:
    """The wheels that are in the bundle because others need them; the catalog has no rules for
    these."""
    parts = parts_of(bundle.about.id, catalog)
    return tuple(wheel for wheel in bundle.wheels if wheel.name not in parts)


def write(path: Path, about: About, wheels: Mapping[Wheel, Path]) -> None:
    """Write a bundle, whole or not at all; one that is there already is replaced.

    Raises:
        OutputError: its folder cannot be made.
        StorageError: an I/O error.
    """
    files.make_folder(path.parent)
    texts = {ABOUT: _toml(asdict(about)), LOCK: lock_text(wheels)}
    sources = {wheel.member: source for wheel, source in wheels.items()}
    with files.atomic_file(path) as out, zipfile.ZipFile(out, "w") as archive:
        for name in sorted([*texts, *sources]):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.create_system, info.external_attr = _UNIX, _FILE_MODE << 16
            if name in texts:
                archive.writestr(info, texts[name])
                continue
            info.file_size = sources[name].stat().st_size  # decides between zip and zip64
            with sources[name].open("rb") as file, archive.open(info, "w") as member:
                shutil.copyfileobj(file, member)


def lock_text(wheels: Iterable[Wheel]) -> str:
    """`pylock.toml` of wheels that lie in the folder `wheels` beside it."""
    packages = [
        {
            "name": wheel.name,
            "version": wheel.version,
            "wheels": [
                {"path": wheel.member, "size": wheel.size, "hashes": {"sha256": wheel.sha256}}
            ],
        }
        for wheel in sorted(wheels, key=lambda wheel: wheel.name)
    ]
    return _toml({"lock-version": "1.0", "created-by": "vox", "packages": packages})


def _libraries(owner: BundleEntry | PluginEntry) -> list[Part]:
    base = owner.catalog.parent
    return [Part(name, Source.parse(text, base)) for name, text in owner.libraries.items()]


def _toml(table: Mapping[str, Any], heading: str = "") -> str:
    """TOML of plain values, and of lists of tables as `[[heading]]` after them."""
    lines, below = [], []
    for key, value in table.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            name = f"{heading}.{key}" if heading else key
            below += [f"\n[[{name}]]\n{_toml(each, name)}" for each in value]
        else:
            lines.append(f"{key} = {_toml_value(value)}\n")
    return "".join([*lines, *below])


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml_value(each)}' for key, each in value.items())} }}"
    # Of these JSON is a part of TOML, but for one character that only TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
