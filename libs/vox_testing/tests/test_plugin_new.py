"""`vox plugin new`: what it takes, writes and says."""

from __future__ import annotations

from pathlib import Path


def test_a_package_is_written_and_the_next_step_said(vox) -> None:
    done = vox("plugin", "new", "vox_mine")
    assert (done.code, done.err) == (0, "")
    *files, following = done.out.splitlines()
    assert "vox_mine/vox_mine/vox_plugin.toml" in files
    assert following == 'next: cd vox_mine && pip install -e ".[test]" && pytest'
    assert all(Path(file).is_file() for file in files)
    assert sorted(files) == sorted(str(p) for p in Path("vox_mine").rglob("*") if p.is_file())


def test_the_flags_reach_the_package(vox) -> None:
    flags = ("--id", "mine", "--bare", "--licence", "MIT", "--out", "elsewhere")
    assert vox("plugin", "new", "vox_mine", *flags).code == 0
    manifest = Path("elsewhere/vox_mine/vox_plugin.toml").read_text()
    assert 'id = "mine"' in manifest
    assert 'licence = "MIT"' in manifest
    assert "vox_torch" not in Path("elsewhere/vox_mine/__init__.py").read_text()


def test_what_cannot_be_done_is_refused(vox) -> None:
    done = vox("plugin", "new", "click")
    assert (done.code, done.out) == (2, "")
    assert "name 'click': installed in this environment already" in done.err
    Path("vox_mine").mkdir()
    done = vox("plugin", "new", "vox_mine")
    assert (done.code, done.out) == (2, "")
    assert "error[VOX-O001]: the output path exists" in done.err
