"""What a wheel or a folder tells without being built or installed."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.core.install_samples import MANIFEST, plugin, wheel
from vox_core.errors import InputError
from vox_core.install.wheel import plugin_ids, project_table

GOOD = plugin("good", "1.0")
PYPROJECT = '[project]\nname = "x"\n'
ENTRY_POINTS = '[project.entry-points."vox_core.plugins"]\nother = "x:backend"\n'


@pytest.fixture
def held(tmp_path: Path) -> Path:
    return tmp_path / wheel(str(tmp_path), **GOOD)


def test_the_plugins_of_a_wheel(held: Path) -> None:
    assert plugin_ids(held) == {"good"}


def test_the_plugins_of_a_folder(tmp_path: Path) -> None:
    assert plugin_ids(tmp_path) is None
    (tmp_path / "src/pkg").mkdir(parents=True)
    (tmp_path / "src/pkg/vox_plugin.toml").write_text(MANIFEST.format(id="good", version="1"))
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    assert plugin_ids(tmp_path) == {"good"}
    (tmp_path / "pyproject.toml").write_text(PYPROJECT + ENTRY_POINTS)
    assert plugin_ids(tmp_path) == {"other"}


@pytest.mark.parametrize("content", [b"no archive", None])
def test_a_wheel_that_is_none(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "x-1.0-py3-none-any.whl"
    if content is None:
        zipfile.ZipFile(file, "w").close()
    else:
        file.write_bytes(content)
    with pytest.raises(InputError, match="the wheel cannot be read") as raised:
        plugin_ids(file)
    assert raised.value.code == "VOX-I003"


@pytest.mark.parametrize("damage", ["deflated data", "method", "encrypted", "version"])
def test_a_wheel_that_is_damaged_further_in(held: Path, damage: str) -> None:
    with zipfile.ZipFile(held) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        info = next(each for each in archive.infolist() if each.filename.endswith("points.txt"))
        begin = info.header_offset + 30 + len(info.filename)
    data = bytearray(held.read_bytes())
    entry = data.rindex(info.filename.encode()) - 46  # in the central directory
    if damage == "deflated data":
        data[begin : begin + 4] = b"\xff" * 4
    offset, value = {"method": (10, 99), "encrypted": (8, 1), "version": (6, 99)}.get(
        damage, (8, data[entry + 8])
    )
    data[entry + offset] = value
    held.write_bytes(data)
    with pytest.raises(InputError) as raised:
        plugin_ids(held)
    assert raised.value.code == "VOX-I003"


def test_tables_without_end(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f"x = {'[' * 3000}{']' * 3000}\n")
    assert project_table(tmp_path) == {}
