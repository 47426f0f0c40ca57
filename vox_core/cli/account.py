"""What was found of some rows, in lines, whatever it is: counts, texts, lists of either."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_KEY = re.compile(r"[a-z]+(_[a-z]+)*")


def told(found: Any) -> Iterator[str]:
    """In lines; none where there is nothing."""
    if isinstance(found, Mapping):
        yield from _mapping(found)
    elif isinstance(found, list | tuple):
        for each in found:
            yield _inline(each)
    elif found not in (None, ""):
        yield _number(found)


def _mapping(found: Mapping[str, Any]) -> Iterator[str]:
    if not found:
        return
    if all(isinstance(value, int) and not isinstance(value, bool) for value in found.values()):
        yield ", ".join(f"{count:,} {_words(reason)}" for reason, count in found.items())
        return
    flat = {k: v for k, v in found.items() if not isinstance(v, Mapping | list | tuple)}
    if flat:
        yield _inline(flat)
    for key, value in found.items():
        if key not in flat:
            yield from (f"{_words(key)}: {line}" for line in told(value))


def _inline(each: Any) -> str:
    """One thing on one line."""
    if not isinstance(each, Mapping):
        return _number(each)
    return "; ".join(f"{_words(key)} {', '.join(told(value))}" for key, value in each.items())


def _words(key: object) -> str:
    """A key as words; the name of a file stays as it is."""
    return str(key).replace("_", " ") if _KEY.fullmatch(str(key)) else str(key)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
