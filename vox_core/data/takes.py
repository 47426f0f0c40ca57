"""What a chat template does with tools, calls of them, their answers and reasoning.

Templates differ, and say so nowhere: some leave a call out without a word, some want its arguments
as JSON text where transformers' convention is an object, some fail on a message without content
and some need it to be null. So it is found by looking: a conversation with all of it is rendered in
each form that is in use, the convention first, and the first form in which the call is written is
the one that messages are given in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vox_core.data.messages import Message
from vox_core.data.template import ChatTemplate, TemplateFault

_USER, _ARGUMENT, _RETURNED, _SAID = "4182650937", "6204819357", "9053718264", "7305918264"
_FUNCTION, _MEANING, _REASONING = "f5197302846", "8264193705", "3958207146"
_ID = "a1b2c3d4e"  # Mistral's must have nine characters
_TOOL = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": _MEANING,
        "parameters": {"type": "object", "properties": {"k": {"type": "string"}}},
    },
}
_CALL = {"id": _ID, "type": "function"}
_CALLS = [{**_CALL, "function": {"name": _FUNCTION, "arguments": {"k": _ARGUMENT}}}]
_TALK = (
    Message("user", _USER),
    Message("assistant", "", {"tool_calls": _CALLS}),
    Message("tool", _RETURNED, {"tool_call_id": _ID, "name": _FUNCTION}),
    Message("assistant", _SAID),
)


@dataclass(frozen=True, slots=True)
class Takes:
    """What a template writes, and how it wants to be given calls.

    Args:
        tools, calls, answers, reasoning: whether it writes them. Where that cannot be told it is
            true: the template's own words will say what it does not like.
        text_arguments: the arguments of a call as JSON text instead of an object.
        null_content: null as what a message without words says, instead of empty text.
    """

    tools: bool = True
    calls: bool = True
    answers: bool = True
    reasoning: bool = True
    text_arguments: bool = False
    null_content: bool = True

    def given(self, message: Message) -> dict[str, Any]:
        """A message as the template is given it."""
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if not message.extra:
            return plain
        plain |= message.extra
        if calls := plain.get("tool_calls"):
            plain["tool_calls"] = [self._call(call) for call in calls]
            if self.null_content and not message.content:
                plain["content"] = None
        if reasoning := plain.get("reasoning_content"):
            plain["thinking"] = reasoning  # under both names, as transformers gives it
        return plain

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        if not self.text_arguments:
            return call
        function = call["function"]
        written = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": written}}


def what_it_takes(template: ChatTemplate) -> Takes:
    """Look.

    Raises:
        TemplateFault: it took too much.
    """
    reasoning = _write(template, Takes(), _reasoned(), False)
    takes = Takes(reasoning=reasoning is None or _REASONING in reasoning)
    found: Takes | None = None
    for tools in (True, False):
        for form in _forms(takes):
            if (text := _write(template, form, _TALK, tools)) is None:
                continue
            seen = replace(form, calls=_well_written(text), answers=_RETURNED in text)
            if tools:
                seen = replace(seen, tools=_MEANING in text)
            if seen.calls:
                return seen
            found = found or seen
    return found or takes


def _forms(takes: Takes) -> list[Takes]:
    return [
        replace(takes, text_arguments=text, null_content=null)
        for text in (False, True)
        for null in (True, False)
    ]


def _reasoned() -> tuple[Message, ...]:
    return Message("user", _USER), Message("assistant", _SAID, {"reasoning_content": _REASONING})


def _write(template: ChatTemplate, form: Takes, talk: Sequence[Message], tools: bool) -> str | None:
    try:
        return template.render([form.given(one) for one in talk], [_TOOL] if tools else None)
    except TemplateFault as fault:
        if fault.too_much:
            raise
        return None


def _well_written(text: str) -> bool:
    """Whether the call stands in the text, and what stands there is not Python's way to write."""
    call = text.partition(_USER)[2].partition(_RETURNED)[0]
    named = _FUNCTION in call and _ARGUMENT in call
    return named and "{'k'" not in call and "None" not in call.partition(_FUNCTION)[0]
