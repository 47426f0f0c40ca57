"""An installation that fails in the middle leaves the environment as it was, file for file."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.install_samples import BY_PIP, BY_UV, MANIFEST, World, checkout, plugin


@pytest.fixture(scope="module", params=[BY_PIP, BY_UV])
def environment(request, tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def world(environment: World) -> Iterator[World]:
    yield environment
    environment.clear()


LIBRARY = {"name": "vox-t-lib", "files": {"vox_t_lib/__init__.py": "", "vox_t_lib/old.py": ""}}
LIBRARY_2 = {"name": "vox-t-lib", "version": "2.0", "files": {"vox_t_lib/__init__.py": "two"}}


@pytest.fixture
def half_upgraded(world: World) -> World:
    """Version 1 of a plugin and its library are there, version 2 of the library can be had."""
    world.wheel({**LIBRARY, "version": "1.0"})
    world.wheel(plugin("good", "1.0", ["vox-t-lib"]))
    world.done("install", "--from-pypi", "vox-t-good==1.0", "--yes")
    world.wheel(LIBRARY_2)
    return world


NEWER = MANIFEST.replace('api = "1.0"', 'api = "9.0"')
FAILING = {
    "a manifest that is not valid": plugin("good", "2.0", ["vox-t-lib>=2"], manifest="id = 1"),
    "a plugin for a newer API": plugin("good", "2.0", ["vox-t-lib>=2"], manifest=NEWER),
    "a package that brings the core's": plugin(
        "good", "2.0", ["vox-t-lib>=2"], files={"vox_core/__init__.py": ""}
    ),
    "a package without a plugin": {
        **LIBRARY_2,
        "name": "vox-t-good",
        "requires": ["vox-t-lib>=2"],
        "files": {"vox_t_good/__init__.py": ""},
    },
}


@pytest.mark.parametrize("case", FAILING)
def test_what_is_found_bad_afterwards_is_undone(half_upgraded: World, case: str) -> None:
    world = half_upgraded
    before = world.state()
    world.wheel(FAILING[case])
    done = world.vox("install", "--from-pypi", "vox-t-good==2.0", "--yes")
    assert (done.returncode, "error[VOX-I008]" in done.stderr) == (1, True), done.stderr
    assert world.state() == before
    assert not list(world.site.parent.glob(".vox-before-*"))


def test_a_build_that_fails_is_undone(half_upgraded: World, tmp_path: Path) -> None:
    world = half_upgraded
    before = world.state()
    arguments = plugin("good", "2.0", ["vox-t-lib>=2"])
    folder = checkout(tmp_path / "good", arguments, before_build="raise SystemExit('no compiler')")
    done = world.vox("install", "good", "--from-path", folder, "--yes")
    assert (done.returncode, "error[VOX-I008]" in done.stderr) == (1, True), done.stderr
    assert "no compiler" in done.stderr
    assert world.state() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_installation_is_undone(
    half_upgraded: World, tmp_path: Path, number: signal.Signals
) -> None:
    world = half_upgraded
    before = world.state()
    mark = tmp_path / "building"
    wait = f"open({str(mark)!r}, 'w'); import time; time.sleep(60)"
    folder = checkout(tmp_path / "good", plugin("good", "2.0", ["vox-t-lib>=2"]), wait)
    process = subprocess.Popen(
        world.command("install", "good", "--from-path", folder, "--yes"),
        env=world.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not mark.exists() and process.poll() is None:
        time.sleep(0.05)
    if world.installer == "pip":  # which has installed what comes from an index by now
        assert world.versions()["vox_t_lib"] == "2.0"
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said.decode().endswith("stopped\n")) == (130, True)
    assert world.state() == before
