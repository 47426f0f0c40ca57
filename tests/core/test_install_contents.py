"""What a wheel or a folder tells without being built or installed."""

from __future__ import annotations

import csv
import json
import zipfile
from pathlib import Path

import pytest

from tests.core.install_samples import MANIFEST, plugin, wheel
from vox_core.errors import InputError
from vox_core.host.contents import digest, held_files, is_installed, plugin_ids, project_table

GOOD = plugin("good", "1.0")
PYPROJECT = '[project]\nname = "x"\n'
ENTRY_POINTS = '[project.entry-points."vox_core.plugins"]\nother = "x:backend"\n'


@pytest.fixture
def held(tmp_path: Path) -> Path:
    return tmp_path / wheel(str(tmp_path), **GOOD)


@pytest.fixture
def site(tmp_path: Path, held: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That wheel as an installer leaves it: with bytecode, a command and notes of its own."""
    folder = tmp_path / "site"
    zipfile.ZipFile(held).extractall(folder)
    with record(folder).open("a", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["../../bin/good", "sha256=x", "1"])
        rows.writerow(["vox_t_good/__pycache__/__init__.pyc", "sha256=x", "1"])
        rows.writerow(["vox_t_good-1.0.dist-info/INSTALLER", "sha256=x", "1"])
    monkeypatch.syspath_prepend(str(folder))
    return folder


def record(site: Path) -> Path:
    return next(site.glob("*.dist-info/RECORD"))


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


def test_where_the_files_of_a_wheel_go(tmp_path: Path) -> None:
    files = {"vox_t_x-1.0.data/scripts/run": "", "vox_t_x-1.0.data/data/share/x": ""}
    arguments = plugin("x", "1.0", files=files)
    arguments["entry_points"] += "[console_scripts]\nx = vox_t_x:main\n"
    held = held_files(tmp_path / wheel(str(tmp_path), **arguments))
    found = {(each.scheme, str(each.path), each.digest is None) for each in held}
    assert found >= {
        ("purelib", "vox_t_x/__init__.py", False),
        ("scripts", "run", False),
        ("data", "share/x", False),
        ("scripts", "x", True),
    }


def test_the_same_files_in_another_archive_are_the_same(held: Path, site: Path) -> None:
    before = digest(held)
    with zipfile.ZipFile(held, "a") as archive:
        archive.comment = b"packed again"
    assert digest(held) != before and is_installed(held, "vox-t-good")


@pytest.mark.parametrize("files", [{"vox_t_good/__init__.py": "2"}, {"vox_t_good/new.py": ""}])
def test_other_files_are_not(tmp_path: Path, held: Path, site: Path, files: dict[str, str]) -> None:
    wheel(str(tmp_path), **plugin("good", "1.0", files=files))
    assert not is_installed(held, "vox-t-good")


def test_nor_fewer_files(held: Path, site: Path) -> None:
    with record(site).open("a") as file:
        file.write("vox_t_good/left.py,sha256=x,1\n")
    assert not is_installed(held, "vox-t-good")


def test_scripts_tell_by_the_archive_alone(tmp_path: Path, held: Path, site: Path) -> None:
    wheel(str(tmp_path), **plugin("good", "1.0", files={"vox_t_good-1.0.data/scripts/x": "1"}))
    assert not is_installed(held, "vox-t-good")
    origin = {"url": held.as_uri(), "archive_info": {"hashes": {"sha256": digest(held)}}}
    (record(site).parent / "direct_url.json").write_text(json.dumps(origin))
    assert is_installed(held, "vox-t-good")
