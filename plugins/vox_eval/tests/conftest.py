"""Fixtures for tests of commands, and suites of a tiny Llama."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.fixtures import _clean_place, vox

from vox_testing.llama import write_llama

__all__ = ["_clean_place", "vox"]

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "other", seed=1)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write("rows.jsonl", row, ...)`: a file of rows, or of a text."""

    def written(name: str, *rows: object) -> Path:
        file = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        file.write_text("\n".join(lines))
        return file

    return written


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
    write("say.jsonl", *({"prompt": f"Say {n}.", "ideal": [str(n), "A", "B"]} for n in range(5)))
    ends = ["one", "twenty", " three hundred"]
    picks = [{"prompt": f"Pick {n}:", "choices": ends, "ideal": n % 3} for n in range(2)]
    picks.append({"messages": [{"role": "user", "content": "é"}], "choices": ends, "ideal": "one"})
    write("pick.jsonl", *picks)
    write("text.jsonl", {"text": "Hello."}, {"text": "A longer text, é." * 40})
    return write("suite.toml", SUITE)
