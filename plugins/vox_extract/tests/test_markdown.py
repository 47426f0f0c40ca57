"""Every row of a Markdown file, word for word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vox_core.data.json_rows import parse_object
from vox_core.data.rows import parse_row
from vox_core.errors import DataError
from vox_extract.locate import Reader
from vox_extract.markdown import locate, markdown_rows
from vox_extract.rows import Extracted, Sieve

DOCUMENT = """---
title: not this
---
![badge](b.svg) <img src="x">

# The tool

It does [what it does](other.md) to a [thing](https://x.org).
<!-- not for readers -->

| a | b |
|---|---|
| 1 | 2 |

## How do I start?

Install it, then run:

```sh
tool --go
```

    indented = "code"

### On a `Mac`

Nothing more to do here.

# Another

```python
alone = 1
```
"""


def rows_of(path: Path, **sieve) -> tuple[list[Extracted], Reader]:
    reader = Reader()
    return list(markdown_rows(locate(str(path)), Sieve(**sieve), reader)), reader


def test_rows_of_a_document(tmp_path: Path) -> None:
    (tmp_path / "guide").mkdir()
    (tmp_path / "guide" / "a.md").write_text(DOCUMENT)
    rows, reader = rows_of(tmp_path)
    assert reader.unread == []
    assert [(row.kind, row.provenance["line"], row.question, row.answer) for row in rows] == [
        (
            "section",
            6,
            "Tell me about The tool.",
            "It does what it does to a [thing](https://x.org).\n\n| a | b |\n|---|---|\n| 1 | 2 |",
        ),
        (
            "section",
            15,
            "How do I start? (The tool)",
            'Install it, then run:\n\n```sh\ntool --go\n```\n\n```\nindented = "code"\n```',
        ),
        (
            "code",
            19,
            "Show code for this (The tool > How do I start?): Install it, then run",
            "```sh\ntool --go\n```",
        ),
        (
            "code",
            23,
            "Give the code for “How do I start?” (The tool).",
            '```\nindented = "code"\n```',
        ),
        (
            "section",
            25,
            "What does “The tool” say about “How do I start? > On a `Mac`”?",
            "Nothing more to do here.",
        ),
        ("code", 31, "Give the code for “Another”.", "```python\nalone = 1\n```"),
    ]
    assert {row.provenance["file"] for row in rows} == {"guide/a.md"}
    assert all(parse_row(parse_object(row.line())).kind == "chat" for row in rows)


def test_what_is_no_words_of_the_document(tmp_path: Path) -> None:
    """Front matter, comments, images and HTML; lines keep their numbers."""
    (tmp_path / "a.md").write_text(
        "---\ntitle: not this\n---\nWords <!-- no --> ![x](y.png)before <b>any</b> heading.\n"
    )
    rows, _ = rows_of(tmp_path)
    assert [(row.answer, row.provenance["object"]) for row in rows] == [
        ("Words  before any heading.", "a")
    ]


def test_the_same_question_is_asked_once(tmp_path: Path) -> None:
    text = "# Tool\n\n## Usage\n\nUse it like so.\n\n## Usage\n\nOr use it so."
    (tmp_path / "a.md").write_text(text)
    assert [row.answer for row in rows_of(tmp_path)[0]] == ["Use it like so."]


def test_a_section_that_is_too_long_is_cut_after_a_part(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# T\n\nFirst of all, this.\n\nSecond, and last.\n\nThird one.")
    rows, _ = rows_of(tmp_path, max_characters=40)
    assert [row.answer for row in rows] == ["First of all, this.\n\nSecond, and last."]


def test_files_that_are_left_out_or_passed_over(tmp_path: Path) -> None:
    for name in ("LICENSE.md", ".hidden/a.md", "node_modules/a.md", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# Heading\n\nSome words about it.")
    with pytest.raises(DataError, match="VOX-D060"):
        locate(str(tmp_path))
    (tmp_path / "bad.md").write_bytes(b"# \xff")
    (tmp_path / "good.markdown").write_text("Some words before any heading.")
    rows, reader = rows_of(tmp_path)
    assert [row.answer for row in rows] == ["Some words before any heading."]
    assert reader.unread == ["bad.md: invalid UTF-8 at byte 2"]


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "good.md").write_text("Some words before any heading.")
    (tmp_path / "huge.md").touch()
    os.truncate(tmp_path / "huge.md", 1 << 40)
    _, reader = rows_of(tmp_path)
    assert reader.unread == ["huge.md: it has more than 10,000,000 bytes"]


@pytest.mark.parametrize("piece", ["[", "![", "<", "`", "<!--", "[a](", "> ", "# a\n", "- "])
def test_a_long_text_is_read_to_its_end(tmp_path: Path, piece: str) -> None:
    """A pattern that takes cubic time or more would reach the suite's own limit."""
    (tmp_path / "a.md").write_text(piece * 5000)
    _, reader = rows_of(tmp_path)
    assert reader.unread == []
