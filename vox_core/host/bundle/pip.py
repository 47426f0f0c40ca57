"""Another interpreter, asked what it is, and its pip."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence

from vox_core.errors import BackendError

QUIET = ("--quiet", "--no-input", "--disable-pip-version-check")
_LINES_SHOWN = 15
_QUESTION = """
import json, platform, sys
version = "%d.%d" % sys.version_info[:2]
print(json.dumps([version, f"{platform.system()}-{platform.machine()}".lower()]))
"""


def ask(python: str) -> tuple[str, str]:
    """Version and platform of an interpreter, as `About` has them."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _QUESTION], capture_output=True, text=True, check=True
        )
        version, platform = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise BackendError(
            "B009",
            "this is no Python that can be installed into",
            where=python,
            found=error,
            remedy="name the interpreter of the environment: --target-python PATH",
        ) from error
    return version, platform


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
