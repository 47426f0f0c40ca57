"""How much of a weight is computed with at a time."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 4 << 20
"""Elements computed at a time: a few arrays of 16 MB in float32."""


def row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices over the rows of a matrix, each of a size that is cheap to compute with."""
    rows = max(1, CHUNK // max(1, shape[-1]))
    return (slice(start, start + rows) for start in range(0, shape[0], rows))
