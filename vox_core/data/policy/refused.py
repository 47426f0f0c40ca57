"""What a policy refuses: too much that is malformed, filters that nothing passes, unrated rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

import numpy as np

from vox_core.contract import DataPolicy
from vox_core.data.policy.reasons import HELD_OUT, KEPT, NAMES
from vox_core.data.policy.table import Table
from vox_core.data.records import Placed
from vox_core.errors import DataError

if TYPE_CHECKING:
    from vox_core.data.policy.choose import Codes

_LONGEST, _SHOWN, _NEAR = 60, 10, 1000
"""Values that are shown, and looked through for one that may be meant."""
_FILTERS = {"category": "category", "lane": "lane", "tag": "tags"}
"""Flag -> how facts call it."""


def require_few_malformed(train: Table, valid: Table, most: float) -> None:
    """Raises:
    DataError: D020, the share of malformed rows is above `most`.
    """
    all_of_them = [*zip(train.files, train.facts, strict=True)]
    all_of_them += zip(valid.files, valid.facts, strict=True)
    malformed = sum(facts.malformed for _, facts in all_of_them)
    rows = malformed + len(train) + len(valid)
    if malformed / rows <= most:
        return
    raise DataError(
        "D020",
        "more rows are malformed than may be skipped",
        where=", ".join(str(file.path) for file, facts in all_of_them if facts.faults),
        found=f"{malformed:,} of {rows:,} rows ({malformed / rows:.2%})",
        expected=f"at most {most:.2%} (--max-skipped)",
        faults=[
            str(Placed(file.path, line, fault))
            for file, facts in all_of_them
            for line, fault in facts.faults
        ],
        remedy="correct these lines, or raise --max-skipped",
    )


def require_known(train: Table, policy: DataPolicy) -> None:
    """Raises:
    DataError: D021, a filter names a value that no row has.
    """
    for flag, name in _FILTERS.items():
        wanted = getattr(policy, flag)
        there = values(train, name) if wanted else Counter[str]()
        if unknown := [value for value in wanted if value not in there]:
            raise no_such(flag, f"--{flag}", f"--{flag}", unknown, there)


def no_such(
    name: str, setting: str, where: str, unknown: Sequence[str], there: Counter[str]
) -> DataError:
    """What is said of a filter that names what no row has.

    Args:
        name: what it looks at: lane, category, tag.
        setting: the filter itself.
        there: what rows have, and how many.
    """
    return DataError(
        "D021",
        f"no row has the {name} that is asked for",
        where=where,
        found=", ".join(unknown) if setting == where else f"{setting}: {', '.join(unknown)}",
        expected=_shown(there) or f"rows with a {name}; none has one",
        remedy=f"{_meant(unknown, there)}name a {name} that rows have, or leave out {setting}",
    )


def _meant(unknown: Sequence[str], there: Counter[str]) -> str:
    """`did you mean …? `, where a value of rows is near."""
    known = {value.casefold(): value for value, _ in reversed(there.most_common(_NEAR))}
    near = [get_close_matches(value.casefold(), known, n=1) for value in unknown]
    meant = dict.fromkeys(known[each[0]] for each in near if each)
    return f"did you mean {' or '.join(meant)}? " if meant else ""


def values(table: Table, name: str) -> Counter[str]:
    """What rows say as `name`, and how many."""
    counts: Counter[str] = Counter()
    for facts in table.facts:
        code_R = getattr(facts, f"{name}_R")
        found = np.bincount(code_R[code_R >= 0], minlength=len(facts.names[name])).tolist()
        for value, rows in zip(facts.names[name], found, strict=True):
            for single in value if name == "tags" else (value,):
                counts[single] += rows
    return counts


def _shown(counts: Counter[str]) -> str:
    names = [f"{value[:_LONGEST]} ({rows:,})" for value, rows in counts.most_common(_SHOWN)]
    more = len(counts) - len(names)
    return ", ".join(names) + (f" and {more:,} more" if more > 0 else "")


def require_rated(train: Table, policy: DataPolicy) -> None:
    """Raises:
    DataError: D022, rows have no rating, and it is not said what becomes of them.
    """
    if policy.min_rating is None or policy.unrated is not None:
        return
    unrated = [int(np.isnan(facts.rating_R).sum()) for facts in train.facts]
    if not any(unrated):
        return
    files = zip(train.files, unrated, strict=True)
    raise DataError(
        "D022",
        "rows have no rating, and nothing says what becomes of them",
        where=", ".join(str(file.path) for file, rows in files if rows),
        found=f"{sum(unrated):,} of {len(train):,} rows without a rating",
        expected="a rating in every row, or --unrated",
        remedy="say --unrated keep, or --unrated drop",
    )


def require_some(code_N: Codes, policy: DataPolicy) -> None:
    """Raises:
    DataError: D023, no row is left, or none is held out.
    """
    counts = np.bincount(code_N, minlength=len(NAMES)).tolist()
    what = remedy = ""
    if not counts[KEPT]:
        what, remedy = "no row is left to train on", "ask for less, or bring other data"
    elif policy.valid_share and not counts[HELD_OUT]:
        what, remedy = "no row is held out", "raise --valid-share, or name a file with --valid"
    if what:
        raise DataError(
            "D023",
            what,
            where="the rows, after everything that was asked of them",
            found=", ".join(f"{n:,} {NAMES[code]}" for code, n in enumerate(counts) if n),
            expected="at least one row",
            remedy=remedy,
        )
