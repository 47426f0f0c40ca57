"""The lock of a run folder, beside those who only look at it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vox_core.errors import OutputError
from vox_core.run import folder
from vox_core.run.folder import LOCK, RunFolder, locked, require_free

LOOK = 0.2
"""Seconds; a look of `vox runs` takes a thousandth of that."""


@contextmanager
def looked_at(run: Path, seconds: float | None) -> Iterator[None]:
    """The lock held shared for so long, as by `vox runs`; None: until the end."""
    (run / LOCK).touch()
    lock = os.open(run / LOCK, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    timer = threading.Timer(seconds or 0, fcntl.flock, (lock, fcntl.LOCK_UN))
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        os.close(lock)


@pytest.mark.parametrize("take", [require_free, lambda run: locked(run).__enter__()])
def test_a_look_at_a_run_does_not_keep_a_process_out(tmp_path, take):
    with looked_at(tmp_path, LOOK):
        take(RunFolder(tmp_path))


def test_a_lock_that_stays_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE", 0.1)
    run = RunFolder(tmp_path)
    with looked_at(tmp_path, None), pytest.raises(OutputError) as caught, locked(run):
        pass
    assert caught.value.code == "VOX-O003"
