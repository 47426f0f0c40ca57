"""Results on stdout: a small table for people, one JSON object for programs.

What comes from packages, probes and installers is somebody else's text. `printable` is the one
place where what could steer a terminal is taken out of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass

import click

# The C0 and C1 control characters, what turns the direction of writing or ends a line in Unicode,
# and surrogates, which no terminal can be sent.
_STEERING = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_A_LINE = re.compile(f"[{_STEERING}]")
_IN_A_TEXT = re.compile(rf"(?![\n\t])[{_STEERING}]")


def printable(text: object, *, lines: bool = False) -> str:
    """The text with what could steer a terminal written out, such as `\\x1b`.

    Args:
        lines: line ends and tabs stay.
    """
    pattern = _IN_A_TEXT if lines else _IN_A_LINE
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def print_json(result: object) -> None:
    """One JSON document on one line; dataclasses as objects, paths as text."""
    told = json.dumps(result, ensure_ascii=False, default=_plain)
    click.echo(_IN_A_LINE.sub(lambda match: f"\\u{ord(match[0]):04x}", told))


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def print_table(rows: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
    """Label and text per line, the texts below one another; a label stands once over its texts."""
    pairs = [*(rows.items() if isinstance(rows, Mapping) else rows)]
    width = max(len(label) for label, _ in pairs) + 2
    before = None
    for label, text in pairs:
        shown = "" if label == before else printable(label)
        click.echo(f"{shown:<{width}}{printable(text, lines=True)}")
        before = label


def print_columns(rows: Iterable[Sequence[str]]) -> None:
    """Rows of cells, each column as wide as its widest cell."""
    rows = [[*map(printable, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def losses(before: float | None, after: float | None) -> str:
    """`3.2100 -> 1.4000 (56 % lower)`; empty unless both were measured."""
    if before is None or after is None:
        return ""
    change = 100 * (after / before - 1)
    direction = "lower" if change < 0 else "higher"
    return f"{before:.4f} -> {after:.4f} ({abs(change):.0f} % {direction})"


def duration(seconds: float) -> str:
    """`0:42`, `1:02:03`; a question mark for what is no length of time."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def megabytes(count: int) -> str:
    """Bytes as MB (10^6), or GB from a thousand of them."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
