"""Bodies that are almost right, at every endpoint that takes one: an answer or a refusal, in time.

Valid bodies are changed in their JSON (other values, missing and deeper ones) and in their bytes.
The endpoints run in this process over a model that answers at once.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.vox_serve.tests.scripted import Speaker, speaker
from plugins.vox_serve.tests.test_tools import CLOCK, WEATHER
from tests.fuzz.mutations import cases, json_values, mutated

SECONDS = 20
TOO_MUCH = "the answer cannot be decoded"
"""Of status 503: a grammar takes too much while it is followed, and ends its answer alone."""
USER = {"role": "user", "content": "Is it warm?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    ],
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "x"]}, "b": {"pattern": "^x+$"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [USER], "temperature": 0.5, "stop": ["x"], "n": 2, "logit_bias": {"7": -1}},
        {"messages": [USER], "logprobs": True, "top_logprobs": 2, "seed": 3, "top_p": 0.5},
        {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}},
        {
            "messages": [USER, CALLED, {"role": "tool", "tool_call_id": "1", "content": "12"}],
            "tools": [WEATHER, CLOCK],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
        {"messages": [USER], "tools": [WEATHER], "tool_choice": "required", "stream": True},
        {"messages": [USER], "response_format": FORMAT, "max_completion_tokens": 4},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    ],
    "/v1/completions": [
        {"prompt": "x", "max_tokens": 3, "logprobs": 2, "echo": False},
        {"prompt": [[1, 2], [3]], "stream": True},
        {"prompt": ["a", "b"], "structured_outputs": {"regex": "[a-z]{2}"}},
        {"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}, "min_p": 0.1, "top_k": 3},
    ],
    "/v1/responses": [
        {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 3, "store": False},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "function_call", "call_id": "1", "name": "clock", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "12"},
            ],
            "tools": [{"type": "function", **CLOCK["function"], "strict": False}],
            "stream": True,
        },
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ],
    "/tokenize": [
        {"prompt": "x", "return_token_strs": True, "add_special_tokens": False},
        {"messages": [USER], "tools": [CLOCK], "add_generation_prompt": False},
    ],
    "/apply-template": [{"messages": [USER, CALLED], "tools": [CLOCK]}],
}
ODD = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 10**400, 1e308, -0.5, "", " ", "x" * 300,
    "\ud800", "\x00", "￿🦊", [], {}, [[]], [None], [1] * 200, float("nan"), "tool", "assistant",
    "required", {"type": "image_url"}, {"type": "object", "properties": []}, {"$ref": "#"},
    {"allOf": [{"$ref": "#"}]}, {"type": "array", "items": {"$ref": "#"}, "minItems": 3},
    {"const": "\ud800"}, {"type": "string", "maxLength": 10**12}, {"x-guidance": {"lenient": 5}},
    "(a*)*b", "(((((a{99}){99}){99}){99}){99})", {"pattern": "(((((a{99}){99}){99}){99}){99})"},
]  # fmt: skip
"""Values for any place."""


@st.composite
def bent(draw: st.DrawFn, valid: list[dict[str, Any]]) -> bytes:
    """A valid body with some places of its JSON changed."""
    document = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 3))):
        place: Any = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and draw(st.integers(0, 2)):
                place = place[key]
                continue
            kind = draw(st.sampled_from(["odd", "any", "drop", "wrap", "deep"]))
            if kind == "drop":
                del place[key]
            elif kind == "wrap":
                place[key] = [place[key]]
            elif kind == "deep":
                for _ in range(draw(st.sampled_from([3, 60, 200]))):
                    place[key] = {"items": place[key]}
            else:
                made = draw(st.sampled_from(ODD) if kind == "odd" else json_values)
                place[key] = copy.deepcopy(made)  # the next change may be within it
            break
    return json.dumps(document, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def talker() -> Iterator[Speaker]:
    with speaker("qwen2.5", max_tokens=6) as found:
        yield found.says("It is warm.")


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


async def answered(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of a POST."""
    sent: list[dict[str, Any]] = []
    coming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if coming:
            return coming.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("localhost", 80),
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    async with asyncio.timeout(SECONDS):
        await app(scope, receive, send)
    start, *parts = sent
    return start["status"], b"".join(part.get("body", b"") for part in parts)


@pytest.mark.parametrize("path", BODIES)
def test_almost_valid_bodies_are_answered_or_refused(talker, loop, path) -> None:
    valid = [{"model": "qwen2.5", **body} for body in BODIES[path]]
    for body in valid:
        status, said = loop.run_until_complete(
            answered(talker.app, path, json.dumps(body).encode())
        )
        assert status == 200, said

    @cases()
    @given(st.one_of(bent(valid), bent(valid), mutated(*(json.dumps(b).encode() for b in valid))))
    def check(body: bytes) -> None:
        status, said = loop.run_until_complete(answered(talker.app, path, body))
        text = said.decode()
        if status == 503 or '"server_error"' in text:
            assert TOO_MUCH in text, (body, text)
        elif status != 200:
            assert 400 <= status < 500, (body, text)
            assert json.loads(text)["error"]["message"], body
        assert len(text) < 100_000

    check()
    body = json.dumps(valid[0]).encode()
    assert loop.run_until_complete(answered(talker.app, path, body))[0] == 200
