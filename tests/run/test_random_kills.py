"""The short form of `make crash`: real runs of a tiny model, killed at random moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("random_kills.py")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.long)])
def test_runs_killed_at_random_moments_are_the_run_that_nobody_killed(kills):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(kills)],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["kills"] == kills
    assert told["runs"] >= 1
