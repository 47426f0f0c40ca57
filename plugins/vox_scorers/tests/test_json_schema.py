"""Answers against a JSON schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vox_eval import Example, Output, Scorer, ScorerSpec, UnusableScorer
from vox_eval.scorer import find_scorer, options_of


def scorer(name: str, **given: Any) -> Scorer:
    return find_scorer(ScorerSpec(name, given, Path()))[0]


DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
PERSON = {
    "type": "object",
    "properties": {"age": {"$ref": "#/$defs/age"}},
    "required": ["age"],
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("answer", "expected", "why"),
    [
        ('{"age": 3}', 1, "valid"),
        ('{"age": -3}', 0, "$.age: -3 is less than the minimum of 0"),
        ("{}", 0, "$: 'age' is a required property"),
        ("{", 0, "no JSON: Expecting property name"),
        ("[" * 100_000, 0, "no JSON: "),
    ],
)
def test_json_against_a_schema(answer, expected, why) -> None:
    found = scorer("json-schema", schema=PERSON).score(Example("id", {}), Output(answer, []))
    assert (found.value, found.why[: len(why)]) == (expected, why)


@pytest.mark.parametrize(
    ("schema", "answer", "why"),
    [
        ({"type": "number"}, "NaN", "no JSON: NaN"),
        ({"type": "number", "multipleOf": 0.01}, "9" * 400, "the schema cannot judge it"),
        ({"$ref": "#"}, "1", "the schema cannot judge it"),
    ],
)
def test_an_answer_that_no_schema_can_judge_is_wrong(schema, answer, why) -> None:
    found = scorer("json-schema", schema=schema).score(Example("id", {}), Output(answer, []))
    assert (found.value, found.why[: len(why)]) == (0, why)


def test_references_are_those_of_schemas_each_from_its_own_id() -> None:
    inner = {"$id": "inner", "$defs": {"y": {"const": {"$ref": "no"}}}, "$ref": "#/$defs/y"}
    schema = {"$id": "https://example.com/", "$ref": "inner", "$defs": {"x": inner}}
    found = scorer("json-schema", schema=schema)
    values = [
        found.score(Example("id", {}), Output(text, [])).value for text in ('{"$ref": "no"}', "1")
    ]
    assert values == [1, 0]


def test_a_keyword_that_a_draft_does_not_have_is_no_reference() -> None:
    for value in (5, "#none"):
        schema = {"$schema": DRAFT_7, "type": "integer", "$dynamicRef": value}
        found = scorer("json-schema", schema=schema).score(Example("id", {}), Output("3", []))
        assert found.value == 1


def test_a_rows_schema_takes_the_place_of_the_tasks() -> None:
    found, own = scorer("json-schema", schema=PERSON), {"type": "integer"}
    assert found.score(Example("id", {"schema": own}), Output("3", [])).value == 1


def test_the_schema_may_be_a_file(tmp_path) -> None:
    (tmp_path / "person.json").write_text('{"type": "integer"}')
    found, _ = find_scorer(ScorerSpec("json-schema", {"schema": "person.json"}, tmp_path))
    assert options_of(found) == {"schema": {"type": "integer"}}
    with pytest.raises(UnusableScorer, match=r"none\.json"):
        find_scorer(ScorerSpec("json-schema", {"schema": "none.json"}, tmp_path))


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "person"}, "no JSON schema"),
        ({"$ref": "#/$defs/none"}, "the schema has no '#/\\$defs/none'"),
        ({"$ref": "https://example.com/schema"}, "nothing is fetched"),
        ({"$dynamicRef": "#none"}, "the schema has no '#none'"),
        ({"properties": {"a": {"$ref": "#/nope"}}}, "the schema has no '#/nope'"),
        (
            {"$schema": DRAFT_7, "not": {"$schema": DRAFT_2020, "$dynamicRef": 5}},
            r"\$dynamicRef is 5, expected a text",
        ),
        ("text", "a schema is an object"),
        ({"$schema": 3}, "a schema is an object"),
        (None, 'no "schema", neither'),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_before(schema, fault) -> None:
    with pytest.raises(ValueError, match=fault):
        scorer("json-schema").check(Example("id", {"schema": schema}))
