"""The scorer `json-schema`: the answer is JSON that a schema allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import field_validator

from vox_core.api.files import read_json
from vox_eval.scorer import (
    Example,
    Output,
    Score,
    Scorer,
    ScorerSpec,
    UnusableScorer,
    hookimpl,
    options,
)

_SHOWN = 200
"""Characters in the words of a score or a fault."""


def parse_json(text: str) -> Any:
    """Return the JSON value in a text.

    Raises:
        ValueError: "no JSON: ...", of NaN and Infinity, too.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@options
class JsonSchema(Scorer):
    """The answer is JSON that a schema (json-schema.org) allows.

    Args:
        schema: of all rows: a table, or a JSON file beside the suite. A row's own field `schema`
            takes its place. References lead to the schema itself alone.
    """

    schema: dict[str, Any] | None = None

    @field_validator("schema")
    @classmethod
    def _is_valid(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            require_schema(schema)
        return schema

    def check(self, example: Example) -> None:
        own = example.fields.get("schema")
        if own is None and self.schema is None:
            raise ValueError('no "schema", neither of the row nor of the scorer')
        if own is not None:
            require_schema(own)

    def score(self, example: Example, output: Output) -> Score:
        from jsonschema.exceptions import best_match

        try:
            answer = parse_json(output.text)
        except ValueError as error:
            return Score(0.0, str(error)[:_SHOWN])
        own = example.fields.get("schema")
        try:
            fault = best_match(_validator(self.schema if own is None else own).iter_errors(answer))
        except (ArithmeticError, ValueError, RecursionError) as error:
            return Score(0.0, f"the schema cannot judge it: {error}"[:_SHOWN])
        if fault is None:
            return Score(1.0, "valid")
        return Score(0.0, f"{fault.json_path}: {fault.message}"[:_SHOWN])


def require_schema(schema: object) -> None:
    """Check a schema and its references.

    Raises:
        ValueError: it is no schema, or refers to something that it does not contain.
    """
    from jsonschema import SchemaError
    from referencing import Registry, Resource
    from referencing.jsonschema import DRAFT202012

    if not isinstance(schema, Mapping) or not isinstance(schema.get("$schema", ""), str):
        raise ValueError("a schema is an object, whose $schema is a text")
    validator = _validator(schema)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"no JSON schema: {error.json_path}: {error.message}"[:_SHOWN]) from None
    root = Resource.from_contents(schema, default_specification=DRAFT202012)
    _require_references(root, Registry().resolver_with_root(root), type(validator))


def _require_references(schema: Any, resolver: Any, draft: Any) -> None:
    """Look up the references of a schema and of those within it, each from its own `$id`."""
    from jsonschema.validators import validator_for
    from referencing.exceptions import Unresolvable

    own = schema.contents if isinstance(schema.contents, Mapping) else {}
    draft = validator_for(own, default=draft)
    for key in sorted({"$ref", "$dynamicRef"} & own.keys() & draft.VALIDATORS.keys()):
        if not isinstance(reference := own[key], str):
            raise ValueError(f"no JSON schema: {key} is {reference!r}, expected a text"[:_SHOWN])
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ValueError(f"the schema has no {reference!r}, and nothing is fetched") from None
    for each in schema.subresources():
        _require_references(each, resolver.in_subresource(each), draft)


def _validator(schema: Any) -> Any:
    """Return jsonschema's validator of a schema's own draft, which fetches nothing."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

    return validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())


# --- hook -----------------------------------------------------------------------------------------


@hookimpl
def vox_scorer(spec: ScorerSpec) -> Scorer:
    """Return the scorer."""
    given = dict(spec.options)
    if isinstance(given.get("schema"), str):
        given["schema"] = _schema_file(spec.folder / given["schema"])
    return JsonSchema(**given)


def _schema_file(path: Path) -> object:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise UnusableScorer(f"scorer 'json-schema': schema: {path}: {error}") from error
