"""Messages that say more than role and content: calls, answers, reasoning, weights; and tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vox_core.data.faults import RowError
from vox_core.data.messages import Message, tool_schemas
from vox_core.data.rows import parse_row

USER = {"role": "user", "content": "x"}
ADD = {"name": "add", "parameters": {"type": "object"}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def messages(*said: dict[str, Any], **row: Any) -> tuple[Message, ...]:
    return parse_row({"messages": [USER, *said], **row}).messages


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "1", "name": "add", "arguments": {"a": 1}},
        {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}},
    ],
)
def test_a_call_in_any_form_has_its_arguments_as_an_object(call: dict[str, Any]) -> None:
    (_, said) = messages(assistant(content=None, tool_calls=[call]))
    assert said == Message("assistant", "", {"tool_calls": [CALL]})


def test_a_call_keeps_what_else_it_says() -> None:
    call = {"index": 0, **CALL}
    (_, said) = messages(assistant(content="I look.", tool_calls=[call]))
    assert said == Message("assistant", "I look.", {"tool_calls": [call]})


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments(arguments: object) -> None:
    (_, said) = messages(assistant(tool_calls=[{"name": "now", "arguments": arguments}]))
    assert said.extra is not None
    assert said.extra["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


def test_the_old_form_of_a_call_and_its_answer() -> None:
    old = {"name": "add", "arguments": '{"a": 1}'}
    (_, said, answer) = messages(
        assistant(content=None, function_call=old),
        {"role": "function", "name": "add", "content": "2"},
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert said == Message("assistant", "", {"tool_calls": [call]})
    assert answer == Message("tool", "2", {"name": "add"})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_goes_by_three_names(name: str) -> None:
    (_, said) = messages(assistant(content="yes", **{name: "hm"}))
    assert said == Message("assistant", "yes", {"reasoning_content": "hm"})


def test_what_is_null_or_empty_is_not_there() -> None:
    (_, said) = messages(
        assistant(content="a", tool_calls=None, reasoning="", name=None, weight=None)
    )
    assert said == Message("assistant", "a")
    assert messages(assistant(content="a", tool_calls=[]))[1] == Message("assistant", "a")


@pytest.mark.parametrize(
    ("fields", "weight"),
    [
        ({"weight": 0}, 0.0),
        ({"weight": 1}, 1.0),
        ({"weight": 0.25}, 0.25),
        ({"train": False}, 0.0),
        ({"train": True}, 1.0),
        ({"train": True, "weight": 0.5}, 0.5),
    ],
)
def test_weights(fields: dict[str, Any], weight: float) -> None:
    assert messages(assistant(content="a", **fields))[1].weight == weight


def test_others_than_the_assistant_are_trained_when_that_is_said_outright() -> None:
    row = {"messages": [{**USER, "weight": 0}, {**USER, "train": True}, assistant(content="a")]}
    assert [message.weight for message in parse_row(row).messages] == [0.0, 1.0, None]


NO_NUMBER = "as messages[1].weight, expected a number from 0 to 1"
FAULTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a weight of a user": (
        [{**USER, "weight": 1}, assistant(content="a")],
        "found the weight 1 of the user in messages[1], expected 0, or "
        '"train": true beside it to train what the assistant does not say',
    ),
    "a weight beyond 1": ([assistant(content="a", weight=2)], f"found 2 {NO_NUMBER}"),
    "a weight below 0": ([assistant(content="a", weight=-0.5)], f"found -0.5 {NO_NUMBER}"),
    "no weight": ([assistant(content="a", weight="1")], f"found a string {NO_NUMBER}"),
    "a boolean": ([assistant(content="a", weight=True)], f"found a boolean {NO_NUMBER}"),
    "train": (
        [assistant(content="a", train=1)],
        "found a number as messages[1].train, expected true or false",
    ),
    "weights that differ": (
        [assistant(content="a", train=False, weight=1)],
        'found "train": false with the weight 1 in messages[1], expected them to agree',
    ),
    "calls of a user": (
        [{**USER, "tool_calls": [CALL]}],
        "found tool_calls of the user in messages[1], expected it of the assistant",
    ),
    "an answer of the assistant": (
        [assistant(content="a", tool_call_id="1")],
        "found tool_call_id of the assistant in messages[1], expected it of the tool",
    ),
    "an answer to nobody": (
        [
            assistant(tool_calls=[CALL]),
            {"role": "tool", "content": "2", "tool_call_id": "7"},
        ],
        'found the tool_call_id "7" in messages[2], expected one of 1',
    ),
    "both forms": (
        [assistant(tool_calls=[CALL], function_call={"name": "add"})],
        "found tool_calls and function_call in messages[1], expected one of them",
    ),
    "two reasonings": (
        [assistant(content="a", reasoning="b", thinking="c")],
        "found different reasoning and thinking in messages[1], expected one of them",
    ),
    "calls that are no list": (
        [assistant(tool_calls={})],
        "found an object as messages[1].tool_calls, expected a list",
    ),
    "a call without a name": (
        [assistant(tool_calls=[{"function": {}}])],
        "found null as messages[1].tool_calls[0].name, expected that of a function",
    ),
    "a call of another type": (
        [assistant(tool_calls=[{**CALL, "type": "code"}])],
        'found "code" as messages[1].tool_calls[0].type, expected "function"',
    ),
    "an id that is a number": (
        [assistant(tool_calls=[{**CALL, "id": 1}])],
        "found a number as messages[1].tool_calls[0].id, expected a string",
    ),
    "arguments that are no JSON": (
        [assistant(tool_calls=[{"name": "add", "arguments": "{a"}])],
        "found invalid JSON at column 2 (Expecting property name enclosed in double quotes) in "
        "messages[1].tool_calls[0].function.arguments, expected a JSON object",
    ),
    "arguments that are a list": (
        [assistant(tool_calls=[{"name": "add", "arguments": [1]}])],
        "found a list as messages[1].tool_calls[0].function.arguments, "
        "expected an object or JSON text of one",
    ),
    "half a surrogate pair": (
        [assistant(tool_calls=[{"name": "add", "arguments": {"a": "\ud800"}}])],
        "found half a surrogate pair in messages[1].tool_calls[0], expected both or none",
    ),
    "neither words nor calls": (
        [assistant(content=None, tool_calls=[])],
        "found null as messages[1].content, expected a string",
    ),
    "a name that is a number": (
        [{**USER, "name": 7}],
        "found a number as messages[1].name, expected a string",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_the_diagnosis_of_a_message(case: str) -> None:
    said, fault = FAULTS[case]
    with pytest.raises(RowError) as caught:
        messages(*said)
    assert fault in map(str, caught.value.faults)


def test_every_call_that_is_wrong_is_named() -> None:
    with pytest.raises(RowError) as caught:
        messages(assistant(tool_calls=[{}, CALL, 7]))
    assert [str(fault).split(",")[0] for fault in caught.value.faults] == [
        "found null as messages[1].tool_calls[0].name",
        "found a number as messages[1].tool_calls[2]",
    ]


# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tools", [[{"type": "function", "function": ADD}], [ADD], json.dumps([ADD])]
)
def test_tools_in_any_form(tools: object) -> None:
    row = parse_row({"messages": [USER, assistant(content="a")], "tools": tools})
    assert row.tools == ({"type": "function", "function": ADD},)
    assert row.unused == ()


def test_functions_are_tools_of_old() -> None:
    row = parse_row({"prompt": "a", "completion": "b", "functions": [ADD]})
    assert row.tools == ({"type": "function", "function": ADD},)


@pytest.mark.parametrize(
    ("tools", "fault"),
    [
        ({}, 'found an object as "tools", expected a list'),
        ("[", 'found no JSON in "tools", expected a list'),
        ([7], "found a number as tools[0], expected an object"),
        ([{"function": 7}], "found a number as tools[0].function, expected an object"),
        ([{"name": ""}], "found an empty string as tools[0].name, expected that of a "
         "function"),
    ],
)  # fmt: skip
def test_the_diagnosis_of_tools(tools: object, fault: str) -> None:
    with pytest.raises(RowError) as caught:
        tool_schemas(tools)
    assert [*map(str, caught.value.faults)] == [fault]


def test_tools_that_nest_too_deeply_are_a_fault_of_the_row() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(RowError, match="nested too deeply"):
        tool_schemas([{"name": "add", "parameters": deep}])
