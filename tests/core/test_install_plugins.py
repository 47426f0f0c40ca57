"""Plugins come and go in a real environment that has no pip, without network."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.install_samples import World, checkout, plugin, present


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(environment: World) -> Iterator[World]:
    yield environment
    environment.clear()


LIBRARY = {"name": "vox-t-lib", "files": {"vox_t_lib/__init__.py": "", "vox_t_lib/old.py": ""}}
LIBRARY_2 = {"name": "vox-t-lib", "version": "2.0", "files": {"vox_t_lib/__init__.py": "two"}}


# --- what works -----------------------------------------------------------------------------------


def test_from_a_checkout_with_its_library(world: World) -> None:
    checkout(world.folder / "libs/lib", {**LIBRARY, "version": "1.0"})
    checkout(world.folder / "plugins/good", plugin("good", "1.0", ["vox-ml>=0.1", "vox-t-lib"]))
    world.enter("good", "local:plugins/good", 'libraries = { vox-t-lib = "local:libs/lib" }\n')
    before = world.state()
    told = world.done("install", "good", "--dry-run")
    assert ([each["name"] for each in told["changes"]], told["done"]) == (
        ["vox-t-good", "vox-t-lib"],
        False,
    )
    assert world.state() == before
    assert world.done("install", "good", "--yes")["done"]
    assert world.versions() == {"vox_t_good": "1.0", "vox_t_lib": "1.0"}
    again = world.done("upgrade", "good", "--yes")
    assert [each["name"] for each in again["changes"]] == ["vox-t-good", "vox-t-lib"]
    removed = world.done("remove", "good", "--yes")
    assert "nothing else needs: vox-t-lib; they stay" in removed["notes"]
    assert world.versions() == {"vox_t_lib": "1.0"}


@pytest.mark.long
def test_from_a_folder_of_wheels_with_the_network_off(world: World) -> None:
    library = world.wheel({**LIBRARY, "version": "1.0"})
    first = world.wheel(plugin("good", "1.0", ["vox-t-lib"]))
    digest = hashlib.sha256(first.read_bytes()).hexdigest()
    world.enter("good", "pypi:vox-t-good==1.0", f'sha256 = {{ "{first.name}" = "{digest}" }}\n')
    empty = world.state()
    told = world.done("install", "good", "--yes")
    assert [(each["name"], each["sha256"], each["size"]) for each in told["changes"]] == [
        ("vox-t-good", digest, first.stat().st_size),
        ("vox-t-lib", hashlib.sha256(library.read_bytes()).hexdigest(), library.stat().st_size),
    ]
    installed = world.state()
    assert world.done("install", "good", "--yes")["changes"] == []
    world.wheel(plugin("good", "2.0", ["vox-t-lib"]))
    world.enter("good", "pypi:vox-t-good==2.0")
    (change,) = world.done("upgrade", "--yes")["changes"]
    assert (change["name"], change["before"], change["after"]) == ("vox-t-good", "1.0", "2.0")
    world.done("install", "--from-pypi", "vox-t-good==1.0", "--yes")
    assert world.state() == installed
    world.done("remove", "good", "--yes")
    assert {path for path in world.state() if "vox_t_good" in path} == set()
    assert world.state().items() >= empty.items()


@pytest.mark.parametrize(
    ("hardware", "torch", "noted"),
    [
        ("none", "9.0.0", "cuda does not run without an NVIDIA GPU: check that `nvidia-smi` lists"),
        ("nvidia", "9.0.0+cpu", "does not run with torch 9.0.0+cpu, a build without CUDA: pip uni"),
        ("nvidia", "9.0.0", None),
    ],
)
def test_what_a_gpus_backend_lacks_is_in_its_plan(
    world: World, hardware: str, torch: str, noted: str | None
) -> None:
    needed = "numpy", "transformers", "peft", "accelerate", "bitsandbytes"
    for name, newest in {"vox-ml-formats": "0.1.0", **dict.fromkeys(needed, "99.0")}.items():
        world.wheel({"name": name, "version": newest, "files": {}})
    present(world, {"name": "torch", "version": torch, "files": {"torch/__init__.py": "1 / 0"}})
    cuda = world.wheel({**plugin("cuda", "0.1.0"), "name": "vox-ml-cuda"})
    given = {"VOX_OVERRIDE_HARDWARE": hardware}
    notes = world.done("install", "cuda", "--from-wheel", cuda, "--dry-run", **given)["notes"]
    assert [noted in note for note in notes] == [True] * (noted is not None)
    other = world.wheel(plugin("good", "1.0"))
    assert not world.done("install", "--from-wheel", other, "--dry-run", **given)["notes"]


def test_constraints_of_pip_hold(world: World, tmp_path: Path) -> None:
    world.wheel({**LIBRARY, "version": "1.0"})
    world.wheel(LIBRARY_2)
    world.wheel(plugin("good", "1.0", ["vox-t-lib"]))
    (tmp_path / "constraints.txt").write_text("vox-t-lib<2\n")
    given = {"PIP_CONSTRAINT": str(tmp_path / "constraints.txt")}
    world.done("install", "--from-pypi", "vox-t-good==1.0", "--yes", **given)
    assert world.versions() == {"vox_t_good": "1.0", "vox_t_lib": "1.0"}


def test_from_a_wheel_and_from_a_path_without_an_id(world: World, tmp_path: Path) -> None:
    file = world.wheel(plugin("third", "1.0"))
    assert world.done("install", "--from-wheel", file, "--yes")["changes"][0]["direct"]
    folder = checkout(tmp_path / "third", plugin("third", "1.1"))
    world.done("install", "third", "--from-path", folder, "--yes")
    assert world.versions() == {"vox_t_third": "1.1"}
    world.done("upgrade", "third", "--yes")  # from where it came
    world.done("remove", "third", "--yes")
    assert world.versions() == {}


def test_a_broken_plugin_can_be_removed_by_id_and_twins_by_package(world: World) -> None:
    world.wheel(plugin("good", "1.0"))
    world.done("install", "--from-pypi", "vox-t-good==1.0", "--yes")
    manifest = world.site / "vox_t_good/vox_plugin.toml"
    manifest.unlink()  # uv links files to those in its cache
    manifest.write_text("not toml")
    world.done("remove", "good", "--yes")
    assert world.versions() == {}
    world.done("install", "--from-pypi", "vox-t-good==1.0", "--yes")
    twin = world.site / "twin-1.0.dist-info"
    twin.mkdir()
    (twin / "METADATA").write_text("Metadata-Version: 2.1\nName: twin\nVersion: 1.0\n")
    (twin / "entry_points.txt").write_text("[vox_core.plugins]\ngood = vox_t_good:x\n")
    (twin / "RECORD").write_text("twin-1.0.dist-info/METADATA,,\ntwin-1.0.dist-info/RECORD,,\n")
    done = world.vox("remove", "good", "--yes")
    assert done.returncode == 2 and "distributions twin, vox-t-good" in done.stderr
    world.done("remove", "vox-t-good", "--yes")
    assert world.versions() == {"twin": "1.0"}


# --- refused before anything is done --------------------------------------------------------------


def test_names_that_the_catalog_does_not_have(world: World) -> None:
    world.enter("good", "pypi:vox-t-good==1.0")
    said = world.refused("I002", "install", "goof", "vox-t-good", "--yes")
    assert "'goof' (did you mean good?)" in said
    assert "'vox-t-good' is the package of plugin 'good'" in said
    said = world.refused("I002", "install", str(world.wheels), "--yes")
    assert "--from-path FOLDER" in said
    assert "another plugin's id" in world.refused(
        "I003", "install", "good", "--from-pypi", "other==1.0", "--yes"
    )
    world.refused("I003", "install", "--from-pypi", "other>=1.0", "--yes")
    world.refused("I003", "install", "--from-path", world.wheels, "--yes")
    world.refused("I010", "remove", "good", "--yes")


def test_a_local_source_without_its_checkout(world: World) -> None:
    world.enter("good", "local:nowhere")
    assert "--from-pypi vox-t-good==VERSION" in world.refused("I003", "install", "good", "--yes")


def test_nobody_agrees(world: World) -> None:
    world.wheel(plugin("good", "1.0"))
    world.refused("I012", "install", "--from-pypi", "vox-t-good==1.0")


def test_a_requirement_that_nothing_fulfils(world: World) -> None:
    world.wheel(plugin("good", "1.0", ["vox-t-nowhere"]))
    said = world.refused("I004", "install", "--from-pypi", "vox-t-good==1.0", "--yes")
    assert "vox-t-nowhere" in said


@pytest.mark.parametrize("name", ["vox-ml", "torch"])
def test_the_core_and_torch_stay(world: World, name: str) -> None:
    if name == "torch":
        file = world.wheel({"name": "torch", "version": "2.0", "files": {"torch/__init__.py": ""}})
        world.wheel(plugin("old", "1.0", ["torch"]))
        world.done("install", "--from-pypi", "vox-t-old==1.0", "--yes")
        file.unlink()
    world.wheel({"name": name, "version": "9.0", "files": {"other/__init__.py": ""}})
    world.wheel(plugin("good", "1.0", [f"{name}>=9"]))
    said = world.refused("I005", "install", "--from-pypi", "vox-t-good==1.0", "--yes")
    assert "-> 9.0" in said


def test_another_archive_than_the_catalog_pins(world: World) -> None:
    file = world.wheel(plugin("good", "1.0"))
    pinned = f'sha256 = {{ "{file.name}" = "{"0" * 64}" }}\n'
    world.enter("good", "pypi:vox-t-good==1.0", pinned)
    world.refused("I007", "install", "good", "--yes")


def test_another_distribution_calls_itself_vox(world: World) -> None:
    info = world.site / "vox-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vox\nVersion: 1.0\n")
    (info / "RECORD").write_text("../../../bin/vox,,\n")
    world.wheel(plugin("good", "1.0"))
    said = world.refused("I006", "install", "--from-pypi", "vox-t-good==1.0", "--yes")
    assert "vox 1.0 (../../../bin/vox)" in said
