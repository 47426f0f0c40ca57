"""The rows of several files with their facts, one file after another, each with its number.

Shape legend: N rows of all files, R of one; 2 halves of a digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from vox_core.data.blocks import cut
from vox_core.data.checked import CheckedFile
from vox_core.data.policy.content import text_of
from vox_core.data.policy.facts import Facts
from vox_core.data.policy.mask import Mask
from vox_core.data.policy.report import Place

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Table:
    """Args:
    files: those that were looked at for their facts.
    """

    def __init__(self, files: Sequence[CheckedFile]) -> None:
        self.files, self.facts = files, [_facts(file) for file in files]
        self._ends = np.cumsum([0, *(each.rows for each in self.facts)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def said_N2(self) -> NDArray[np.uint64]:
        """Digests of what the rows say."""
        empty_02 = np.zeros((0, 2), np.uint64)
        return np.concatenate([empty_02, *(each.said_R2 for each in self.facts)])

    def place(self, row: int) -> Place:
        """Where a row stands."""
        file = int(self._ends.searchsorted(row, side="right")) - 1
        line = self.facts[file].line_R[row - int(self._ends[file])]
        return Place(self.files[file].path, int(line))

    def parts(self, value_N: NDArray[Any]) -> list[NDArray[Any]]:
        """What is said of all rows, cut into that of each file."""
        return [value_N[a:b] for a, b in pairwise(self._ends.tolist())]

    def masked(self, used_N: NDArray[np.bool_]) -> list[CheckedFile]:
        """The files with some of their rows; without a mask if that is all there is in one."""
        return [
            replace(file, chosen=_mask(facts, used_R), facts=None)
            for file, facts, used_R in zip(self.files, self.facts, self.parts(used_N), strict=True)
        ]

    def well_formed(self) -> list[CheckedFile]:
        """The files with all of their rows that can be read."""
        return self.masked(np.ones(len(self), np.bool_))

    def texts(self, used_N: NDArray[np.bool_]) -> Iterator[str]:
        """What some of the rows say, read from their files.

        Raises:
            DataError: D001, a file has changed.
        """
        for file in self.masked(used_N):
            for block in cut([file.path], masks=[file.chosen], lines=[file.lines]):
                yield from map(text_of, block.records())
            file.require_unchanged()


def _facts(file: CheckedFile) -> Facts:
    assert file.facts is not None
    return file.facts


def _mask(facts: Facts, used_R: NDArray[np.bool_]) -> Mask | None:
    everything = bool(used_R.all()) and not facts.faults
    return None if everything else Mask.of(facts.line_R[used_R])
