"""The pip of an interpreter, which makes wheels."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

QUIET = ("--quiet", "--no-input", "--disable-pip-version-check")
_LINES_SHOWN = 15


def pip(python: str, arguments: Sequence[str], environ: Mapping[str, str]) -> list[str] | None:
    """Run an interpreter's pip: None if all went well, or the end of what it said."""
    done = subprocess.run(
        [python, "-P", "-m", "pip", *arguments],  # -P: not a pip.py of the current folder
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(environ),
        check=False,
    )
    return None if done.returncode == 0 else done.stdout.strip().splitlines()[-_LINES_SHOWN:]
