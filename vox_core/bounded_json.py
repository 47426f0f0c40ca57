"""Read JSON of unknown origin, with limits on size and nesting.

Files of models, adapters and runs may be malformed or hostile. Every fault of their JSON (too many
bytes, nested too deeply, not JSON) raises `JsonFault`, a `ValueError`. Callers check the content.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_BYTES = 64 << 20
"""Ten times the index of the largest model there is."""
MAX_DEPTH = 64
"""Configurations nest five deep; what walks a document by recursion stays far from its end."""


class JsonFault(ValueError):
    """Why a document cannot be read, worded to follow "it is not JSON that can be read"."""


def read(path: Path, *, unique: bool = False) -> Any:
    """Return the JSON document in a file.

    Args:
        unique: refuse duplicate keys in an object; by default the last one counts.

    Raises:
        JsonFault: it has more than `MAX_BYTES`, nests deeper than `MAX_DEPTH`, or is not JSON.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise JsonFault(f"it has more than {MAX_BYTES:,} bytes")
    document = parse(content, unique=unique)
    if is_deep(document):
        raise JsonFault(f"it is nested more than {MAX_DEPTH} deep")
    return document


def parse(content: bytes, *, unique: bool = False) -> Any:
    """Return the JSON document in `content`, however deeply nested; JsonFault if there is none."""
    try:
        return json.loads(content, object_pairs_hook=_no_duplicates if unique else None)
    except JsonFault:
        raise
    except RecursionError:
        raise JsonFault("it is nested too deeply") from None
    except ValueError as error:  # not JSON, not Unicode, or a number of thousands of digits
        raise JsonFault(str(error)) from error


def is_deep(document: object) -> bool:
    """Whether lists and objects nest deeper than `MAX_DEPTH`."""
    level = [document]
    for _ in range(MAX_DEPTH + 1):
        level = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [child for each in level if isinstance(each, list) for child in each]
        if not level:
            return False
    return True


def schema_faults(error: ValidationError) -> list[str]:
    """Return `key: fault` for each of pydantic's faults in a document."""
    faults = [(".".join(map(str, e["loc"])) or "document", e["msg"]) for e in error.errors()]
    return [f"{key}: {fault.removeprefix('Value error, ')}" for key, fault in faults]


def repeated(keys: list[str]) -> str:
    """Return the first duplicate of `keys`."""
    counts = Counter(keys)
    return next(key for key in keys if counts[key] > 1)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise JsonFault(f"the key {repeated([key for key, _ in pairs])!r:.80} stands twice")
    return found


def differences(a: Any, b: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted field, value in a, value in b) of every difference; None where there is none.

    Args:
        a, b: as `read` gives them, nested no deeper than it allows.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif a != b:
        yield where, a, b
