"""A look at every row of a file: how many there are, of which forms, and what is wrong with the
rest.

Only counts are kept. The usual row is not even made (`plain.py`), so that a look takes about as
long as `json.loads` of each line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vox_core.data.jsonl import RowError, numbered_lines, other_format, parse_object
from vox_core.data.plain import Shapes
from vox_core.data.quick import Shape
from vox_core.data.rows import parse_row

Refuse = Callable[[int, str], None]
"""Called with the number of a line and one thing that is wrong with it; 0 for the whole file."""
Progress = Callable[[int, int], None]
"""Called with bytes read and all bytes."""
_TELL_EVERY = 1 << 14
_MOST_SHAPES = 4096


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
    if other := other_format(path):
        refuse(0, other)
        return Seen(0, {}, {}, 1)
    shapes, kinds = dict[Shape, int](), Counter[tuple[str, tuple[str, ...]]]()
    faulty, done, shape_of = 0, 0, Shapes().of
    size = path.stat().st_size
    for count, (number, line) in enumerate(numbered_lines(path)):
        done += len(line or b"")
        if line is not None and (shape := shape_of(line)):
            shapes[shape] = shapes.get(shape, 0) + 1
            if len(shapes) > _MOST_SHAPES:
                _fold(shapes, kinds)
        else:
            try:
                row = parse_row(parse_object(line))
                kinds[row.form, row.unused] += 1
            except RowError as fault:
                faulty += 1
                for text in fault.faults:
                    refuse(number, text)
        if progress and not count % _TELL_EVERY:
            progress(min(done, size), size)
    if progress:
        progress(size, size)
    _fold(shapes, kinds)
    return _seen(kinds, faulty)


def _fold(shapes: dict[Shape, int], kinds: Counter[tuple[str, tuple[str, ...]]]) -> None:
    """Into what is kept of a shape. Shapes are counted by identity, which is quick, and may come
    again as another object."""
    for shape, rows in shapes.items():
        kinds[shape.form, shape.unused] += rows
    shapes.clear()


def _seen(kinds: Counter[tuple[str, tuple[str, ...]]], faulty: int) -> Seen:
    forms, unused = Counter[str](), Counter[str]()
    for (form, names), rows in kinds.items():
        forms[form] += rows
        unused.update(dict.fromkeys(names, rows))
    return Seen(kinds.total(), dict(forms.most_common()), dict(unused), faulty)
