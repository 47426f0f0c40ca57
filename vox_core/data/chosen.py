"""Data files and a policy -> which of their rows are trained on, and which are held out.

Rows are read once, for their facts, which the cache keeps; near duplicates take a second pass over
the rows that are left, and the cache keeps those, too. Where no policy asks for anything and no row
is held out, this is `check_files` and nothing else.

Rows of files that were named for validation are all used, whatever the policy says of training
rows, so that runs under different policies are judged by the same rows; malformed ones are skipped
there, too.

Shape legend: K training rows that are compared, V rows of validation files, P pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core.cache import CACHE_VERSION
from vox_core.contract import DataPolicy
from vox_core.data.checked import CheckedFile, check_files
from vox_core.data.policy.report import Report
from vox_core.data.readers import NO_FIELDS, FieldMap

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vox_core.data.policy.choose import Pairs
    from vox_core.data.policy.table import Table

Tell = Callable[[str, int, int], None]
"""Told of what is done, and of rows done and all; 0 while nobody knows how many there are."""
_SHELF = "near"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Files with the rows that are used of them.

    Args:
        report: None where nothing was asked and nothing looked for.
    """

    train: list[CheckedFile]
    valid: list[CheckedFile]
    report: Report | None = None


def choose_rows(
    train: Sequence[Path],
    valid: Sequence[Path],
    policy: DataPolicy,
    tell: Tell | None = None,
    fields: FieldMap = NO_FIELDS,
) -> Chosen:
    """Look at the files, and choose among their rows.

    Raises:
        DataError: D001, D002, D003; D020, too many rows are malformed; D021, a filter names what no
            row has; D022, rows have no rating; D023, no row is left, or none is held out.
        ConfigError: C009, datasketch is not installed.
    """
    if policy == DataPolicy() and not valid:
        return Chosen(check_files(train, fields), [])

    def read(path: Path, rows: int) -> None:
        if tell:
            tell(f"reading {path.name}", rows, 0)

    skip = policy.malformed_rows == "skip"
    if policy.dedup == "near":
        from vox_core.data.policy import near

        near.version()  # before anything is read
    checked = check_files([*train, *valid], fields, facts=True, skip=skip, progress=read)
    return _choose(checked[: len(train)], checked[len(train) :], policy, tell)


def _choose(
    train_files: Sequence[CheckedFile],
    valid_files: Sequence[CheckedFile],
    policy: DataPolicy,
    tell: Tell | None,
) -> Chosen:
    from vox_core.data.policy import refused
    from vox_core.data.policy.account import account
    from vox_core.data.policy.choose import choose
    from vox_core.data.policy.reasons import HELD_OUT, KEPT
    from vox_core.data.policy.table import Table

    train, valid = Table(train_files), Table(valid_files)
    refused.require_few_malformed(train, valid, policy.max_skipped)
    refused.require_known(train, policy)
    refused.require_rated(train, policy)
    search = _Search(train, valid, policy.near_threshold, tell)
    code_N, pairs_P2 = choose(train.facts, policy, search)
    refused.require_some(code_N, policy)
    held_out = train.masked(code_N == HELD_OUT) if policy.valid_share else []
    return Chosen(
        train.masked(code_N == KEPT),
        valid.well_formed() or [file for file in held_out if file.used],
        account(train, valid, code_N, pairs_P2, search.leaks),
    )


class _Search:
    """Looks for near duplicates among training rows and, while it is at it, held-out ones.

    Attributes:
        leaks: held-out row -> training row that says nearly the same, once it has looked.
    """

    def __init__(self, train: Table, valid: Table, threshold: float, tell: Tell | None) -> None:
        self._train, self._valid, self._threshold, self._tell = train, valid, threshold, tell
        self.leaks: dict[int, int] = {}

    def __call__(self, row_K: NDArray[np.int64]) -> Pairs:
        """Of training rows that are left, those that say nearly what an earlier one says."""
        pairs_P2 = self._recalled(row_K)
        trained_P2 = pairs_P2 < len(row_K)  # the others come after them
        leaks_P2 = pairs_P2[~trained_P2[:, 0] & trained_P2[:, 1]]
        self.leaks = {v - len(row_K): int(row_K[n]) for v, n in leaks_P2.tolist()}
        found: Pairs = row_K[pairs_P2[trained_P2[:, 0]]]
        return found

    def _recalled(self, row_K: NDArray[np.int64]) -> Pairs:
        """Pairs among these rows and the held-out ones: kept before, or looked for now."""
        import numpy as np

        from vox_core.data.policy import near, shelf

        said_K2 = np.concatenate([self._train.said_N2[row_K], self._valid.said_N2])
        made_by = f"{CACHE_VERSION} {near.version()} {self._threshold}\n"
        name = hashlib.sha256(made_by.encode() + said_K2.tobytes()).hexdigest()
        if found := shelf.read(_SHELF, name):
            return found[0]["pairs_P2"]
        used_N = np.zeros(len(self._train), np.bool_)
        used_N[row_K] = True
        used_V = np.ones(len(self._valid), np.bool_)
        texts = chain(self._train.texts(used_N), self._valid.texts(used_V))
        pairs_P2 = near.near_pairs(texts, len(said_K2), self._threshold, self._told)
        shelf.write(_SHELF, name, {"pairs_P2": pairs_P2}, {})
        return pairs_P2

    def _told(self, done: int, count: int) -> None:
        if self._tell:
            self._tell("looking for near duplicates", done, count)
