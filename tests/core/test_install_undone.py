"""An installation that fails or is interrupted leaves the environment as it was, file for file."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.core.install_samples import MANIFEST, World, checkout, plugin, present
from vox_core.install.undo import begin, unfinished


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(environment: World) -> Iterator[World]:
    yield environment
    environment.clear()


LIBRARY = {"name": "vox-t-lib", "files": {"vox_t_lib/__init__.py": "", "vox_t_lib/old.py": ""}}
LIBRARY_2 = {"name": "vox-t-lib", "version": "2.0", "files": {"vox_t_lib/__init__.py": "two"}}


@pytest.fixture(scope="module")
def version_1(environment: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What vox installs of version 1 of a plugin and its library."""
    site = environment.site
    before = [path.name for path in site.iterdir()]
    environment.wheel({**LIBRARY, "version": "1.0"})
    environment.wheel(plugin("good", "1.0", ["vox-t-lib"]))
    environment.done("install", "--from-pypi", "vox-t-good==1.0", "--yes")
    made = tmp_path_factory.mktemp("installed") / "site"
    shutil.copytree(site, made, ignore=shutil.ignore_patterns(*before))
    environment.clear()
    return made


@pytest.fixture
def half_upgraded(world: World, version_1: Path) -> World:
    """Version 1 of a plugin and its library are there, version 2 of the library can be had."""
    shutil.copytree(version_1, world.site, dirs_exist_ok=True)
    world.wheel({**LIBRARY, "version": "1.0"})
    world.wheel(plugin("good", "1.0", ["vox-t-lib"]))
    world.wheel(LIBRARY_2)
    return world


NEWER = MANIFEST.replace('api = "2.0"', 'api = "9.0"')
NEEDS = ["vox-t-lib>=2"]
BROKEN = {
    "a manifest that is not valid": plugin("good", "2.0", NEEDS, manifest="id = 1"),
    "a plugin for a newer API": plugin("good", "2.0", NEEDS, manifest=NEWER),
    "a package that brings vox's": plugin("good", "2.0", NEEDS, files={"vox_core/__init__.py": ""}),
    "a package without a plugin": {**plugin("good", "2.0", NEEDS), "entry_points": ""},
    "a file in the place of a folder": plugin("good", "2.0", NEEDS, files={"vox_t_dir": ""}),
    "another id": plugin("good", "2.0", NEEDS, manifest=MANIFEST.replace("{id}", "evil")),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_refused_before_anything_is_touched(
    half_upgraded: World, case: str
) -> None:
    world = half_upgraded
    (world.site / "vox_t_dir").mkdir()
    world.wheel(BROKEN[case])
    world.refused("I003", "install", "--from-pypi", "vox-t-good==2.0", "--yes")


FAILING = {
    "a module that ends the interpreter": (
        plugin("good", "2.0", NEEDS, files={"vox_t_good.pth": "import os; os._exit(0)\n"}),
        "the environment's Python fails",
    ),
    "a folder in the place of a file": (
        plugin("good", "2.0", NEEDS, files={"vox_t_file/x.py": ""}),
        "uv ended with",
    ),
    "a requirement that its manifest adds": (
        plugin(
            "good",
            "2.0",
            NEEDS,
            manifest=f'{MANIFEST}[requires]\ndistributions = ["vox-t-nowhere"]\n',
        ),
        "vox-t-nowhere is not installed",
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_failure_in_the_middle_is_undone(half_upgraded: World, case: str) -> None:
    world, (arguments, said) = half_upgraded, FAILING[case]
    (world.site / "vox_t_file").touch()
    before = world.state()
    world.wheel(arguments)
    done = world.vox("install", "--from-pypi", "vox-t-good==2.0", "--yes")
    assert (done.returncode, "error[VOX-I008]" in done.stderr) == (1, True), done.stderr
    assert said in done.stderr
    assert world.state() == before


def test_an_editable_install_is_restored(half_upgraded: World, tmp_path: Path) -> None:
    world = half_upgraded
    world.done("remove", "good", "--yes")
    code = tmp_path / "good"
    arguments = plugin("good", "1.0", ["vox-t-lib"])
    for path, text in arguments["files"].items():
        (code / path).parent.mkdir(parents=True, exist_ok=True)
        (code / path).write_text(text)
    info = "vox_t_good-1.0.dist-info"
    origin = f'{{"url": "{code.as_uri()}", "dir_info": {{"editable": true}}}}'
    files = {"_good.pth": f"{code}\n", f"{info}/direct_url.json": origin}
    present(world, {**arguments, "files": files})
    before = world.state()
    ends = {"vox_t_good.pth": "import os; os._exit(0)\n"}
    world.wheel(plugin("good", "2.0", NEEDS, files=ends))
    done = world.vox("install", "--from-pypi", "vox-t-good==2.0", "--yes")
    assert (done.returncode, "error[VOX-I008]" in done.stderr) == (1, True), done.stderr
    assert world.state() == before
    assert "installed from a checkout in place" in world.vox("upgrade", "good").stdout


def test_a_build_that_fails_is_undone(half_upgraded: World, tmp_path: Path) -> None:
    world = half_upgraded
    before = world.state()
    arguments = plugin("good", "2.0", NEEDS)
    folder = checkout(tmp_path / "good", arguments, before_build="raise SystemExit('no compiler')")
    done = world.vox("install", "good", "--from-path", folder, "--yes")
    assert (done.returncode, "error[VOX-I008]" in done.stderr) == (1, True), done.stderr
    assert "no compiler" in done.stderr
    assert world.state() == before


# --- signals --------------------------------------------------------------------------------------

STOP = """#!{python}
import os, subprocess, sys, time
if "{verb}" in sys.argv and "--prefix" not in sys.argv and "--dry-run" not in sys.argv:
    done = subprocess.run([{uv!r}, *sys.argv[1:]]) if {after} else None
    vox = os.getppid()
    open({mark!r}, "w").close()
    while os.getppid() == vox:  # goes on once vox is killed, as uv would
        time.sleep(0.02)
os.execv({uv!r}, sys.argv)
"""


@pytest.fixture
def stopping(half_upgraded: World) -> Iterator[Callable[[str, bool], Path]]:
    """Makes uv of the environment wait before or after a command; gives the file that tells so."""
    program, mark = half_upgraded.venv / "bin/uv", half_upgraded.folder / "waiting"
    real = str(program.resolve())

    def stop(verb: str, after: bool) -> Path:
        program.unlink()
        text = STOP.format(python=sys.executable, verb=verb, uv=real, after=after, mark=str(mark))
        program.write_text(text)
        program.chmod(0o755)
        return mark

    yield stop
    program.unlink()
    program.symlink_to(real)
    mark.unlink(missing_ok=True)


def stopped_at(world: World, mark: Path, number: signal.Signals) -> tuple[int, str]:
    """Exit code and stderr of an upgrade that gets a signal once uv waits."""
    world.wheel(plugin("good", "2.0", NEEDS))
    process = subprocess.Popen(
        world.command("install", "--from-pypi", "vox-t-good==2.0", "--yes"),
        env=world.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not mark.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    return process.returncode, said.decode()


@pytest.mark.parametrize(
    ("number", "verb"),
    [
        (signal.SIGINT, "uninstall"),
        (signal.SIGTERM, "install"),
        pytest.param(signal.SIGINT, "install", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "uninstall", marks=pytest.mark.long),
    ],
)
def test_an_interrupted_installation_is_undone(
    half_upgraded: World,
    stopping: Callable[[str, bool], Path],
    number: signal.Signals,
    verb: str,
) -> None:
    mark = stopping(verb, True)
    before = half_upgraded.state()
    code, said = stopped_at(half_upgraded, mark, number)
    assert (code, said.endswith("stopped\n")) == (130, True), said
    assert half_upgraded.state() == before


@pytest.mark.parametrize("verb", ["uninstall", "install"])
def test_a_killed_installation_is_found_and_undone(
    half_upgraded: World, stopping: Callable[[str, bool], Path], verb: str
) -> None:
    world = half_upgraded
    mark = stopping(verb, True)
    before = world.state()
    code, _ = stopped_at(world, mark, signal.SIGKILL)
    assert code == -signal.SIGKILL and world.state() != before
    done = world.vox("doctor")
    assert (done.returncode, "cut off: install vox-t-good, vox-t-lib" in done.stdout) == (1, True)
    said = world.refused("I013", "remove", "good", "--yes")
    remedy = said.partition("put its files back: ")[2].strip()
    assert f"put its files back: {remedy}" in done.stdout
    subprocess.run(remedy.split(), env=world.environ(), check=True)
    assert world.state() == before
    assert "cut off" not in world.vox("doctor").stdout
    again = subprocess.run(remedy.split(), env=world.environ(), capture_output=True, check=True)
    assert b"nothing to undo" in again.stdout


def test_undoing_can_be_cut_off_and_run_again(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "old").mkdir(parents=True)
    (site / "old/a.py").write_text("a")
    (site / "old/b.py").write_text("b")
    added = [site / "new/c.py", site / "old/a.py"]
    begin(site, "install new", added, [site / "old/a.py", site / "old/b.py"])
    shutil.rmtree(site / "old")
    (site / "new").mkdir()
    (site / "new/c.py").write_text("c")
    found = unfinished(site)
    assert found is not None
    found.put_back(str(site / "old/a.py"))  # and no further
    again = unfinished(site)
    assert again is not None and again.back() == []
    files = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.*")}
    assert files == {"old/a.py": "a", "old/b.py": "b"}
    assert unfinished(site) is None


def test_what_cannot_be_put_back_is_named_and_the_journal_stays(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    change = begin(tmp_path, "remove a", [], [tmp_path / "a.py"])
    change.copy_of(str(tmp_path / "a.py")).unlink()
    assert change.back() == [f"{tmp_path / 'a.py'}: No such file or directory"]
    assert unfinished(tmp_path) == change


def test_a_full_disk(half_upgraded: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the files of before are kept, and in uv."""
    world = half_upgraded
    world.wheel(plugin("good", "2.0", NEEDS))
    full = (
        "import errno, os, shutil\n"
        "def full(*a, **k): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "import vox_core.install.undo as undo; undo._link = full\n"
    )
    (world.site / "full.pth").write_text("import full\n")
    (world.site / "full.py").write_text(full)
    before = world.state()
    done = world.vox("install", "--from-pypi", "vox-t-good==2.0", "--yes")
    assert (done.returncode, "error[VOX-S001]" in done.stderr) == (1, True), done.stderr
    assert world.state() == before
