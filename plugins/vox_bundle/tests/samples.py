"""A catalog of one plugin and the library it is built on, with their sources; ways to spoil what is
made of them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from vox_bundle.archive import Bundle
from vox_core.catalog import Catalog, read_catalogs
from vox_core.errors import VoxError

TINY, LIB = "vox_test_tiny-1.0-py3-none-any.whl", "vox_test_lib-1.0-py3-none-any.whl"
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "1.0"
requires-python = ">=3.11"
dependencies = {needs}
"""
MANIFEST = """
id = "tiny"
name = "Tiny"
version = "1.0"
api = "2.0"
licence = "MIT"
provides.hooks = ["vox_event"]
[requires]
hardware-tag = "nvidia"
"""
CATALOG = """
[[plugin]]
id = "tiny"
description = "a tiny plugin"
provides.hooks = ["vox_event"]
default-source = "local:tiny"
distribution = "vox-test-tiny"
import-package = "vox_test_tiny"
libraries = { vox-test-lib = "local:lib" }
requires-tag = "nvidia"
specifier = ">=1,<2"
api = "2.0"
licence = "MIT"
[[bundle]]
id = "small"
description = "a \\"small\\" bundle"
plugins = ["tiny"]
"""


def package(folder: Path, name: str, needs: list[str]) -> Path:
    module = folder / name.replace("-", "_")
    module.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name, needs=needs))
    (module / "__init__.py").write_text("raise SystemExit('imported')\n")
    return module


def sources(folder: Path, catalog: str = CATALOG, manifest: str = MANIFEST) -> Catalog:
    """A catalog with the packages that it names."""
    package(folder / "lib", "vox-test-lib", [])
    module = package(folder / "tiny", "vox-test-tiny", ["vox-test-lib", "not-there"])
    (module / "vox_plugin.toml").write_text(manifest)
    (folder / "catalog.toml").write_text(catalog)
    return read_catalogs([folder / "catalog.toml"])


def changed(folder: Path, old: str, new: str) -> Catalog:
    """The same catalog, but for one thing."""
    assert CATALOG.count(old) == 1
    path = folder / "changed.toml"
    path.write_text(CATALOG.replace(old, new))
    return read_catalogs([path])


def faults(run: Callable[[], object], code: str) -> tuple[str, ...]:
    with pytest.raises(VoxError) as caught:
        run()
    assert caught.value.code == f"VOX-{code}"
    return caught.value.faults


Members: TypeAlias = dict[str, bytes]


def rewritten(
    bundle: Bundle, folder: Path, edit: Callable[[Members], object], compression: int = 0
) -> Path:
    """A copy of the bundle file with other members."""
    with zipfile.ZipFile(bundle.file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    edit(members)
    path = folder / "tampered.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def replace(member: str, old: str, new: str) -> Callable[[Members], None]:
    def edit(members: Members) -> None:
        text = members[member].decode()
        assert text.count(old) >= 1
        members[member] = text.replace(old, new).encode()

    return edit


def add(name: str, content: bytes = b"x") -> Callable[[Members], None]:
    return lambda members: members.update({name: content})


def remove(name: str) -> Callable[[Members], None]:
    return lambda members: members.pop(name) and None


def swap_a_byte(members: Members) -> None:
    content = bytearray(members[f"wheels/{TINY}"])
    content[100] ^= 1
    members[f"wheels/{TINY}"] = bytes(content)
