"""The quick way of reading a row gives what the slow way gives, whatever the line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vox_core.data.jsonl import RowError, parse_object
from vox_core.data.quick import read_row, usual_row
from vox_core.data.rows import Row, parse_row

USUAL = {
    "messages": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    },
    "pairs": {
        "prompt": "a",
        "response": "é\u2028",
        "rating": 4.5,
        "tags": ["x"],
        "difficulty": "hard",
    },
    "Alpaca": {"instruction": "a", "input": "i", "output": "b"},
    "prompt/completion": {"prompt": "a", "completion": "b", "id": 7, "meta": {"x": [{"y": 1}, {}]}},
    "Alpaca and more": {"instruction": "a", "output": "b", "rating": 2**64 + 1, "tags": ["x"]},
    "text": {"text": 'she said ": {"a": 1}', "source": None},
}


def slowly(line: bytes) -> Row | tuple[str, ...]:
    try:
        return parse_row(parse_object(line))
    except RowError as fault:
        return fault.faults


def quickly(line: bytes) -> Row | tuple[str, ...]:
    try:
        return read_row(line)
    except RowError as fault:
        return fault.faults


@pytest.mark.parametrize("form", USUAL)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_usual_row_is_read_quickly(form: str, ascii_only: bool) -> None:
    line = json.dumps(USUAL[form], ensure_ascii=ascii_only).encode()
    usual = usual_row(line)
    assert usual is not None and usual[1].form == form.split()[0]
    assert quickly(line) == slowly(line)
    assert isinstance(quickly(line), Row)


SLOW = {
    "a key twice": b'{"text": "a", "text": "b"}',
    "a key twice, once escaped": b'{"text": "a", "t\\u0065xt": "b"}',
    "a key twice, once apart from its colon": b'{"text": "a", "text" : "b"}',
    "a key twice after a tab": b'{"text": "a", "text"\t: "b"}',
    "a key twice after a carriage return": b'{"text": "a", "text"\r: "b"}',
    "a key twice within": b'{"text": "a", "x": [{"y": 1, "y": 2}]}',
    "a key that ends with a backslash": b'{"text": "a", "x\\\\": 1, "x\\\\": 2}',
    "a key twice, and one in a text": b'{"text": "\\\\\\":", "a\\\\": 1, "text": "b"}',
    "half a surrogate pair": b'{"text": "\\ud83d"}',
    "invalid UTF-8": b'{"text": "\xff"}',
    "NaN": b'{"text": "a", "x": NaN}',
    "an empty text": b'{"text": "\xe2\x80\xa8"}',
    "a blank input": b'{"instruction": "a", "input": " ", "output": "b"}',
    "a number as input": b'{"instruction": "a", "input": 0, "output": "b"}',
    "a rating that is none": b'{"text": "a", "rating": true}',
    "tags that are none": b'{"text": "a", "tags": ["a", 1]}',
    "a category that is none": b'{"text": "a", "category": 1}',
    "a rating beyond all": b'{"text": "a", "rating": 1e999}',
    "a system that comes late": (
        b'{"messages": [{"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}]}'
    ),
    "nobody answers": b'{"messages": [{"role": "user", "content": "a"}]}',
    "three fields": (
        b'{"messages": [{"role": "user", "content": "a"}, '
        b'{"role": "assistant", "content": "b", "weight": 0}]}'
    ),
    "a misspelt field": b'{"text": "a", "promt": "b"}',
    "deep": b'{"text": "a", "x": ' + b"[" * 50 + b"]" * 50 + b"}",
}


@pytest.mark.parametrize("case", SLOW)
def test_what_is_not_certain_goes_the_slow_way(case: str) -> None:
    assert usual_row(SLOW[case]) is None
    assert quickly(SLOW[case]) == slowly(SLOW[case])


words = st.sampled_from(
    ["a", "", " ", '":', '\\":', "\\", "é", "\ud83d", "\u2028", " :", "user", "role", "x" * 3]
) | st.text(max_size=4)
NAMES = (
    "prompt instruction input completion response output text messages turns conversations rating "
    "tags category tools chosen rejected id a\\ functions system"
)
names = st.sampled_from(NAMES.split())
numbers = st.integers() | st.floats() | st.sampled_from([2**64, -(2**63) - 1, 10**400])
scalars = st.none() | st.booleans() | numbers | words
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"]), "content": words},
    optional={"weight": numbers},
)
values = st.recursive(
    scalars | st.lists(message, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=2),
    max_leaves=5,
)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Rows of somewhat the right form, written in several ways, and sometimes damaged."""
    row = draw(st.dictionaries(names, values, max_size=4))
    if draw(st.booleans()):
        row = {"messages": draw(st.lists(message, max_size=3)), **row}
    separators = draw(st.sampled_from([(", ", ": "), (",", ":"), (", ", " : "), (",", "\t:")]))
    text = json.dumps(row, ensure_ascii=draw(st.booleans()), separators=separators)
    if draw(st.integers(0, 3)) == 0:  # a key twice
        key = draw(names)
        text = text[:-1] + f"{',' if row else ''}{json.dumps(key)}:{json.dumps(draw(scalars))}}}"
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if draw(st.integers(0, 5)) == 0:
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


@settings(max_examples=150, deadline=None)
@given(lines())
def test_quick_and_slow_give_the_same(line: bytes) -> None:
    assert quickly(line) == slowly(line)


@pytest.mark.long
@settings(max_examples=2000, deadline=None)
@given(lines())
def test_quick_and_slow_give_the_same_for_many_lines(line: bytes) -> None:
    assert quickly(line) == slowly(line)
