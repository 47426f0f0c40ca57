"""A question to pip or uv, and what it means when they find no way.

    said = ask([*environment.installer("install"), "--dry-run", "x==1.0"], environment)

An installer that may take wheels alone says that it found nothing where an index has the source
and nothing else. That is told apart here: uv says it, pip writes it to its log. So is a plugin that
wants another vox than this one.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import InvalidVersion, Version

from vox_core.errors import InputError
from vox_core.host.discover import installed_versions
from vox_core.host.environment import Environment, installer_variables
from vox_core.host.origin import file_name
from vox_core.host.unbuilt import stopped_at

LINES_SHOWN = 15
_UV_REFUSES = re.compile(
    r"Wheels are required for `([\w.-]+)|Building source distributions for `([\w.-]+)"
)
_PIP_SKIPS = re.compile(r"No sources permitted for [^:]+: (\S+)")
_PIP_MISSES = re.compile(r"No matching distribution found for (.+)")
_CORE = "vox-ml"
_OF_CORE = re.compile(rf"\b{_CORE} ?((?:[=~!<>]=?=?[\w.*+!-]+,? ?)+)")
_TOO_OLD = (">", ">=", "==", "~=", "===")
"""Operators of a requirement that a vox can be too old for."""


def ask(
    command: Sequence[str], environment: Environment, given: str = "", log: Path | None = None
) -> str:
    """What the installer answers; a refusal is an error of the user's.

    Args:
        given: its stdin.
        log: where pip has written all that it looked at.

    Raises:
        InputError: I004, it refuses; what it says about it is shown.
    """
    done = subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=installer_variables(),
    )
    if done.returncode:
        known = log.read_text(encoding="utf-8", errors="replace") if log and log.is_file() else ""
        raise _no_way(environment, done.stderr or done.stdout, known)
    return done.stdout or done.stderr


def last_lines(output: str) -> list[str]:
    """The end of what a program said, without empty lines."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    return lines[-LINES_SHOWN:]


def only_source(
    environment: Environment, what: Sequence[str], faults: Sequence[str] = ()
) -> InputError:
    """The error that says what would have to be built."""
    return InputError(
        "I004",
        f"there is no wheel for this machine of {', '.join(what)}",
        where=environment,
        found="the source alone, and to build it is to run its code",
        faults=faults,
        remedy="name a version that has a wheel, or, if you trust the source, run again with "
        "--allow-source",
    )


def _no_way(environment: Environment, said: str, log: str) -> InputError:
    if stopped := stopped_at(log):
        return only_source(environment, [stopped])
    if names := sorted({*_refused_by_uv(said), *_missed_by_pip(log)}):
        return only_source(environment, names, last_lines(said))
    if wanted := _another_core(said):
        return _other_core(environment, wanted, last_lines(said))
    return InputError(
        "I004",
        "the installer finds no way to install this",
        where=environment,
        faults=last_lines(said),
        remedy="mend what the installer names: the connection, the index that it is set up "
        "with, or what the package requires",
    )


def _another_core(said: str) -> str | None:
    """The versions of vox that are wanted, if this one is not among them."""
    here = _core_version()
    for match in _OF_CORE.finditer(said):
        with suppress(InvalidSpecifier, InvalidVersion):
            wanted = SpecifierSet(match[1].strip(" ,"))
            if not wanted.contains(Version(here), prereleases=True):
                return str(wanted)
    return None


def _other_core(environment: Environment, wanted: str, said: Sequence[str]) -> InputError:
    lower = (each for each in SpecifierSet(wanted) if each.operator in _TOO_OLD)
    is_old = any(not each.contains(_core_version(), prereleases=True) for each in lower)
    return InputError(
        "I004",
        f"this vox is too {'old' if is_old else 'new'} for it",
        where=environment,
        found=f"{_CORE} {_core_version()}",
        expected=f"{_CORE}{wanted}, which it requires",
        faults=said,
        remedy=f"upgrade {_CORE} first, and run again"
        if is_old
        else f"name a version of it that takes {_CORE} {_core_version()}",
    )


def _core_version() -> str:
    return installed_versions([_CORE]).get(_CORE, "")


def _refused_by_uv(said: str) -> Iterator[str]:
    for match in _UV_REFUSES.finditer(said):
        yield canonicalize_name(match[1] or match[2])


def _missed_by_pip(log: str) -> Iterator[str]:
    """What pip found no wheel of and passed over the source of, in a version that would do."""
    missed = [match[1] for match in _PIP_MISSES.finditer(log)]
    sources = {file_name(match[1]) for match in _PIP_SKIPS.finditer(log)}
    for file in sources:
        with suppress(InvalidSdistFilename, InvalidRequirement):
            name, version = parse_sdist_filename(file)
            for requirement in map(Requirement, missed):
                fits = requirement.specifier.contains(version, prereleases=True)
                if canonicalize_name(requirement.name) == name and fits:
                    yield name
