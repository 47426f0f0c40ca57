"""Parsing: whatever the bytes are, a request or a refusal with a status below 500."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from tests.fuzz.mutations import cases, json_values, mutated

from vox_serve.requests import ApiError, ChatRequest, CompletionRequest, parse
from vox_serve.responses import encoded

CHAT = {
    "model": "one",
    "messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "Hi"}],
    "temperature": 0.5,
    "logit_bias": {"7": -1},
    "stop": ["\n"],
    "stream_options": {"include_usage": True},
    "n": 2,
    "seed": -3,
}
TEXT = {"model": "one", "prompt": [[1, 2], [3]], "logprobs": 3, "stop": "x", "max_tokens": 7}


def looked_at(kind: type[ChatRequest] | type[CompletionRequest], body: bytes) -> None:
    try:
        assert parse(kind, body).model_dump_json()
    except ApiError as error:
        refused = error
    else:
        return
    assert 400 <= refused.status < 500
    assert len(encoded(refused.body)) < 2000


@pytest.mark.parametrize(("kind", "valid"), [(ChatRequest, CHAT), (CompletionRequest, TEXT)])
def test_mutated_bodies_are_refused_or_read(kind, valid) -> None:
    @cases(1.0)
    @given(mutated(json.dumps(valid).encode()))
    def check(body: bytes) -> None:
        looked_at(kind, body)

    check()


@pytest.mark.parametrize(("kind", "valid"), [(ChatRequest, CHAT), (CompletionRequest, TEXT)])
def test_any_value_in_any_field_is_refused_or_read(kind, valid) -> None:
    @cases(0.2)
    @given(json_values)
    def check(value: object) -> None:
        for name in (*kind.model_fields, "tools", "user", "anything"):
            looked_at(kind, json.dumps({**valid, name: value}).encode("utf-8", "surrogatepass"))

    check()


def test_the_values_are_those_of_the_body() -> None:
    asked = parse(ChatRequest, json.dumps({**CHAT, "user": "me", "top_p": None}).encode())
    assert [message.rendered["role"] for message in asked.messages] == ["system", "user"]
    assert (asked.n, asked.seed, asked.stop, asked.top_p) == (2, -3, ["\n"], 1.0)
    assert asked.stream_options.include_usage
    assert parse(CompletionRequest, json.dumps(TEXT).encode()).prompts == [[1, 2], [3]]
    one = parse(CompletionRequest, b'{"model": "m", "prompt": [1, 2]}')
    assert (one.prompts, one.stop, one.top) == ([[1, 2]], [], None)


@pytest.mark.parametrize("stop", ["x" * 257, ["a", "x" * 10**6]])
def test_a_long_stop_text_is_refused(stop) -> None:
    """Each token of an answer is held against each beginning of it."""
    with pytest.raises(ApiError, match="stop"):
        parse(ChatRequest, json.dumps({**CHAT, "stop": stop}).encode())


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "system", "content": None}])
def test_a_message_without_content_is_refused_but_the_assistants(message) -> None:
    said = {"role": "assistant", "content": None}
    body = {**CHAT, "messages": [{"role": "user", "content": ""}, said]}
    assert [each.rendered["content"] for each in parse_chat(body).messages] == ["", ""]
    with pytest.raises(ApiError, match="needs content"):
        parse_chat({**CHAT, "messages": [message]})


def parse_chat(body: dict[str, object]) -> ChatRequest:
    return parse(ChatRequest, json.dumps(body).encode())
