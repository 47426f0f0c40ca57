"""Statistics of data files: rows, lengths, duplicates, languages."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vox_core.data.records import read_lines
from vox_core.data.rows import Record
from vox_core.data.source import open_source
from vox_data import counting
from vox_data.counting import SAMPLE, Counts, Duplicates
from vox_data.stats import (
    UNCLEAR,
    Truncation,
    histogram,
    language_mix,
    lengths,
    truncations,
)

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "how?"}, {"role": "assistant", "content": "so 🙂"}]},
    {"messages": [{"role": "assistant", "content": "a"}], "id": 3},
    {
        "messages": [
            {"role": "system", "content": ""},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("in", "parts")]},
            {"role": "assistant", "content": "b"},
        ]
    },
    {"prompt": "a", "completion": "bc"},
    {"instruction": "a", "input": "d", "output": "bc", "id": 1},
    {"text": "a text"},
    {"text": "a text", "category": "x", "rating": 4},
    {"text": "another", "rating": 4, "category": "x", "source": {"a": 1}},
]  # fmt: skip
WRONG = [
    b'{"messages": []}',
    b'{"text": ""}',
    b'{"text": "a", "prompt": "b"}',
    b'{"text": "a"',
    b'{"text": "a"} {"text": "b"}',
    b'{"text": "\xff"}',
    b"[1]",
    b'{"messages": [{"role": "assistant", "content": 3}]}',
    b'{"text": "a", "text": "b"}',
    b'{"prompt": ""}',
]


def write(path: Path, *rows: dict[str, Any] | bytes) -> Path:
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"\n".join(lines))
    return path


def count(paths: list[Path], progress: counting.Progress | None = None) -> Counts:
    return counting.count([open_source(path) for path in paths], progress)


def duplicates(counts: Counts, paths: list[Path]) -> Duplicates:
    return counts.duplicates([open_source(path) for path in paths])


def test_every_row_is_counted_as_the_records_say(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS)
    found = count([path])
    records = [record for _, record in read_lines(path) if isinstance(record, Record)]
    assert (found.rows, found.malformed) == (len(records), 0)
    assert found.forms == Counter(record.form for record in records)
    said = [[m.content for m in record.messages or ()] or [record.text or ""] for record in records]
    assert [*found.characters] == [sum(map(len, texts)) for texts in said]
    assert [*found.lines] == [record.line for record in records]
    roles = [tuple(m.role for m in record.messages or ()) for record in records]
    assert found.roles == Counter(roles)
    assert found.sample == ["\n".join(texts) for texts in said]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_read_is_counted_apart(tmp_path: Path, wrong: bytes) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS, wrong, b"", ROWS[0], b"  ")
    records = [isinstance(record, Record) for _, record in read_lines(path)]
    found = count([path])
    assert (records.count(True), records.count(False)) == (len(ROWS) + 1, 1)
    assert (found.rows, found.malformed) == (len(ROWS) + 1, 1)


def test_a_row_after_a_broken_one_in_its_block_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *([ROWS[0]] * 5), b'{"text": "\xff"}', *([ROWS[5]] * 5))
    found = count([path])
    assert (found.rows, found.malformed, found.forms["text"]) == (10, 1, 5)


def test_progress_is_bytes_of_all_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", *ROWS * 9)
    second = write(tmp_path / "b.jsonl", *ROWS)
    told: list[tuple[int, int]] = []
    assert count([first, second], lambda *done: told.append(done)).first == [0, 72]
    size = first.stat().st_size + second.stat().st_size
    assert told == sorted(told)
    assert told[-1] == (size, size)


def test_attributes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "a", "category": f"c{n % 3}", "rating": n % 2} for n in range(12)]
    found = count([write(tmp_path / "a.jsonl", rows[0], *rows)])
    assert found.attributes["category"].total() >= 12
    assert found.attributes["rating"][1] == 6
    monkeypatch.setattr(counting, "_MOST_VALUES", 2)
    many = count([write(tmp_path / "b.jsonl", rows[0], *rows)])
    assert set(many.attributes["category"]) == {"c0", "c1", "other values"}


def test_the_sample_is_spread_over_all_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": str(n)} for n in range(5 * SAMPLE)))
    taken = [int(text) for text in count([path]).sample]
    assert SAMPLE <= len(taken) < 2 * SAMPLE
    assert {b - a for a, b in pairwise(taken)} == {4}
    assert taken[-1] > 5 * SAMPLE - 5


def test_duplicates_are_named_with_the_row_they_repeat(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", ROWS[5], ROWS[0], {**ROWS[5], "id": 9})
    b = write(tmp_path / "b.jsonl", ROWS[0], ROWS[3], ROWS[5])
    found = duplicates(count([a, b]), [a, b])
    assert (found.rows, found.repeated) == (3, 2)
    assert found.first == ((f"{a}:3", f"{a}:1"), (f"{b}:1", f"{a}:2"), (f"{b}:3", f"{a}:1"))
    other_roles = [
        {"messages": [{"role": "assistant", "content": "a\nb"}]},
        {
            "messages": [
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "b"},
            ]
        },
    ]
    path = write(tmp_path / "c.jsonl", *other_roles)
    assert duplicates(count([path]), [path]).rows == 0


def test_percentiles_are_lengths_of_rows() -> None:
    values = np.random.default_rng(1).integers(1, 400, 999)
    found = lengths(*histogram(Counter(values.tolist())))
    expected = np.percentile(values, [*found.percentiles], method="inverted_cdf")
    assert [*found.percentiles.values()] == expected.tolist()
    assert (found.total, found.longest) == (values.sum(), values.max())
    assert lengths(*histogram({})).longest == 0


def test_truncation_at_each_length() -> None:
    found = truncations(*histogram({100: 3, 600: 2, 1500: 1}), 700)
    assert found == [
        Truncation(512, 3, 2 * 88 + 988),
        Truncation(700, 1, 800),
        Truncation(1024, 1, 476),
        Truncation(2048, 0, 0),
    ]


def test_languages_are_told() -> None:
    german = "Das ist ein Satz, den jemand auf Deutsch geschrieben hat."
    english = "This is a sentence which somebody wrote in English."
    assert language_mix([german, english, english, "42"]) == {"de": 1, "en": 2, UNCLEAR: 1}
