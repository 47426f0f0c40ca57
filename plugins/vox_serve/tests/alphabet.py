"""A model that says the alphabet, and stops at each step while a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from vox_core.contract import RowByRow

SECONDS = 20


class Alphabet(RowByRow):
    """The next token is the letter after the last one; the letters are tokens `first` and on. The
    adapter `bad` computes no numbers.

    Attributes:
        free: cleared by a test to hold back the next step.
        faults: number of next steps that fail.
        stuck: no row can be removed.
        inside: the rows in the batch.
    """

    def __init__(self, first: int, vocabulary: int) -> None:
        self.first, self.vocabulary = first, vocabulary
        self.free, self.faults, self.stuck = threading.Event(), 0, False
        self.free.set()
        self.inside: set[int] = set()

    def insert(self, row, tokens_T, adapter=None) -> None:
        self.inside.add(row)
        super().insert(row, tokens_T, adapter)

    def remove(self, row) -> None:
        if self.stuck:
            raise RuntimeError("device lost")
        self.inside.remove(row)
        super().remove(row)

    def advance(self, tokens):
        assert self.free.wait(SECONDS)
        if self.faults:
            self.faults -= 1
            raise RuntimeError("out of memory")
        return super().advance(tokens)

    def logits(self, tokens_T, adapter=None, first=0):
        place = (int(tokens_T[-1]) - self.first + 1) % 26
        logits_1V = np.eye(1, self.vocabulary, self.first + place, dtype=np.float32)
        return logits_1V * (np.nan if adapter == "bad" else 1)

    def add_adapter(self, name, adapter) -> None:
        raise NotImplementedError

    remove_adapter = log_probs = close = add_adapter


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for an event of another thread."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
