"""docs/reference is what tools/reference.py writes, and covers everything."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from vox_core.errors import CODES

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "reference.py"


@pytest.fixture
def reference():
    spec = importlib.util.spec_from_file_location("reference", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stale_page_is_named(reference, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "docs/reference").mkdir(parents=True)
    (tmp_path / "vox_core").mkdir()
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    (tmp_path / "docs/reference/cli.md").write_text("old")
    assert reference.main(["--check"]) == 1
    assert "docs/reference/cli.md is out of date" in capsys.readouterr().err
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0


def test_every_code_and_command_has_its_place(reference) -> None:
    pages = {file.name: text for file, text in reference.pages().items()}
    assert [code for code in CODES if f"`VOX-{code}`" not in pages["errors.md"]] == []
    for path in ("vox train", "vox model pull", "vox config show"):
        assert f"## {path}\n" in pages["cli.md"]
    assert "`micro-batch-tokens` | integer | `2048`" in pages["config.md"]
