"""An environment that bundles are applied to.

The bundle holds plugin `good` and what a test gives it as libraries.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.core.install_samples import World, wheel

from vox_bundle.build import build
from vox_core.catalog import Catalog, read_catalogs
from vox_core.install.environment import Environment

if TYPE_CHECKING:
    import pytest

BUNDLE = """
libraries = {{ {libraries} }}
[[bundle]]
id = "small"
description = "a small bundle"
plugins = ["good"]
"""
TORCH = {"name": "torch", "files": {"torch/__init__.py": ""}}
LIBRARY = {"name": "vox-t-lib", "files": {"vox_t_lib/__init__.py": "", "vox_t_lib/old.py": ""}}
LIBRARY_2 = {"name": "vox-t-lib", "version": "2.0", "files": {"vox_t_lib/__init__.py": "two"}}


def prepared(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The environment, and its settings for this process too; empty again afterwards."""
    for name, value in world.environ().items():
        monkeypatch.setenv(name, value)
    here = world.environment()
    monkeypatch.setattr(Environment, "here", lambda: replace(here))
    yield world
    world.clear()


def bundled(world: World, *parts: Mapping[str, Any]) -> Path:
    """A bundle of these wheels; the first is that of plugin `good`."""
    libraries = ", ".join(f'{part["name"]} = "local:nowhere"' for part in parts[1:])
    world.enter("good", "local:nowhere", BUNDLE.format(libraries=libraries))
    folder = world.folder / "parts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for part in parts:
        wheel(str(folder), **part)
    return build("small", catalog_of(world), world.folder / "b.zip", wheel_folders=[folder]).file


def catalog_of(world: World) -> Catalog:
    return read_catalogs([world.catalog])
