"""What a chat template does with tools, calls of them, their answers and reasoning.

Templates differ, and say so nowhere: some leave a call out without a word, some want its arguments
as JSON text where transformers' convention is an object, some fail on a message without content,
others need it to be null, or empty. So it is found by looking: a conversation with all of it is
rendered in each form that is in use, the convention first, and the first form in which the call is
written is the one that messages are given in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeAlias

from vox_core.data.messages import Message
from vox_core.data.template import ChatTemplate, TemplateFault

_USER, _ARGUMENT, _RETURNED, _SAID = "4182650937", "6204819357", "9053718264", "7305918264"
_FUNCTION, _MEANING, _REASONING = "f5197302846", "8264193705", "3958207146"
_BESIDE = "1739502846"
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
_REASONED = (_TALK[0], Message("assistant", _SAID, {"reasoning_content": _REASONING}))

Chat: TypeAlias = Sequence[Message]


@dataclass(frozen=True, slots=True)
class Takes:
    """What a template writes, and how it wants to be given calls.

    Args:
        tools, calls, answers, reasoning: whether it writes them. Where that cannot be told it is
            true: the template's own words will say what it does not like.
        words: whether it writes what a message says that also calls tools.
        text_arguments: the arguments of a call as JSON text instead of an object.
        content: of a message that only calls tools. transformers leaves it out where it is null.
    """

    tools: bool = True
    calls: bool = True
    answers: bool = True
    words: bool = True
    reasoning: bool = True
    text_arguments: bool = False
    content: Literal["absent", "empty", "null"] = "absent"

    def given(self, message: Message) -> dict[str, Any]:
        """A message as the template is given it."""
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if not message.extra:
            return plain
        plain |= message.extra
        if calls := plain.get("tool_calls"):
            plain["tool_calls"] = [self._call(call) for call in calls]
            if not message.content:
                self._say_nothing(plain)
        if reasoning := plain.get("reasoning_content"):
            plain["thinking"] = reasoning  # under both names, as transformers gives it
        return plain

    def _say_nothing(self, plain: dict[str, Any]) -> None:
        if self.content == "absent":
            del plain["content"]
        elif self.content == "null":
            plain["content"] = None

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
    reasoning = _write(template, Takes(), _REASONED, tools=False)
    takes = Takes(reasoning=reasoning is None or _REASONING in reasoning)
    for talk, tools in product((_TALK, _TALK[:2]), (True, False)):
        seen = [
            one for form in _forms(takes) if (one := _seen(template, form, talk, tools)) is not None
        ]
        if seen:
            return next((one for one in seen if one.calls), seen[0])
    return takes


def _seen(template: ChatTemplate, form: Takes, talk: Chat, tools: bool) -> Takes | None:
    """What is written of a conversation in one form; None if the template does not like it."""
    if (text := _write(template, form, talk, tools)) is None:
        return None
    both = replace(talk[1], content=_BESIDE)
    beside = _write(template, form, [talk[0], both, *talk[2:]], tools)
    return replace(
        form,
        tools=not tools or _MEANING in text,
        calls=_well_written(text),
        answers=_TALK[2] not in talk or _RETURNED in text,
        words=beside is None or _BESIDE in beside,
    )


def _forms(takes: Takes) -> Iterator[Takes]:
    """The convention first."""
    contents: tuple[Literal["absent", "empty", "null"], ...] = ("absent", "empty", "null")
    for text, content in product((False, True), contents):
        yield replace(takes, text_arguments=text, content=content)


def _write(template: ChatTemplate, form: Takes, talk: Chat, tools: bool) -> str | None:
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
