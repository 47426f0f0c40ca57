"""A model's chat template, compiled once and rendered within limits.

The environment is the one that transformers renders in, with its filters, its globals and its
`{% generation %}` blocks, but in vox's own sandbox, which bounds what a rendering uses
(`sandbox.py`). Templates are somebody else's code: whatever one raises is a `TemplateFault`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_core.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template

    from vox_core.data.sandbox import Sandbox

Chat: TypeAlias = Sequence[Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]] | None

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

MAX_SOURCE = 1 << 18
"""Ten times the longest template of a known model, in characters."""


class TemplateFault(Exception):
    """Why the chat template does not render a conversation; `too_much` if it took too much, so that
    it is not to be asked again."""

    too_much = False


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template.
        names: further variables, such as the special tokens.

    Attributes:
        marked: it says itself what the model generates, with `{% generation %}`.

    Raises:
        TemplateFault: it cannot be compiled.
    """

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        self._names = dict(names)
        self.marked = _GENERATION.search(source) is not None
        with _faults():
            if len(source) > MAX_SOURCE:
                raise ValueError(f"the template has more than {MAX_SOURCE:,} characters")
            self._sandbox = _sandbox()
            self._template: Template = self._sandbox.from_string(
                self._sandbox.parse_metered(source)
            )
            # Copied for each rendering, which takes a plain dictionary half the time.
            self._template.globals = dict(self._template.globals)

    def render(self, chat: Chat, tools: Tools = None, *, generation_prompt: bool = False) -> str:
        """The text of a conversation.

        Args:
            chat: messages, each with what the template is given of it.
            tools: JSON schemas of functions.

        Raises:
            TemplateFault: the template refuses it, fails, or takes too much.
        """
        with _faults():
            self._sandbox.refill(_characters(chat, tools))
            return self._template.render(self._variables(chat, tools, generation_prompt))

    def render_marked(self, chat: Chat, tools: Tools = None) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the stretches of it that stood between generation markers.

        Raises:
            TemplateFault: as `render`.
        """
        blocks: list[str] = []
        stretches: list[tuple[int, int]] = []
        track: Any = vars(self._sandbox)["activate_tracker"]
        with _faults():
            self._sandbox.refill(_characters(chat, tools))
            with track(blocks, stretches):
                for block in self._template.generate(self._variables(chat, tools, False)):
                    blocks.append(block)
                    self._sandbox.made(block)
        return "".join(blocks), stretches

    def _variables(self, chat: Chat, tools: Tools, generation_prompt: bool) -> dict[str, Any]:
        return {
            **self._names,
            "messages": [dict(message) for message in chat],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
        }


def _characters(chat: Chat, tools: Tools) -> int:
    """Of all that a template is given."""
    given = 0
    for message in chat:
        said = message.get("content") if len(message) == 2 else None
        given += len(said) if type(said) is str else characters(message)
    return given + characters(tools) if tools else given


def characters(value: object) -> int:
    """Of the text in a JSON value; anything else in it counts as a few."""
    total, open_ = 0, [value]
    while open_:
        item = open_.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            open_ += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            open_ += item
        else:
            total += 4
    return total


def _sandbox() -> Sandbox:
    """vox's sandbox, with all that transformers gives a chat template."""
    from transformers.utils import chat_template_utils

    from vox_core.data.sandbox import Sandbox

    # Compiled from nothing: a template of somebody else's is never compiled without a budget.
    compile_: Any = chat_template_utils._compile_jinja_template
    theirs = compile_("").environment
    ours = Sandbox(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=[type(extension) for extension in theirs.extensions.values()],
    )
    ours.globals |= {name: v for name, v in theirs.globals.items() if name != "lipsum"}
    ours.adopt(theirs.filters.items())
    return ours


@contextmanager
def _faults() -> Iterator[None]:
    """What a template raises by itself, or trips over, is its own fault."""
    try:
        yield
    except Exception as error:
        from vox_core.data.sizes import TooMuch

        first, *_ = str(error).splitlines() or [""]
        fault = TemplateFault(first[:500] or type(error).__name__)
        fault.too_much = isinstance(error, TooMuch | MemoryError)
        raise fault from error


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
