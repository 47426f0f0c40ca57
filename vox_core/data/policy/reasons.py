"""What may become of a row: the table that the guide prints and every report counts by.

A row is left out for the first reason that applies, in the order of the table.
"""

from __future__ import annotations

import re

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

MALFORMED_KINDS: dict[str, str] = {
    "line too long": r"a line of more than",
    "invalid UTF-8": r"invalid UTF-8",
    "invalid JSON": r"invalid JSON|nested too deeply|which JSON does not have|number that cannot",
    "repeated key": r"the key .* more than once",
    "half a character": r"half a surrogate pair",
    "no object": r"expected a JSON object",
    "misspelt field": r"meant as \"",
    "unsupported": r"which vox does not support|of type text only",
    "empty": r"empty, expected|without fields",
    "roles": r"the role \"|_role|\.role, expected|no assistant message",
    "unknown form": (
        r"the fields .* expected one of|fields of several forms|^found .* of (prompt|completion), "
    ),
    "wrong type": r"^found (null|an? \w+) as ",
}
"""Kind of fault -> how its text looks; the first that fits counts."""
OTHER = "other"


def kind_of(fault: str) -> str:
    """The kind that a malformed row is counted by, from the text of its fault."""
    kinds = (kind for kind, looks in MALFORMED_KINDS.items() if re.search(looks, fault))
    return next(kinds, OTHER)
