"""A record as text, with the stretches of it that are trained.

A conversation is rendered whole, by the model's own chat template, and only text is looked at here.
A stretch begins where the model begins to speak and ends with its end-of-turn token:

- The beginning of turn i is the end of H_i, the rendering of the messages before it with the
  generation prompt: what the model will see when it is asked to speak. H_i must be a prefix of the
  whole text. (It also is for templates that strip the thinking of earlier turns, as H_i ends with
  a user's turn, and those before it look the same in both.)
- Where it is not (some templates open a `<think>` in the prompt which they leave out of earlier
  turns), the whole conversation is rendered again with a marker as turn i's content, and the
  marker is where the content begins; what stands before it must be the same in both.
- The end is the first end-of-turn token after the beginning, and before the content of the next
  message, which a marker finds in the same way. A turn that the template does not close ends with
  what the assistant says, whitespace cut.
- A template with `{% generation %}` markers says itself what is trained; an end-of-turn token that
  directly follows its stretch is added to it.

A beginning or an end that none of these finds is a fault of the row, never a guess. Nothing is ever
tokenised here: tokens merge across the boundary, characters do not.

An end-of-turn token that stands literally in what the assistant says ends the stretch there, since
generation would end there too. What users say is never trained, whatever it contains.

Templates that ask for the date get a fixed one: the same data must give the same tokens tomorrow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from vox_core.data.records import Message, Record
from vox_core.data.template import ChatTemplate, TemplateFault, takes_too_much
from vox_core.data.tokenizer import end_of_turn_ids, template_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEMPLATE = "the row is a conversation, and the model has no chat template"

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIXED_DATE = {
    "%d": "26", "%b": "Jul", "%B": "July", "%m": "07", "%Y": "2024", "%y": "24", "%A": "Friday",
    "%a": "Fri", "%H": "00", "%M": "00", "%S": "00",
}  # fmt: skip
_FIXED_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace('{code}', '{value}')" for code, value in _FIXED_DATE.items())
    + " }}{% endmacro %}{{ '' }}"  # the last block keeps trim_blocks off the template's first line
)


class RenderError(Exception):
    """Why a row cannot be rendered, or not with certainty about what is trained."""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters [start, stop) are trained; `closed` if they end with an end-of-turn token."""

    start: int
    stop: int
    closed: bool


@dataclass(frozen=True, slots=True)
class Rendered:
    """A record's text. `templated` if the chat template wrote it: its special tokens are then in
    the text; otherwise the tokenizer's own (bos, eos) are still to be added around it."""

    text: str
    spans: tuple[Span, ...]
    templated: bool


class Renderer:
    """Renders records for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.end_of_turn = end_of_turn_ids(tokenizer)
        self.template = _template(tokenizer)
        self._chat: ChatTemplate | None = None
        self._closer = _any_of(self.end_of_turn_names())

    def render(self, record: Record) -> Rendered:
        """The record's text and spans.

        Raises:
            RenderError: the template refuses the row, or leaves it unclear what is trained.
        """
        if record.text is not None:
            return Rendered(record.text, (Span(0, len(record.text), False),), templated=False)
        assert record.messages is not None
        if self.template is not None:
            return self._conversation(record.messages)
        if record.kind == "chat":
            raise RenderError(NO_TEMPLATE)
        prompt, completion = (message.content for message in record.messages)
        text = prompt + completion
        return Rendered(text, (Span(len(prompt), len(text), False),), templated=False)

    def end_of_turn_names(self) -> list[str]:
        """The tokens that end a turn, as text."""
        names = self._tokenizer.convert_ids_to_tokens(sorted(self.end_of_turn))
        return cast("list[str]", names)

    def _conversation(self, chat: Sequence[Message]) -> Rendered:
        if _GENERATION.search(cast(str, self.template)):
            return self._marked(chat)
        text = self._text(chat)
        turns = (i for i, message in enumerate(chat) if message.role == "assistant")
        return Rendered(text, tuple(self._span(chat, i, text) for i in turns), templated=True)

    def _span(self, chat: Sequence[Message], turn: int, text: str) -> Span:
        start = self._start(chat, turn, text)
        closer = self._closer.search(text, start)
        if closer and text[start : closer.start()].strip() == chat[turn].content.strip():
            return Span(start, closer.end(), closed=True)  # the usual case, and certain as it is
        limit = self._limit(chat, turn, text)
        if closer and closer.end() <= limit:
            return Span(start, closer.end(), closed=True)
        stop = min(limit, _common(self._until(chat, turn, start), text))
        if stop < start:
            raise RenderError(f"the chat template leaves unclear where messages[{turn}] ends")
        return Span(start, max(start, len(text[:stop].rstrip())), closed=False)

    def _start(self, chat: Sequence[Message], turn: int, text: str) -> int:
        prompt = self._prompt(chat[:turn])
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        before = self._before_content(chat, turn)
        if before is not None and text.startswith(before):
            return len(before)
        raise RenderError(f"the chat template leaves unclear where messages[{turn}] begins")

    def _limit(self, chat: Sequence[Message], turn: int, text: str) -> int:
        """An offset after turn's end-of-turn token and before what anyone says next."""
        for later in range(turn + 1, len(chat)):
            if (before := self._before_content(chat, later)) is not None:
                return _common(before, text)
        return len(text)

    def _until(self, chat: Sequence[Message], turn: int, start: int) -> str:
        """The messages up to and with turn's, rendered alone, without what closes the last one."""
        alone = self._text(chat[: turn + 1])
        closer = self._closer.search(alone, start)
        return alone[: closer.start()] if closer else alone

    def _prompt(self, chat: Sequence[Message]) -> str | None:
        """H: the messages with the generation prompt; None where the template refuses them."""
        try:
            return self._text(chat, generation_prompt=True) if chat else None
        except RenderError:
            return None

    def _before_content(self, chat: Sequence[Message], index: int) -> str | None:
        """What the template writes before the content of a message; None if it leaves that out."""
        marker = "6204819357"  # digits alone survive case filters and escapes
        while any(marker in message.content for message in chat):
            marker += "0"
        marked = [*chat[:index], replace(chat[index], content=marker), *chat[index + 1 :]]
        before, found, _ = self._text(marked).partition(marker)
        return before if found else None

    def _marked(self, chat: Sequence[Message]) -> Rendered:
        """Spans as the template's own generation markers give them.

        transformers' mask over *tokens* is not used: it marks everything to the end of the text
        when a stretch ends in whitespace that the tokenizer trims from its offsets.
        """
        with self._template_faults():
            text, stretches = self._compiled().render_marked(_plain(chat))
        spans = (self._closed(text, start, stop) for start, stop in stretches)
        return Rendered(text, tuple(spans), templated=True)

    def _closed(self, text: str, start: int, stop: int) -> Span:
        closer = self._closer.search(text, start, stop) or self._closer.match(text, stop)
        return Span(start, closer.end() if closer else stop, closed=closer is not None)

    def _text(self, chat: Sequence[Message], *, generation_prompt: bool = False) -> str:
        with self._template_faults():
            return self._compiled().render(_plain(chat), generation_prompt=generation_prompt)

    @contextmanager
    def _template_faults(self) -> Iterator[None]:
        """What a template raises is a fault of the row; taking too much is the template's own."""
        try:
            yield
        except TemplateFault as fault:
            if fault.too_much:
                raise takes_too_much(fault, self._tokenizer.name_or_path) from fault
            raise RenderError(f"the chat template refuses the row: {fault}") from fault

    def _compiled(self) -> ChatTemplate:
        """Compiled when a row asks for it, so that what is wrong with it is told of a row."""
        if self._chat is None:
            source = cast(str, self.template)
            self._chat = ChatTemplate(source, self._tokenizer.special_tokens_map)
        return self._chat


def _template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template (the default one among several), its clock stopped; None without one."""
    template = template_source(tokenizer)
    if template and "strftime_now" in template:
        return _FIXED_CLOCK + template
    return template


def _any_of(words: Sequence[str]) -> re.Pattern[str]:
    """Matches any of `words`, the longest first; nothing if there are none."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _plain(chat: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in chat]


def _common(left: str, right: str) -> int:
    """Length of the longest common prefix."""
    if right.startswith(left):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
