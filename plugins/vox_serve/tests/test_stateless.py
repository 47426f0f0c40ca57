"""`/v1/responses`: the chat's answer as OpenAI's `Response`, whole and in typed events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from plugins.vox_serve.tests.scripted import Speaker, speaker
from plugins.vox_serve.tests.test_tools import KÖLN, SAID, WEATHER

FUNCTION = {"type": "function", **WEATHER["function"], "strict": None}
CALL = SAID["qwen2.5"].format("get_weather", KÖLN)


@pytest.fixture(scope="module")
def talker() -> Iterator[Speaker]:
    with speaker("qwen2.5") as found:
        yield found


def asked(talker: Speaker, **fields: Any) -> Any:
    body = {"model": "qwen2.5", "input": "Is it warm in Köln?", "temperature": 0, **fields}
    return talker.client.post("/v1/responses", json=body)


def events(talker: Speaker, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; each is named by its type, and they are numbered."""
    found = []
    for number, each in enumerate(asked(talker, stream=True, **fields).text.split("\n\n")[:-1]):
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


def plain(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without their ids, which are random."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


def test_an_answer_is_that_of_the_chat(talker) -> None:
    talker.says("It is warm.")
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Is it warm in Köln?"}
    chat = talker.chat(messages=[system, user]).json()
    found = asked(talker, instructions="Be brief.", metadata={"a": "b"}).json()
    (item,) = found["output"]
    assert (found["object"], found["status"], found["store"]) == ("response", "completed", False)
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    (part,) = item["content"]
    assert part == {"type": "output_text", "text": "It is warm.", "annotations": [], "logprobs": []}
    assert found["metadata"] == {"a": "b"}
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert found["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    assert asked(talker, input=[system, user]).json()["usage"] == found["usage"]


def test_events_of_a_message_build_the_response(talker) -> None:
    whole = asked(talker.says("It is warm.")).json()
    found = events(talker)
    kinds = [each["type"].removeprefix("response.") for each in found]
    deltas = [each for each in found if each["type"] == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert len(deltas) > 1
    assert "".join(each["delta"] for each in deltas) == "It is warm."
    last = found[-1]["response"]
    assert plain(last["output"]) == plain(whole["output"])
    assert last["usage"] == whole["usage"]
    assert found[2]["item"] == {**last["output"][0], "content": [], "status": "in_progress"}
    assert found[-2]["item"] == last["output"][0]


def test_a_call_and_its_result(talker) -> None:
    found = asked(talker.says(f"I look.\n{CALL}"), tools=[FUNCTION]).json()
    message, call = found["output"]
    assert message["content"][0]["text"] == "I look."
    assert (call["type"], call["name"], call["arguments"]) == (
        "function_call",
        "get_weather",
        KÖLN,
    )
    streamed = events(talker, tools=[FUNCTION])
    assert plain(streamed[-1]["response"]["output"]) == plain(found["output"])
    kinds = [each["type"].removeprefix("response.") for each in streamed]
    assert kinds[-5:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
    user = {"role": "user", "content": [{"type": "input_text", "text": "Is it warm in Köln?"}]}
    answer = asked(talker.says("Yes."), tools=[FUNCTION], input=[user, message, call, result])
    assert answer.json()["output"][0]["content"][0]["text"] == "Yes.", answer.text


def test_a_cut_answer_is_incomplete(talker) -> None:
    found = asked(talker.says("It is warm."), max_output_tokens=1).json()
    assert found["status"] == found["output"][0]["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events(talker, max_output_tokens=1)[-1]["type"] == "response.incomplete"
    assert asked(talker.says("")).json()["output"][0]["content"][0]["text"] == ""


def test_formats_and_choices_are_those_of_the_chat(talker) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    format = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    found = asked(talker.says('{"a": 1}'), text={"format": format}).json()
    assert json.loads(found["output"][0]["content"][0]["text"]) == {"a": 1}
    choice = {"type": "function", "name": "get_weather"}
    found = asked(talker.says("No."), tools=[FUNCTION], tool_choice=choice).json()
    assert [item["type"] for item in found["output"]] == ["function_call"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"store": True}, "store", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "not supported"),
        ({"input": []}, "input", ""),
        ({"input": [{"type": "reasoning"}]}, "input", "items of type 'reasoning'"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "robot"),
        ({"input": [{"content": [{"type": "input_image"}]}]}, "input.0.content", "input_image"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"fromat": {"type": "text"}}}, "text.fromat", "did you mean format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tool_choice": "required"}, None, "needs tools"),
        ({"temperature": 5}, "temperature", "less than"),
        ({"input": "x", "model": "y"}, "model", "there is no model"),
    ],
    ids=str,
)
def test_what_needs_a_store_or_is_malformed_is_refused(talker, fields, param, says) -> None:
    response = asked(talker, **fields)
    error = response.json()["error"]
    assert response.status_code in (400, 404)
    assert error["param"] == param, error
    assert says in error["message"]
