"""A row that is known by its writing alone is one that the slow way reads, as of the same form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.test_data_quick import SLOW, USUAL
from vox_core.data import plain
from vox_core.data.attributes import ATTRIBUTES
from vox_core.data.jsonl import MAX_LINE_BYTES, RowError, parse_object
from vox_core.data.plain import Shapes, expression
from vox_core.data.quick import usual_row
from vox_core.data.rows import parse_row

TEXTS = ["a", " a", "\n\ta", '"', "\\", "é", "\u4e2d", "\u3042", "\U0001f600", 'a": "b"}', "a\x7f"]
BLANK = ["", " ", "\n", "\u2028", "\u3000", "\xa0", "\x1c", "\x85", "\u1680", " \u2003 "]


def written(row: Mapping[str, object], *, ascii_only: bool = True, spaced: bool = True) -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    text = json.dumps(row, ensure_ascii=ascii_only, separators=separators)
    return text.encode("utf-8", "surrogatepass")


def matches(pattern_of: Mapping[str, object], line: bytes) -> bool:
    """Whether the expression that is made of one row is that of another line."""
    values, shape = usual_row(written(pattern_of)) or pytest.fail("expected a usual row")
    return bool(re.fullmatch(expression(values, shape), line, re.DOTALL))


@pytest.mark.parametrize("form", ["messages", "pairs", "Alpaca", "text"])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("spaced", [True, False])
def test_a_row_as_it_is_mostly_written_is_known(form: str, ascii_only: bool, spaced: bool) -> None:
    line = written(USUAL[form], ascii_only=ascii_only, spaced=spaced)
    assert matches(USUAL[form], line)
    assert matches(USUAL[form], line + b"\r\n")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_whatever_a_text_says_it_is_one(text: str, ascii_only: bool) -> None:
    assert matches({"text": "a"}, written({"text": text}, ascii_only=ascii_only))


@pytest.mark.parametrize("text", [*BLANK, "\ud83d"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_text_that_says_nothing_is_none(text: str, ascii_only: bool) -> None:
    line = written({"text": text}, ascii_only=ascii_only)
    shapes = Shapes()
    assert shapes.of(b'{"text": "a"}') is not None
    assert shapes.of(line) is None


@pytest.mark.parametrize("case", SLOW)
def test_what_is_not_certain_is_not_known(case: str) -> None:
    shapes = Shapes()
    for row in USUAL.values():
        assert shapes.of(written(row)) is not None
    assert shapes.of(SLOW[case]) is None


def test_only_so_many_shapes_are_kept_and_those_that_matched_last() -> None:
    shapes = Shapes()
    for number in range(2 * plain._MOST):
        line = written({"text": "a", f"x{number}": 1})
        assert shapes.of(line) is shapes.of(line) is not None
        assert shapes._matches[0][1] is shapes.of(line)
    assert len(shapes._matches) == plain._MOST
    older = written({"text": "a", f"x{number - 1}": 1})
    assert shapes._matches[0][1] is not shapes.of(older) is shapes._matches[0][1]


def test_where_rows_are_written_in_ever_other_ways_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain, "_MOST_MISSES", 20)
    shapes = Shapes()
    for number in range(30):
        assert shapes.of(written({"text": "a", f"x{number}": 1})) is not None
        assert bool(shapes._matches) is (number < 20)


@pytest.mark.parametrize("more", [{"x" * 2000: 1}, {"x": {"y" * 2000: 1}}, {"x": [1]}, {"x": [{}]}])
def test_what_would_match_nothing_is_not_kept(more: dict[str, object]) -> None:
    """Or would be long."""
    shapes = Shapes()
    assert shapes.of(written({"text": "a", **more})) is not None
    assert not shapes._matches


@pytest.mark.parametrize("value", [{"file": "a.md", "line": 3}, {}, 1e-05, 0.1 + 0.2, -1.5e300])
def test_what_goes_with_a_row_may_be_an_object_or_a_number(value: object) -> None:
    row = {"text": "a", "provenance": value}
    shapes = Shapes()
    assert shapes.of(written(row)) is not None
    assert bool(shapes._matches) is (value != -1.5e300)
    assert matches(row, written(row)) is bool(shapes._matches)
    twice = b'{"text": "a", "provenance": {"file": "a.md", "file": 3}}'
    assert shapes.of(twice) is None


def test_a_line_that_is_too_long_has_no_shape() -> None:
    line = written({"text": "a" * (MAX_LINE_BYTES - 12)})
    assert len(line) == MAX_LINE_BYTES
    assert Shapes().of(line) is not None
    assert Shapes().of(line + b" ") is None


@pytest.mark.parametrize("end", ["", '"', '"}', '"} '])
def test_a_line_that_almost_matches_is_soon_refused(end: str) -> None:
    """Were there two ways of matching a text, this would take 2**1000 steps."""
    text = " \\n" * 1000 + "a\\n" * 1000 + end
    turns = '{"role": "user", "content": "a"}, ' * 1000
    for line in (
        f'{{"text": "{text}x',
        f'{{"messages": [{turns}{{"role": "user", "content": "a"}}',
    ):
        assert Shapes().of(b'{"text": "a"}')
        assert not matches(USUAL["messages"], line.encode())
        assert not matches({"text": "a"}, line.encode())


ESCAPES = ["\\", "\\n", "\\u", "\\u00e9", "\\ud83d", "\\ude00", "\\u2028", "\\u0000"]
PIECES = [*ESCAPES, *'"aé\u4e2d{},: \t\x1c\u2028\u3000\U0001f600\ud83d']
pieces = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
"""What stands between quotation marks, well formed or not."""
SCALARS = [
    "1",
    "-0",
    "01",
    "1.5",
    "1e3",
    "1.",
    "null",
    "true",
    '""',
    '"a"',
    "[]",
    '["a"]',
    "[1]",
    "{}",
]
scalars = st.sampled_from(SCALARS)


@pytest.mark.parametrize("name", [*ATTRIBUTES, "x", "input"])
def test_what_a_row_says_of_itself_is_of_the_right_type(name: str) -> None:
    start = '"instruction": "a", "output": "b"' if name == "input" else '"text": "a"'
    for learnt in SCALARS:
        shapes = Shapes()
        shapes.of(f'{{{start}, "{name}": {learnt}}}'.encode())
        for scalar in SCALARS:
            assert as_the_slow_way_says(shapes, f'{{{start}, "{name}": {scalar}}}'.encode())


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Rows of a few forms, whose texts are put in as they are."""
    text = pieces.map(lambda each: f'"{each}"')
    role = st.sampled_from(['"user"', '"assistant"', '"system"', '"tool"'])
    turn = st.builds('{{"role": {}, "content": {}}}'.format, role, text)
    conversation = st.lists(turn, max_size=3).map(lambda turns: f"[{', '.join(turns)}]")
    value = text | scalars | st.lists(text, max_size=2).map(lambda each: f"[{', '.join(each)}]")
    rows = [
        f'{{"messages": {draw(conversation)}}}',
        f'{{"instruction": {draw(text)}, "input": {draw(value)}, "output": {draw(text)}}}',
        f'{{"text": {draw(text)}, "rating": {draw(value)}, "category": {draw(value)}}}',
        f'{{"text": {draw(text)}, "tags": {draw(value)}, "x": {{"y": {draw(value)}, "z": ""}}}}',
    ]
    data = bytearray(draw(st.sampled_from(rows)).encode("utf-8", "surrogatepass"))
    if draw(st.integers(0, 5)) == 0:
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


KNOWN: list[Mapping[str, object]] = [
    USUAL["messages"],
    USUAL["Alpaca"],
    {"text": "a", "rating": 1, "category": "b"},
    {"text": "a", "tags": [], "x": {"y": 1, "z": ""}},
]


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    """Which has learnt as much as it does."""
    shapes = Shapes()
    for row in KNOWN:
        assert shapes.of(written(row)) is not None
    assert len(shapes._matches) == plain._MOST
    return shapes


def as_the_slow_way_says(shapes: Shapes, line: bytes) -> bool:
    if (shape := shapes.of(line)) is not None:
        row = parse_row(parse_object(line))
        return (row.form, row.unused) == (shape.form, shape.unused)
    try:
        parse_row(parse_object(line))
    except RowError:
        return True
    return usual_row(line) is None


@settings(max_examples=150, deadline=None)
@given(lines())
def test_a_known_row_is_what_the_slow_way_says(shapes: Shapes, line: bytes) -> None:
    assert as_the_slow_way_says(shapes, line)


@pytest.mark.long
@settings(max_examples=5_000, deadline=None)
@given(lines())
def test_a_known_row_is_what_the_slow_way_says_of_many(shapes: Shapes, line: bytes) -> None:
    assert as_the_slow_way_says(shapes, line)
