"""Format nested counts, texts and lists, such as those of a data report, as lines of text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_KEY = re.compile(r"[a-z]+(_[a-z]+)*")


def account_lines(found: Any) -> Iterator[str]:
    """Yield lines of text for a nested value; none for an empty one."""
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
            yield from (f"{_words(key)}: {line}" for line in account_lines(value))


def _inline(each: Any) -> str:
    if not isinstance(each, Mapping):
        return _number(each)
    return "; ".join(
        f"{_words(key)} {', '.join(account_lines(value))}" for key, value in each.items()
    )


def _words(key: object) -> str:
    """Return a key such as `near_duplicates` as words; leave file names unchanged."""
    return str(key).replace("_", " ") if _KEY.fullmatch(str(key)) else str(key)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
