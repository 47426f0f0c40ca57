"""A `Model` in numpy whose next token depends on all tokens before it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vox_core.contract import RowByRow

VOCABULARY = 64


class Numbers(RowByRow):
    """Logits are pseudo-random numbers, drawn for the sum of the tokens so far and the adapter.

    Attributes:
        batches: rows inside at each call of `advance`.
    """

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        self.vocabulary = vocabulary
        self.batches: list[list[int]] = []
        self.inside: list[int] = []
        self.closed = False

    def logits(self, tokens_T, adapter=None, first=0):
        sums_T = np.cumsum((np.asarray(tokens_T) + 1) * np.arange(1, len(tokens_T) + 1))
        sums = sums_T[first:].tolist()
        rows = [np.random.default_rng([total, len(adapter or "")]) for total in sums]
        return np.array([rng.normal(size=self.vocabulary) * 3 for rng in rows], np.float32)

    def insert(self, row, tokens_T, adapter=None) -> None:
        assert row not in self.inside
        self.inside.append(row)
        super().insert(row, tokens_T, adapter)

    def advance(self, tokens: Mapping[int, int]):
        assert not self.closed
        self.batches.append(list(self.inside))
        return super().advance(tokens)

    def remove(self, row) -> None:
        assert not self.closed
        self.inside.remove(row)
        super().remove(row)

    def close(self) -> None:
        self.closed = True

    def add_adapter(self, name, adapter) -> None:
        raise NotImplementedError

    def remove_adapter(self, name) -> None:
        raise NotImplementedError

    def log_probs(self, batch, adapter=None, seed=None):
        raise NotImplementedError


class InParts(Numbers):
    """The same, which computes a prompt in parts: two calls of `advance` before its first logits,
    and the logits of one new row at a time."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__(vocabulary)
        self._waiting: dict[int, int] = {}

    def insert(self, row, tokens_T, adapter=None) -> None:
        super().insert(row, tokens_T, adapter)
        self._new.remove(row)
        self._waiting[row] = 2

    def advance(self, tokens):
        for row in list(self._waiting):
            self._waiting[row] -= 1
            if self._waiting[row] <= 0 and not self._new:
                self._new.append(row)
                del self._waiting[row]
        return super().advance(tokens)

    def remove(self, row) -> None:
        self._waiting.pop(row, None)
        super().remove(row)
