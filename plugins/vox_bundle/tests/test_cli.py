"""`vox bundle`: what each command prints; the other tests have what they do."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "vox-test-lone"
version = "1.0"
requires-python = ">=3.11"
"""
CATALOG = """
[[bundle]]
id = "lone"
description = "one library"
libraries = { vox-test-lone = "local:lone" }
"""


@pytest.fixture
def further(tmp_path: Path) -> Path:
    """A further catalog, named in vox.toml."""
    module = tmp_path / "lone" / "vox_test_lone"
    module.mkdir(parents=True)
    (module / "__init__.py").touch()
    (tmp_path / "lone" / "pyproject.toml").write_text(PROJECT)
    path = tmp_path / "further.toml"
    path.write_text(CATALOG)
    (tmp_path / "vox.toml").write_text('[plugin]\ncatalogs = ["further.toml"]\n')
    return path


def test_list(vox) -> None:
    done = vox("bundle", "list")
    assert (done.code, done.err) == (0, "")
    rows = [line.split(maxsplit=2)[:2] for line in done.out.splitlines()]
    names = ["vox-base", "vox-cpu", "vox-default", "vox-nvidia", "vox-apple", "vox-dev"]
    assert [name for name, _ in rows] == names
    assert rows[:2] == [["vox-base", "no"], ["vox-cpu", "cpu"]]


def test_list_as_json(vox, further: Path) -> None:
    bundles = {each["id"]: each for each in json.loads(vox("bundle", "list", "--json").out)}
    assert bundles["vox-dev"]["extends"] == ["vox-default", "vox-apple"]
    assert {"cpu", "mlx", "runs"} <= {*bundles["vox-dev"]["plugins"]}
    assert bundles["lone"] == {
        "id": "lone",
        "description": "one library",
        "extends": [],
        "plugins": [],
    }


def test_a_catalog_with_faults(vox, further: Path, monkeypatch) -> None:
    further.write_text("[[bundle]]\n")
    done = vox("bundle", "list")
    assert done.code == 2
    assert "error[VOX-C005]" in done.err
    assert "- bundle number 1: id: missing" in done.err


def test_build_and_verify(vox, further: Path) -> None:
    done = vox("bundle", "build", "lone", "--out", "b/lone.zip", "--no-build-isolation")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "built    b/lone.zip",
        "bundle   lone: one library",
        "plugins  none",
        "wheels   vox_test_lone-1.0-py3-none-any.whl",
        "next: vox bundle install b/lone.zip",
    ]
    done = vox("bundle", "verify", "b/lone.zip", "--json")
    assert done.code == 0
    assert json.loads(done.out)["wheels"][0]["file"] == "vox_test_lone-1.0-py3-none-any.whl"

    with zipfile.ZipFile("b/lone.zip", "a") as archive:
        archive.writestr("more", "")
    for command in ("verify", "install"):
        done = vox("bundle", command, "b/lone.zip")
        assert (done.code, done.out) == (2, "")
        assert "error[VOX-B008]" in done.err
        assert "- more: does not belong in a bundle" in done.err


@pytest.mark.parametrize("command", ["verify", "install"])
def test_a_bundle_file_that_is_not_there(vox, command: str) -> None:
    done = vox("bundle", command, "nowhere.zip")
    assert (done.code, done.out) == (2, "")
    assert "error[VOX-B012]" in done.err and "nowhere.zip" in done.err
