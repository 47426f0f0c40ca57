"""Constrain answers to JSON schemas, regular expressions or tool calls, by llguidance.

llguidance (extra `grammar`) compiles a constraint for a tokenizer and gives, before each token, the
tokens that may follow. An answer ends when its grammar is complete. Keywords of JSON Schema that
llguidance does not have are refused, as are schemas that nothing satisfies.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vox_core.api.generating import AnswerText
from vox_serve.tools import Format

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

    from vox_core.contract import Bools

_SPACES = r"[\x20\x0A\x09]{0,16}"
"""Between the tokens of JSON. Without a limit, small models write blanks until `max_tokens`."""
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint of an answer.

    Args:
        param: the field of the request.
        kind: of `value`: a JSON schema, a regular expression, or a grammar as llguidance has it.
    """

    param: str
    kind: Literal["json", "regex", "lark"]
    value: Any


class GrammarFault(Exception):
    """Why a constraint cannot be followed."""


class GuidedText(AnswerText):
    """The text of an answer that follows a grammar.

    Args:
        matcher: at the beginning of the grammar; of this answer alone.
        others: those of `AnswerText`.
    """

    def __init__(self, matcher: LLMatcher, *others: Any, **options: Any) -> None:
        super().__init__(*others, **options)
        self._matcher, self._fault = matcher, ""

    def add(self, token: int) -> bool:
        """See `AnswerText`; the answer also ends with its grammar.

        Raises:
            GrammarFault: the grammar takes too much to follow, or the model has no token for it.
        """
        if not self._fault and super().add(token):
            return True
        if self._fault or not self._matcher.consume_token(token):
            raise GrammarFault(self._fault or self._matcher.get_error())
        return bool(self._matcher.is_stopped())

    def allowed(self, size: int) -> Bools | None:
        """Return which of `size` tokens may follow: bool (V,); None after a fault, which `add` then
        raises, so that it ends this answer alone."""
        import numpy as np

        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask_V = np.zeros(size, np.bool_)
        known_V = np.unpackbits(bits, bitorder="little")[:size]
        mask_V[: len(known_V)] = known_V
        if self._matcher.is_error() or not mask_V.any():
            self._fault = self._matcher.get_error() or "no token of the model can follow"
            return None
        return mask_V


def token_trie(tokenizer: PreTrainedTokenizerBase, turn_ends: Collection[int]) -> LLTokenizer:
    """Return llguidance's form of a tokenizer, which takes about a second.

    Raises:
        GrammarFault: llguidance is not installed.
    """
    try:
        from llguidance.hf import from_tokenizer
    except ModuleNotFoundError as error:
        what = "llguidance is not installed; pip install 'vox-ml-serve[grammar]'"
        raise GrammarFault(what) from error
    fast: Any = tokenizer
    return from_tokenizer(fast, eos_token=sorted(turn_ends) or None)


def matcher(trie: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """Compile a constraint.

    Raises:
        GrammarFault: it is malformed, not supported, or cannot be satisfied.
    """
    from llguidance import LLMatcher, LLParserLimits

    value = constraint.value
    if constraint.kind == "json":
        value = LLMatcher.grammar_from_json_schema(json.dumps(_spaced(value)))
    elif constraint.kind == "regex":
        value = LLMatcher.grammar_from_regex(value)
    limits = LLParserLimits(verbose_errors=False)
    found = LLMatcher(trie, value, log_level=0, limits=limits)
    if found.is_error():
        raise GrammarFault(" ".join(found.get_error().split())[:_SHOWN])
    return found


def calls_grammar(
    form: Format,
    functions: Sequence[Mapping[str, Any]],
    *,
    many: bool,
    words: bool,
    special: Mapping[str, int],
) -> str:
    """Return the grammar of an answer that calls functions.

    Args:
        functions: with `name` and `parameters`, a JSON schema.
        many: more than one call.
        words: the answer may also be text, or have text before its calls.
        special: markers that are special tokens, with their ids.
    """
    calls = "head call (joint call)* tail" if many and form.joint else "head call tail"
    rules = [f"start: {calls}"]
    if words and form.marker:
        opening = f"<[{special[form.marker]}]>" if form.marker in special else None
        start = "(begun rest)* WORDS" if form.end else "WORDS | begun rest"
        rules = [f"start: {start}", r"WORDS: /(.|\n)*/"]
        rules += [f"begun: WORDS {opening}"] if opening else [f'begun[lazy]: WORDS "{form.marker}"']
        rules.append(f"rest: after {'call (joint call)*' if many and form.joint else 'call'} tail")
        rules.append(f"after: {_literal(form.head.removeprefix(form.marker), special)}")
    elif words:
        rules = [f"start: {calls} | WORDS", r"WORDS: /([^{ \n](.|\n)*)?/"]
    rules += [
        f"head: {_literal(form.head, special)}",
        f"joint: {_literal(form.joint or '', special)}",
        f"tail: {_literal(form.tail, special)}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    for index, function in enumerate(functions):
        name = json.dumps(function["name"])
        before = _literal(f'{{"name": {name}, "{form.arguments}": ', {})
        schema = json.dumps(_spaced(function.get("parameters") or {"type": "object"}))
        rules.append(f'call_{index}: {before} %json {schema} "}}"')
    return "\n".join(rules)


def choice_grammar(texts: Sequence[str]) -> str:
    """Return the grammar of an answer that is one of `texts`."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _spaced(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": _SPACES}}


def _literal(text: str, special: Mapping[str, int]) -> str:
    """Return `text` as a grammar has it, its markers as tokens where they are special ones."""
    for marker, token in special.items():
        before, found, after = text.partition(marker)
        if found:
            parts = [_literal(before, special), f"<[{token}]>", _literal(after, special)]
            return " ".join(part for part in parts if part != '""') or '""'
    return json.dumps(text, ensure_ascii=False)
