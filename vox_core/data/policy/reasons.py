"""What may become of a row: the table that the guide prints and every report counts by.

A row is left out for the first reason that applies, in the order of the table.
"""

from __future__ import annotations

KEPT, HELD_OUT = 0, 1
MALFORMED = "malformed"

REASONS: dict[str, str] = {
    "unrated": "no rating, with --unrated drop",
    "rating": "its rating is below --min-rating",
    "category": "its category is not in --category",
    "lane": "its lane is not in --lane",
    "tag": "none of its tags is in --tag",
    "too short": "fewer characters than --min-chars",
    "too long": "more characters than --max-chars",
    "duplicate": "same content as an earlier row (--dedup exact, near)",
    "near duplicate": "nearly the same content as an earlier row (--dedup near)",
}
NAMES = ("kept", "held out", *REASONS)
"""By code, as `choose` gives it."""
CODES = {name: code for code, name in enumerate(NAMES)}
