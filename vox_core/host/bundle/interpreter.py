"""Another interpreter, asked what it is and what is installed for it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import packaging
from packaging.utils import canonicalize_name

from vox_core.errors import BackendError
from vox_core.host.environment import Environment, find_uv, package_folders

_LIMIT_S = 60.0
_PACKAGING = str(Path(packaging.__file__).parents[1])
# `-P` would do as much as the second line, but is not known before Python 3.11.
_QUESTION = """
import sys
sys.path[:] = filter(None, sys.path)  # not what happens to lie in the current folder
import importlib.util, json, platform, sysconfig
from importlib import metadata
distributions = []
for each in metadata.distributions():
    try:
        distributions.append((each.metadata["Name"], each.version))
    except Exception:
        pass  # somebody else's damage
pip = importlib.util.find_spec("pip")
sys.path.append(sys.argv[1])  # for packaging alone, if it is not there
try:
    from packaging.tags import sys_tags
    tags = [str(tag) for tag in sys_tags()]
except Exception:
    tags = []  # too old a Python for it, and for vox
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "full_version": platform.python_version(),
    "tags": tags,
    "platform": "-".join((platform.system(), platform.machine())).lower(),
    "python": sys.executable,
    "prefix": sys.prefix,
    "base_prefix": sys.base_prefix,
    "paths": sysconfig.get_paths(),
    "has_pip": pip is not None and pip.origin is not None,
    "distributions": distributions,
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What an interpreter says of itself.

    Args:
        version: `3.12`, as `About` has it.
        full_version: `3.12.4`.
        tags: those of the wheels that it can install.
        platform: `linux-x86_64`, as `About` has it.
        environment: where it keeps its packages.
        installed: canonical name -> version, of every distribution that it sees.
    """

    version: str
    full_version: str
    tags: frozenset[str]
    platform: str
    environment: Environment
    installed: Mapping[str, str]


def ask(python: str) -> Interpreter:
    """What an interpreter says of itself.

    Raises:
        BackendError: B009, it is none, or not one that can be asked.
    """
    try:
        return _interpreter(_answer(python))
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as error:
        raise BackendError(
            "B009",
            "this is no Python that can be installed into",
            where=python,
            found=_short(error),
            remedy="name the interpreter of the environment: --target-python PATH",
        ) from error


def _answer(python: str) -> Mapping[str, Any]:
    done = subprocess.run(
        [python, "-c", _QUESTION, _PACKAGING],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=_LIMIT_S,
    )
    told: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])  # a .pth file may print too
    return told


def _interpreter(told: Mapping[str, Any]) -> Interpreter:
    installed: dict[str, str] = {}
    for name, version in told["distributions"]:
        if name and version:
            installed.setdefault(canonicalize_name(name), version)  # the first hides the others
    paths = told["paths"]
    environment = Environment(
        python=Path(told["python"]),
        prefix=Path(told["prefix"]),
        base_prefix=Path(told["base_prefix"]),
        folders=package_folders(paths),
        standard_library=Path(paths["stdlib"]),
        has_pip=told["has_pip"],
        uv=find_uv(Path(paths["scripts"])),
    )
    return Interpreter(
        told["version"],
        told["full_version"],
        frozenset(told["tags"]),
        told["platform"],
        environment,
        installed,
    )


def _short(error: Exception) -> str:
    """Without the question, which the errors of `subprocess` repeat."""
    if isinstance(error, subprocess.CalledProcessError):
        return error.stderr.strip().rpartition("\n")[2] or f"exit {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {_LIMIT_S:g} s"
    return str(error)
