"""A model's chat template, rendered by transformers in a child process within limits.

`worker.py` says which limits, and why. Templates are somebody else's code: whatever one raises is a
`TemplateFault`. One that takes too much is a `DataError`, so that no other row is rendered with it.

Templates differ in what they do with tools, calls of them, their answers and reasoning, and say so
nowhere: some leave a call out without a word, some want its arguments as JSON text where
transformers' convention is an object, some fail on a message without content, others need it to be
null, or empty. So it is found by looking: a conversation with all of it is rendered in each form
that is in use, the convention first, and the first form in which the call is written is the one
that messages are given in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeAlias

from vox_core.data.messages import Message
from vox_core.data.worker import CallFailed, limited, time_limit
from vox_core.errors import DataError

Chat: TypeAlias = Sequence[Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
_Text: TypeAlias = tuple[str, list[tuple[int, int]]]

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

MAX_TEXT = 64 << 20
"""Characters of a rendering, beside `PER_CHARACTER` for each of its conversation."""
PER_CHARACTER = 64


class TemplateFault(Exception):
    """Why the chat template does not render a conversation; `syntax` if it is no template."""

    syntax = False


class _TooMuch(TemplateFault):
    """It takes more time or memory than a rendering may."""


class ChatTemplate:
    """A chat template.

    Args:
        names: further variables, such as the special tokens.
        where: for errors.

    Attributes:
        marked: it says itself what the model generates, with `{% generation %}`.
    """

    def __init__(self, source: str, names: Mapping[str, Any], where: str = "") -> None:
        self._source, self._names, self._where = source, dict(names), where
        self.marked = GENERATION.search(source) is not None

    def render(self, chat: Chat, tools: Tools = None, *, generation_prompt: bool = False) -> str:
        """The text of a conversation.

        Args:
            chat: messages, each with what the template is given of it.
            tools: JSON schemas of functions.

        Raises:
            TemplateFault: the template refuses it or fails.
            DataError: D005, the template takes too much time or memory.
        """
        return self._render(chat, tools, add_generation_prompt=generation_prompt)[0]

    def render_marked(self, chat: Chat, tools: Tools = None) -> _Text:
        """Return the text, and the stretches of it that stood between generation markers."""
        return self._render(chat, tools, return_assistant_tokens_mask=True)

    def _render(self, chat: Chat, tools: Tools, **how: bool) -> _Text:
        messages = [dict(message) for message in chat]
        schemas = [dict(tool) for tool in tools] if tools else None
        try:
            found = limited(_rendered, self._source, messages, schemas, {**self._names, **how})
        except CallFailed as died:
            found = _TooMuch(died)
        if isinstance(found, _TooMuch):
            what = "the chat template takes more time or memory than a rendering may"
            remedy = "use a template from a source that you trust, or another model"
            raise DataError("D005", what, where=self._where, found=found, remedy=remedy)
        if isinstance(found, TemplateFault):
            raise found
        return found


def _rendered(
    source: str,
    chat: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    given: dict[str, Any],
) -> _Text | TemplateFault:
    """Render in a child process; a fault is returned, because an exception would end the child."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template  # which says that it gives text
    try:
        with time_limit():
            (text,), stretches = render([chat], tools, chat_template=source, **given)
    except Exception as error:  # noqa: BLE001 - templates are somebody else's code
        if isinstance(error, MemoryError):
            return _TooMuch("it takes more memory than its process may have")
        first, *_ = str(error).splitlines() or [""]
        fault = TemplateFault(first[:500] or type(error).__name__)
        fault.syntax = isinstance(error, TemplateSyntaxError)
        return fault
    if len(text) > MAX_TEXT and len(text) > MAX_TEXT + PER_CHARACTER * len(repr((chat, tools))):
        return _TooMuch(f"it makes {len(text):,} characters of the conversation")
    return text, stretches[0] if stretches else []


# --- what a template takes ------------------------------------------------------------------------

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


@dataclass(frozen=True, slots=True)
class Takes:
    """Parts of a message that a chat template renders, and its format of tool calls.

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
            if not message.content and self.content == "absent":
                del plain["content"]
            elif not message.content and self.content == "null":
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
    """Find out by rendering what a template takes."""
    reasoning = _write(template, Takes(), _REASONED, tools=False)
    takes = Takes(reasoning=reasoning is None or _REASONING in reasoning)
    for talk, tools in product((_TALK, _TALK[:2]), (True, False)):
        seen = [
            one for form in _forms(takes) if (one := _seen(template, form, talk, tools)) is not None
        ]
        if seen:
            return next((one for one in seen if one.calls), seen[0])
    return takes


def _seen(
    template: ChatTemplate, form: Takes, talk: Sequence[Message], tools: bool
) -> Takes | None:
    """The text of a conversation in one form; None if the template refuses it."""
    if (text := _write(template, form, talk, tools)) is None:
        return None
    beside = _write(template, form, [talk[0], replace(talk[1], content=_BESIDE), *talk[2:]], tools)
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


def _write(template: ChatTemplate, form: Takes, talk: Sequence[Message], tools: bool) -> str | None:
    try:
        return template.render([form.given(one) for one in talk], [_TOOL] if tools else None)
    except TemplateFault:
        return None


def _well_written(text: str) -> bool:
    """Whether the call stands in the text, and what stands there is not Python's way to write."""
    call = text.partition(_USER)[2].partition(_RETURNED)[0]
    named = _FUNCTION in call and _ARGUMENT in call
    return named and "{'k'" not in call and "None" not in call.partition(_FUNCTION)[0]
