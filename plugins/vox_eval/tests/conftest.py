"""Fixtures for tests of commands, and suites of a tiny Llama."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.cli.fixtures import _clean_place, vox

from vox_core.api.generating import GenerateSettings, open_base
from vox_core.api.models import resolve_reference, write_adapter
from vox_core.run.load_proof import take_probe
from vox_eval.evaluation import evaluate
from vox_eval.suites import read_suites
from vox_testing import jobs
from vox_testing.llama import write_llama

__all__ = ["_clean_place", "vox"]

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "other", seed=1)


@pytest.fixture(scope="session")
def trained(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mine`, an adapter with the records of a run that trained on `train.jsonl`, and `yes.jsonl`:
    questions of which it has 12 more right than its base, and the base none."""
    place = tmp_path_factory.mktemp("trained")
    run, data = place / "mine", place / "train.jsonl"
    run.mkdir()
    state = jobs.stirred(jobs.start(llama, jobs.plan(llama, rank=4)), 0.3).adapter
    write_adapter(run, state, base=str(llama), modules={})
    lines = [json.dumps({"prompt": f"Is {n} good?", "completion": "Yes"}) for n in range(16)]
    data.write_text("\n".join(lines))
    sha256 = hashlib.sha256(data.read_bytes()).hexdigest()
    sources = {"data": [{"path": str(data), "sha256": sha256}]}
    (run / "plan.json").write_text(
        json.dumps({"settings": {"data": [str(data)]}, "sources": sources})
    )
    settings = GenerateSettings(backend="cpu", dtype="fp32")
    source, rows = resolve_reference(str(run)), [[1, 5, 9, 30, 12, 7], [1, 40, 41, 42, 2]]
    with open_base(source, {"a": state}, settings) as opened:
        probe = take_probe(
            opened.model, "a", state, rows, SimpleNamespace(backend="cpu", dtype="fp32")
        )
    assert probe
    (run / "probe.json").write_text(probe.model_dump_json())
    (place / "yes.jsonl").write_text("\n".join(map(json.dumps, _won(place, run, llama))))
    return run


def _won(place: Path, run: Path, base: Path) -> list[dict[str, object]]:
    """Questions whose answer by the run is not that of its base."""
    ends = ["Yes", "No!"]
    asked = [{"prompt": f"Was {n * n} so?", "choices": ends, "ideal": 0} for n in range(200)]
    (place / "all.jsonl").write_text("\n".join(map(json.dumps, asked)))
    suite = 'name = "a"\ntask = [{ id = "a", rows = "all.jsonl", scorer = "choice" }]'
    (place / "all.toml").write_text(suite)
    settings = GenerateSettings(backend="cpu", dtype="fp32")
    found = []
    for model in (run, base):
        done = evaluate(
            str(model), suite=read_suites([place / "all.toml"]), settings=settings,
            out=place / "evals" / model.name, observe=lambda _: None,
        )  # fmt: skip
        found.append([json.loads(line)["answer"] for line in (done.folder / "eval.jsonl").open()])
    won = [
        {**row, "ideal": ours}
        for row, ours, theirs in zip(asked, *found, strict=True)
        if ours != theirs
    ]
    assert len(won) >= 12
    return won[:12]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write("rows.jsonl", row, ...)`: a file of rows, or of a text."""
    return partial(write_in, tmp_path)


def write_in(folder: Path, name: str, *rows: object) -> Path:
    file = folder / name
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


SUITE = """
name = "tiny"

[[task]]
id = "say"
rows = "say.jsonl"
scorer = { name = "contains", ignore-case = true }
sampling = { max-tokens = 5 }
weight = 3

[[task]]
id = "warm"
rows = "say.jsonl"
scorer = "exact"
sampling = { max-tokens = 3, temperature = 1, seed = 7 }

[[task]]
id = "pick"
rows = "pick.jsonl"
scorer = { name = "choice", normalise = "bytes" }

[[task]]
id = "text"
rows = "text.jsonl"
scorer = "perplexity"
"""


@pytest.fixture
def suite(write: Write) -> Path:
    """A suite of four tasks and 15 examples."""
    return write_suite(write)


def write_suite(write: Write) -> Path:
    write("say.jsonl", *({"prompt": f"Say {n}.", "ideal": [str(n), "A", "B"]} for n in range(5)))
    ends = ["one", "twenty", " three hundred"]
    picks = [{"prompt": f"Pick {n}:", "choices": ends, "ideal": n % 3} for n in range(2)]
    picks.append({"messages": [{"role": "user", "content": "é"}], "choices": ends, "ideal": "one"})
    write("pick.jsonl", *picks)
    write("text.jsonl", {"text": "Hello."}, {"text": "A longer text, é." * 40})
    return write("suite.toml", SUITE)
