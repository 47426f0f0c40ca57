"""Bundles applied to real environments: whole or not at all, with no network."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from plugins.vox_bundle.tests.samples import faults
from plugins.vox_bundle.tests.target import (
    LIBRARY,
    LIBRARY_2,
    TORCH,
    bundled,
    catalog_of,
    prepared,
)
from tests.core.install_samples import World, plugin, present

from vox_bundle.install import plan_bundle
from vox_core.errors import InputError, VoxError
from vox_core.install.apply import apply
from vox_core.install.uv import find_uv


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), "vox_bundle")


@pytest.fixture
def world(environment: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield from prepared(environment, monkeypatch)


def command(world: World, *arguments: object) -> list[str]:
    """`vox bundle install`, in the environment itself."""
    return [str(world.python), "-m", "vox_core.cli", "bundle", "install", *map(str, arguments)]


def vox(world: World, *arguments: object, stdin: int = subprocess.DEVNULL, **environ: str) -> Any:
    return subprocess.run(
        command(world, *arguments),
        env=world.environ(**environ),
        cwd=world.folder,
        capture_output=True,
        text=True,
        stdin=stdin,
        check=False,
    )


# --- what works -----------------------------------------------------------------------------------


def test_the_plan_is_shown_and_its_wheels_installed_and_nothing_else(
    world: World, tmp_path: Path
) -> None:
    """Neither the dependency that nobody has, nor anything that the installer's settings add."""
    file = bundled(world, plugin("good", "1.0", ["not-there>=3"]), {**LIBRARY, "version": "1.0"})
    more = {"PIP_TARGET": str(tmp_path), "PIP_INDEX_URL": "http://localhost:9/simple"}
    done = vox(world, file, "--yes", "--verbose", UV_INDEX_URL="http://localhost:9/simple", **more)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"install in {world.venv} (a virtual environment)"
    assert lines[1].startswith("  vox-t-good  1.0 (new)  1.")
    assert f"from {file.as_uri()}/wheels/vox_t_good-1.0-" in lines[1]
    assert lines[2].startswith("  vox-t-lib  1.0 (new)  ")
    assert lines[-3:] == [
        "note: bundle small: a small bundle; plugins: good",
        "note: vox-t-good needs not-there>=3, which is not here; the bundle does not bring it",
        "installed; next: vox plugin list",
    ]
    assert world.versions() == {"vox_t_good": "1.0", "vox_t_lib": "1.0"}
    assert not list(tmp_path.iterdir())
    state = world.state()
    assert vox(world, file).stdout.startswith("nothing to install")  # which needs no yes
    assert world.state() == state


def test_it_upgrades_what_is_there(world: World) -> None:
    present(world, {**LIBRARY, "version": "1.0"})
    file = bundled(world, plugin("good", "1.0"), LIBRARY_2)
    plan = plan_bundle(file, catalog_of(world))
    assert [(each.name, each.before, each.after) for each in plan.changes] == [
        ("vox-t-good", None, "1.0"),
        ("vox-t-lib", "1.0", "2.0"),
    ]
    assert world.versions() == {"vox_t_lib": "1.0"}
    apply(plan)
    assert world.versions() == {"vox_t_good": "1.0", "vox_t_lib": "2.0"}
    assert not plan_bundle(file, catalog_of(world)).changes


def test_a_dry_run_and_nobody_who_agrees(world: World) -> None:
    file, before = bundled(world, plugin("good", "1.0")), world.state()
    assert "vox-t-good  1.0 (new)" in vox(world, file, "--dry-run").stdout
    done = vox(world, file)
    assert (done.returncode, "error[VOX-I012]" in done.stderr) == (2, True), done.stderr
    assert world.state() == before


@pytest.mark.parametrize(("answer", "code"), [("n", 130), ("y", 0)])
def test_a_person_is_asked(world: World, answer: str, code: int) -> None:
    file, before = bundled(world, plugin("good", "1.0")), world.state()
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    done = vox(world, file, stdin=theirs)
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, "continue?" in done.stderr) == (code, True), done.stderr
    assert (world.state() == before) == (answer == "n")


# --- what is refused: test_fit.py has the others -------------------------------------------------


def test_torch_stays(world: World) -> None:
    present(world, {**TORCH, "version": "2.0"})
    file = bundled(world, plugin("good", "1.0"), {**TORCH, "version": "9.0"})
    before = world.state()
    done = vox(world, file, "--yes")
    assert (done.returncode, "error[VOX-I005]" in done.stderr) == (2, True), done.stderr
    assert world.state() == before


# --- failed in the middle -------------------------------------------------------------------------

GOOD = plugin("good", "2.0", ["vox-t-lib>=2"])
NEWER = {key: dict(value) if key == "files" else value for key, value in GOOD.items()}
NEWER["files"]["vox_t_good/vox_plugin.toml"] = NEWER["files"]["vox_t_good/vox_plugin.toml"].replace(
    'api = "2.0"', 'api = "9.0"'
)
WITH = GOOD["files"]
FAILING: dict[str, tuple[dict[str, Any], str, str]] = {
    "uv itself": (
        {**GOOD, "files": {**WITH, "vox_t_good-2.0.data/nowhere/x": ""}},
        "I008",
        "uv ended with",
    ),
    "no entry point": ({**GOOD, "entry_points": ""}, "I003", "brings no plugin, not 'good'"),
    "a newer API": (NEWER, "I003", "good: api: written for 9.0"),
    "it brings vox's": (
        {**GOOD, "files": {**WITH, "vox_core/__init__.py": ""}},
        "I003",
        "vox_core/__init__.py, which belongs to vox-ml",
    ),
    "it ends the interpreter": (
        {**GOOD, "files": {**WITH, "good.pth": "import os; os._exit(0)\n"}},
        "I008",
        "the environment's Python fails",
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_what_fails_is_undone(world: World, case: str) -> None:
    present(world, {**LIBRARY, "version": "1.0"})
    present(world, plugin("good", "1.0", ["vox-t-lib"]))
    part, code, said = FAILING[case]
    file, before = bundled(world, part, LIBRARY_2), world.state()
    plan = plan_bundle(file, catalog_of(world))
    with pytest.raises(VoxError) as caught:
        apply(plan)
    assert caught.value.code == f"VOX-{code}" and said in str(caught.value)
    assert world.state() == before
    assert not (world.site / ".vox-change").exists()


def test_a_bundle_that_changes_while_the_plan_is_looked_at(world: World) -> None:
    file = bundled(world, plugin("good", "1.0"))
    plan, before = plan_bundle(file, catalog_of(world)), world.state()
    file.write_bytes(b"")
    faults(lambda: apply(plan), "B008")
    bundled(world, plugin("good", "1.0", ["another"]))  # sound, but not what was agreed to
    faults(lambda: apply(plan), "I008")
    assert world.state() == before


def test_one_at_a_time(world: World) -> None:
    file = bundled(world, plugin("good", "1.0"))
    plan, before = plan_bundle(file, catalog_of(world)), world.state()
    with plan.environment.locked():
        done = vox(world, file, "--yes")
        assert (done.returncode, "error[VOX-I011]" in done.stderr) == (2, True), done.stderr
    assert world.state() == before


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rn", "true"], check=False, capture_output=True).returncode != 0
    if shutil.which("unshare")
    else True,
    reason="no namespaces here",
)
def test_into_a_fresh_environment_with_uv_alone(world: World, tmp_path: Path) -> None:
    """As the guide says: no vox there, and no network."""
    subprocess.run([find_uv(), "venv", "--quiet", str(tmp_path / "fresh")], check=True)
    core = {"name": "vox-ml", "version": version("vox-ml"), "files": {"vox_ml_mark.py": ""}}
    file = bundled(world, plugin("good", "1.0", ["vox-ml"]), core)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", file, tmp_path / "bundle"], check=True)
    lock, python = tmp_path / "bundle/pylock.toml", tmp_path / "fresh/bin/python"
    how = ["--offline", "--no-index", "--no-deps", "--require-hashes"]
    command = ["unshare", "-rn", find_uv(), "pip", "install", "--python", python, *how, "-r", lock]
    environ = {**os.environ, "UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [*map(str, command)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (site,) = (tmp_path / "fresh/lib").glob("python*/site-packages")
    assert (site / "vox_t_good").is_dir() and (site / "vox_ml_mark.py").is_file()


# --- the guards of every installation -------------------------------------------------------------


def test_it_overwrites_no_files_of_others(world: World) -> None:
    present(world, {**TORCH, "version": "2.0", "files": {"torch/__init__.py": "GOOD = 1\n"}})
    file = bundled(world, plugin("good", "1.0", files={"torch/__init__.py": "EVIL = 1\n"}))
    plan, before = plan_bundle(file, catalog_of(world)), world.state()
    with pytest.raises(VoxError) as raised:
        apply(plan)
    assert raised.value.code == "VOX-I003" and "belongs to torch" in raised.value.faults[0]
    assert world.state() == before


def test_it_brings_no_version_that_breaks_others(world: World) -> None:
    present(world, {**LIBRARY, "version": "4.0"})
    stranger = {"name": "vox-ml-torch", "version": "1.0", "files": {}, "requires": ["vox-t-lib>=2"]}
    present(world, stranger)
    file = bundled(world, plugin("good", "1.0"), {**LIBRARY, "version": "1.0"})
    with pytest.raises(InputError) as raised:
        plan_bundle(file, catalog_of(world))
    assert raised.value.code == "VOX-I005"
    assert raised.value.faults == ("vox-ml-torch needs vox-t-lib>=2, which would be 1.0",)
