"""The file format of a bundle: one zip archive.

    BUNDLE.toml          which bundle of the catalog it is, and what it is for
    pylock.toml          name, version, SHA-256 and size of every wheel (PEP 751)
    wheels/NAME.whl      the wheels themselves

Members are stored without compression (wheels are compressed already) in the order of their names
and without times, so equal content makes equal bytes. read.py is the other direction.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.pylock import Package, PackageWheel, Pylock
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version
from pydantic import ConfigDict, StrictBool

from vox_core import files

if TYPE_CHECKING:
    from packaging.tags import Tag

ABOUT, LOCK, WHEELS = "BUNDLE.toml", "pylock.toml", "wheels/"
ANY = "any"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment that a zip archive can tell
_FILE_MODE = 0o100644
_UNIX = 3


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
        """What the lock says about the wheel at `path`.

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
    """A bundle file whose every wheel is what the lock and the catalog say."""

    file: Path
    about: About
    wheels: tuple[Wheel, ...]


def write(path: Path, about: About, wheels: Mapping[Wheel, Path]) -> None:
    """Write a bundle, whole or not at all; one that is there already is replaced.

    Raises:
        OutputError: its folder cannot be made.
        StorageError: an I/O error.
    """
    files.make_folder(path.parent)
    texts = {ABOUT: _toml(asdict(about)), LOCK: _toml(_lock(wheels).to_dict())}
    sources = {wheel.member: source for wheel, source in wheels.items()}
    with files.atomic_file(path) as out, zipfile.ZipFile(out, "w") as archive:
        for name in sorted([*texts, *sources]):
            if name in texts:
                archive.writestr(_member(name), texts[name])
            else:
                _store(archive, name, sources[name])


def _store(archive: zipfile.ZipFile, name: str, source: Path) -> None:
    info = _member(name)
    info.file_size = source.stat().st_size  # decides between zip and zip64
    with source.open("rb") as file, archive.open(info, "w") as member:
        shutil.copyfileobj(file, member)


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.create_system, info.external_attr = _UNIX, _FILE_MODE << 16
    return info


def _lock(wheels: Mapping[Wheel, Path]) -> Pylock:
    return Pylock(
        lock_version=Version("1.0"),
        created_by="vox",
        packages=[
            Package(
                name=canonicalize_name(wheel.name),
                version=Version(wheel.version),
                wheels=[
                    PackageWheel(
                        path=wheel.member, size=wheel.size, hashes={"sha256": wheel.sha256}
                    )
                ],
            )
            for wheel in sorted(wheels, key=lambda wheel: wheel.name)
        ],
    )


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
