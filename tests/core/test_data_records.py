"""JSONL files as records: every form of row, and the exact diagnosis of every malformed one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.core.data_samples import load_records
from vox_core.data import json_rows
from vox_core.data.faults import RowError
from vox_core.data.fields import Attributes
from vox_core.data.formats import find_split, require_files
from vox_core.data.messages import Message
from vox_core.data.records import STEP
from vox_core.data.rows import parse_row
from vox_core.errors import DataError

GOOD = b'{"prompt": "a", "completion": "b"}\n'


@pytest.fixture
def write(tmp_path: Path):
    def write(*lines: bytes | str | object, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(map(line_bytes, lines)))
        return path

    return write


def line_bytes(line: bytes | str | object) -> bytes:
    if isinstance(line, bytes):
        return line
    text = line if isinstance(line, str) else json.dumps(line)
    return text.encode() + b"\n"


def turns(*roles: str) -> dict[str, object]:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


def said(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", **fields}]}


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "a", "completion": "b"}, "a", "b"),
        ({"prompt": " a ", "response": "b\n", "id": 7}, " a ", "b\n"),
        ({"instruction": "a", "output": "b"}, "a", "b"),
        ({"instruction": "a", "input": "", "output": "b"}, "a", "b"),
        ({"instruction": "a", "input": None, "response": "b"}, "a", "b"),
        ({"instruction": "a", "input": "c", "output": "b"}, "a\n\nc", "b"),
        ({"question": "a", "answer": "b"}, "a", "b"),
        ({"question": "a", "response": "b"}, "a", "b"),
        ({"prompt": "a", "answer": "b"}, "a", "b"),
        ({"prompt": "a", "completion": "b", "question": "c", "answer": "d"}, "a", "b"),
    ],
)
def test_prompt_and_completion(write, row: object, prompt: str, answer: str) -> None:
    (record,) = load_records([write(row)])
    assert record.kind == "completion"
    assert record.messages == (Message("user", prompt), Message("assistant", answer))


def test_text(write) -> None:
    (record,) = load_records([write({"text": " once upon a time\n"})])
    assert (record.kind, record.text, record.messages) == ("text", " once upon a time\n", None)


def chat(*said: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in (each.split(": ") for each in said)]


FORMS: dict[str, tuple[object, str, list[str], tuple[str, ...]]] = {
    "messages": ({"messages": chat("user: a", "assistant: b")}, "messages", ["a", "b"], ()),
    "turns": ({"turns": chat("user: a", "assistant: b"), "id": 1}, "messages", ["a", "b"], ("id",)),
    "messages and other turns": (
        {"turns": chat("user: x"), "messages": chat("user: a", "assistant: b")},
        "messages",
        ["a", "b"],
        ("turns",),
    ),
    "ShareGPT": (
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "a"},
                {"from": "bard", "value": "b"},
                {"from": "observation", "value": "c"},
                {"from": "chatgpt", "value": "d"},
            ]
        },
        "ShareGPT",
        ["s", "a", "b", "c", "d"],
        (),
    ),
    "ShareGPT with a system": (
        {
            "conversations": [{"from": "user", "value": "a"}, {"from": "gpt", "value": "b"}],
            "system": "s",
        },
        "ShareGPT",
        ["s", "a", "b"],
        (),
    ),
    "ShareGPT called messages": (
        {"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        "ShareGPT",
        ["a", "b"],
        (),
    ),
    "messages called conversations": (
        {"conversations": chat("user: a", "assistant: b")},
        "messages",
        ["a", "b"],
        (),
    ),
    "Alpaca": (
        {"instruction": "a", "input": "i", "output": "b", "id": 1},
        "Alpaca",
        ["a\n\ni", "b"],
        ("id",),
    ),
    "prompt/response": (
        {"prompt": "a", "response": "b", "rating": 1},
        "prompt/response",
        ["a", "b"],
        (),
    ),
    "canonical names": (
        {"instruction": "x", "prompt": "a", "output": "y", "response": "b", "input": "z"},
        "prompt/response",
        ["a", "b"],
        ("instruction", "output", "input"),
    ),
    "two names, one text": (
        {"instruction": "a", "prompt": "a", "completion": "b", "output": "b"},
        "prompt/completion",
        ["a", "b"],
        (),
    ),
    "columns of other forms": (
        {"prompt": "a", "completion": "b", "text": None, "messages": None, "chosen": None},
        "prompt/completion",
        ["a", "b"],
        (),
    ),
}


@pytest.mark.parametrize("case", FORMS)
def test_forms(write, case: str) -> None:
    row, form, contents, unused = FORMS[case]
    (record,) = load_records([write(row)])
    assert (record.form, record.unused) == (form, unused)
    assert [message.content for message in record.messages or ()] == contents


PAIRS: dict[str, dict[str, object]] = {
    "texts": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "conversations": {
        "chosen": chat("user: a", "assistant: b"),
        "rejected": chat("user: a", "assistant: c"),
    },
    "answers": {"prompt": "a", "chosen": chat("assistant: b"), "rejected": chat("assistant: c")},
    "a prompt of messages": {
        "prompt": chat("user: a"),
        "chosen": chat("assistant: b"),
        "rejected": chat("assistant: c"),
    },
    "a prompt that is repeated": {
        "prompt": "a",
        "chosen": chat("user: a", "assistant: b"),
        "rejected": chat("user: a", "assistant: c"),
    },
    "ShareGPT": {
        "chosen": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        "rejected": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "c"}],
    },
}


@pytest.mark.parametrize("case", PAIRS)
def test_preferences(write, case: str) -> None:
    (record,) = load_records([write({**PAIRS[case], "tags": ["t"]})])
    assert (record.kind, record.form, record.unused) == ("preference", "preference", ())
    assert record.messages == (Message("user", "a"), Message("assistant", "b"))
    assert record.rejected == (Message("user", "a"), Message("assistant", "c"))
    assert record.attributes == Attributes(tags=("t",))


def test_a_preference_with_the_conversation_beside_it(write) -> None:
    (record,) = load_records([write({**PAIRS["conversations"], "messages": [], "prompt": "other"})])
    assert (record.kind, record.unused) == ("preference", ("messages", "prompt"))


def test_what_a_row_says_of_itself(write) -> None:
    said = {
        "rating": 4,
        "category": "sql",
        "difficulty": "hard",
        "lane": "",
        "response_mode": None,
        "task_family": "f",
        "tags": ["a", "b"],
    }
    first, second = load_records([write({"text": "a", **said}, {"text": "b", "difficulty": 0.5})])
    assert first.attributes == Attributes(4.0, "sql", "hard", None, None, "f", ("a", "b"))
    assert (second.attributes, first.unused) == (Attributes(difficulty=0.5), ())


def test_tools_are_kept_as_they_are(write) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}]
    (record,) = load_records([write({**turns("user", "assistant"), "tools": tools})])
    assert record.tools == tuple(tools)


@pytest.mark.parametrize(
    "roles",
    [
        ("user", "assistant"),
        ("system", "user", "assistant", "user"),
        ("developer", "user", "assistant"),
        ("user", "assistant", "tool", "tool", "assistant"),
        ("user", "user", "assistant", "assistant"),
        ("assistant", "user"),
    ],
)
def test_roles_that_make_sense(write, roles: tuple[str, ...]) -> None:
    (record,) = load_records([write(turns(*roles))])
    assert record.kind == "chat"
    assert tuple(message.role for message in record.messages or ()) == roles


def test_parts_of_text_are_joined(write) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    (record,) = load_records([write(said(content=parts))])
    assert record.messages == (Message("user", "x"), Message("assistant", "one two"))


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_system_and_a_tool_may_say_nothing(write, role: str) -> None:
    row = turns("system", "user", "assistant", "tool")
    row["messages"] = [
        {**message, "content": "" if message["role"] == role else "x"}
        for message in row["messages"]  # type: ignore[attr-defined]
    ]
    assert len(load_records([write(row)])) == 1


def test_places_are_kept_over_blank_lines_a_byte_order_mark_and_windows_line_ends(write) -> None:
    path = write(b"\xef\xbb\xbf" + GOOD, b"\n", b"  \r\n", GOOD.replace(b"\n", b"\r\n"), GOOD[:-1])
    assert [(r.source, r.line) for r in load_records([path])] == [(path, 1), (path, 4), (path, 5)]


def test_a_line_separator_of_unicode_does_not_end_a_line(write) -> None:
    (record,) = load_records([write('{"text": "a\u2028b\x85c"}')])
    assert record.text == "a\u2028b\x85c"


def test_files_are_read_in_the_order_given(write) -> None:
    first, second = write({"text": "1"}, name="b"), write({"text": "2"}, name="a")
    assert [record.text for record in load_records([first, second, first])] == ["1", "2", "1"]


# --- what is refused ------------------------------------------------------------------------------

ROLES = "expected one of system, developer, user, assistant, tool"
FIELDS = (
    "expected one of messages, conversations, prompt, instruction, question, completion, response, "
    "output, answer, text, chosen"
)
SPEAKERS = (
    "expected one of human, user, gpt, assistant, chatgpt, bing, bard, function_call, system, "
    "tool, function, observation"
)
MALFORMED: dict[str, tuple[bytes | str | object, list[str]]] = {
    "invalid JSON": (
        '{"text": "a" "b"}',
        [
            "found invalid JSON at column 14 (Expecting ',' delimiter), "
            "expected one JSON object on one line"
        ],
    ),
    "two objects": (
        '{"text": "a"} {"text": "b"}',
        ["found invalid JSON at column 15 (Extra data), expected one JSON object on one line"],
    ),
    "invalid UTF-8": (
        b'{"text": "\xff"}\n',
        ["found invalid UTF-8 at byte 10 of the line (0xff), expected UTF-8"],
    ),
    "a list": ([1], ["found a list, expected a JSON object"]),
    "a string": ('"a"', ["found a string, expected a JSON object"]),
    "null": (None, ["found null, expected a JSON object"]),
    "NaN": (
        '{"text": NaN}',
        ["found NaN, which JSON does not have, expected a number, a string or null"],
    ),
    "a key twice": (
        '{"text": "a", "text": "b"}',
        ['found the key "text" more than once, expected it once'],
    ),
    "a key twice, once escaped": (
        '{"text": "a", "t\\u0065xt" : "b"}',
        ['found the key "text" more than once, expected it once'],
    ),
    "a key twice within": (
        '{"messages": [{"role": "user", "role": "user", "content": "a"}]}',
        ['found the key "role" more than once, expected it once'],
    ),
    "nesting": (
        '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}",
        ["found JSON nested too deeply, expected a flat row"],
    ),
    "no fields": ({}, [f"found an object without fields, {FIELDS}"]),
    "unknown fields": (
        {"promt": "a", "completed": "b", "zzz": 1},
        [
            f'found the fields promt, completed, zzz, {FIELDS} (is "promt" meant as "prompt"?; '
            'is "completed" meant as "completion"?)'
        ],
    ),
    "ShareGPT without turns": (
        {"conversations": []},
        ["found no assistant message (roles: none), expected at least one"],
    ),
    "strangers": (
        {"conversations": [{"from": "gpt-4", "value": "a"}, {"value": "b"}, "c", {"from": "gpt"}]},
        [
            f'found "gpt-4" as conversations[0].from, {SPEAKERS}',
            f"found null as conversations[1].from, {SPEAKERS}",
            "found a string as conversations[2], expected an object",
            "found null as conversations[3].value, expected a string",
        ],
    ),
    "ShareGPT without words": (
        {"conversations": [{"from": "human", "value": 3}, {"from": "gpt", "value": " "}]},
        [
            "found a number as conversations[0].value, expected a string",
            "found nothing in conversations[1].value, expected text of the assistant",
        ],
    ),
    "messages called conversations": (
        {"conversations": [{"role": "user", "content": 3}, {"role": "assistant", "content": "a"}]},
        ["found a number as conversations[0].content, expected a string"],
    ),
    "a prompt of messages": (
        {
            "prompt": [{"role": "user", "content": 3}],
            "chosen": [{"from": "gpt", "value": "a"}],
            "rejected": [{"from": "gpt", "value": ""}],
        },
        [
            "found a number as prompt[0].content, expected a string",
            "found nothing in rejected[0].value, expected text of the assistant",
        ],
    ),
    "turns": (
        {"turns": [{"role": "human", "content": "a"}]},
        [f'found "human" as turns[0].role, {ROLES}'],
    ),
    "attributes": (
        {
            "prompt": "a",
            "response": " ",
            "rating": "5",
            "difficulty": [],
            "lane": 1,
            "category": {},
            "tags": ["a", None],
        },
        [
            'found nothing in "response", expected text',
            'found an object as "category", expected a string',
            'found a number as "lane", expected a string',
            'found a string as "rating", expected a number',
            'found a list as "difficulty", expected a number or a word',
            "found null as tags[1], expected a string",
        ],
    ),
    "ratings that are no numbers": (
        '{"text": "a", "rating": true, "difficulty": 1e999, "tags": "x"}',
        [
            'found a boolean as "rating", expected a number',
            'found a number too large as "difficulty", expected a finite one',
            'found a string as "tags", expected a list of strings',
        ],
    ),
    "one answer of a pair": (
        {"prompt": "a", "chosen": "b"},
        ['found "chosen" without "rejected", expected both'],
    ),
    "a pair of two kinds": (
        {"prompt": "a", "chosen": "b", "rejected": []},
        [
            'found a string as "chosen" and a list as "rejected", '
            "expected two strings or two lists of messages"
        ],
    ),
    "a pair of the same": (
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        ['found the same as "chosen" and as "rejected", expected two answers'],
    ),
    "a pair without a prompt": (
        {"chosen": "a", "rejected": "b"},
        ["found none of prompt, instruction, question, expected one"],
    ),
    "a pair that begins differently": (
        {
            "chosen": turns("user", "assistant")["messages"],
            "rejected": said(content="b")["messages"][1:],
        },
        ['found "chosen" and "rejected" that begin differently, expected one prompt'],
    ),
    "a pair that ends with a question": (
        {
            "prompt": "x",
            "chosen": [{"role": "assistant", "content": ""}],
            "rejected": turns("assistant", "user")["messages"],
        },
        [
            "found nothing in chosen[0].content, expected text of the assistant",
            'found a "rejected" that ends with the user, expected the assistant',
        ],
    ),
    "several forms": (
        {"text": "a", "prompt": "b", "completion": "c"},
        [
            "found fields of several forms (prompt, completion, text), expected those of one; "
            'to leave one out: [data.fields] text = ""'
        ],
    ),
    "several forms, all null": (
        {"text": None, "messages": None},
        [
            "found fields of several forms (messages, text), expected those of one; "
            'to leave one out: [data.fields] text = ""'
        ],
    ),
    "both fields wrong": (
        {"prompt": 1, "completion": []},
        [
            'found a number as "prompt", expected a string',
            'found a list as "completion", expected a string',
        ],
    ),
    "no completion": (
        {"prompt": "a"},
        ["found none of completion, response, output, answer, expected one"],
    ),
    "an empty prompt": (
        {"prompt": " \n", "completion": "a"},
        ['found nothing in "prompt", expected text'],
    ),
    "a number": (
        {"prompt": "a", "completion": 3},
        ['found a number as "completion", expected a string'],
    ),
    "half a surrogate pair": (
        '{"text": "a\\ud83d"}',
        ['found half a surrogate pair (\\ud83d) in "text", expected both halves or none'],
    ),
    "tools": (
        {"text": "a", "tools": [{}]},
        ["found tools, which vox does not support, expected none"],
    ),
    "tools of another kind": (
        {**turns("user", "assistant"), "tools": ["a"]},
        ["found a string as tools[0], expected an object"],
    ),
    "a misspelt field": (
        {**turns("user", "assistant"), "promt": "a", "outputs": "b"},
        [
            'found the field "promt", expected a known one (is it meant as "prompt"?)',
            'found the field "outputs", expected a known one (is it meant as "output"?)',
        ],
    ),
    "messages are no list": (
        {"messages": {}},
        ['found an object as "messages", expected a list'],
    ),
    "no messages": (
        {"messages": []},
        ["found no assistant message (roles: none), expected at least one"],
    ),
    "no assistant": (
        turns("system", "user"),
        ["found no assistant message (roles: system, user), expected at least one"],
    ),
    "system late and a tool first": (
        turns("tool", "system", "assistant"),
        [
            'found the role "tool" in messages[0], expected it after an assistant',
            'found the role "system" in messages[1], expected it first or not at all',
        ],
    ),
    "faults of several messages": (
        {"messages": [{"role": "human", "content": "a"}, "b", {"role": "user", "content": ""}]},
        [
            f'found "human" as messages[0].role, {ROLES}',
            "found a string as messages[1], expected an object",
            "found nothing in messages[2].content, expected text of the user",
        ],
    ),
    "no role": (
        {"messages": [{"content": "a"}]},
        [f"found null as messages[0].role, {ROLES}"],
    ),
    "an empty answer": (
        said(content=""),
        ["found nothing in messages[1].content, expected text of the assistant"],
    ),
    "no content": (
        said(),
        ["found null as messages[1].content, expected a string"],
    ),
    "an image": (
        said(content=[{"type": "image", "url": "a.png"}]),
        [
            'found a part of type "image" in messages[1].content[0], '
            "expected parts of type text only"
        ],
    ),
    "a part without text": (
        said(content=[{"type": "text"}]),
        ["found null as messages[1].content[0].text, expected a string"],
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_the_diagnosis_of_a_malformed_row(write, case: str) -> None:
    line, faults = MALFORMED[case]
    path = write(GOOD, b"\n", line, GOOD)
    with pytest.raises(DataError) as caught:
        load_records([path])
    assert caught.value.code == "VOX-D003"
    assert list(caught.value.faults) == [f"{path}, line 3: {fault}" for fault in faults]
    assert caught.value.exit_code == 2


def test_a_number_of_thousands_of_digits(write) -> None:
    with pytest.raises(DataError) as caught:
        load_records([write('{"text": ' + "9" * 5000 + "}")])
    assert "line 1: found a number that cannot be read" in caught.value.faults[0]


def test_a_line_that_is_too_long_is_passed_over_without_reading_it_whole(
    write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "MAX_LINE_BYTES", 100)
    longest = b'{"text": "' + b"x" * 88 + b'"}\n'
    assert len(longest) == 101  # with its line end, which does not count
    path = write(GOOD, b"x" * 1000 + b"\n", longest, b"[]\n", b"x" * 101)
    with pytest.raises(DataError) as caught:
        load_records([path])
    assert list(caught.value.faults) == [
        f"{path}, line 2, 5: found a line of more than 100 bytes, expected less",
        f"{path}, line 4: found a list, expected a JSON object",
    ]


def test_a_line_of_ten_megabytes_is_refused(write) -> None:
    path = write({"text": "x" * 10_000_000})
    with pytest.raises(DataError, match="malformed") as caught:
        load_records([path])
    assert "line 1: found a line of more than 10,000,000 bytes" in caught.value.faults[0]


def test_the_faults_of_all_files_come_together(write) -> None:
    first = write(GOOD, *[b"{\n"] * 25, name="a.jsonl")
    second = write(GOOD, b"{\n", name="b.jsonl")
    with pytest.raises(DataError) as caught:
        load_records([first, second])
    recurring, single = caught.value.faults
    assert recurring.startswith(f"{first}, line 2, 3, 4, 5, 6 and 20 more: found invalid JSON")
    assert single.startswith(f"{second}, line 2: ")
    assert caught.value.found == "26 faults"
    assert caught.value.remedy == STEP


def test_a_fault_of_every_row_is_one_of_the_file(write) -> None:
    lines = [b'{"prompt": "a"}\n', b'{"prompt": "b"}\n']
    path = write(*lines)
    with pytest.raises(DataError) as caught:
        load_records([path])
    fault = "found in every row none of completion, response, output, answer, expected one"
    assert caught.value.faults == (f"{path}: {fault}",)
    assert caught.value.remedy.startswith("correct these files or leave them out")
    assert caught.value.remedy.endswith("--objective grpo --reward FILE.py:FUNCTION")
    for others, places in (([GOOD], "line 1, 2"), ([b"{\n"], "line 1, 2")):
        path = write(*lines, *others)
        with pytest.raises(DataError) as caught:
            load_records([path])
        assert caught.value.faults[0].startswith(f"{path}, {places}: found none of")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file(write, content: bytes) -> None:
    path = write(content)
    with pytest.raises(DataError) as caught:
        load_records([path])
    assert (caught.value.code, caught.value.where) == ("VOX-D002", str(path))


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_records([tmp_path / "a", tmp_path / "b"])
    assert (caught.value.code, caught.value.found) == ("VOX-D001", "nothing there")
    assert caught.value.where == f"{tmp_path / 'a'}, {tmp_path / 'b'}"


def test_a_function_call_of_sharegpt_is_a_call() -> None:
    """As LLaMA-Factory has them."""

    def row(value: object) -> dict[str, object]:
        talk = [("human", "1 + 1?"), ("function_call", value), ("observation", "2"), ("gpt", "Two")]
        turns = [{"from": role, "value": text} for role, text in talk]
        return {"conversations": turns, "tools": '[{"name": "add"}]'}

    messages = parse_row(row('{"name": "add", "arguments": {"a": 1}}')).messages
    assert messages
    assert [each.role for each in messages] == ["user", "assistant", "tool", "assistant"]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert (messages[1].content, messages[1].extra) == ("", {"tool_calls": [call]})
    for value, words in (("add(1)", r"conversations\[1\].value"), ("{}", "that of a function")):
        with pytest.raises(RowError, match=words):
            parse_row(row(value))


SYSTEMS: dict[str, dict[str, object]] = {
    "prompt/completion": {"prompt": "q", "completion": "a"},
    "Alpaca": {"instruction": "q", "output": "a"},
    "question/answer": {"question": "q", "answer": "a"},
    "messages": turns("user", "assistant"),
    "lists": {"prompt": "q", "completion": turns("assistant")["messages"]},
    "preference": {"question": "q", "chosen": "a", "rejected": "b"},
}


@pytest.mark.parametrize("form", SYSTEMS)
def test_a_system_field_is_the_first_message(form: str) -> None:
    """As in Orca's pairs, and in data sets of the Alpaca form."""
    row = SYSTEMS[form]
    record = parse_row({"system": "s", **row})
    assert record.unused == ()
    for messages in filter(None, (record.messages, record.rejected)):
        assert messages[0] == Message("system", "s")
        assert [each.role for each in messages[1:]] == ["user", "assistant"]
    assert record.kind == ("preference" if record.rejected else "chat")
    for nothing in ("", None, " \n"):
        plain = parse_row({"system": nothing, **row})
        assert (plain.messages, plain.unused) == (parse_row(row).messages, ())
    with pytest.raises(RowError, match='found a number as "system"'):
        parse_row({**row, "system": 3})


def test_a_pair_with_a_system_field_begins_with_one_prompt() -> None:
    talks = {n: [{"role": "user", "content": n}, *turns("assistant")["messages"]] for n in "ab"}  # type: ignore[misc]
    with pytest.raises(RowError, match="begin differently"):
        parse_row({"system": "s", "chosen": talks["a"], "rejected": talks["b"]})


def test_a_conversation_keeps_its_own_system_message() -> None:
    row = {**turns("system", "user", "assistant"), "system": "another"}
    record = parse_row(row)
    assert record.messages == parse_row(turns("system", "user", "assistant")).messages
    assert record.unused == ("system",), "which is a warning"
    assert record.messages
    assert parse_row({**row, "system": record.messages[0].content}).unused == ()
    assert parse_row({"text": "t", "system": "s"}).unused == ("system",)
    developer = {**turns("developer", "user", "assistant"), "system": "another"}
    assert parse_row(developer).unused == ("system",)


def test_a_pipe_in_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows")
    with pytest.raises(DataError) as caught:
        load_records([tmp_path / "rows"])
    assert (caught.value.code, caught.value.found) == ("VOX-D001", "a pipe")
    assert "- for a pipe" in str(caught.value.expected)


# --- folders --------------------------------------------------------------------------------------


def test_a_folder_stands_for_its_split(write, tmp_path: Path) -> None:
    train, valid = write(GOOD), write(GOOD, name="valid.jsonl")
    other = write(GOOD, name="other.jsonl")
    assert find_split([tmp_path, other]) == ([train, other], [valid])
    assert find_split([tmp_path], valid=other) == ([train], [other])
    valid.unlink()
    assert find_split([tmp_path]) == ([train], [])


def test_a_folder_without_training_data(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find_split([tmp_path])
    assert (caught.value.code, caught.value.where) == ("VOX-D001", str(tmp_path / "train.jsonl"))


def test_a_share_of_the_rows_is_no_file() -> None:
    with pytest.raises(DataError, match="missing") as caught:
        require_files([Path("0.1")])
    assert caught.value.remedy.endswith("for a share of the rows use --valid-share 0.1")


def test_validation_data_that_are_not_there(write, tmp_path: Path) -> None:
    train = write(GOOD)
    with pytest.raises(DataError, match="missing"):
        find_split([train], valid=tmp_path / "no.jsonl")
    with pytest.raises(DataError) as caught:
        find_split([train], valid=tmp_path)
    assert caught.value.found == "a folder"
