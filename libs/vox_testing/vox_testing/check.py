"""`vox plugin check`: run the conformance suite on a plugin in a child process.

A child pytest runs a test file of one import, as a plugin's author has it, and writes a JUnit
report, from which the outcomes are read. Pytest's dots go to stderr while it runs. A project that
is not installed is put on the child's path, with metadata made from its `pyproject.toml`, so that
it is discovered like an installed one.

This process imports nothing of the plugin, and guard.py kills all its processes at the end. A
plugin whose import hangs is reported after `IMPORT_LIMIT_S`, a suite that hangs after its time
limit.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from vox_core.api.host import discover
from vox_core.errors import BackendError, ConfigError, PluginError
from vox_core.hookspecs import ENTRY_POINTS
from vox_testing.guard import Overdue, call
from vox_testing.subject import find

IMPORT_LIMIT_S = 60.0
"""For the import alone, of the clock; a tensor library from a cold disk may take half of it."""
LIMIT_S = 3600.0
"""For the whole suite; it takes a few minutes on a CPU, more where kernels are compiled."""

_SUITE = "from vox_testing.suite import *  # noqa: F403\n"
# Without other installed pytest plugins: the result must depend on the backend alone.
_PYTEST = ("-p", "vox_testing.plugin", "-p", "no:cacheprovider", "-q")
_FINISHED = (0, 1)
"""What pytest ends with when every test has run, some of them with a failure."""
_NONE_CHOSEN = (4, 5)
"""What it ends with for an expression that it cannot read, and for one that selects no test."""
_IMPORT = """
import importlib, os, sys
for stream in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
importlib.import_module(sys.argv[1])
"""
_QUIET = ("--no-header", "--no-summary", "--tb=short", "--show-capture=no")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check; `detail` is the reason of a skip or failure, on one line."""

    check: str
    status: Literal["passed", "skipped", "failed"]
    detail: str


CORE = ("the loss falls", "merged weights are the formula", "logits are the references")
"""A check of training, merging and loading; where all are skipped, nothing has been shown."""


@dataclass(frozen=True, slots=True)
class Target:
    """A plugin's id, its module, and paths to add to those of the environment."""

    id: str
    module: str
    path: tuple[Path, ...] = ()


def check(
    reference: str, limit_s: float = LIMIT_S, *, only: str | None = None, first: bool = False
) -> tuple[str, list[Outcome]]:
    """Run the suite on the plugin that `reference` names: its id, or the folder of its project.

    Args:
        limit_s: seconds for the whole suite.
        only: pytest's `-k`, an expression of words in the names of tests.
        first: stop at the first failure.

    Returns:
        The id, and the outcome of every check, in the order in which they ran.

    Raises:
        BackendError: B003, no such plugin; B011, the folder is not the project of one.
        ConfigError: C002, no check matches `only`.
        PluginError: X001, the child process or pytest ended early, or exceeded its time limit.
    """
    with tempfile.TemporaryDirectory(prefix="vox-check-") as name:
        scratch = Path(name)
        target = _find(reference, scratch)
        _require_import(target, scratch)
        chosen = [*(("-k", only) if only else ()), *(("-x",) if first else ())]
        return target.id, _outcomes(_run(target, scratch, limit_s, chosen))


def unshown(outcomes: Sequence[Outcome]) -> str | None:
    """Return why outcomes without a failure are not a pass; None if they are one."""
    core = [each for each in outcomes if each.check.partition(" [")[0] in CORE]
    if any(each.status != "skipped" for each in core):
        return None
    reasons = list(dict.fromkeys(each.detail for each in core))
    return (
        "not passed: neither training, merging nor loading was checked "
        f"({'; '.join(reasons) or 'no such check ran'})"
    )


def _find(reference: str, scratch: Path) -> Target:
    """Find the plugin; an installed id wins over a folder of that name, `./NAME` is always a
    folder."""
    plugins = {plugin.id: plugin for plugin in discover()}
    folder = Path(reference).resolve()
    if reference in plugins or not folder.is_dir():
        found = find(reference)
        return Target(found.id, found.entry_point.module)
    project, id, place = _project(folder)
    module = place.partition(":")[0].strip()
    if id in plugins and (where := plugins[id].folder) and where.is_relative_to(folder):
        return Target(id, module)
    _describe(project, f"{id} = {place}", scratch / "installed")
    return Target(id, module, (scratch / "installed", folder / "src", folder))


def _project(folder: Path) -> tuple[dict[str, Any], str, str]:
    """Return the project with a name and a version, and its only plugin's entry point."""
    file = folder / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        plugins = {**project.get("entry-points", {}).get(ENTRY_POINTS, {})}
        project = {"version": "0", "name": project["name"], **project}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _no_project(file, f"{type(error).__name__}: {error}") from error
    if len(plugins) != 1:
        raise _no_project(file, f"entry points: {', '.join(plugins) or 'none'}")
    ((id, place),) = plugins.items()
    return project, id, str(place)


def _no_project(file: Path, found: str) -> BackendError:
    return BackendError(
        "B011",
        "the folder is not the project of one plugin",
        where=file,
        found=found,
        expected=f"[project] with one entry point in the group {ENTRY_POINTS}",
        remedy="name such a folder or the id of an installed plugin: `vox plugin list`",
    )


def _describe(project: dict[str, Any], entry_point: str, site: Path) -> None:
    """Write the metadata that discovery reads, as an installation would."""
    name, version = str(project["name"]).replace("-", "_"), project["version"]
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{entry_point}\n")


def _require_import(target: Target, scratch: Path) -> None:
    """Check that the import ends in time; the suite reports its outcome."""
    command = [sys.executable, "-c", _IMPORT, target.module]
    try:
        call(command, IMPORT_LIMIT_S, scratch, _environment(target.path))
    except Overdue:
        raise _overdue(
            f"importing {target.module} does not end",
            IMPORT_LIMIT_S,
            f"run python -c 'import {target.module}', and press Ctrl-C to see where it waits",
        ) from None


def _run(target: Target, scratch: Path, limit_s: float, chosen: Sequence[str]) -> Path:
    """Run pytest on `chosen` tests; return the path of its report."""
    report, test = scratch / "report.xml", scratch / "test_conformance.py"
    test.write_text(_SUITE)
    (scratch / "pytest.ini").write_text("[pytest]\n")
    how = ["--vox-backend", target.id, "--junit-xml", str(report), "-c", "pytest.ini", *chosen]
    command = [sys.executable, "-m", "pytest", *_PYTEST, *_QUIET, *how, str(test)]
    try:
        returncode = call(command, limit_s, scratch, _environment(target.path))
    except Overdue:
        raise _overdue(
            f"the suite on plugin {target.id!r} does not end",
            limit_s,
            "run its own tests with `pytest -v`, which names the one that hangs; if it only takes "
            "long, give it more with --timeout",
        ) from None
    if "-k" in chosen and returncode in _NONE_CHOSEN:
        raise _none_chosen(chosen[1])
    if not report.is_file() or returncode not in _FINISHED:
        raise _ended_early(target.id, returncode, report)
    return report


def _none_chosen(expression: str) -> ConfigError:
    return ConfigError(
        "C002",
        "no check of the suite matches",
        where="-k",
        found=expression,
        expected="words of the names of checks with and, or, not: merge and not rounds",
        remedy="see the names with `vox plugin check --json`, with _ for each space",
    )


def _overdue(what: str, limit_s: float, remedy: str) -> PluginError:
    return PluginError(
        "X001",
        what,
        found=f"it was ended after {limit_s:g} s, with whatever it had started",
        remedy=remedy,
    )


def _environment(path: Sequence[Path]) -> dict[str, str]:
    """Return this environment with `path` first and without network access."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    before = [str(folder) for folder in path] + [kept.get("PYTHONPATH", "")]
    return {
        **kept,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, before)),
        "HF_HUB_OFFLINE": "1",
    }


def _ended_early(id: str, returncode: int, report: Path) -> PluginError:
    how = f"by {signal.Signals(-returncode).name}" if returncode < 0 else f"with exit {returncode}"
    return PluginError(
        "X001",
        f"plugin {id!r} ended the process that the suite ran in",
        found=f"the process ended {how}{_interrupted(report)}",
        remedy="see above for the last thing that it did; run its own tests with `pytest -v`",
    )


def _interrupted(report: Path) -> str:
    """Return pytest's reason for stopping early, if it did."""
    if not report.is_file():
        return ""
    errors = [error.text or "" for error in ElementTree.parse(report).iter("error")]
    last = [text.strip().rpartition("\n")[2] for text in errors]
    return f": {last[-1]}" if last else ", which is how pytest says that it was interrupted"


def _outcomes(report: Path) -> list[Outcome]:
    return [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]


def _outcome(case: Any) -> Outcome:
    check = case.get("name").removeprefix("test_").replace("_", " ").replace("[", " [")
    for tag, status in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            return Outcome(check, status, _reason(found.get("message", "")))  # type: ignore[arg-type]
    return Outcome(check, "passed", "")


def _reason(message: str) -> str:
    """Return the first line, behind it the comparison of an `assert` that has a message."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    if lines[0] == "AssertionError" and lines[1:]:
        del lines[0]
    first = lines[0].removeprefix("AssertionError: ")
    compared = lines[1:2] if "".join(lines[1:2]).startswith("assert ") else []
    return ": ".join([first, *compared])
