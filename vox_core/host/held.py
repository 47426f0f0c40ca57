"""What the installed distributions require of one another, and what a plan would break of it.

A resolver of pip's or uv's looks at what it is asked for, and not at what else is installed: it
would bring an older library for one plugin under the feet of another, or of vox itself. So the
environment's interpreter is asked what is there, and the plan is held against it.

Only what held before is looked at, and only for the core, torch, the plugins and what those need.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vox_core.errors import InputError
from vox_core.host.discover import UNKNOWN
from vox_core.host.environment import Environment
from vox_core.host.inspection import ChildError, asked

if TYPE_CHECKING:
    from vox_core.host.resolve import Change

_ROOTS = ("vox-ml", "torch", "vox-ml-torch")
_QUESTION = """
import json, platform, sys
path = {path!r}
sys.path[:] = filter(None, sys.path) if path is None else path
from importlib import metadata
rows = []
for each in metadata.distributions():
    try:
        points = each.read_text("entry_points.txt") or ""
        known = each.metadata
        ours = "vox_core.plugins" in points
        rows.append([known["Name"], each.version, each.requires or [], ours])
    except Exception:
        pass  # somebody else's damage
print({token!r} + json.dumps({{
    "python_version": "%d.%d" % sys.version_info[:2],
    "python_full_version": platform.python_version(),
    "rows": rows,
}}))
"""


@dataclass(frozen=True, slots=True)
class Survey:
    """What is installed, by canonical name.

    Args:
        versions: of every distribution that the interpreter sees.
        needs: what each requires there, without its extras.
        plugins: those that bring plugins.
    """

    versions: Mapping[str, str]
    needs: Mapping[str, Sequence[Requirement]]
    plugins: frozenset[str]


def survey(environment: Environment) -> Survey:
    """Ask the environment's interpreter.

    Raises:
        ChildError: it cannot say, and why.
    """
    # What this process sees is what plans for its own environment are made of.
    path = sys.path if environment.prefix == Path(sys.prefix) else None
    told = asked(environment, lambda token: _QUESTION.format(path=path, token=token))
    try:
        return _survey(told)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ChildError(f"its answer makes no sense: {error}") from error


def require_needs_kept(changes: Sequence[Change], environment: Environment) -> None:
    """Raises InputError I005 if a requirement that holds now would not hold afterwards."""
    if not changes:
        return
    try:
        there = survey(environment)
    except ChildError as error:
        raise _silent(environment, error) from error
    if faults := [*_broken(changes, there)]:
        names = sorted(change.name for change in changes if change.after is None)
        raise InputError(
            "I005",
            f"something that is installed needs {' and '.join(names)}"
            if names
            else "this would break what is installed",
            where=environment,
            faults=faults,
            remedy="remove what needs it first, or together with it"
            if names
            else "choose versions that fit together; what is named here may have an upgrade: "
            "vox plugin upgrade",
        )


def require_as_planned(changes: Iterable[Change], environment: Environment) -> None:
    """Raises InputError I011 if the versions before are not those that the plan was made for."""
    try:
        versions = survey(environment).versions
    except ChildError as error:
        raise _silent(environment, error) from error
    faults = [
        f"{change.name}: {change.before or 'not there'} in the plan, "
        f"{versions.get(change.name, 'not there')} now"
        for change in changes
        if change.before != UNKNOWN and versions.get(change.name) != change.before
    ]
    if faults:
        raise InputError(
            "I011",
            "the environment has changed since the plan was made",
            where=environment,
            faults=faults,
            remedy="run again, for a plan of what is there now",
        )


def _survey(told: Mapping[str, Any]) -> Survey:
    markers = {key: str(told[key]) for key in ("python_version", "python_full_version")}
    versions: dict[str, str] = {}
    needs: dict[str, list[Requirement]] = {}
    plugins = set()
    for name, version, requires, is_plugin in told["rows"]:
        key = canonicalize_name(name) if name else ""
        if key and version and key not in versions:  # the first on the path hides others
            versions[key] = str(version)
            needs[key] = [*_requirements(requires, {**markers, "extra": ""})]
            plugins |= {key} if is_plugin else set()
    return Survey(versions, needs, frozenset(plugins))


def _requirements(texts: Iterable[str], markers: dict[str, str]) -> Iterator[Requirement]:
    for text in texts:
        with suppress(InvalidRequirement):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(markers):
                yield requirement


def _broken(changes: Sequence[Change], there: Survey) -> Iterator[str]:
    """Each requirement that holds now and would not afterwards; what changes is not asked."""
    changed = {change.name: change.after for change in changes}
    kept = {name: version for name, version in there.versions.items() if name not in changed}
    after = {**kept, **{name: version for name, version in changed.items() if version}}
    for owner in _watched(there, leaving=changed.keys()):
        for requirement in there.needs[owner]:
            name = canonicalize_name(requirement.name)
            if _holds(requirement, there.versions) and not _holds(requirement, after):
                yield f"{owner} needs {requirement}, which would be {after.get(name, 'gone')}"


def _watched(there: Survey, leaving: Iterable[str]) -> list[str]:
    """What vox and its plugins need, directly or through one another, and stays as it is."""
    found: set[str] = set()
    leaving = {*leaving}
    waiting = [*_ROOTS, *there.plugins]
    while waiting:
        name = waiting.pop()
        if name in there.needs and name not in found and name not in leaving:
            found.add(name)
            waiting += [canonicalize_name(each.name) for each in there.needs[name]]
    return sorted(found)


def _holds(requirement: Requirement, versions: Mapping[str, str]) -> bool:
    version = versions.get(canonicalize_name(requirement.name))
    if version is None:
        return False
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:  # only a build would tell
        return True


def _silent(environment: Environment, error: ChildError) -> InputError:
    return InputError(
        "I001",
        "this Python environment does not say what is installed in it",
        where=environment,
        found=error,
        remedy=f"find out why: {environment.python} -P -c 'import importlib.metadata'",
    )
