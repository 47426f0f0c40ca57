"""A model's chat template, rendered by transformers in a child process within limits.

`worker.py` says which limits, and why. Templates are somebody else's code: whatever one raises, or
takes too much of, is a `TemplateFault`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from vox_core.data.worker import WorkerDied, limited, time_limit
from vox_core.errors import DataError

Chat: TypeAlias = Sequence[Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
_Text: TypeAlias = tuple[str, list[tuple[int, int]]]

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

MAX_TEXT = 64 << 20
"""Characters of a rendering, beside `PER_CHARACTER` for each of its conversation."""
PER_CHARACTER = 64


class TemplateFault(Exception):
    """Why the chat template does not render a conversation.

    Attributes:
        too_much: it takes too much time or memory, so no other row shall be rendered with it.
        syntax: it is no template.
    """

    too_much = False
    syntax = False


class ChatTemplate:
    """A chat template.

    Args:
        source: the template.
        names: further variables, such as the special tokens.

    Attributes:
        marked: it says itself what the model generates, with `{% generation %}`.
    """

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        self._source, self._names = source, dict(names)
        self.marked = GENERATION.search(source) is not None

    def render(self, chat: Chat, tools: Tools = None, *, generation_prompt: bool = False) -> str:
        """The text of a conversation.

        Args:
            chat: messages, each with what the template is given of it.
            tools: JSON schemas of functions.

        Raises:
            TemplateFault: the template refuses it, fails, or takes too much.
        """
        return self._render(chat, tools, generation_prompt, marked=False)[0]

    def render_marked(self, chat: Chat, tools: Tools = None) -> _Text:
        """The text, and the stretches of it that stood between generation markers.

        Raises:
            TemplateFault: as `render`.
        """
        return self._render(chat, tools, prompt=False, marked=True)

    def _render(self, chat: Chat, tools: Tools, prompt: bool, *, marked: bool) -> _Text:
        messages = [dict(message) for message in chat]
        schemas = [dict(tool) for tool in tools] if tools else None
        try:
            found = limited(_rendered, self._source, self._names, messages, schemas, prompt, marked)
        except WorkerDied as died:
            if not died.exceeded:
                raise
            found = _fault(str(died), too_much=True)
        if isinstance(found, TemplateFault):
            raise found
        return found


def _rendered(
    source: str,
    names: dict[str, Any],
    chat: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    prompt: bool,
    marked: bool,
) -> _Text | TemplateFault:
    """In a child. A fault is a result: what is raised there ends the child."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template  # which says that it gives text
    try:
        with time_limit():
            (text,), stretches = render(
                conversations=[chat],
                tools=tools,
                chat_template=source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **names,
            )
    except Exception as error:  # noqa: BLE001 - templates are somebody else's code
        if isinstance(error, MemoryError):
            return _fault("it takes more memory than its process may have", too_much=True)
        first, *_ = str(error).splitlines() or [""]
        syntax = isinstance(error, TemplateSyntaxError)
        return _fault(first[:500] or type(error).__name__, syntax=syntax)
    if len(text) > MAX_TEXT and len(text) > MAX_TEXT + PER_CHARACTER * len(repr((chat, tools))):
        return _fault(f"it makes {len(text):,} characters of the conversation", too_much=True)
    return text, stretches[0] if marked else []


def _fault(said: str, *, too_much: bool = False, syntax: bool = False) -> TemplateFault:
    fault = TemplateFault(said)
    fault.too_much, fault.syntax = too_much, syntax
    return fault


def takes_too_much(fault: TemplateFault, model: object) -> DataError:
    """The error for a template that is not to be asked again.

    Args:
        model: the folder that it is from.
    """
    return DataError(
        "D005",
        "the model's chat template takes more time or memory than a rendering may",
        where=f"the chat template of {model}",
        found=fault,
        expected="text of a size that goes with the conversation",
        remedy="do not use this template: take it from a source you trust, or use another model",
    )
