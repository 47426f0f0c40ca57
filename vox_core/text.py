"""Words for people: numbers with their units, and foreign text without control characters.

Names of packages and answers of probes and installers are somebody else's text. `printable` is the
one place that takes out what could steer a terminal.
"""

from __future__ import annotations

import math
import re

# The C0 and C1 control characters, what turns the direction of writing or ends a line in Unicode,
# and surrogates, which no terminal can be sent.
_STEERING = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
CONTROLS = re.compile(f"[{_STEERING}]")
_CONTROLS_IN_LINES = re.compile(rf"(?![\n\t])[{_STEERING}]")


def printable(text: object, *, lines: bool = False) -> str:
    """The text with what could steer a terminal written out, such as `\\x1b`.

    Args:
        lines: line ends and tabs stay.
    """
    pattern = _CONTROLS_IN_LINES if lines else CONTROLS
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


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
