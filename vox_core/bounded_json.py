"""JSON that somebody else wrote, read within limits.

A file of a model, an adapter or a run comes from anywhere. Whatever is wrong with its JSON is one
kind of fault, a `ValueError`: too many bytes, nested too deeply, no JSON at all. What a document
means is its reader's business.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""Ten times the index of the largest model there is."""
MAX_DEPTH = 64
"""Configurations nest five deep; what walks a document by recursion stays far from its end."""


class JsonFault(ValueError):
    """Why a document cannot be read, in words that follow "it is not JSON that can be read"."""


def read(path: Path, *, limit: int = MAX_BYTES, unique: bool = False) -> Any:
    """The document in a file.

    Args:
        limit: most bytes.
        unique: refuse a key that stands twice in an object; without it the last one counts.

    Raises:
        JsonFault: it is larger, nested more deeply than `MAX_DEPTH`, or not JSON.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise JsonFault(f"it has more than {limit:,} bytes")
    document = parse(content, unique=unique)
    if is_deep(document):
        raise JsonFault(f"it is nested more than {MAX_DEPTH} deep")
    return document


def parse(content: bytes, *, unique: bool = False) -> Any:
    """The document in `content`, of any depth that Python can read.

    Raises:
        JsonFault: it is not JSON.
    """
    try:
        return json.loads(content, object_pairs_hook=_no_duplicates if unique else None)
    except JsonFault:
        raise
    except RecursionError:
        raise JsonFault("it is nested too deeply") from None
    except ValueError as error:  # not JSON, not Unicode, or a number of thousands of digits
        raise JsonFault(str(error)) from error


def is_deep(document: object) -> bool:
    """Whether lists and objects nest more than `MAX_DEPTH` deep."""
    level = [document]
    for _ in range(MAX_DEPTH + 1):
        level = [child for value in level for child in _children(value)]
        if not level:
            return False
    return True


def repeated(keys: list[str]) -> str:
    """The first of `keys` that stands there twice."""
    counts = Counter(keys)
    return next(key for key in keys if counts[key] > 1)


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


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
