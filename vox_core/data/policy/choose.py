"""Facts and a policy -> what becomes of every row. Pure, but for near duplicates (`near.py`), which
are looked for by whoever calls.

A row keeps its side when the set grows: whether it is held out is a matter of what it says alone.
Of rows that say the same the first stays, in the order of the files.

Shape legend: N rows of all files, one file after another; P pairs; V values of a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vox_core.contract import DataPolicy
from vox_core.data.policy.facts import Facts
from vox_core.data.policy.reasons import CODES, HELD_OUT, KEPT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Codes: TypeAlias = NDArray[np.uint8]
    Pairs: TypeAlias = NDArray[np.int64]
    Bools: TypeAlias = NDArray[np.bool_]

Near: TypeAlias = "Callable[[NDArray[np.int64]], Pairs]"
"""Rows that are candidates -> pairs (row, earlier row that says nearly the same), int64 [P, 2]."""


def choose(facts: Sequence[Facts], policy: DataPolicy, near: Near) -> tuple[Codes, Pairs]:
    """Decide about every row.

    Args:
        near: looks for near duplicates; asked for `dedup` near only.

    Returns:
        uint8 [N], what becomes of each row (`reasons.NAMES`); and int64 [P, 2], of each duplicate
        the row itself and the one that stays.
    """
    code_N = np.concatenate([np.zeros(0, np.uint8), *(_filtered(each, policy) for each in facts)])
    pairs_P2 = np.zeros((0, 2), np.int64)
    if policy.dedup != "none":
        pairs_P2 = _leave_out(code_N, "duplicate", duplicates(facts, code_N))
    if policy.dedup == "near":
        found_P2 = _leave_out(code_N, "near duplicate", near(np.flatnonzero(code_N == KEPT)))
        pairs_P2 = np.concatenate([pairs_P2, found_P2])
    if policy.valid_share:
        said_N2 = np.concatenate([each.said_R2 for each in facts])
        code_N[(code_N == KEPT) & held_out(said_N2, policy.valid_share)] = HELD_OUT
    return code_N, pairs_P2


def held_out(said_N2: NDArray[np.uint64], share: float) -> Bools:
    """Which rows are held out, by the digests of what they say: those of a fixed part of all
    digests. Another `share` that is larger holds out the same rows, and others."""
    bound = min(int(share * 2**64), 2**64 - 1)
    return said_N2[:, 0] < np.uint64(bound)


def duplicates(facts: Sequence[Facts], code_N: Codes) -> Pairs:
    """Of the rows that are kept so far, those that say the same as an earlier one, with the first
    that does; int64 [P, 2]."""
    whole_N2 = np.concatenate([each.whole_R2 for each in facts])
    row_K = np.flatnonzero(code_N == KEPT)
    order_K = np.lexsort((row_K, whole_N2[row_K, 1], whole_N2[row_K, 0]))
    row_K, whole_K2 = row_K[order_K], whole_N2[row_K[order_K]]
    new_K = np.ones(len(row_K), np.bool_)
    new_K[1:] = (whole_K2[1:] != whole_K2[:-1]).any(axis=1)
    first_K = row_K[new_K][np.cumsum(new_K) - 1]
    pairs_P2 = np.stack([row_K[~new_K], first_K[~new_K]], axis=1)
    return pairs_P2[np.argsort(pairs_P2[:, 0])]


def _leave_out(code_N: Codes, reason: str, pairs_P2: Pairs) -> Pairs:
    code_N[pairs_P2[:, 0]] = CODES[reason]
    return pairs_P2


def _filtered(facts: Facts, policy: DataPolicy) -> Codes:
    """Of each row the first filter that it does not pass; 0 if it passes all of them."""
    code_R = np.zeros(facts.rows, np.uint8)
    unrated_R = np.isnan(facts.rating_R)
    refused: dict[str, Bools] = {}
    if policy.unrated == "drop":
        refused["unrated"] = unrated_R
    if policy.min_rating is not None:
        refused["rating"] = ~unrated_R & (facts.rating_R < policy.min_rating)
    for name in ("category", "lane"):
        if wanted := getattr(policy, name):
            fits_V = [value in wanted for value in facts.names[name]]
            refused[name] = ~_of_code(fits_V, getattr(facts, f"{name}_R"))
    if policy.tag:
        fits_V = [not {*policy.tag}.isdisjoint(tags) for tags in facts.names["tags"]]
        refused["tag"] = ~_of_code(fits_V, facts.tags_R)
    refused["too short"] = facts.chars_R < policy.min_chars
    if policy.max_chars:
        refused["too long"] = facts.chars_R > policy.max_chars
    for reason, refused_R in refused.items():
        code_R[(code_R == KEPT) & refused_R] = CODES[reason]
    return code_R


def _of_code(fits_V: Sequence[bool], code_R: NDArray[np.int32]) -> Bools:
    """The value of each row's code; False for a row that has none."""
    return np.array([*fits_V, False])[code_R]  # the code of none is -1
