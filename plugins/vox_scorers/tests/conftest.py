"""Fixtures of the evaluations that the scorers are for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.fixtures import _clean_place

from vox_testing.llama import write_llama

__all__ = ["_clean_place"]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write("rows.jsonl", row, ...)`: a file of rows, or of a text."""

    def written(name: str, *rows: object) -> Path:
        file = tmp_path / name
        file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
        return file

    return written
