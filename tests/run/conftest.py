"""Tiny models and data for whole runs through the real CPU backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.bigram import Bigram, chosen_for_all
from vox_core.config import TrainSettings, validate
from vox_testing.tiny import make_model

TALK = [
    ("How do I merge?", "Run vox merge RUN."),
    ("How do I train a model on my own file?", "Run vox train --data FILE."),
    ("Talk?", "Run vox chat RUN, and say something to it."),
    ("Which backends are there?", "vox backend list says it."),
    ("What is the licence of vox?", "Apache-2.0."),
    ("Stop?", "Press Control-C once."),
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(family, dtype=..., shard=...)` -> model folder, made once."""
    made: dict[tuple[object, ...], Path] = {}

    def make(family: str, **options: str) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            made[key] = make_model(family, tmp_path_factory.mktemp(family) / "base", **options)
        return made[key]

    return make


@pytest.fixture
def bigrams(monkeypatch: pytest.MonkeyPatch) -> list[Bigram]:
    """Every run trains with a `Bigram`, and is listed here."""
    return chosen_for_all(monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with `train.jsonl` and `valid.jsonl`."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [json.dumps({"prompt": question, "completion": answer}) for question, answer in TALK]
    # Others than the rows that are trained: those would be leaks, of which a run warns.
    held_out = [json.dumps({"prompt": f"So: {q}", "completion": a}) for q, a in TALK[:2]]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "valid.jsonl").write_text("\n".join(held_out))
    return folder


@pytest.fixture
def settings(tmp_path: Path, data: Path) -> Callable[..., TrainSettings]:
    """`settings(model, key=value, ...)`: five quick float32 steps, unless told otherwise."""

    def make(base: Path, **given: object) -> TrainSettings:
        quick = {
            "model": str(base),
            "data": [data],
            "out": tmp_path / "run",
            "dtype": "fp32",
            "max_steps": 5,
            "batch_size": 2,
            "lr": 1e-2,
            "rank": 4,
            "alpha": 8,
        }
        return validate(TrainSettings, {**quick, **given})

    return make
