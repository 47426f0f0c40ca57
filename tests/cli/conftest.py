"""`vox` in this process, behind its own error boundary, with nothing of the user's around it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from vox_core.cli import errors, root


class Done(NamedTuple):
    code: int
    out: str
    err: str


Vox = Callable[..., Done]


@pytest.fixture(autouse=True)
def _clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and no settings from outside."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("VOX_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def vox(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Vox:
    """`vox("train", "--rank", 8, stdin="…")` -> exit code, stdout, stderr."""

    def run(*arguments: object, stdin: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = errors.run(root, [str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run
