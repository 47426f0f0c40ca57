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
generation would end there too. What users say is not trained, whatever it contains, unless the row
asks for it: then it is the words, found by a marker, and an end-of-turn token directly after them.

Tools, calls and reasoning are given to the template as transformers gives them (`takes.py`), and a
row with something that the template would leave out without a word is refused. How the stretches
are found is in `turns.py`.

Templates that ask for the date get a fixed one: the same data must give the same tokens tomorrow.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from vox_core.data.messages import Message
from vox_core.data.rows import Record
from vox_core.data.template import ChatTemplate, TemplateFault, takes_too_much
from vox_core.data.template_features import Takes, what_it_takes
from vox_core.data.tokenizer import end_of_turn_ids, template_source
from vox_core.data.turns import Chat, RenderError, Span, Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NO_TEMPLATE", "RenderError", "Rendered", "Renderer", "Span", "weight_of"]

NO_TEMPLATE = "the row is a conversation, and the model has no chat template"

_FIXED_DATE = {
    "%d": "26", "%b": "Jul", "%B": "July", "%m": "07", "%Y": "2024", "%y": "24", "%A": "Friday",
    "%a": "Fri", "%H": "00", "%M": "00", "%S": "00",
}  # fmt: skip
_FIXED_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace('{code}', '{value}')" for code, value in _FIXED_DATE.items())
    + " }}{% endmacro %}{{ '' }}"  # the last block keeps trim_blocks off the template's first line
)


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
        special = _template(tokenizer, tools=True)
        self._for_tools = special if special != self.template else None
        self._chats: dict[str, ChatTemplate] = {}
        self._found: dict[str, Takes] = {}
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
            return self._conversation(record)
        if record.kind == "chat" or record.tools:
            raise RenderError(NO_TEMPLATE)
        prompt, completion = record.messages
        text = prompt.content + completion.content
        span = Span(len(prompt.content), len(text), False, weight_of(completion))
        return Rendered(text, (span,) if span.weight else (), templated=False)

    def end_of_turn_names(self) -> list[str]:
        """The tokens that end a turn, as text."""
        names = self._tokenizer.convert_ids_to_tokens(sorted(self.end_of_turn))
        return cast("list[str]", names)

    def prompt(self, record: Record, turn: int) -> str | None:
        """What a model is asked to go on from for `messages[turn]`: those before it, with the
        generation prompt. None where the template refuses them."""
        return self._turns(record, "").prompt(turn)

    def before(self, record: Record, turn: int) -> str | None:
        """What the template writes before the content of `messages[turn]`; None if it leaves that
        out.

        Raises:
            RenderError: the template refuses the record.
        """
        return self._turns(record, "").before_content(turn)

    def _conversation(self, record: Record) -> Rendered:
        chat = cast("tuple[Message, ...]", record.messages)
        if record.tools or [one for one in chat if one.extra or one.role == "tool"]:
            self._require_written(record, chat)
        if self._compiled(record).marked:
            return self._marked(record, chat)
        text = self._write(record, chat)
        turns = self._turns(record, text)
        spans = tuple(_weighted(turns, i, one) for i, one in enumerate(chat) if weight_of(one))
        return Rendered(text, spans, templated=True)

    def _turns(self, record: Record, text: str) -> Turns:
        chat = cast("tuple[Message, ...]", record.messages)
        return Turns(chat, text, partial(self._write, record), self._closer)

    def _require_written(self, record: Record, chat: Chat) -> None:
        """Refuse what the template would leave out without a word."""
        takes = self._takes(record)
        if record.tools and not takes.tools:
            raise RenderError("the chat template does not write the row's tools")
        for index, message in enumerate(chat):
            extra, what = message.extra or {}, f"messages[{index}]"
            if "tool_calls" in extra and not takes.calls:
                raise RenderError(f"the chat template does not write the calls of {what}")
            if "tool_calls" in extra and message.content.strip() and not takes.words:
                raise RenderError(f"the chat template does not write what {what} says beside calls")
            if message.role == "tool" and not takes.answers:
                raise RenderError(f"the chat template does not write {what} of a tool")
            if "reasoning_content" in extra and not takes.reasoning:
                said = f"the reasoning of {what}, unless in its content"
                raise RenderError(f"the chat template does not write {said}")

    def _marked(self, record: Record, chat: Chat) -> Rendered:
        """Spans as the template's own generation markers give them.

        transformers' mask over *tokens* is not used: it marks everything to the end of the text
        when a stretch ends in whitespace that the tokenizer trims from its offsets.
        """
        template, given = self._compiled(record), self._given(record, chat)
        with self._template_faults():
            text, stretches = template.render_marked(given, record.tools)
        spans = [self._closed(text, start, stop) for start, stop in stretches]
        if [message for message in chat if message.weight is not None]:
            spans = self._weigh(self._turns(record, text), chat, spans)
        return Rendered(text, tuple(spans), templated=True)

    def _weigh(self, turns: Turns, chat: Chat, spans: Sequence[Span]) -> list[Span]:
        """Spans of the template's markers with the weights of the messages that they are from, and
        those of others than the assistant."""
        assistants = [i for i, message in enumerate(chat) if message.role == "assistant"]
        starts = [turns.start(i) for i in assistants]
        others = [i for i, message in enumerate(chat) if i not in assistants and weight_of(message)]
        weighed = [_weighted(turns, i, chat[i]) for i in others]
        for span in spans:
            before = bisect_right(starts, max(span.start, span.stop - 1))
            weight = weight_of(chat[assistants[max(before, 1) - 1]])
            weighed += [replace(span, weight=weight)] if weight else []
        return sorted(weighed, key=lambda span: span.start)

    def _closed(self, text: str, start: int, stop: int) -> Span:
        closer = self._closer.search(text, start, stop) or self._closer.match(text, stop)
        return Span(start, closer.end() if closer else stop, closed=closer is not None)

    def _write(self, record: Record, chat: Chat, prompt: bool = False) -> str:
        """The text of `chat`, which may be a variation of the record's messages."""
        template, given = self._compiled(record), self._given(record, chat)
        with self._template_faults():
            return template.render(given, record.tools, generation_prompt=prompt)

    def _given(self, record: Record, chat: Chat) -> list[dict[str, Any]]:
        usual = [{"role": one.role, "content": one.content} for one in chat if not one.extra]
        if len(usual) == len(chat):
            return usual
        takes = self._takes(record)
        return [takes.given(message) for message in chat]

    @contextmanager
    def _template_faults(self) -> Iterator[None]:
        """What a template raises is a fault of the row; taking too much is the template's own."""
        try:
            yield
        except TemplateFault as fault:
            if fault.too_much:
                raise takes_too_much(fault, self._tokenizer.name_or_path) from fault
            raise RenderError(f"the chat template refuses the row: {fault}") from fault

    def _takes(self, record: Record) -> Takes:
        source = self._source(record)
        if source not in self._found:
            template = self._compiled(record)
            with self._template_faults():
                self._found[source] = what_it_takes(template)
        return self._found[source]

    def _compiled(self, record: Record) -> ChatTemplate:
        """Compiled when a row asks for it, so that what is wrong with it is told of a row."""
        source = self._source(record)
        if source not in self._chats:
            with self._template_faults():
                self._chats[source] = ChatTemplate(source, self._tokenizer.special_tokens_map)
        return self._chats[source]

    def _source(self, record: Record) -> str:
        source = (record.tools and self._for_tools) or self.template
        return cast(str, source)


def weight_of(message: Message) -> float:
    """How much of what a message says is trained."""
    if message.weight is None:
        return 1.0 if message.role == "assistant" else 0.0
    return message.weight


def _weighted(turns: Turns, turn: int, message: Message) -> Span:
    span = turns.span(turn) if message.role == "assistant" else turns.words(turn)
    return span if message.weight is None else replace(span, weight=message.weight)


def _template(tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> str | None:
    """The chat template, its clock stopped; None without one."""
    template = template_source(tokenizer, tools=tools)
    if template and "strftime_now" in template:
        return _FIXED_CLOCK + template
    return template


def _any_of(words: Sequence[str]) -> re.Pattern[str]:
    """Matches any of `words`, the longest first; nothing if there are none."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
