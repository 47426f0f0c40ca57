"""What policies ask of the rows of one file, in columns.

Facts are taken in one pass over the rows and say nothing of any policy, so they are kept in the
cache under the SHA-256 of the file, and another policy reads no row. A row takes 64 bytes.

Shape legend: R well-formed rows, in the order of the file; 2 halves of a digest.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vox_core.cache import CACHE_VERSION
from vox_core.data.faults import RowError, RowFault
from vox_core.data.policy import shelf
from vox_core.data.policy.content import chars, digests
from vox_core.data.records import Record
from vox_core.data.rows import NO_ATTRIBUTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids: TypeAlias = NDArray[np.uint64]

SHELF = "facts"
NONE = -1
"""The code of a row that does not say it."""
_NAMED = ("category", "lane", "tags")
_COLUMNS = ("line_R", "said_R2", "whole_R2", "chars_R", "rating_R", *(f"{n}_R" for n in _NAMED))


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """Of the rows of a file.

    Args:
        line_R: int64, from 1.
        said_R2, whole_R2: uint64; digests of what is said, without and with its weights.
        chars_R: int64; characters that are said.
        rating_R: float64; NaN for a row without one.
        category_R, lane_R, tags_R: int32; index in `names`, -1 for none.
        names: "category" and "lane" -> values; "tags" -> the tags of a row, several together.
        faults: (line, what is wrong with it) of malformed rows; a line may have several.
        unused: field that means nothing to vox -> rows that have it.
    """

    line_R: NDArray[np.int64]
    said_R2: Ids
    whole_R2: Ids
    chars_R: NDArray[np.int64]
    rating_R: NDArray[np.float64]
    category_R: NDArray[np.int32]
    lane_R: NDArray[np.int32]
    tags_R: NDArray[np.int32]
    names: Mapping[str, list[Any]]
    faults: list[tuple[int, RowFault]]
    unused: Mapping[str, int]

    @property
    def rows(self) -> int:
        return len(self.line_R)

    @property
    def malformed(self) -> int:
        """Lines with a fault."""
        return len({line for line, _ in self.faults})


class Collector:
    """Takes the facts of one row after another."""

    def __init__(self) -> None:
        self._line, self._chars, self._rating = array("q"), array("q"), array("d")
        self._said, self._whole = bytearray(), bytearray()
        self._codes = {name: array("i") for name in _NAMED}
        self._known: dict[str, dict[Any, int]] = {name: {} for name in _NAMED}
        self._faults: list[tuple[int, RowFault]] = []
        self._unused: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        said, whole = digests(record)
        self._said += said
        self._whole += whole
        self._line.append(record.line)
        self._chars.append(chars(record))
        if record.unused:
            self._unused.update(record.unused)
        says = record.attributes
        if says is NO_ATTRIBUTES:  # the usual case
            self._rating.append(float("nan"))
            for codes in self._codes.values():
                codes.append(NONE)
            return
        self._rating.append(float("nan") if says.rating is None else says.rating)
        self._code("category", says.category)
        self._code("lane", says.lane)
        self._code("tags", tuple(sorted({*says.tags})) or None)

    def refuse(self, line: int, error: RowError) -> None:
        self._faults += ((line, fault) for fault in error.faults)

    def _code(self, name: str, value: object) -> None:
        known = self._known[name]
        code = NONE if value is None else known.setdefault(value, len(known))
        self._codes[name].append(code)

    def facts(self) -> Facts:
        return Facts(
            line_R=np.array(self._line, np.int64),
            said_R2=np.frombuffer(self._said, "<u8").reshape(-1, 2),
            whole_R2=np.frombuffer(self._whole, "<u8").reshape(-1, 2),
            chars_R=np.array(self._chars, np.int64),
            rating_R=np.array(self._rating, np.float64),
            **{f"{name}_R": np.array(codes, np.int32) for name, codes in self._codes.items()},
            names={name: list(known) for name, known in self._known.items()},
            faults=self._faults,
            unused=self._unused,
        )


def remember(name: str, facts: Facts) -> None:
    """Keep what was found of the file that `name` stands for."""
    about = {
        "version": CACHE_VERSION,
        "names": facts.names,
        "faults": [(line, fault.to_json()) for line, fault in facts.faults],
        "unused": facts.unused,
    }
    shelf.write(SHELF, name, {each: getattr(facts, each) for each in _COLUMNS}, about)


def recall(name: str) -> Facts | None:
    """What was found under this cache version; None if nothing was."""
    if not (found := shelf.read(SHELF, name)):
        return None
    arrays, about = found
    if about.get("version") != CACHE_VERSION or set(arrays) != set(_COLUMNS):
        return None
    names = {**about["names"], "tags": [tuple(tags) for tags in about["names"]["tags"]]}
    faults = [(line, RowFault.from_json(fault)) for line, fault in about["faults"]]
    return Facts(**arrays, names=names, faults=faults, unused=about["unused"])
