"""Format numbers with units, suggest names, clean foreign text, silence streams without a reader.

Package names and the output of probes and installers may contain control characters. `printable`
escapes everything that could control a terminal.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

# C0 and C1 control characters, Unicode's bidirectional controls and line separators, and
# surrogates, which cannot be encoded.
_STEERING = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
CONTROLS = re.compile(f"[{_STEERING}]")
_CONTROLS_IN_LINES = re.compile(rf"(?![\n\t])[{_STEERING}]")


def printable(text: object, *, lines: bool = False) -> str:
    """Escape the characters that could control a terminal, such as `\x1b`.

    Args:
        lines: keep line ends and tabs.
    """
    pattern = _CONTROLS_IN_LINES if lines else CONTROLS
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the name of `known` that is spelt most like `name`; empty if none is close."""
    return next(iter(difflib.get_close_matches(name, [*known], n=1)), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean …?` if a name of `known` is close, else ""."""
    return f"did you mean {near}?" if (near := nearest(name, known)) else ""


def hint(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean …?)` if a name of `known` is close, else ""."""
    return f" ({meant})" if (meant := did_you_mean(name, known)) else ""


def counted(number: int | float, noun: str) -> str:
    """Format a count: `1 row`, `2,000 rows`, `0.5 epochs`."""
    shown = f"{number:.4g}" if isinstance(number, float) else f"{number:,}"
    return f"{shown} {noun}" + ("" if number == 1 else "s")


def named(reference: str, title: str) -> str:
    """Return a model's reference with its title, which two runs may share: `runs/a (base)`."""
    return reference if reference.rstrip("/").endswith(title) else f"{reference} ({title})"


def losses(before: float | None, after: float | None, *, rewarded: bool = False) -> str:
    """Format two losses: `3.2100 -> 1.4000 (56 % lower)`; empty unless both exist. Without the
    percentage if the first is not above 0.0000. Of negative rewards, format the rewards."""
    if before is None or after is None:
        return ""
    if rewarded:
        return f"{-before:z.4f} -> {-after:z.4f}"
    if before < 5e-5:
        return f"{before:z.4f} -> {after:z.4f}"
    change = 100 * (after / before - 1)
    direction = "lower" if change < 0 else "higher"
    return f"{before:z.4f} -> {after:z.4f} ({abs(change):.0f} % {direction})"


def duration(seconds: float) -> str:
    """Format seconds as `0:42` or `1:02:03`; `?` if not finite or negative."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def megabytes(count: int) -> str:
    """Format bytes as MB (10^6), or as GB from 1000 MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def silence(stream: TextIO) -> None:
    """Redirect a stream, unless it was replaced, to /dev/null: nobody reads it, and Python's last
    flush would fail."""
    with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())
