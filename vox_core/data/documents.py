"""Documents in arrays: all tokens end to end, and a few numbers for each document.

The arrays may be mapped from files (`store.py`), so that a data set may be larger than memory: a
`Document` is made when one is asked for, and what is summed over all of them is summed in blocks.

Shape legend: T tokens of all documents, D documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from vox_core.data.encode import Document

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DIGEST_FORMAT = b"vox-documents-1"
_BLOCK = 1 << 20
"""Tokens, or documents, looked at together."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Some documents, without what is the same for many of them.

    Args:
        tokens_T: int32.
        weights_T: float32, or uint8 where every weight is 0 or 1.
        lengths_D: int64, tokens of each document.
        sources_D: int32, the number of the file it comes from.
        lines_D: int64, the line of that file.
        ends_D: int32, end-of-turn tokens that are trained.
        difficulty_D: float32, NaN where the row does not say (`sampler.py`).
    """

    tokens_T: NDArray[np.int32]
    weights_T: NDArray[Any]
    lengths_D: NDArray[np.int64]
    sources_D: NDArray[np.int32]
    lines_D: NDArray[np.int64]
    ends_D: NDArray[np.int32]
    difficulty_D: NDArray[np.float32]

    @classmethod
    def of(cls, documents: Sequence[Document], sources: dict[Path, int]) -> Columns:
        """Copy `documents`; files that are not in `sources` yet are added to it."""
        weights_T = np.concatenate([np.zeros(0, np.float32), *(d.weights_T for d in documents)])
        whole = weights_T.astype(np.uint8)
        numbers = [sources.setdefault(d.source, len(sources)) for d in documents]
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(d.tokens_T for d in documents)]),
            whole if _zero_or_one(weights_T) else weights_T,
            np.array([len(d) for d in documents], np.int64),
            np.array(numbers, np.int32),
            np.array([d.line for d in documents], np.int64),
            np.array([d.ends for d in documents], np.int32),
            np.array([d.difficulty for d in documents], np.float32),
        )


class Documents(Sequence[Document]):
    """Documents in order.

    Args:
        columns: their arrays, which may be mapped from files.
        starts_D1: int64; document d has the tokens [starts[d], starts[d + 1]).
        sources: the files that `columns.sources_D` counts.
        owner: kept as long as this is, such as the temporary folder of mapped files.
        digest, trained_tokens: of these documents, where they were computed before.
    """

    def __init__(
        self,
        columns: Columns,
        starts_D1: NDArray[np.int64],
        sources: Sequence[Path],
        owner: object = None,
        digest: str | None = None,
        trained_tokens: int | None = None,
    ) -> None:
        self._columns, self._starts = columns, starts_D1
        self._sources, self._owner = tuple(sources), owner
        self._digest, self._trained_tokens = digest, trained_tokens

    @classmethod
    def of(cls, documents: Sequence[Document]) -> Documents:
        """The same documents, in arrays."""
        if isinstance(documents, Documents):
            return documents
        sources: dict[Path, int] = {}
        columns = Columns.of(documents, sources)
        return cls(columns, starts_of(columns.lengths_D), tuple(sources))

    def __len__(self) -> int:
        return len(self._columns.lines_D)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | Sequence[Document]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        at, columns = int(index) % len(self), self._columns
        start, stop = int(self._starts[at]), int(self._starts[at + 1])
        return Document(
            columns.tokens_T[start:stop],
            columns.weights_T[start:stop].astype(np.float32),
            self._sources[int(columns.sources_D[at])],
            int(columns.lines_D[at]),
            int(columns.ends_D[at]),
            float(columns.difficulty_D[at]),
        )

    @property
    def lengths_D(self) -> NDArray[np.int64]:
        """Tokens of each document; int64."""
        return self._columns.lengths_D

    @property
    def difficulty_D(self) -> NDArray[np.float32]:
        """How difficult each document is; NaN where its row does not say."""
        return self._columns.difficulty_D

    @property
    def files_D(self) -> NDArray[np.int32]:
        """The number of each document's file, among `files`."""
        return self._columns.sources_D

    @property
    def files(self) -> tuple[Path, ...]:
        return self._sources

    @property
    def tokens(self) -> int:
        """Of all documents."""
        return int(self._starts[-1])

    @property
    def longest(self) -> int:
        """Tokens of the longest document; 0 without documents."""
        return int(self.lengths_D.max(initial=0))

    @property
    def longest_at(self) -> int:
        """The first of the longest documents."""
        return int(self.lengths_D.argmax())

    @property
    def ends(self) -> int:
        """End-of-turn tokens that are trained, in all documents."""
        return int(self._columns.ends_D.sum(dtype=np.int64))

    @property
    def trained_tokens(self) -> int:
        """Of all documents."""
        if self._trained_tokens is None:
            weights_T = self._columns.weights_T
            blocks = range(0, len(weights_T), _BLOCK)
            counts = (np.count_nonzero(weights_T[at : at + _BLOCK]) for at in blocks)
            self._trained_tokens = sum(map(int, counts))
        return self._trained_tokens

    def trained_D(self) -> NDArray[np.int64]:
        """Of each document the tokens whose loss is computed; nothing precedes its first one."""
        weights_T, counts = self._columns.weights_T, [np.zeros(0, np.int64)]
        for first, last in self._extents():
            starts = self._starts[first : last + 1]
            trained_T = (weights_T[starts[0] : starts[-1]] > 0).astype(np.int64)
            trained_T[starts[:-1] - starts[0]] = 0
            counts.append(np.add.reduceat(trained_T, starts[:-1] - starts[0]))
        return np.concatenate(counts)

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of each document's length (int64), tokens (int64) and weights (float32),
        little-endian, in order. Nothing else enters: not paths, not lines."""
        if self._digest is None:
            self._digest = self._computed_digest()
        return self._digest

    def _computed_digest(self) -> str:
        sha256 = hashlib.sha256(_DIGEST_FORMAT)
        for tokens_T, weights_T, bounds in self._blocks():
            tokens, weights = tokens_T.data.cast("B"), weights_T.data.cast("B")
            for start, stop in bounds:
                sha256.update((stop - start).to_bytes(8, "little"))
                sha256.update(tokens[8 * start : 8 * stop])
                sha256.update(weights[4 * start : 4 * stop])
        return sha256.hexdigest()

    def _blocks(
        self,
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], list[tuple[int, int]]]]:
        """Documents together until they are a block: tokens and weights as they are hashed, and the
        extent of each document in them."""
        for first, last in self._extents():
            starts = self._starts[first : last + 1]
            at = slice(int(starts[0]), int(starts[-1]))
            inside = (starts - starts[0]).tolist()
            yield (
                self._columns.tokens_T[at].astype("<i8"),
                self._columns.weights_T[at].astype("<f4"),
                list(pairwise(inside)),
            )

    def _extents(self) -> Iterator[tuple[int, int]]:
        """Documents [first, last) that are a block together."""
        first = 0
        while first < len(self):
            limit = self._starts[first] + _BLOCK
            last = max(first + 1, int(np.searchsorted(self._starts, limit, "right")) - 1)
            yield first, last
            first = last


def starts_of(lengths_D: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of some documents begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_D, dtype=np.int64)])


def _zero_or_one(weights_T: NDArray[np.float32]) -> bool:
    return bool(((weights_T == 0) | (weights_T == 1)).all())
