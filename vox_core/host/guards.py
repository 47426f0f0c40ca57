"""What stands against changing an environment; each function raises if it is so.

Whether the environment is vox's to change at all is for environment.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vox_core.errors import InputError
from vox_core.host.environment import Environment
from vox_core.host.inspection import intruders
from vox_core.host.resolve import Change
from vox_core.host.targets import Target

CORE = "vox-ml"
KEPT = (CORE, "torch")
"""What never changes on the way: training depends on them as they are."""


def require_no_intruder(environment: Environment) -> None:
    """Raises InputError I006 if something else calls itself vox here."""
    if found := intruders():
        raise InputError(
            "I006",
            "the vox command or the vox_core package belongs to another distribution",
            where=environment,
            found=", ".join(found),
            expected=f"only {CORE} brings them",
            remedy=f"use an environment without it, or remove it and install {CORE} again",
        )


def require_kept(changes: Iterable[Change], environment: Environment) -> None:
    """Raises InputError I005 if one of `KEPT` would change."""
    changed = [each for each in changes if each.name in KEPT and each.before is not None]
    if changed:
        raise InputError(
            "I005",
            f"this would change {' and '.join(each.name for each in changed)}",
            where=environment,
            faults=[f"{each.name} {each.before} -> {each.after}" for each in changed],
            remedy="if you want that, install that version yourself first, and run again",
        )


def _file_name(source: str) -> str:
    """The file at the end of a path or an address, whatever query follows it."""
    return unquote(urlsplit(source).path).rpartition("/")[2]


def require_pinned(changes: Sequence[Change], wanted: Iterable[Target]) -> None:
    """Raises InputError I007 if an archive has not the digest that the catalog pins."""
    pins = {file: sha256 for target in wanted for file, sha256 in target.sha256.items()}
    named = {change.source: _file_name(change.source) for change in changes}
    faults = [
        f"{change.source}: found {change.sha256}, expected {pins[file]}"
        for change in changes
        if (file := named[change.source]) in pins and change.sha256 != pins[file]
    ]
    if faults:
        raise InputError(
            "I007",
            "an archive does not have the SHA-256 of the catalog",
            faults=faults,
            remedy="do not install it; get it from a place that you trust",
        )


def require_inside(name: str, environment: Environment) -> None:
    """Raises InputError I010 if another environment lends a distribution to this one.

    Installers would leave it there without a word.
    """
    place = Path(str(metadata.distribution(name).locate_file("")))
    if place.resolve() not in {folder.resolve() for folder in environment.folders}:
        raise InputError(
            "I010",
            f"{name} is not in this environment",
            where=environment,
            found=f"it is in {place}, which this environment sees",
            remedy="remove it with the Python that it was installed with",
        )
