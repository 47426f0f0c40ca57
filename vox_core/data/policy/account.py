"""What became of every row, as a report.

Shape legend: N training rows of all files, R of one, V rows of validation files, P pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from vox_core.data.checked import CheckedFile
from vox_core.data.policy.facts import Facts
from vox_core.data.policy.leaks import shared
from vox_core.data.policy.reasons import HELD_OUT, KEPT, MALFORMED, NAMES
from vox_core.data.policy.report import LISTED, FileRows, Leak, Place, Report, Skipped
from vox_core.data.policy.table import Table

if TYPE_CHECKING:
    from vox_core.data.policy.choose import Codes, Pairs


def account(
    train: Table, valid: Table, code_N: Codes, pairs_P2: Pairs, near: Mapping[int, int]
) -> Report:
    """Args:
    code_N, pairs_P2: what was chosen (`choose`).
    near: held-out row -> training row that says nearly the same.
    """
    leaks = [*_leaks(train, valid, code_N, near)]
    codes = train.parts(code_N)
    pairs = pairs_P2[np.argsort(pairs_P2[:, 0], kind="stable")][:LISTED]
    return Report(
        files=[
            *(_file_rows(*each) for each in zip(train.files, train.facts, codes, strict=True)),
            *(_valid_rows(*each) for each in zip(valid.files, valid.facts, strict=True)),
        ],
        malformed=[*chain(_malformed(train), _malformed(valid))],
        duplicates=[
            Skipped(train.place(row), NAMES[code_N[row]], of=train.place(stays))
            for row, stays in pairs.tolist()
        ],
        leaks=leaks[:LISTED],
        leaked=len(leaks),
    )


def _leaks(train: Table, valid: Table, code_N: Codes, near: Mapping[int, int]) -> Iterator[Leak]:
    if not len(valid):
        return
    used_K = np.flatnonzero(code_N == KEPT)
    pairs_P2 = shared(train.said_N2[used_K], valid.said_N2)
    exact = {row: int(used_K[number]) for row, number in pairs_P2.tolist()}
    for row, other in sorted({**near, **exact}.items()):
        yield Leak(valid.place(row), train.place(other), near=row not in exact)


def _file_rows(file: CheckedFile, facts: Facts, code_R: Codes) -> FileRows:
    counts = np.bincount(code_R, minlength=len(NAMES)).tolist()
    return FileRows(
        file.path,
        "train",
        facts.rows + facts.malformed,
        used=counts[KEPT],
        held_out=counts[HELD_OUT],
        left_out={NAMES[c]: counts[c] for c in range(HELD_OUT + 1, len(NAMES)) if counts[c]},
        malformed=_kinds(facts),
    )


def _valid_rows(file: CheckedFile, facts: Facts) -> FileRows:
    rows = facts.rows + facts.malformed
    return FileRows(file.path, "valid", rows, used=facts.rows, malformed=_kinds(facts))


def _kinds(facts: Facts) -> Counter[str]:
    """Code -> malformed lines, each by its first fault."""
    first = dict(reversed(facts.faults))
    return Counter(fault.code for fault in first.values())


def _malformed(table: Table) -> Iterator[Skipped]:
    for file, facts in zip(table.files, table.facts, strict=True):
        by_line: dict[int, list[str]] = {}
        for line, fault in facts.faults:
            by_line.setdefault(line, []).append(str(fault))
        for line, texts in by_line.items():
            yield Skipped(Place(file.path, line), MALFORMED, "; ".join(texts))
