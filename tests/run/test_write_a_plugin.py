"""The plugin in docs/guide/write-a-plugin.md, as a package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.core.plugin_site import Site

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/guide/write-a-plugin.md").read_text(encoding="utf-8")


@pytest.fixture
def vox(tmp_path: Path) -> Any:
    """Run vox in a folder where the guide's plugin is installed."""
    site = tmp_path / "site"
    for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", GUIDE, re.S):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    project = tomllib.loads((site / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = project["entry-points"]["vox_core.plugins"]
    lines = [f"{id} = {target}\n" for id, target in entries.items()]
    Site(site).describe(project["name"], f"[vox_core.plugins]\n{''.join(lines)}")
    path = os.pathsep.join([str(site), *filter(None, sys.path)])

    def run(*words: object, code: int = 0) -> str:
        command = [sys.executable, "-m", "vox_core.cli", *map(str, words)]
        done = subprocess.run(
            command,
            check=False,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
        )
        assert done.returncode == code, done.stderr.decode()
        return (done.stderr if code else done.stdout).decode()

    return run


def test_the_guides_plugin(vox, tiny, tmp_path: Path) -> None:
    assert "no problems found" in vox("plugin", "doctor", "brief")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi?"}\n')
    words = ["train", "prompts.jsonl", "--model", tiny("llama"), "--out", "run", "--backend", "cpu"]
    words += ["--objective", "grpo", "--reward", "brief", "--rollouts", "2", "--max-steps", "1"]
    vox(*words, "--rollout-tokens", "16")
    answers = [
        json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()
    ]
    lengths = [len(each["answer"].split()) for each in answers]
    assert [each["rewards"] for each in answers] == [{"brief": 1 / (1 + n)} for n in lengths]
    (tmp_path / "vox.toml").write_text(f"[brief]\nwords = {max(lengths)}\n")
    assert f"words = {max(lengths)}" in vox("config", "show")
    assert vox("brief", "run") == ""
    longer = sum(n > 1 for n in lengths)
    assert vox("brief", "run", "--words", "1").count("\n") == longer
    (tmp_path / "run/rollouts.jsonl").unlink()
    assert "VOX-D001]: the run has no sampled answers" in vox("brief", "run", code=2)
