"""Tool calls: the formats of families, read back from what a model says, streamed and not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.vox_serve.tests.scripted import Speaker, speaker
from tests.fuzz.mutations import cases

from vox_serve.tools import FORMATS, Call, Calls

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "at": {"type": "integer"}},
            "required": ["city"],
            "$defs": {"City": {"type": "string", "maxLength": 12}},
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
KÖLN, BONN = ('{"city": "Köln", "at": 7}', '{"city": "Bonn"}')
SAID = {
    "qwen2.5": '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>',
    "qwen3": '<think>\n\n</think>\n\n<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>',
    "granite4": '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>',
    "llama3.2": '{{"name": "{}", "parameters": {}}}',
    "mistral-nemo": '[TOOL_CALLS][{{"name": "{}", "arguments": {}}}]',
}
"""What the model of each family says to call a function."""
FAMILY = pytest.mark.parametrize("family", SAID)


@pytest.fixture(scope="module")
def speakers() -> Iterator[Any]:
    """`speakers(family)`."""
    with ExitStack() as stack:
        found: dict[str, Speaker] = {}

        def of(family: str) -> Speaker:
            if family not in found:
                found[family] = stack.enter_context(speaker(family))
            return found[family]

        yield of


def call_of(choice: dict[str, Any]) -> tuple[str, str, str | None]:
    """Name, arguments and the content beside a message's only call."""
    (call,) = choice["message"]["tool_calls"]
    assert (len(call["id"]), call["id"].isalnum(), call["type"]) == (9, True, "function")
    return call["function"]["name"], call["function"]["arguments"], choice["message"]["content"]


@FAMILY
def test_a_call_is_read_and_its_answer_is_rendered(speakers, family) -> None:
    """The second request sends back the message of the first, as clients do."""
    talker = speakers(family).says(SAID[family].format("get_weather", KÖLN))
    (choice,) = talker.chat(tools=[WEATHER, CLOCK]).json()["choices"]
    content = "<think>\n\n</think>" if family == "qwen3" else None
    assert call_of(choice) == ("get_weather", KÖLN, content)
    assert choice["finish_reason"] == "tool_calls"
    id = choice["message"]["tool_calls"][0]["id"]
    returned = {"role": "tool", "tool_call_id": id, "content": "21 degrees"}
    asked = {"role": "user", "content": "Is it warm in Köln?"}
    messages = [asked, choice["message"], returned]
    answer = talker.says("Yes.").chat(messages=messages, tools=[WEATHER, CLOCK]).json()
    assert answer["choices"][0]["message"]["content"] == "Yes."
    assert answer["choices"][0]["finish_reason"] == "stop"
    body = {"messages": messages, "tools": [WEATHER]}
    rendered = talker.client.post("/apply-template", json=body).json()["prompt"]
    assert "21 degrees" in rendered and "The weather at a place." in rendered
    assert SAID[family].format("get_weather", KÖLN)[-40:-4] in rendered


@FAMILY
def test_a_streamed_call_is_the_call_that_is_not_streamed(speakers, family) -> None:
    talker = speakers(family).says(SAID[family].format("get_weather", KÖLN))
    found = talker.chunks(tools=[WEATHER])
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "get_weather")]
    assert calls[0]["function"]["arguments"] == KÖLN
    content = "<think>\n\n</think>" if family == "qwen3" else ""
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    assert [c["finish_reason"] for c in found[-1]["choices"]] == ["tool_calls"]


@FAMILY
def test_words_and_calls_of_unknown_functions_stay_text(speakers, family) -> None:
    for said in ("It is <b>warm</b>. [x] {1}", SAID[family].format("shell", "{}")):
        answer = speakers(family).says(said).chat(tools=[WEATHER]).json()["choices"][0]
        assert answer["message"]["content"] == said
        assert "tool_calls" not in answer["message"]
        assert answer["finish_reason"] == "stop"


def test_several_calls_with_words_before_them(speakers) -> None:
    said = "I look.\n" + "\n".join(SAID["qwen2.5"].format("get_weather", x) for x in (KÖLN, BONN))
    answer = speakers("qwen2.5").says(said).chat(tools=[WEATHER]).json()["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [KÖLN, BONN]
    assert answer["content"] == "I look."
    one = speakers("qwen2.5").chat(tools=[WEATHER], parallel_tool_calls=False).json()
    assert call_of(one["choices"][0]) == ("get_weather", KÖLN, "I look.")
    both = '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "clock"}]'
    answer = speakers("mistral-nemo").says(both).chat(tools=[CLOCK]).json()["choices"][0]
    assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == ["{}"] * 2


def test_a_call_that_is_cut_stays_text(speakers) -> None:
    said = SAID["qwen2.5"].format("get_weather", KÖLN)
    answer = speakers("qwen2.5").says(said).chat(tools=[WEATHER], max_tokens=9).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    assert said.startswith(answer["message"]["content"]) and "tool_calls" not in answer["message"]


def test_without_a_choice_of_tools_nothing_is_rendered_or_read(speakers) -> None:
    said = SAID["qwen2.5"].format("get_weather", KÖLN)
    talker = speakers("qwen2.5").says(said)
    plain = talker.chat().json()
    none = talker.chat(tools=[WEATHER], tool_choice="none").json()
    assert none["choices"][0]["message"]["content"] == said
    assert none["usage"] == plain["usage"]


# --- enforced calls -------------------------------------------------------------------------------


@FAMILY
@pytest.mark.parametrize("strict", [False, True])
def test_a_call_is_enforced_by_the_grammar(speakers, family, strict) -> None:
    """The model would rather say something else, and arguments outside of the schema."""
    pytest.importorskip("llguidance")
    tools = [{**WEATHER, "function": {**WEATHER["function"], "strict": strict}}, CLOCK]
    for said, choice in (
        ("No.", "required"),
        (SAID[family].format("get_weather", '{"city": 5, "x": 1}'), "required"),
        ("No.", {"type": "function", "function": {"name": "get_weather"}}),
    ):
        answer = speakers(family).says(said).chat(tools=tools, tool_choice=choice).json()
        name, arguments, content = call_of(answer["choices"][0])
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert content is None
        if name == "get_weather":
            found = json.loads(arguments)
            assert isinstance(found["city"], str) and found.keys() <= {"city", "at"}
        assert choice == "required" or name == "get_weather"


@FAMILY
def test_strict_functions_leave_words_free(speakers, family) -> None:
    pytest.importorskip("llguidance")
    tools = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]
    for said in ("It is warm.", "A\n\nB"):
        answer = speakers(family).says(said).chat(tools=tools).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (said, "stop")
    head = SAID[family].format("get_weather", '{"ci')[: -len("}\n</tool_call>")]
    if family == "mistral-nemo":
        head = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"ci'
    if family == "llama3.2":
        head = '{"name": "get_weather", "parameters": {"ci'
    speakers(family).says(head + "x" * 40)
    (choice,) = speakers(family).chat(tools=tools).json()["choices"]
    name, arguments, _ = call_of(choice)
    assert name == "get_weather" and isinstance(json.loads(arguments)["city"], str)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("chatml", "does not write the tools"),
        ("granite3.3", "does not write the calls"),
        ("qwen3.5", "in none of the formats that vox reads: Hermes, Mistral, Llama 3"),
    ],
)
def test_a_template_without_a_known_format_is_refused(speakers, family, says) -> None:
    response = speakers(family).chat(tools=[WEATHER])
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "a name once"),
        ({"tools": [{"name": "f", "parameters": [1]}]}, "tools", "expected a JSON schema"),
        ({"tools": [CLOCK] * 129}, "tools", "128"),
        ({"tool_choice": "required"}, None, "needs tools"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            None,
            "none of the tools",
        ),
        ({"tools": [CLOCK], "response_format": {"type": "json_object"}}, None, "beside tools"),
        ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", ""),
    ],
)
def test_wrong_tools_are_refused(speakers, fields, param, says) -> None:
    response = speakers("qwen2.5").chat(**fields)
    error = response.json()["error"]
    assert response.status_code == 400
    assert says in error["message"]
    assert param is None or error["param"].startswith(param)


def test_what_the_grammar_needs_is_named(speakers, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with speaker("qwen2.5") as fresh:  # the others may have compiled their tokenizer
        response = fresh.chat(tools=[CLOCK], tool_choice="required")
    assert response.status_code == 400
    assert "pip install 'vox-ml-serve[grammar]'" in response.json()["error"]["message"]
    mistral = speakers("mistral-nemo").chat(tools=[CLOCK], parallel_tool_calls=False)
    assert "tool_choice = required" in mistral.json()["error"]["message"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_call_whose_name_is_no_text_stays_text(form) -> None:
    text = f'{form.head}{{"name": ["f"], "{form.arguments}": {{}}}}{form.tail}'
    assert [*Calls(form, {"f"}).feed(text, last=True)] == [text]


# --- the reader -----------------------------------------------------------------------------------

_PARTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[",
    "]",
    "{",
    "}",
    "<tool",
    " ",
    "\n",
    "é",
]
_PARTS += ['{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": 1}}', '{"name": 1}']
_PARTS += ['{"name": ["f"]}']


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_pieces_of_an_answer_are_read_as_the_whole(form) -> None:
    @cases(5.0)
    @given(st.lists(st.sampled_from(_PARTS), max_size=8), st.data())
    def check(parts: list[str], data: st.DataObject) -> None:
        text = "".join(parts)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole = _merged(Calls(form, {"f"}).feed(text, last=True))
        reader = Calls(form, {"f"})
        found = [
            part
            for number, piece in enumerate(pieces)
            for part in reader.feed(piece, last=number == len(pieces) - 1)
        ]
        assert _merged(found) == whole
        if not any(isinstance(part, Call) for part in whole):
            assert "".join(map(str, whole)) == text

    check()


def _merged(parts: Any) -> list[str | Call]:
    merged: list[str | Call] = []
    for part in parts:
        if merged and isinstance(part, str) and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged
