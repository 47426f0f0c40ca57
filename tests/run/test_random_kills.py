"""The short form of `make crash`: real runs of a tiny model, killed at random moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("random_kills.py")


@pytest.mark.long  # test_killed.py kills at every call to the disk
def test_runs_killed_at_random_moments_are_the_run_that_nobody_killed():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "6"],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["kills"] == 6
    assert told["runs"] >= 1
