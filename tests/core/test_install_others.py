"""What belongs to others stays theirs: their files, what they need, their environment; and what a
plan that is out of date, a redirected installer or a hostile package would do to it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.core.install_samples import World, checkout, plugin, present

TORCH = {"name": "torch", "version": "2.13.0", "files": {"torch/__init__.py": "GOOD = 1\n"}}
EVIL = {"torch/__init__.py": "EVIL = 1\n"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(environment: World) -> Iterator[World]:
    yield environment
    environment.clear()


def undone(world: World, *arguments: object, **environ: str) -> str:
    """What is said of an installation that fails afterwards and leaves nothing."""
    before = world.state()
    done = world.vox(*arguments, "--yes", **environ)
    assert (done.returncode, "error[VOX-I008]" in done.stderr) == (1, True), done.stderr
    assert world.state() == before
    assert not (world.site / ".vox-change").exists()
    return done.stderr


def requiring(name: str, *requires: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "files": {}, "requires": [*requires], **more}


# --- their files ----------------------------------------------------------------------------------


def test_a_wheel_with_files_of_others_is_refused_by_its_list(world: World) -> None:
    present(world, TORCH)
    data = {"vox_t_good-1.0.data/purelib/torch/__init__.py": "EVIL = 2\n"}
    for files in (EVIL, data):
        file = world.wheel(plugin("good", "1.0", files=files))
        said = world.refused("I003", "install", "--from-wheel", file, "--yes")
        assert "torch/__init__.py, which belongs to torch" in said


def test_the_same_file_is_nobodys_loss(world: World) -> None:
    present(world, TORCH)
    file = world.wheel(plugin("good", "1.0", files=TORCH["files"]))
    world.done("install", "--from-wheel", file, "--yes")
    assert world.versions() == {"torch": "2.13.0", "vox_t_good": "1.0"}
    world.done("remove", "good", "--yes")  # which takes it, and gives it back
    assert (world.site / "torch/__init__.py").read_text() == "GOOD = 1\n"


@pytest.mark.parametrize("mode", ["hardlink", "copy"])
def test_files_of_others_stay_when_a_build_brings_them(
    world: World, tmp_path: Path, mode: str
) -> None:
    present(world, TORCH)
    folder = checkout(tmp_path / "good", plugin("good", "1.0", files=EVIL))
    said = world.refused("I003", "install", "--from-path", folder, "--yes", UV_LINK_MODE=mode)
    assert "torch/__init__.py, which belongs to torch" in said


def test_nothing_is_added_to_the_core(world: World, tmp_path: Path) -> None:
    files = {"vox_core/host/more.py": "EVIL = 1\n"}
    folder = checkout(tmp_path / "good", plugin("good", "1.0", files=files))
    said = world.refused("I003", "install", "--from-path", folder, "--yes")
    assert "more.py, which belongs to vox-ml" in said


def test_no_interpreter_is_replaced(world: World, tmp_path: Path) -> None:
    arguments = plugin("good", "1.0")
    arguments["entry_points"] += "[console_scripts]\nactivate = vox_t_good:x\n"
    for source in ("--from-wheel", world.wheel(arguments)), ("--from-path", tmp_path / "good"):
        checkout(tmp_path / "good", arguments)
        said = world.refused("I003", "install", *source, "--yes")
        assert "bin/activate, which belongs to no package" in said
    arguments["entry_points"] = arguments["entry_points"].replace("activate", "python3")
    said = undone(world, "install", "--from-wheel", world.wheel(arguments))
    assert "reserved name `python3`" in said


# --- what they need -------------------------------------------------------------------------------


def old_library(world: World) -> None:
    world.wheel(requiring("vox-t-lib", files={"vox_t_lib/__init__.py": ""}))
    present(world, requiring("vox-t-lib", version="4.0", files={"vox_t_lib/__init__.py": ""}))


@pytest.mark.parametrize("owner", ["vox-t-stranger", "torch", "vox-t-other"])
def test_what_is_needed_is_not_brought_in_another_version(world: World, owner: str) -> None:
    old_library(world)
    marked = 'vox-t-lib<9; python_version < "3"'
    given = requiring(owner, "vox-t-lib>=2", marked)
    if owner == "vox-t-other":
        given = plugin("other", "1.0", ["vox-t-between"])
        present(world, requiring("vox-t-between", "vox-t-lib>=2", marked))
    present(world, given)
    file = world.wheel(plugin("good", "1.0", ["vox-t-lib<2"]))
    said = world.refused("I005", "install", "--from-wheel", file, "--yes")
    between = "vox-t-between" if owner == "vox-t-other" else owner
    assert f"{between} needs vox-t-lib>=2, which would be 1.0" in said


def test_what_did_not_hold_before_stops_nothing(world: World) -> None:
    old_library(world)
    present(world, requiring("vox-ml-torch", "vox-t-lib>=5", "vox-t-nowhere"))
    file = world.wheel(plugin("good", "1.0", ["vox-t-lib<2"]))
    world.done("install", "--from-wheel", file, "--yes")
    assert world.versions()["vox_t_lib"] == "1.0"


def test_a_version_that_only_a_build_tells_breaks_nothing(world: World, tmp_path: Path) -> None:
    present(world, plugin("good", "1.0"))
    present(world, requiring("vox-t-stranger", "vox-t-good<2"))
    folder = checkout(tmp_path / "good", plugin("good", "2.0"))
    project = folder / "pyproject.toml"
    text = project.read_text().replace('version = "2.0"\n', "")
    project.write_text(text.replace("dynamic = [", 'dynamic = ["version", '))
    said = world.refused("I005", "install", "--from-path", folder, "--yes")
    assert "vox-t-stranger needs vox-t-good<2, which would be 2.0" in said


def test_a_plugin_that_another_needs_is_not_removed_without_it(world: World) -> None:
    world.wheel(plugin("a", "1.0"))
    world.wheel(plugin("b", "1.0", ["vox-t-a"]))
    world.done("install", "--from-pypi", "vox-t-b==1.0", "--yes")
    said = world.refused("I005", "remove", "a", "--yes")
    assert "vox-t-b needs vox-t-a, which would be gone" in said
    world.done("remove", "a", "b", "--yes")
    assert world.versions() == {}


# --- a plan that is out of date -------------------------------------------------------------------

STALE = """
import subprocess, sys
from pathlib import Path
from vox_core.install.apply import apply
from vox_core.install.plan import plan_install
plan = plan_install(source=Path(sys.argv[1]))
install = ["-m", "vox_core.cli", "plugin", "install", "--from-wheel", sys.argv[2], "--yes"]
subprocess.run([sys.executable, *install], check=True)
apply(plan)
"""


def test_what_has_changed_since_the_plan_is_not_touched(world: World, tmp_path: Path) -> None:
    first = world.wheel(plugin("good", "1.0"))
    newer = world.wheel(plugin("good", "2.0"))
    command = [world.python, "-P", "-c", STALE, newer, first]
    done = subprocess.run(
        [str(part) for part in command],
        env=world.environ(),
        cwd=world.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the environment has changed since the plan was made" in done.stderr
    assert world.versions() == {"vox_t_good": "1.0"}


# --- an installer that is sent elsewhere ----------------------------------------------------------


@pytest.mark.parametrize("name", ["PIP_TARGET", "UV_TARGET", "UV_PREFIX", "UV_PYTHON"])
def test_it_installs_here(world: World, tmp_path: Path, name: str) -> None:
    file = world.wheel(plugin("good", "1.0"))
    told = world.done("install", "--from-wheel", file, "--yes", **{name: str(tmp_path / "away")})
    assert world.versions() == {"vox_t_good": "1.0"}
    assert not (tmp_path / "away").exists()
    noted = ("settings of pip that uv has no equal for: target",) if name == "PIP_TARGET" else ()
    assert tuple(told["notes"]) == noted


# --- packages that end the interpreter, or cannot be read -----------------------------------------


@pytest.mark.parametrize(
    "text", ["import os; os._exit(0)\n", "import os; print('no'); os._exit(0)\n"]
)
def test_an_interpreter_that_ends_without_an_answer(world: World, text: str) -> None:
    file = world.wheel(plugin("good", "1.0", files={"vox_t_good.pth": text}))
    said = undone(world, "install", "--from-wheel", file)
    assert "the environment's Python fails: it ended without an answer" in said


def test_what_is_printed_at_exit_is_no_answer(world: World) -> None:
    text = "import atexit; print('hello'); atexit.register(print, 'bye')\n"
    file = world.wheel(plugin("good", "1.0", files={"vox_t_good.pth": text}))
    assert world.vox("install", "--from-wheel", file, "--yes").returncode == 0
    assert world.versions() == {"vox_t_good": "1.0"}


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_a_wheel_that_is_none(world: World, content: bytes) -> None:
    file = world.wheels / "x-1.0-py3-none-any.whl"
    file.write_bytes(content)
    world.refused("I004", "install", "--from-wheel", file, "--yes")


def test_entry_points_that_cannot_be_parsed(world: World) -> None:
    arguments = {**plugin("good", "1.0"), "entry_points": "[vox_core.plugins]\nfoo\n"}
    said = undone(world, "install", "--from-wheel", world.wheel(arguments))
    assert "`entry_points.txt` is invalid" in said


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[project]\nname = 5\n", "I003"),
        (f"x = {'[' * 3000}{']' * 3000}\n", "I004"),
        ('[project]\nname = "a"\n[project.entry-points]\n"vox_core.plugins" = [{a = 1}]\n', "I004"),
    ],
)
def test_a_pyproject_that_makes_no_sense(
    world: World, tmp_path: Path, text: str, code: str
) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    world.refused(code, "install", "--from-path", tmp_path, "--yes", PIP_NO_BUILD_ISOLATION="0")


# --- one change at a time -------------------------------------------------------------------------


def test_one_lock_for_all_users_and_names_of_an_environment(world: World, tmp_path: Path) -> None:
    file = world.wheel(plugin("other", "1.0"))
    link = tmp_path / "link"
    link.symlink_to(world.venv)
    install: Sequence[object] = ("install", "--from-wheel", file, "--yes")
    with world.environment().locked():
        other_user = world.vox(*install, VOX_CACHE=str(tmp_path / "cache"))
        through = subprocess.run(
            [str(link / "bin/python"), *world.command(*install)[1:]],
            env=world.environ(),
            capture_output=True,
            text=True,
            check=False,
        )
    for done in (other_user, through):
        assert (done.returncode, "error[VOX-I011]" in done.stderr) == (2, True), done.stderr
    assert world.versions() == {}
