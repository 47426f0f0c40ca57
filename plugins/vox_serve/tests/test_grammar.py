"""Answers that follow a schema, a regular expression or a choice, whatever the model would say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from plugins.vox_serve.tests.scripted import Speaker, speaker

from vox_serve.grammar import GrammarFault

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["warm", "cold"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/Day"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "kind", "days"],
    "additionalProperties": False,
    "$defs": {"Day": {"type": "integer", "minimum": 3, "maximum": 5}},
}


def formatted(schema: Any) -> dict[str, Any]:
    wrapped = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": wrapped}}


@pytest.fixture(scope="module")
def talker() -> Iterator[Speaker]:
    with speaker("qwen2.5") as found:
        yield found


def said(talker: Speaker, text: str, **fields: Any) -> tuple[str, str]:
    """The answer of a model that would say `text`, and its finish reason."""
    (choice,) = talker.says(text).chat(**fields).json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("text", ["Hello", '{"city": 7}', '{"city": "Köln", "kind": "hot"'])
def test_an_answer_follows_a_schema(talker, text, temperature) -> None:
    for fields in (formatted(SCHEMA), {"structured_outputs": {"json": SCHEMA}}):
        answer, finish = said(talker, text, temperature=temperature, seed=1, **fields)
        found = json.loads(answer)
        assert list(found) == ["city", "kind", "days"] and finish == "stop"
        assert found["kind"] in ("warm", "cold") and len(found["city"]) <= 8
        assert found["days"] and set(found["days"]) <= {3, 4, 5}


def test_an_answer_that_follows_already_is_not_changed(talker) -> None:
    """Blanks as the model sets them; it ends with the grammar, before the end-of-turn token."""
    text = '{"city": "Bonn",\n  "kind": "cold", "days": [4]}'
    assert said(talker, text + " And more.", **formatted(SCHEMA)) == (text, "stop")
    whole = talker.chat(**formatted(SCHEMA)).json()["usage"]["completion_tokens"]
    assert whole == len(talker.served.encode(text, special=False))


@pytest.mark.parametrize(
    ("constraint", "text", "expected"),
    [
        ({"regex": r"[0-9]{3}-[a-z]+"}, "123-abc", "123-abc"),
        ({"regex": "(yes|no)"}, "no", "no"),
        ({"choice": ["warm", "cold", 'q"'] * 2}, 'q"', 'q"'),
        ({"json_object": True}, '{"a": [1, null]} x', '{"a": [1, null]}'),
    ],
    ids=str,
)
def test_vllms_structured_outputs(talker, constraint, text, expected) -> None:
    assert said(talker, text, structured_outputs=constraint) == (expected, "stop")
    other, _ = said(talker, "%", structured_outputs=constraint, max_tokens=60)
    assert not other.startswith("%")
    body = {"model": "qwen2.5", "prompt": "x", "structured_outputs": constraint, "temperature": 0}
    completion = talker.says(text).client.post("/v1/completions", json=body).json()
    assert completion["choices"][0]["text"] == expected


def test_each_of_several_answers_follows_it_alone_and_streamed(talker) -> None:
    fields = {"n": 3, "temperature": 2, "seed": 5, **formatted(SCHEMA)}
    found = talker.says("").chat(**fields).json()["choices"]
    answers = [choice["message"]["content"] for choice in found]
    assert [[*json.loads(answer)] for answer in answers] == [SCHEMA["required"]] * 3
    streamed = ["", "", ""]
    for chunk in talker.chunks(**fields):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == answers


def test_a_grammar_ends_with_max_tokens_and_stop_texts_too(talker) -> None:
    text = '{"city": "Bonn", "kind": "cold", "days": [4]}'
    cut, finish = said(talker, text, max_tokens=5, **formatted(SCHEMA))
    assert text.startswith(cut) and finish == "length"
    assert said(talker, text, stop="kind", **formatted(SCHEMA)) == ('{"city": "Bonn", "', "stop")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (formatted({"type": "integer", "minimum": 5, "maximum": 3}), "minimum (5) is greater than"),
        (formatted({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (formatted({"$ref": "#/nowhere"}), "does not exist"),
        (formatted({"$ref": "http://127.0.0.1:9/x"}), "Resource"),
        (formatted({"type": "string", "pattern": "("}), "unclosed group"),
        (formatted([]), "valid dictionary"),
        ({"response_format": {"type": "json_schema"}}, "belongs to the type json_schema"),
        ({"response_format": {"type": "xml"}}, "json_schema"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "look-around"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "send one of"),
        ({"structured_outputs": {}}, "send one of"),
        ({"structured_outputs": {"grammar": "x"}}, "not permitted"),
        ({"structured_outputs": {"regex": "a"}, **formatted(SCHEMA)}, "send response_format or"),
    ],
    ids=str,
)
def test_a_constraint_that_cannot_be_followed_is_refused(talker, fields, says) -> None:
    response = talker.chat(**fields)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert says in error["message"]


def test_a_grammar_that_takes_too_much_ends_its_answer_alone(talker, monkeypatch) -> None:
    """Another answer of the same batch goes on; the fault is found while generating."""
    import llguidance

    small = llguidance.LLParserLimits(max_lexer_states=5, verbose_errors=False)
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **_: small)
    hard = {"regex": "(a|b)*c(a|b){40}d"}
    failed = talker.says("a" * 300).chat(structured_outputs=hard)
    assert failed.status_code == 503, failed.text
    assert said(talker, "fine") == ("fine", "stop")


def test_a_fault_of_the_mask_is_raised_with_the_next_token(talker) -> None:
    from vox_serve.grammar import Constraint

    matcher = talker.served.matcher(Constraint("x", "regex", "a+"))
    text = talker.served.text((), (), matcher)
    assert text.allowed(1) is None  # the model has one token, which cannot follow
    with pytest.raises(GrammarFault, match="no token"):
        text.add(0)
