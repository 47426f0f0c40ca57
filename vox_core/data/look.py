"""Count the rows of a JSONL file by form and collect the faults of the others.

Only counts are kept, so that a file may be larger than memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vox_core.data.faults import RowError, RowFault
from vox_core.data.jsonl import file_faults, numbered_lines
from vox_core.data.rows import read_row

Refuse = Callable[[int, RowFault], None]
"""Called with the number of a line and one thing that is wrong with it; 0 for the whole file."""
Progress = Callable[[int, int], None]
"""Called with bytes read and all bytes."""
_TELL_EVERY = 1 << 14


@dataclass(frozen=True, slots=True)
class Seen:
    """What is in a file.

    Args:
        rows: that are well formed.
        forms: name of a form -> rows that have it.
        unused: field that means nothing to vox -> rows that have it.
        faulty: rows that are not well formed.
    """

    rows: int
    forms: Mapping[str, int]
    unused: Mapping[str, int]
    faulty: int = 0


def look(path: Path, refuse: Refuse, progress: Progress | None = None) -> Seen:
    """Look at every line of a JSONL file.

    Raises:
        OSError: it cannot be read.
    """
    if faults := file_faults(path):
        for each in faults:
            refuse(0, each)
        return Seen(0, {}, {}, 1)
    kinds = Counter[tuple[str, tuple[str, ...]]]()
    faulty, done, size = 0, 0, path.stat().st_size
    for count, (number, line) in enumerate(numbered_lines(path)):
        done += len(line or b"")
        try:
            row = read_row(line)
            kinds[row.form, row.unused] += 1
        except RowError as error:
            faulty += 1
            for fault in error.faults:
                refuse(number, fault)
        if progress and not count % _TELL_EVERY:
            progress(min(done, size), size)
    if progress:
        progress(size, size)
    return _seen(kinds, faulty)


def _seen(kinds: Counter[tuple[str, tuple[str, ...]]], faulty: int) -> Seen:
    forms, unused = Counter[str](), Counter[str]()
    for (form, names), rows in kinds.items():
        forms[form] += rows
        unused.update(dict.fromkeys(names, rows))
    return Seen(kinds.total(), dict(forms.most_common()), dict(unused), faulty)
