"""How difficult a document is: what its row says, as a number.

`beginner` and `easy` are 1, `intermediate` and `medium` 2, `advanced` and `hard` 3, `expert` 4; a
number is itself, on any scale as long as all rows use it. What says nothing, or another word, is as
difficult as the median of the others: it may be anything, and first or last it would be trained
apart from what it resembles.

Shape legend: D documents.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVELS = {
    "beginner": 1.0,
    "easy": 1.0,
    "intermediate": 2.0,
    "medium": 2.0,
    "advanced": 3.0,
    "hard": 3.0,
    "expert": 4.0,
}
UNKNOWN = math.nan


def level(said: float | str | None) -> float:
    """The number; `UNKNOWN` for what says nothing."""
    if said is None:
        return UNKNOWN
    if isinstance(said, str):
        if (named := LEVELS.get(said.strip().lower())) is not None:
            return named
        try:
            said = float(said)
        except ValueError:
            return UNKNOWN
    return float(np.float32(said)) if math.isfinite(said) and abs(said) < 1e30 else UNKNOWN


def filled(levels_D: NDArray[np.float32]) -> NDArray[np.float32]:
    """With the median of those that are known in place of the others; the lower of two."""
    known = np.sort(levels_D[~np.isnan(levels_D)])
    median = known[(len(known) - 1) // 2]
    return np.where(np.isnan(levels_D), median, levels_D)
