"""Held-out rows that are trained on, too: what they measure is memory.

Shape legend: N rows that are trained, V rows that are held out; 2 halves of a digest; P pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def shared(said_N2: NDArray[np.uint64], said_V2: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Held-out rows that say what a trained row says, by digests.

    Returns:
        int64 [P, 2]: the number of the held-out row, and of the first trained one.
    """
    there_N = np.flatnonzero(np.isin(said_N2[:, 0], said_V2[:, 0]))
    first: dict[bytes, int] = {}
    for row in there_N.tolist():
        first.setdefault(said_N2[row].tobytes(), row)
    maybe_V = np.flatnonzero(np.isin(said_V2[:, 0], said_N2[there_N, 0]))
    found = ((row, first.get(said_V2[row].tobytes())) for row in maybe_V.tolist())
    pairs = [(row, other) for row, other in found if other is not None]
    return np.array(pairs, np.int64).reshape(-1, 2)
