"""A manifest is found without an import, whoever built the package and however it is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.core.author_env import Environment

BUILDERS = {
    "hatchling": 'requires = ["hatchling"]\nbuild-backend = "hatchling.build"',
    "setuptools": 'requires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"',
    "flit": 'requires = ["flit_core"]\nbuild-backend = "flit_core.buildapi"',
    "poetry": 'requires = ["poetry-core"]\nbuild-backend = "poetry.core.masonry.api"',
    "uv_build": 'requires = ["uv_build"]\nbuild-backend = "uv_build"',
}
# What each needs to be told: that the package lies at the root, and that it has a data file.
EXTRA = {
    "setuptools": '[tool.setuptools.package-data]\n"*" = ["*.toml"]',
    "uv_build": '[tool.uv.build-backend]\nmodule-root = ""',
}
PROJECT = """
[build-system]
{build}

[project]
name = "{name}"
version = "1.0"
description = "a backend"
requires-python = ">=3.11"

[project.entry-points."vox_core.plugins"]
{name} = "{name}:backend"

{extra}
"""
MANIFEST = """
id = "{name}"
name = "A backend"
version = "1.0"
api = "2.0"
licence = "Apache-2.0"
provides.hooks = ["vox_event"]
"""
DISCOVER = """
import json, sys
from vox_core.host.discover import discover
found = {plugin.id: plugin for plugin in discover()}
told = {id: [str(plugin.fault or ""), bool(plugin.manifest)] for id, plugin in found.items()}
print(json.dumps([told, sorted(set(found) & set(sys.modules))]))
"""


def project(folder: Path, builder: str, name: str) -> Path:
    package = folder / name / name
    package.mkdir(parents=True)
    text = PROJECT.format(name=name, build=BUILDERS[builder], extra=EXTRA.get(builder, ""))
    (folder / name / "pyproject.toml").write_text(text)
    (folder / name / "README.md").write_text("A backend.")
    (package / "__init__.py").write_text('"""A backend."""\n\nbackend = object()\n')
    (package / "vox_plugin.toml").write_text(MANIFEST.format(name=name))
    return folder / name


@pytest.fixture(scope="module")
def installed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, list[object]], list[str]]:
    """(id -> [fault, has a manifest], ids whose package was imported), for ten packages."""
    folder = tmp_path_factory.mktemp("builders")
    environment = Environment(folder)
    regular = [project(folder, builder, f"regular_{builder}") for builder in BUILDERS]
    editable = [project(folder, builder, f"editable_{builder}") for builder in BUILDERS]
    environment.install(*regular, *[part for each in editable for part in ("-e", each)])
    done = environment.run("-P", "-c", DISCOVER)  # as the `vox` script: without the current folder
    assert not done.returncode, done.stderr
    found, imported = json.loads(done.stdout)
    return found, imported


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("kind", ["regular", "editable"])
def test_the_manifest_is_found(installed, kind: str, builder: str) -> None:
    found, _ = installed
    assert found[f"{kind}_{builder}"] == ["", True]


def test_no_package_is_imported(installed) -> None:
    _, imported = installed
    assert imported == []
