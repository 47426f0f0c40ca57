"""What may become of a row: the table that the guide prints and every report counts by.

A row is left out for the first reason that applies, in the order of the table.
"""

from __future__ import annotations

KEPT, HELD_OUT = 0, 1
MALFORMED = "malformed"

REASONS: dict[str, str] = {
    "unrated": "it has no rating, and --unrated says drop",
    "rating": "its rating is below --min-rating",
    "category": "its category is none of those of --category",
    "lane": "its lane is none of those of --lane",
    "tag": "it has none of the tags of --tag",
    "too short": "it says fewer characters than --min-chars",
    "too long": "it says more characters than --max-chars",
    "duplicate": "an earlier row says the same (--dedup exact, near)",
    "near duplicate": "an earlier row says nearly the same (--dedup near)",
}
NAMES = ("kept", "held out", *REASONS)
"""By code, as `choose` gives it."""
CODES = {name: code for code, name in enumerate(NAMES)}
