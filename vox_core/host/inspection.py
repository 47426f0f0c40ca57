"""What is installed, asked of a fresh interpreter.

A process that has just had packages installed around it may see the old ones: metadata and import
finders are cached, `.pth` files are read at start. So the questions after an installation go to a
child, and the child imports no plugin either.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from vox_core.errors import BackendError
from vox_core.host.environment import Environment

if TYPE_CHECKING:
    from importlib import metadata

_CHILD = "from vox_core.host.inspection import answer; print({token!r} + answer())"
_TOKEN = "vox answers: "
"""Begins the line with the answer; a .pth file may print before it, and after it at exit."""
_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """An installed plugin; `fault` says why it cannot be used, whatever the hardware."""

    id: str
    distribution: str
    version: str
    fault: str | None


def inspect(environment: Environment) -> tuple[list[Row], list[str]]:
    """The plugins that are installed in `environment`, and `intruders` there.

    Raises:
        ChildError: the interpreter cannot say, and why.
    """
    told = asked(environment, lambda token: _CHILD.format(token=token))
    try:
        return [Row(**row) for row in told["plugins"]], [*told["intruders"]]
    except (LookupError, TypeError) as error:
        raise ChildError(f"its answer makes no sense: {error}") from error


def asked(environment: Environment, code: Callable[[str], str]) -> Any:
    """What a fresh interpreter of the environment answers, out of JSON.

    Args:
        code: Python that prints a line which begins with the token given to it, and then JSON.

    Raises:
        ChildError: it does not answer, and why.
    """
    # -P: a folder `vox_core` that happens to be the current one is not what is installed.
    command = [str(environment.python), "-P", "-c", code(_TOKEN)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"no answer within {_LIMIT_S:g} s") from error
    except OSError as error:
        raise ChildError(f"it cannot be started: {error}") from error
    if done.returncode:
        raise ChildError(done.stderr.strip().rpartition("\n")[2] or f"exit {done.returncode}")
    return _answer_in(done.stdout)


def _answer_in(output: str) -> Any:
    _, token, rest = output.rpartition(_TOKEN)
    if not token:
        raise ChildError("it ended without an answer, as if a .pth file had ended it")
    try:
        return json.loads(rest.partition("\n")[0])
    except ValueError as error:
        raise ChildError(f"its answer is no JSON: {error}") from error


class ChildError(Exception):
    """Why a fresh interpreter could not say what is installed."""


def answer() -> str:
    """What `inspect` asks for, as JSON; runs in the child."""
    from vox_core.host.discover import discover
    from vox_core.host.machine import this_machine, unmet

    plugins = discover()
    machine = this_machine(plugins)
    rows = []
    for plugin in plugins:
        fault = _on_one_line(plugin.fault) if plugin.fault else None
        if plugin.manifest and (stands_in_the_way := unmet(plugin.manifest, machine)):
            fault = ": ".join(stands_in_the_way)
        rows.append(asdict(Row(plugin.id, plugin.distribution, plugin.version, fault)))
    return json.dumps({"plugins": rows, "intruders": intruders()})


def _on_one_line(fault: BackendError) -> str:
    details = "; ".join(fault.faults) or fault.found
    return f"{fault.what}: {details}" if details else fault.what


def intruders() -> list[str]:
    """Distributions beside vox-ml that bring a `vox` command or a `vox_core` package."""
    from importlib import metadata

    return sorted(
        {
            f"{distribution.metadata['Name']} {distribution.version} ({file})"
            for distribution in metadata.distributions()
            for file in _files_named_vox(distribution)
            if _is_ours(file) and distribution.metadata["Name"] != "vox-ml"
        }
    )


def _files_named_vox(distribution: metadata.Distribution) -> list[metadata.PackagePath]:
    """What it brings, if it may be ours; nothing for a stranger whose RECORD cannot be read."""
    with suppress(OSError, ValueError):
        if "vox" in (distribution.read_text("RECORD") or ""):
            return distribution.files or []
    return []


def _is_ours(file: PurePath) -> bool:
    parts = file.parts
    is_command = parts[0] == ".." and parts[-1] in ("vox", "vox.exe")
    return is_command or parts[0] == "vox_core"
