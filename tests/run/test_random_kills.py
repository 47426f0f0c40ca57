"""The short form of `make crash`: real runs of a tiny model, killed at random moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("random_kills.py")
KILLS = 8


@pytest.mark.slow
def test_runs_killed_at_random_moments_are_the_run_that_nobody_killed():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(KILLS)],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["kills"] == KILLS
    assert told["runs"] >= 1
