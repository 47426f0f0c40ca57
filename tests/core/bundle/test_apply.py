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

from tests.core.bundle.samples import faults
from tests.core.bundle.target import (
    LIBRARY,
    LIBRARY_2,
    TORCH,
    bundled,
    catalog_of,
    prepared,
    present,
)
from tests.core.install_samples import World, plugin
from vox_core.errors import VoxError
from vox_core.install.apply import apply
from vox_core.install.bundle.apply import plan_apply
from vox_core.install.uv import find_uv


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(environment: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield from prepared(environment, monkeypatch)


def command(world: World, *arguments: object) -> list[str]:
    """`vox bundle apply`, in the environment itself."""
    return [str(world.python), "-m", "vox_core.cli", "bundle", "apply", *map(str, arguments)]


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
        "installed; next: vox train, which good will watch",
    ]
    assert world.versions() == {"vox_t_good": "1.0", "vox_t_lib": "1.0"}
    assert not list(tmp_path.iterdir())
    state = world.state()
    assert vox(world, file).stdout.startswith("nothing to install")  # which needs no yes
    assert world.state() == state


def test_it_is_applied_to_another_environment(world: World) -> None:
    present(world, {**LIBRARY, "version": "1.0"})
    file = bundled(world, plugin("good", "1.0"), LIBRARY_2)
    plan = plan_apply(file, catalog_of(world), str(world.python))
    assert [(each.name, each.before, each.after) for each in plan.changes] == [
        ("vox-t-good", None, "1.0"),
        ("vox-t-lib", "1.0", "2.0"),
    ]
    assert world.versions() == {"vox_t_lib": "1.0"}
    apply(plan)
    assert world.versions() == {"vox_t_good": "1.0", "vox_t_lib": "2.0"}
    assert not plan_apply(file, catalog_of(world), str(world.python)).changes


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
    'api = "1.0"', 'api = "9.0"'
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
    plan = plan_apply(file, catalog_of(world), str(world.python))
    with pytest.raises(VoxError) as caught:
        apply(plan)
    assert caught.value.code == f"VOX-{code}" and said in str(caught.value)
    assert world.state() == before
    assert not (world.site / ".vox-change").exists()


def test_a_bundle_that_changes_while_the_plan_is_looked_at(world: World) -> None:
    file = bundled(world, plugin("good", "1.0"))
    plan, before = plan_apply(file, catalog_of(world), str(world.python)), world.state()
    file.write_bytes(b"")
    faults(lambda: apply(plan), "B008")
    bundled(world, plugin("good", "1.0", ["another"]))  # sound, but not what was agreed to
    faults(lambda: apply(plan), "I008")
    assert world.state() == before


def test_one_at_a_time(world: World) -> None:
    file = bundled(world, plugin("good", "1.0"))
    plan, before = plan_apply(file, catalog_of(world), str(world.python)), world.state()
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
def test_into_a_fresh_environment_without_a_network(world: World, tmp_path: Path) -> None:
    """vox itself is in the bundle; the environment has neither vox nor pip."""
    subprocess.run([find_uv(), "venv", "--quiet", str(tmp_path / "fresh")], check=True)
    python = tmp_path / "fresh/bin/python"
    (site,) = (tmp_path / "fresh/lib").glob("python*/site-packages")
    borrowed = (world.site / "borrowed.pth").read_text()
    (site / "borrowed.pth").write_text(borrowed)  # what vox needs, which no test bundle holds
    core = {"name": "vox-ml", "version": version("vox-ml"), "files": {"vox_ml_mark.py": ""}}
    file = bundled(world, plugin("good", "1.0", ["vox-ml"]), core)
    command = ["unshare", "-rn", sys.executable, "-m", "vox_core.cli", "bundle", "apply", file]
    done = subprocess.run(
        [*map(str, command), "--target-python", str(python), "--yes"],
        env=world.environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (site / "vox_t_good").is_dir() and (site / "vox_ml_mark.py").is_file()
