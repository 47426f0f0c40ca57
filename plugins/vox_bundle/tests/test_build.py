"""Bundles built from real packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.pylock import Pylock
from plugins.vox_bundle.tests.samples import CATALOG, LIB, TINY, changed, faults, package, sources

from vox_bundle.archive import Bundle
from vox_bundle.build import build
from vox_bundle.verify import verify
from vox_core.catalog import Catalog, load_catalog
from vox_core.errors import ConfigError


def test_what_a_bundle_holds(bundle: Bundle, catalog: Catalog) -> None:
    with zipfile.ZipFile(bundle.file) as archive:
        assert archive.namelist() == [
            "pylock.toml",
            f"wheels/{LIB}",
            f"wheels/{TINY}",
        ]
        lock = Pylock.from_dict(tomllib.loads(archive.read("pylock.toml").decode()))
        contents = {name: archive.read(name) for name in archive.namelist()}
        assert {info.date_time[0] for info in archive.infolist()} == {1980}  # no clock was asked
    assert lock.tool == {"vox": {"bundle": "small", "vox": version("vox-ml")}}
    for locked in lock.packages:
        (wheel,) = locked.wheels or ()
        content = contents[wheel.path or ""]
        assert (wheel.size, wheel.hashes["sha256"]) == (len(content), sha256(content).hexdigest())


def test_it_verifies(bundle: Bundle, catalog: Catalog) -> None:
    assert verify(bundle.file, catalog) == bundle


def test_equal_content_makes_equal_bytes(
    bundle: Bundle, catalog: Catalog, wheels: Path, tmp_path: Path
) -> None:
    """Whether the wheels are made, or taken from a folder with other times."""
    again = build("small", catalog, tmp_path / "a" / "again.zip", wheel_folders=[wheels])
    assert again.file.read_bytes() == bundle.file.read_bytes()


def test_no_wheel_of_another_version_or_platform_is_taken(
    catalog: Catalog, wheels: Path, tmp_path: Path
) -> None:
    """Both would be newer; neither is what the catalog allows or this Python can install."""
    for name in ("vox_test_tiny-2.0-py3-none-any.whl", "vox_test_tiny-1.5-cp39-cp39-win32.whl"):
        (tmp_path / name).write_bytes(b"")
    made = build("small", catalog, tmp_path / "small.zip", wheel_folders=[wheels, tmp_path])
    assert [wheel.file for wheel in made.wheels] == [LIB, TINY]


def test_all_missing_sources_are_told(tmp_path: Path) -> None:
    catalog = sources(tmp_path)
    shutil.rmtree(tmp_path / "lib")
    shutil.rmtree(tmp_path / "tiny")
    found = faults(lambda: build("small", catalog, tmp_path / "b.zip"), "B010")
    assert found == (
        f"vox-test-lib: {tmp_path / 'lib'} is not there",
        f"vox-test-tiny: {tmp_path / 'tiny'} is not there",
    )


def test_a_wheel_that_is_not_the_pinned_one(catalog: Catalog, wheels: Path, tmp_path: Path) -> None:
    pinned = changed(tmp_path, 'api = "2.0"', f'sha256 = {{ "{TINY}" = "{"0" * 64}" }}')
    found = faults(
        lambda: build("small", pinned, tmp_path / "b.zip", wheel_folders=[wheels]), "B010"
    )
    assert [f"{TINY}: SHA-256" in each for each in found] == [True]
    assert not (tmp_path / "b.zip").exists()


def test_a_source_that_gives_something_else(tmp_path: Path) -> None:
    catalog = sources(tmp_path, CATALOG.replace('"local:lib"', '"local:tiny"'))
    found = faults(lambda: build("small", catalog, tmp_path / "b.zip", isolation=False), "B010")
    assert found == ("vox-test-lib: no wheel of it",)


def test_what_pip_says_of_a_broken_source(tmp_path: Path) -> None:
    catalog = sources(tmp_path)
    (tmp_path / "lib" / "pyproject.toml").write_text("[build-system\n")
    found = faults(lambda: build("small", catalog, tmp_path / "b.zip", isolation=False), "X003")
    assert "lib" in "\n".join(found)


def test_a_yanked_plugin_is_not_bundled(tmp_path: Path) -> None:
    catalog = changed(tmp_path, 'api = "2.0"', 'status = "yanked"\nadvisory = "it leaks"')
    found = faults(lambda: build("small", catalog, tmp_path / "b.zip"), "B009")
    assert found == ("tiny: yanked: it leaks",)


def test_with_dependencies(
    catalog: Catalog, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip resolves them, here from the folder of wheels alone."""
    package(tmp_path / "not-there", "not-there", [])
    how = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *how, str(tmp_path / "not-there")], check=True
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    made = build(
        "small",
        catalog,
        tmp_path / "all.zip",
        wheel_folders=[wheels, tmp_path],
        with_dependencies=True,
    )
    assert [wheel.name for wheel in made.wheels] == ["not-there", "vox-test-lib", "vox-test-tiny"]
    assert verify(made.file, catalog) == made


def test_the_bundle_that_ships_has_the_core_and_the_engine(tmp_path: Path) -> None:
    made = build("vox-cpu", load_catalog(environ={}), tmp_path / "cpu.zip", isolation=False)
    assert [wheel.name for wheel in made.wheels] == [
        "vox-ml",
        "vox-ml-cpu",
        "vox-ml-formats",
        "vox-ml-torch",
    ]
    assert verify(made.file, load_catalog(environ={})) == made


def test_an_unknown_bundle(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no bundle"):
        build("big", catalog, tmp_path / "b.zip")
