"""`vox data`: the table of its commands; `check` is in data_check.py."""

from __future__ import annotations

from vox_core.cli.lazy import Entry, LazyGroup

COMMANDS: dict[str, Entry] = {
    "check": Entry("vox_core.cli.data_check:check", "Report faulty rows and summarise the files."),
}

data = LazyGroup(
    name="data", table=COMMANDS, path=("data",), help="Check and inspect training data."
)
