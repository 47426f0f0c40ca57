"""What may be installed, from an index, a wheel or a folder: the file that the catalog pins, wheels
and not strangers' sources, the plugin and the version that were meant, and what was looked at."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.core.install_samples import (
    MANIFEST,
    World,
    checkout,
    plugin,
    sdist,
    wheel,
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(environment: World) -> Iterator[World]:
    yield environment
    environment.clear()


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# --- the file that the catalog pins ---------------------------------------------------------------


def test_a_file_that_is_not_pinned_is_refused_by_name(world: World) -> None:
    file = world.wheel(plugin("good", "1.0"))
    pins = f'sha256 = {{ "{file.name}" = "{digest(file)}" }}\n'
    world.enter("good", "pypi:vox-t-good==1.0", pins)
    other = file.rename(file.with_name("vox_t_good-1.0-7-py3-none-any.whl"))
    for source in ([], ["--from-wheel", other]):
        said = world.refused("I007", "install", "good", *source, "--yes")
        assert f"{other.name}: not one of the files that the catalog pins: {file.name}" in said
    other.unlink()
    made = sdist(world.wheels, plugin("good", "1.0"), world.folder / "mark")
    said = world.refused("I007", "install", "good", "--allow-source", "--yes")
    assert f"{made.name}: not one of the files that the catalog pins: {file.name}" in said


def test_the_pinned_wheel_by_path(world: World) -> None:
    file = world.wheel(plugin("good", "1.0"))
    pins = f'sha256 = {{ "{file.name}" = "{digest(file)}" }}\n'
    world.enter("good", "pypi:vox-t-good==1.0", pins)
    (change,) = world.done("install", "--from-wheel", file, "--yes")["changes"]
    assert (change["sha256"], change["direct"]) == (digest(file), True)
    world.wheel(plugin("good", "1.0", files={"vox_t_good/more.py": ""}))
    assert "found" in world.refused("I007", "install", "--from-wheel", file, "--yes")


CHANGED = """
import sys
from pathlib import Path
from vox_core.install.apply import apply
from vox_core.install.plan import plan_install
plan = plan_install(source=Path(sys.argv[1]))
Path(sys.argv[2]).replace(sys.argv[1])
apply(plan)
"""


def test_a_wheel_that_changes_after_the_plan_is_not_installed(world: World, tmp_path: Path) -> None:
    file = world.wheel(plugin("good", "1.0"))
    more = plugin("good", "1.0", files={"vox_t_good/more.py": ""})
    other = tmp_path / wheel(str(tmp_path), **more)
    command = [str(world.python), "-P", "-c", CHANGED, str(file), str(other)]
    done = subprocess.run(command, env=world.environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Hash mismatch" in done.stderr, done.stderr
    assert world.versions() == {}


# --- a wheel, and not somebody's source -----------------------------------------------------------


@pytest.mark.parametrize("needs", [[], ["vox-t-lib"]])
def test_a_source_of_an_index_is_not_built_unasked(world: World, needs: list[str]) -> None:
    mark = world.folder / "mark"
    mark.unlink(missing_ok=True)
    if needs:
        world.wheel(plugin("good", "1.0", needs))
    source = {"name": "vox-t-lib", "version": "1.0", "files": {"vox_t_lib/__init__.py": ""}}
    sdist(world.wheels, source if needs else plugin("good", "1.0"), mark)
    install = ("install", "--from-pypi", "vox-t-good==1.0", "--yes")
    said = world.refused("I004", *install)
    assert f"there is no wheel for this machine of {needs[0] if needs else 'vox-t-good'}" in said
    assert "--allow-source" in said
    assert not mark.exists()
    done = world.vox(*install, "--allow-source")
    built = needs[0] if needs else "vox-t-good"
    assert done.returncode == 0, done.stderr
    assert f"built on this machine, which runs its code: {built}" in done.stdout
    assert mark.exists() and "vox_t_good" in world.versions()


@pytest.mark.parametrize("inside", [False, True])
def test_a_source_by_address_is_not_built_unasked(world: World, inside: bool) -> None:
    mark, folder = world.folder / "mark", world.folder / "elsewhere"
    mark.unlink(missing_ok=True)
    folder.mkdir(exist_ok=True)
    made = sdist(folder, {"name": "vox-t-dep", "version": "1.0", "files": {}}, mark)
    address = f"vox-t-dep @ {made.as_uri()}"
    lib = {"name": "vox-t-lib", "version": "1.0", "files": {"vox_t_lib/__init__.py": ""}}
    world.wheel({**lib, "requires": [address]})
    file = world.wheel(plugin("good", "1.0", ["vox-t-lib"] if inside else [address]))
    said = world.refused("I004", "install", "--from-wheel", file, "--dry-run")
    assert "vox-t-dep" in said and not mark.exists()
    if inside:  # uv takes no address at that depth, source or not
        return
    assert "there is no wheel for this machine of vox-t-dep" in said
    assert "--allow-source" in said
    done = world.vox("install", "--from-wheel", file, "--dry-run", "--allow-source")
    assert "built on this machine, which runs its code: vox-t-dep" in done.stdout, done.stderr
    assert mark.exists()


@pytest.mark.parametrize("static", [False, True])
def test_a_folder_is_built_and_not_what_it_names(
    world: World, tmp_path: Path, static: bool
) -> None:
    mark = tmp_path / "mark"
    made = sdist(tmp_path, {"name": "vox-t-dep", "version": "1.0", "files": {}}, mark)
    address = f"vox-t-dep @ {made.as_uri()}"
    folder = checkout(tmp_path / "good", plugin("good", "1.0", [address]))
    project = folder / "pyproject.toml"
    if static:
        text = project.read_text().replace('"dependencies", ', "")
        project.write_text(f'{text}dependencies = ["{address}"]\n')
    said = world.refused("I004", "install", "--from-path", folder, "--dry-run")
    assert "there is no wheel for this machine of vox-t-dep" in said
    assert not mark.exists()
    done = world.vox("install", "--from-path", folder, "--dry-run", "--allow-source")
    assert (done.returncode, mark.exists()) == (0, True), done.stderr


def test_a_wheel_by_address_is_taken(world: World, tmp_path: Path) -> None:
    name = wheel(str(tmp_path), "vox-t-dep", "1.0", {"vox_t_dep/__init__.py": ""})
    address = f"vox-t-dep @ {(tmp_path / name).as_uri()}"
    file = world.wheel(plugin("good", "1.0", [address]))
    done = world.done("install", "--from-wheel", file, "--yes")
    assert [each["name"] for each in done["changes"]] == ["vox-t-dep", "vox-t-good"]
    folder = checkout(tmp_path / "good", plugin("good", "1.1", [address]))
    world.done("install", "--from-path", folder, "--yes")
    assert world.versions() == {"vox_t_dep": "1.0", "vox_t_good": "1.1"}


@pytest.mark.parametrize("wanted", [">=99", "<0.0.1"])
def test_a_plugin_for_another_vox_says_so(world: World, wanted: str) -> None:
    file = world.wheel(plugin("good", "1.0", [f"vox-ml{wanted}"]))
    told = world.refused("I004", "install", "--from-wheel", file, "--yes")
    assert f"vox-ml{wanted}" in told and "another version of vox-ml needs that version" in told


# --- no network -----------------------------------------------------------------------------------


def test_what_the_guide_says_of_a_folder_of_wheels(world: World) -> None:
    """An index of pip's configuration is asked, and not with --no-index."""
    asked: list[str] = []

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    world.wheel(plugin("good", "1.0"))
    with HTTPServer(("127.0.0.1", 0), Index) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/simple"
        given = {"PIP_INDEX_URL": url, "UV_NO_CACHE": "1"}
        install = ("install", "--from-pypi", "vox-t-good==1.0", "--dry-run")
        world.done(*install, **given)
        assert asked == []
        world.done(*install, **given, PIP_NO_INDEX="0")
        assert asked  # so it was there to be asked
        server.shutdown()


def test_these_tests_have_no_network(world: World) -> None:
    said = world.refused("I004", "install", "--from-pypi", "pip==23.0", "--dry-run")
    assert "not found in the provided package locations" in said  # uv has no index


def test_what_is_nowhere_is_not_said_to_have_a_source(world: World) -> None:
    sdist(world.wheels, plugin("good", "1.0"), world.folder / "mark")
    said = world.refused("I004", "install", "--from-pypi", "vox-t-good==2.0", "--yes")
    assert "--allow-source" not in said


def test_it_is_said_before_a_folder_is_built(world: World, tmp_path: Path) -> None:
    folder = checkout(tmp_path / "good", plugin("good", "1.0"))
    done = world.vox("install", "--from-path", folder, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"Building metadata of {folder} (runs its build script)" in done.stderr
    assert "built on this machine, which runs its code: vox-t-good" in done.stdout


# --- what the catalog has against it --------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ('status = "yanked"\nadvisory = "it is broken"', "good: yanked: it is broken"),
        ('requires-tag = "abacus"', "good: needs a device with tag abacus"),
        ("platforms = \"sys_platform == 'win64'\"", "good: not for this platform"),
        ('specifier = ">=2,<3"', "vox-t-good 1.0: the catalog wants"),
    ],
)
def test_a_source_does_not_get_around_the_catalog(
    world: World, tmp_path: Path, key: str, said: str
) -> None:
    file = world.wheel(plugin("good", "1.0"))
    folder = checkout(tmp_path / "good", plugin("good", "1.0"))
    world.enter("good", "pypi:vox-t-good==2.0", f"{key}\n")
    sources = [["--from-wheel", file], ["--from-pypi", "vox-t-good==1.0"], ["--from-path", folder]]
    for source in sources:
        assert said in world.refused("I003", "install", *source, "--yes")


# --- the content, and not the version -------------------------------------------------------------


def test_a_rebuilt_wheel_is_installed_again_and_the_same_is_not(world: World) -> None:
    more = plugin("good", "1.0", files={"vox_t_good/more.py": "1"})
    file = world.wheel(more)
    world.done("install", "--from-wheel", file, "--yes")
    assert world.done("install", "--from-wheel", file, "--yes")["changes"] == []
    world.wheel(plugin("good", "1.0", files={"vox_t_good/more.py": "2"}))
    done = world.vox("install", "--from-wheel", file, "--yes")
    assert done.returncode == 0, done.stderr
    assert "vox-t-good  1.0 again (its content differs)" in done.stdout
    assert (world.site / "vox_t_good/more.py").read_text() == "2"
    assert world.done("install", "--from-wheel", file, "--yes")["changes"] == []
    world.wheel(plugin("good", "1.0"))
    world.done("install", "--from-wheel", file, "--yes")
    assert not (world.site / "vox_t_good/more.py").exists()


# --- the plugin that was meant --------------------------------------------------------------------


def test_a_package_of_another_id_is_refused_before(world: World, tmp_path: Path) -> None:
    file = world.wheel(plugin("good", "1.0"))
    folder = checkout(tmp_path / "good", plugin("good", "1.0"))
    (folder / "vox_t_good").mkdir()
    (folder / "vox_t_good/vox_plugin.toml").write_text(MANIFEST.format(id="good", version="1.0"))
    sources = [["--from-wheel", file], ["--from-pypi", "vox-t-good==1.0"], ["--from-path", folder]]
    for source in sources:
        said = world.refused("I003", "install", "evil", *source, "--yes")
        assert "vox-t-good brings plugin 'good', not 'evil'" in said
    world.done("install", "--from-wheel", file, "--yes")
    said = world.refused("I003", "install", "evil", "--from-pypi", "vox-t-good==1.0", "--yes")
    assert "vox-t-good brings plugin 'good', not 'evil'" in said


def test_what_only_a_build_tells_is_refused_after_it(world: World, tmp_path: Path) -> None:
    folder = checkout(tmp_path / "good", plugin("good", "1.0"))
    said = world.refused("I003", "install", "evil", "--from-path", folder, "--yes")
    assert "vox-t-good brings plugin 'good', not 'evil'" in said


# --- a source that is not there -------------------------------------------------------------------


def test_paths_that_lead_nowhere(world: World) -> None:
    missing = world.folder / "none-1.0-py3-none-any.whl"
    said = world.refused("I003", "install", "--from-wheel", missing, "--yes")
    assert f"{missing}\n  found:    nothing there" in said
    said = world.refused("I003", "install", "--from-path", world.folder / "none", "--yes")
    assert f"{world.folder / 'none'}\n  found:    nothing there" in said
