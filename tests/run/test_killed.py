"""SIGKILL at every call to the disk: whatever was announced loads, and nothing is left over."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.killed import LAST, faults, gone_on

SCRIPT = Path(__file__).with_name("killed.py")
# What strace can kill at; on some machines a rename is another call than on others.
SYSCALLS = ("mkdir", "write", "fsync", "rename")


@pytest.mark.slow
def test_killed_at_every_call_to_the_disk(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "run" / "checkpoints")],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["broken"] == []
    assert told["kills"] > 20 * LAST
    assert {"create", "fsync", "mkdir", "rename", "write", "unlink", "rmdir"} <= set(told["kinds"])


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("strace"), reason="no strace here")
@pytest.mark.parametrize("call", SYSCALLS)
def test_killed_by_strace_at_every_call_of_a_kind(call, tmp_path):
    """The same from outside the process, where no seam of ours could be wrong."""
    parent = tmp_path / "run" / "checkpoints"
    parent.parent.mkdir()
    for at in range(1, 1000):
        shutil.rmtree(parent, ignore_errors=True)
        announced, ended = straced(parent, call, at)
        if ended:
            break
        assert gone_on(parent, announced) == [], f"{call} number {at}"
    assert at > LAST
    assert faults(parent, LAST) == []


def straced(parent: Path, call: str, at: int) -> tuple[int, bool]:
    """A start of the run that is killed at its call number `at`: what it announced last, and
    whether it ended before that."""
    kinds = {"mkdir": "mkdir,mkdirat", "rename": "rename,renameat,renameat2"}.get(call, call)
    # A thread of its own writes checkpoints; each thread's calls are counted by themselves.
    done = subprocess.run(
        [
            *("strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={kinds}"),
            *("-e", f"inject={kinds}:signal=SIGKILL:when={at}"),
            *(sys.executable, "-B", str(SCRIPT), str(parent), "--once"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, -9, 137), done.stderr
    steps = [int(step) for step in re.findall(r"^\d+$", done.stdout, re.M)]
    return max(steps, default=0), done.returncode == 0
