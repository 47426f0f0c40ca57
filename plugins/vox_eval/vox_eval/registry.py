"""The registry: names of promoted models, with their history, in `registry/` of the current folder.

    registry/production.json                 what the name stands for, and every change of it
    registry/promotions/production-DIGEST/   the records of a promotion (promotion.py)

An entry has `reference` (an absolute path, or an id), `digest` (of base and adapter), `title`,
`promotion` (the records' folder), `records` (their digest), `time`, and `rolled_back`: the digest
of the model that a roll back took away. A change holds the registry's lock, reads the file anew,
and replaces it whole. The core resolves names (`promoted`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vox_core.api.files import read_json, write_json
from vox_core.api.installing import known
from vox_core.api.models import NAME, REGISTRY, promoted
from vox_core.api.runs import RunFolder, locked
from vox_core.errors import ModelError, OutputError

FORMAT = 1


def names() -> list[str]:
    """Return the names in the registry."""
    return sorted(path.stem for path in REGISTRY.glob("*.json") if NAME.fullmatch(path.stem))


def history(name: str) -> list[dict[str, Any]]:
    """Return every change of a name, oldest first; none if there is no such name.

    Raises:
        ModelError: M009, the registry cannot be read.
    """
    current = promoted(name)
    try:
        found: Any = read_json(REGISTRY / f"{name}.json")["history"] if current else []
        if (found[-1] if found else None) == current:
            return [dict(each) for each in found]
        if promoted(name) != current:  # another process has moved it meanwhile
            return history(name)
        said = "a history that ends with another model"
    except (OSError, ValueError, TypeError, KeyError) as error:
        said = str(error)
    remedy = "restore the file from a backup, or delete it and promote again"
    raise fault(name, "the registry cannot be read", said, remedy)


def current(name: str) -> dict[str, Any] | None:
    """Return what a name stands for; None for no such name."""
    entries = history(name)
    return entries[-1] if entries else None


def listed(name: str) -> dict[str, Any]:
    """Return what a name stands for, or an `error` of this name alone."""
    try:
        return current(name) or {"error": "hidden by a file or folder of this name"}
    except ModelError as error:
        return {"error": f"{error.what}: {error.found}"}


def require_name(name: str) -> None:
    """Refuse a name that commands would take for something else.

    Raises:
        ModelError: M009.
    """
    taken = f"a file or folder, {Path(name).absolute()}" if Path(name).exists() else ""
    if name in known().models or taken:
        what = "the name cannot stand for a promoted model: it means something else"
        raise fault(name, what, taken or "a model of the catalog", "choose another name")


_AGAIN = "run the command again; it compares with the model that is there then"


@contextmanager
def changing(name: str, expected: str | None) -> Iterator[None]:
    """Hold the registry, whose name still stands for the model with the digest `expected`.

    Raises:
        ModelError: M009, another process has moved it, or holds the registry.
    """
    with _held(name):
        found = current(name)
        if (found and found["digest"]) != expected:
            there = found["reference"] if found else "no such name"
            raise fault(name, "the name was moved by another process meanwhile", there, _AGAIN)
        yield


@contextmanager
def _held(name: str) -> Iterator[None]:
    try:
        with locked(RunFolder(REGISTRY)):
            yield
    except OutputError as error:
        if error.code != "VOX-O003":
            raise
        what = "another process is changing the registry"
        raise fault(name, what, error.found, _AGAIN) from error


def move(name: str, **entry: str) -> None:
    """Let a name stand for a model, from now on; call it within `changing`."""
    entry["time"] = datetime.now(UTC).isoformat(timespec="seconds")
    entries = [*history(name), entry]
    value = {"format": FORMAT, "name": name, "current": entry, "history": entries}
    write_json(REGISTRY / f"{name}.json", value)


def roll_back(name: str) -> str:
    """Let a name stand for the model before; each call goes one promotion further back.

    Returns:
        The reference that it stands for now.

    Raises:
        ModelError: M009, there is no such name, or nothing before, or that is gone.
    """
    if not history(name):  # before a folder is made for the lock
        require_name(name)
        raise _nothing_before(name, 0)
    with _held(name):
        stack = list[dict[str, Any]]()
        for each in history(name):
            if "rolled_back" in each or (stack and stack[-1]["digest"] == each["digest"]):
                stack.pop()
            stack += [] if "rolled_back" in each else [each]
        if len(stack) < 2:
            raise _nothing_before(name, len(stack))
        before = Path(stack[-2]["reference"])
        if before.is_absolute() and not before.exists():
            raise fault(name, "the model before is gone", before, "restore it, or promote another")
        move(name, **{**stack[-2], "rolled_back": stack[-1]["digest"]})
    return str(stack[-2]["reference"])


def _nothing_before(name: str, left: int) -> ModelError:
    what, first = "there is no model to roll back to", "the first model that was promoted"
    if not left:
        return fault(name, what, "no such name", "`vox registry list` shows the names")
    return fault(name, what, first, "name another model itself, or promote one")


def fault(name: str, what: str, found: object, remedy: str) -> ModelError:
    """Return the error for a registry that cannot be read or changed."""
    return ModelError("M009", what, where=REGISTRY / f"{name}.json", found=found, remedy=remedy)
