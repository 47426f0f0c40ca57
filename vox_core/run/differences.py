"""Where two JSON documents differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def differences(a: Any, b: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted field, value in a, value in b) of every difference; None where there is none.

    Args:
        a, b: as `bounded_json` reads them, nested no deeper than it allows.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif a != b:
        yield where, a, b
