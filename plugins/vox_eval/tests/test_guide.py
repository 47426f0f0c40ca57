"""The scorer in docs/guide/evaluate.md, as a package, and the guide's suite."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from vox_eval.scorer import Example, Output
from vox_eval.suites import read_suites

GUIDE = (Path(__file__).resolve().parents[3] / "docs/guide/evaluate.md").read_text("utf-8")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's package, installed as `pip install -e` does: on the path, with its metadata."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    (project,) = re.findall(r"```toml\n(.*?)```", GUIDE, re.S)
    (entry,) = re.findall(r'\[project\.entry-points\."vox_eval\.plugins"\]\n(.*)\n', project)
    folder = tmp_path / "site" / "vox_haiku-0.1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vox-haiku\nVersion: 0.1\n")
    (folder / "entry_points.txt").write_text(f"[vox_eval.plugins]\n{entry.replace(chr(34), '')}\n")
    (folder.parent / "vox_haiku.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "vox_haiku", raising=False)


def test_the_guides_scorer(package, write) -> None:
    write("rows.jsonl", {"prompt": "A haiku, please."})
    (used,) = re.findall(r"`scorer = (\{ name = \"lines\".*?\})`", GUIDE)
    text = f'name = "s"\ntask = [{{ id = "t", rows = "rows.jsonl", scorer = {used} }}]'
    (task,) = read_suites([write("suite.toml", text)]).tasks
    assert task.package == "vox-haiku 0.1"
    scores = [task.scorer.score(Example("id", {}), Output(t, [])) for t in ("a\nb\nc\n", "a")]
    assert [(each.value, each.why) for each in scores] == [(1, "3 lines"), (0, "1 lines")]


def test_the_guides_suite_and_rows(write) -> None:
    blocks = [block.replace("\n    ", "\n") for block in re.findall(r"(?:\n    .*|\n)+", GUIDE)]
    (suite,) = [block for block in blocks if 'name = "support"' in block]
    rows = [json.loads(line) for line in re.findall(r'^    (\{".*\})$', GUIDE, re.M)]
    rows = [row for row in rows if "tests" not in row]  # those of a plugin's scorer
    for name, row in zip(("sums", "capitals", "text"), rows, strict=True):
        write(f"{name}.jsonl", row)
    tasks = read_suites([write("suite.toml", suite)]).tasks
    assert [task.examples[0].ideal for task in tasks] == [("42",), ("Oslo",)]
    text = 'name = "s"\ntask = [{ id = "t", rows = "text.jsonl", scorer = "perplexity" }]'
    assert read_suites([write("suite.toml", text)]).tasks[0].examples
