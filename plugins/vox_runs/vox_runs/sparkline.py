"""Draw a curve as one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-~=+*#"
GAP = " "


def sparkline(values: Sequence[float | None], width: int, encoding: str | None = "utf-8") -> str:
    """Draw the values as at most `width` bars, left to right.

    A bar is the mean of its values, or a gap if they are all missing. The lowest bar is the
    smallest mean. ASCII characters if the encoding has no bars.
    """
    width = max(min(width, len(values)), 1)
    cuts = [len(values) * at // width for at in range(width + 1)]
    parts = [values[start:stop] for start, stop in pairwise(cuts)]
    means = [_mean([value for value in part if value is not None]) for part in parts]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    bars = _bars(encoding)
    return "".join(
        GAP if mean is None else bars[round((mean - low) / span * (len(bars) - 1)) if span else 0]
        for mean in means
    )


def _mean(values: Sequence[float]) -> float | None:
    # Halved, so that even the difference of the two largest floats is finite.
    return sum(value / 2 / len(values) for value in values) if values else None


def _bars(encoding: str | None) -> str:
    try:
        BARS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN
    return BARS
