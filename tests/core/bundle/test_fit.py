"""Bundles that are not for an environment: refused before an installer is started."""

from __future__ import annotations

import shutil
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.core.bundle.samples import faults, rewritten, swap_a_byte
from tests.core.bundle.samples import replace as replaced
from tests.core.bundle.target import TORCH, bundled, catalog_of, prepared, present
from tests.core.install_samples import World, plugin
from vox_core.catalog import Catalog
from vox_core.errors import VoxError
from vox_core.install.bundle.apply import _tags, plan_apply, platform_name
from vox_core.install.bundle.archive import Bundle
from vox_core.install.bundle.build import build
from vox_core.install.bundle.verify import verify
from vox_core.install.environment import Environment


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(environment: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield from prepared(environment, monkeypatch)


def refused(world: World, file: Path, code: str, python: Path | None = None) -> Sequence[str]:
    before = world.state()
    python = python or world.python
    found = faults(lambda: plan_apply(file, catalog_of(world), str(python)), code)
    assert world.state() == before
    return found


def test_torch_stays(world: World) -> None:
    present(world, {**TORCH, "version": "2.0"})
    file = bundled(world, plugin("good", "1.0", ["torch"]), {**TORCH, "version": "9.0"})
    assert refused(world, file, "I005") == ("torch 2.0 -> 9.0",)


def test_a_build_of_the_same_torch_stays(world: World) -> None:
    present(world, {**TORCH, "version": "2.0+cpu"})
    file = bundled(world, plugin("good", "1.0", ["torch>=2"]), {**TORCH, "version": "2.0"})
    plan = plan_apply(file, catalog_of(world), str(world.python))
    assert [each.name for each in plan.changes] == ["vox-t-good"]


def test_the_core_stays(world: World) -> None:
    core = {"name": "vox-ml", "version": "9.0", "files": {"other/__init__.py": ""}}
    file = bundled(world, plugin("good", "1.0"), core)
    assert refused(world, file, "I005") == (f"vox-ml {version('vox-ml')} -> 9.0",)


def test_made_for_another_torch_and_another_core(world: World) -> None:
    """pip would not look: it is told to install these wheels and no dependencies."""
    present(world, {**TORCH, "version": "2.0"})
    file = bundled(world, plugin("good", "1.0", ["vox-ml>=9", "torch>=3", "x; extra == 'y'"]))
    assert refused(world, file, "B009") == (
        f"vox-t-good needs vox-ml>=9, here it is {version('vox-ml')}",
        "vox-t-good needs torch>=3, here it is 2.0",
    )


def test_torch_is_not_there(world: World) -> None:
    file = bundled(world, plugin("good", "1.0", ["torch"]))
    assert refused(world, file, "B009") == ("vox-t-good needs torch, which is not here",)


def test_vox_is_not_there(world: World, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    file, bare = bundled(world, plugin("good", "1.0")), tmp_path / "bare/bin/python"
    assert refused(world, file, "B009", bare) == (
        "vox-ml is not here, and the bundle does not bring it",
    )


def test_another_vox_made_it(world: World, tmp_path: Path) -> None:
    file = bundled(world, plugin("good", "1.0"))
    older = rewritten(
        verify(file, catalog_of(world)),
        tmp_path,
        replaced("BUNDLE.toml", version("vox-ml"), "0.0.1"),
    )
    told = plan_apply(older, catalog_of(world), str(world.python)).notes
    assert f"made with vox-ml 0.0.1, here it is {version('vox-ml')}" in told


def test_an_environment_that_belongs_to_a_tool(world: World) -> None:
    file = bundled(world, plugin("good", "1.0"))
    (world.venv / "pipx_metadata.json").touch()
    try:
        with pytest.raises(VoxError) as caught:
            plan_apply(file, catalog_of(world), str(world.python))
    finally:
        (world.venv / "pipx_metadata.json").unlink()
    assert caught.value.code == "VOX-I001"
    assert caught.value.remedy.startswith(f"unpack the bundle: {sys.executable} -m zipfile -e ")
    assert caught.value.remedy.endswith("inject venv wheels/vox_t_good-1.0-py3-none-any.whl")


def test_metadata_that_is_none(world: World) -> None:
    bundled(world, plugin("good", "1.0"))
    (part,) = (world.folder / "parts").glob("*.whl")
    with zipfile.ZipFile(part) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(part, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, b"\xff" if name.endswith("METADATA") else content)
    file = world.folder / "b.zip"
    build("small", catalog_of(world), file, wheel_folders=[part.parent])
    (found,) = refused(world, file, "B008")
    assert found.startswith(f"{part.name}: METADATA cannot be read: 'utf-8' codec")


@pytest.mark.usefixtures("nvidia")
def test_a_tampered_bundle(world: World, bundle: Bundle, catalog: Catalog, tmp_path: Path) -> None:
    path, before = rewritten(bundle, tmp_path, swap_a_byte), world.state()
    faults(lambda: plan_apply(path, catalog, str(world.python)), "B008")
    assert world.state() == before


def test_the_tag_that_a_plugin_requires_is_enforced(
    world: World, bundle: Bundle, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOX_OVERRIDE_HARDWARE", "none")
    found = faults(lambda: plan_apply(bundle.file, catalog, str(world.python)), "B009")
    assert found == ("tiny: needs a device with tag nvidia (found: cpu)",)


@pytest.mark.usefixtures("nvidia")
def test_a_bundle_for_another_python_and_platform(
    world: World, bundle: Bundle, catalog: Catalog, tmp_path: Path
) -> None:
    path = rewritten(bundle, tmp_path, replaced("BUNDLE.toml", '"any"', '"2.7"'))
    found = faults(lambda: plan_apply(path, catalog, str(world.python)), "B009")
    assert [each.split(",")[0] for each in found] == ["made for Python 2.7", "made for 2.7"]


@pytest.mark.usefixtures("nvidia")
def test_the_tags_of_the_wheels_decide_whatever_the_label_says(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bundled(world, plugin("good", "1.0"), {**TORCH, "version": "1.0"})
    monkeypatch.setattr("vox_core.install.bundle.apply.sys_tags", lambda: iter(()))
    place = Environment.of(str(world.python))
    where = f"not for Python {place.version} on {platform_name()}"
    assert refused(world, file, "B009") == (
        f"torch-1.0-py3-none-any.whl: {where}",
        f"vox_t_good-1.0-py3-none-any.whl: {where}",
    )


def test_the_tags_of_another_python(world: World) -> None:
    place = replace(Environment.of(str(world.python)), version="3.99.0")
    tags = {*map(str, _tags(place))}
    assert {"py3-none-any", "cp399-none-any"} < tags
    assert f"cp{sys.version_info[0]}{sys.version_info[1]}-none-any" not in tags


def test_markers_are_those_of_the_other_python(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = [f"x; python_full_version {sign} '3.99.7'" for sign in ("==", "!=")]
    needs = [need.replace("x;", f"x{number};") for number, need in enumerate(needs)]
    file = bundled(world, plugin("good", "1.0", needs))
    other = replace(Environment.of(str(world.python)), version="3.99.7")
    monkeypatch.setattr(Environment, "of", lambda python: other)
    told = plan_apply(file, catalog_of(world), str(world.python)).notes
    assert [note.split("needs ")[1][:2] for note in told if "needs" in note] == ["x0"]


def test_what_the_catalog_does_not_vouch_for_is_noted(world: World, tmp_path: Path) -> None:
    lib = {"name": "vox-t-lib", "version": "1.0", "files": {"vox_t_lib/__init__.py": ""}}
    file = bundled(world, plugin("good", "1.0", ["vox-t-lib"]), lib)
    sound = verify(file, catalog_of(world))
    text = world.catalog.read_text()
    world.catalog.write_text(text.replace('vox-t-lib = "local:nowhere"', ""))
    labelled = replaced("BUNDLE.toml", "dependencies = false", "dependencies = true")
    path = rewritten(sound, tmp_path, labelled)
    told = plan_apply(path, catalog_of(world), str(world.python)).notes
    assert "dependencies, for which the catalog has no rules: vox-t-lib 1.0" in told


def test_what_is_no_python(bundle: Bundle, catalog: Catalog) -> None:
    for name in ("/nowhere/python", shutil.which("false") or "false", shutil.which("true") or ""):
        with pytest.raises(VoxError) as caught:
            plan_apply(bundle.file, catalog, name)
        assert caught.value.code == "VOX-B009"
        assert "import" not in str(caught.value)  # the question itself is nobody's business
