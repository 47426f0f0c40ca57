"""`vox data`: a table; each command is in a module of its own (`data_check.py` and so on)."""

from __future__ import annotations

from vox_core.cli.lazy import Entry, LazyGroup

COMMANDS: dict[str, Entry] = {
    "check": Entry("vox_core.cli.data_check:check", "What is wrong with data, and what is in it."),
}

data = LazyGroup(
    name="data", table=COMMANDS, path=("data",), help="Look at data before it is trained."
)
