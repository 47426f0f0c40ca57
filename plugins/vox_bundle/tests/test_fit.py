"""Bundles that are not for an environment: refused before an installer is started."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
from plugins.vox_bundle.tests.samples import faults, rewritten, swap_a_byte
from plugins.vox_bundle.tests.samples import replace as replaced
from plugins.vox_bundle.tests.target import TORCH, bundled, catalog_of, prepared
from tests.core.install_samples import World, plugin, present

from vox_bundle.archive import Bundle
from vox_bundle.build import build
from vox_bundle.install import plan_bundle
from vox_bundle.verify import verify
from vox_core.catalog import Catalog
from vox_core.errors import VoxError


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), "vox_bundle")


@pytest.fixture
def world(environment: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield from prepared(environment, monkeypatch)


def refused(world: World, file: Path, code: str) -> Sequence[str]:
    before = world.state()
    found = faults(lambda: plan_bundle(file, catalog_of(world)), code)
    assert world.state() == before
    return found


def test_torch_stays(world: World) -> None:
    present(world, {**TORCH, "version": "2.0"})
    file = bundled(world, plugin("good", "1.0", ["torch"]), {**TORCH, "version": "9.0"})
    assert refused(world, file, "I005") == ("torch 2.0 -> 9.0",)


def test_a_build_of_the_same_torch_stays(world: World) -> None:
    present(world, {**TORCH, "version": "2.0+cpu"})
    file = bundled(world, plugin("good", "1.0", ["torch>=2"]), {**TORCH, "version": "2.0"})
    plan = plan_bundle(file, catalog_of(world))
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


def test_another_vox_made_it(world: World, tmp_path: Path) -> None:
    file = bundled(world, plugin("good", "1.0"))
    older = rewritten(
        verify(file, catalog_of(world)),
        tmp_path,
        replaced("pylock.toml", f'vox = "{version("vox-ml")}"', 'vox = "0.0.1"'),
    )
    told = plan_bundle(older, catalog_of(world)).notes
    assert f"made with vox-ml 0.0.1, here it is {version('vox-ml')}" in told


def test_an_environment_that_belongs_to_a_tool(world: World) -> None:
    file = bundled(world, plugin("good", "1.0"))
    (world.venv / "pipx_metadata.json").touch()
    try:
        with pytest.raises(VoxError) as caught:
            plan_bundle(file, catalog_of(world))
    finally:
        (world.venv / "pipx_metadata.json").unlink()
    assert caught.value.code == "VOX-I001"
    assert "uv pip install --offline --no-index" in caught.value.remedy


def test_metadata_that_is_none(world: World) -> None:
    bundled(world, plugin("good", "1.0"))
    (part,) = (world.folder / "parts").glob("*.whl")
    with zipfile.ZipFile(part) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(part, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, b"\xff" if name.endswith("METADATA") else content)
    (found,) = faults(
        lambda: build(
            "small", catalog_of(world), world.folder / "b.zip", wheel_folders=[part.parent]
        ),
        "B010",
    )
    assert found.startswith(f"{part.name}: METADATA cannot be read: 'utf-8' codec")


@pytest.mark.usefixtures("nvidia")
def test_a_tampered_bundle(world: World, bundle: Bundle, catalog: Catalog, tmp_path: Path) -> None:
    path, before = rewritten(bundle, tmp_path, swap_a_byte), world.state()
    faults(lambda: plan_bundle(path, catalog), "B008")
    assert world.state() == before


def test_the_tag_that_a_plugin_requires_is_enforced(
    world: World, bundle: Bundle, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOX_OVERRIDE_HARDWARE", "none")
    found = faults(lambda: plan_bundle(bundle.file, catalog), "B009")
    assert found == ("tiny: needs a device with tag nvidia (found: cpu)",)


def test_the_tags_of_the_wheels_decide(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    file = bundled(world, plugin("good", "1.0"), {**TORCH, "version": "1.0"})
    monkeypatch.setattr("vox_bundle.install.sys_tags", lambda: iter(()))
    torch, good = refused(world, file, "B009")
    assert torch.startswith("torch-1.0-py3-none-any.whl: not for Python ")
    assert good.startswith("vox_t_good-1.0-py3-none-any.whl: not for Python ")


def test_markers_are_those_of_this_python(world: World) -> None:
    needs = [f"x; python_version {sign} '3'" for sign in ("<", ">")]
    needs = [need.replace("x;", f"x{number};") for number, need in enumerate(needs)]
    file = bundled(world, plugin("good", "1.0", needs))
    told = plan_bundle(file, catalog_of(world)).notes
    assert [note.split("needs ")[1][:2] for note in told if "needs" in note] == ["x1"]


def test_what_the_catalog_does_not_vouch_for_is_noted(world: World) -> None:
    lib = {"name": "vox-t-lib", "version": "1.0", "files": {"vox_t_lib/__init__.py": ""}}
    file = bundled(world, plugin("good", "1.0", ["vox-t-lib"]), lib)
    text = world.catalog.read_text()
    world.catalog.write_text(text.replace('vox-t-lib = "local:nowhere"', ""))
    told = plan_bundle(file, catalog_of(world)).notes
    assert "dependencies, for which the catalog has no rules: vox-t-lib 1.0" in told
