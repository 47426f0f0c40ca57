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
- The end is the first end-of-turn token after the content begins (the last one, of a turn that
  only calls tools), and before the content of the next message; a marker finds both in the same
  way. A turn that the template does not close ends with what the assistant says, whitespace cut.
- A template with `{% generation %}` markers says itself what is trained, up to the last end-of-turn
  token in its stretch or directly after it.

A beginning or an end that none of these finds is a fault of the row, never a guess. Nothing is ever
tokenised here: tokens merge across the boundary, characters do not.

An end-of-turn token that stands literally in what the assistant says ends the stretch there, since
generation would end there too. What users say is not trained, whatever it contains, unless the row
asks for it: then it is the words, found by a marker, and an end-of-turn token directly after them.

Tools, calls and reasoning are given to the template as transformers gives them
(`template.py`), and a row with something that the template would leave out without a word is
refused.

Templates that ask for the date get a fixed one: the same data must give the same tokens tomorrow.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from vox_core.data.messages import Message
from vox_core.data.rows import Record
from vox_core.data.template import ChatTemplate, Takes, TemplateFault, what_it_takes
from vox_core.data.tokenizer import chat_template, end_of_turn_ids, template_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat: TypeAlias = Sequence[Message]
Write: TypeAlias = Callable[[Chat, bool], str]
"""A conversation's text, with or without the generation prompt; raises RenderError."""

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


class RenderError(Exception):
    """The template cannot render a row, or the trained text in it is ambiguous."""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters [start, stop) are trained; `closed` if they end with an end-of-turn token."""

    start: int
    stop: int
    closed: bool
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Rendered:
    """A record's text. `templated` if the chat template wrote it: its special tokens are then in
    the text; otherwise the tokenizer's own (bos, eos) are still to be added around it."""

    text: str
    spans: tuple[Span, ...]
    templated: bool


class Renderer:
    """Renders records for one tokenizer.

    Args:
        today: give templates that ask for the date today's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, today: bool = False) -> None:
        self._tokenizer = tokenizer
        self.end_of_turn = end_of_turn_ids(tokenizer)
        source = partial(template_source if today else _source, tokenizer)
        self.template, self._for_tools = source(tools=False), source(tools=True)
        longest_first = sorted(self.end_of_turn_names(), key=len, reverse=True)
        names = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._closer = re.compile(rf"({names})(?:\s*(?:{names}))*")
        self._chat = cache(partial(chat_template, tokenizer))
        self._found = cache(what_it_takes)

    def render(self, record: Record) -> Rendered:
        """Return a record's text and spans, or raise `RenderError` where the spans are unclear."""
        if record.text is not None:
            return Rendered(record.text, (Span(0, len(record.text), False),), templated=False)
        assert record.messages is not None
        if self.template is not None:
            return self._conversation(record)
        if record.kind == "chat" or record.tools:
            raise RenderError(NO_TEMPLATE)
        prompt, *answer = record.messages
        if not record.answered:
            assert not answer, "a conversation needs a template"
            return Rendered(prompt.content, (), templated=False)
        (completion,) = answer
        text = prompt.content + completion.content
        span = Span(len(prompt.content), len(text), False, weight_of(completion))
        return Rendered(text, (span,) if span.weight else (), templated=False)

    def end_of_turn_names(self) -> list[str]:
        """The tokens that end a turn, as text."""
        return cast("list[str]", self._tokenizer.convert_ids_to_tokens(sorted(self.end_of_turn)))

    def turns(self, record: Record, text: str = "") -> Turns:
        """The turns of a conversation in its text; without the text, `prompt` and `before_content`
        alone."""
        chat = cast("tuple[Message, ...]", record.messages)
        return Turns(chat, text, partial(self._write, record), self._closer)

    def prompt(self, record: Record, *, generation: bool = True) -> str:
        """The text of a conversation that the model goes on with.

        Args:
            generation: end it with the generation prompt.

        Raises:
            RenderError: the template refuses the conversation, or leaves a part of it out.
        """
        return self._write(record, self._written(record), generation)

    def _conversation(self, record: Record) -> Rendered:
        if not record.answered:
            return Rendered(self.prompt(record), (), templated=True)
        chat = self._written(record)
        if self._template(record).marked:
            return self._marked(record, chat)
        text = self._write(record, chat)
        turns = self.turns(record, text)
        spans = tuple(_weighted(turns, i, one) for i, one in enumerate(chat) if weight_of(one))
        return Rendered(text, spans, templated=True)

    def _written(self, record: Record) -> Chat:
        """The messages, unless the template would leave out a part of them without a word."""
        chat = cast("tuple[Message, ...]", record.messages)
        if not (record.tools or [one for one in chat if one.extra or one.role == "tool"]):
            return chat
        takes = self._takes(record)
        if record.tools and not takes.tools:
            raise RenderError("the chat template does not write the tools")
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
        return chat

    def _marked(self, record: Record, chat: Chat) -> Rendered:
        """Spans as the template's own generation markers give them.

        transformers' mask over *tokens* is not used: before 5.24 it marks everything to the end of
        the text when a stretch ends in whitespace that the tokenizer trims from its offsets.
        """
        given = self._given(record, chat)
        with self._template_faults():
            text, stretches = self._template(record).render_marked(given, record.tools)
        spans = []
        for start, stop in stretches:
            after = self._closer.match(text, stop)
            ends = self._closer.finditer(text, start, after.end(1) if after else stop)
            end = max((found.end(1) for found in ends), default=0)
            spans.append(Span(start, end or stop, closed=end > 0))
        if [message for message in chat if message.weight is not None]:
            spans = self._weigh(self.turns(record, text), chat, spans)
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

    def _write(self, record: Record, chat: Chat, prompt: bool = False) -> str:
        """The text of `chat`, which may be a variation of the record's messages."""
        given = self._given(record, chat)
        with self._template_faults():
            return self._template(record).render(given, record.tools, generation_prompt=prompt)

    def _given(self, record: Record, chat: Chat) -> list[dict[str, Any]]:
        takes = self._takes(record) if any(one.extra for one in chat) else Takes()
        return [takes.given(message) for message in chat]

    @contextmanager
    def _template_faults(self) -> Iterator[None]:
        """Raise a template's fault as the row's."""
        try:
            yield
        except TemplateFault as fault:
            raise RenderError(f"the chat template refuses the row: {fault}") from fault

    def _takes(self, record: Record) -> Takes:
        with self._template_faults():
            return self._found(self._template(record))

    def _template(self, record: Record) -> ChatTemplate:
        return self._chat((record.tools and self._for_tools) or self.template)


def weight_of(message: Message) -> float:
    """Return the loss weight of a message: its own, or 1 for the assistant and 0 for others."""
    return float(message.role == "assistant") if message.weight is None else message.weight


def _weighted(turns: Turns, turn: int, message: Message) -> Span:
    span = turns.span(turn) if message.role == "assistant" else turns.words(turn)
    return span if message.weight is None else replace(span, weight=message.weight)


def _source(tokenizer: PreTrainedTokenizerBase, *, tools: bool) -> str | None:
    """The chat template, its clock stopped; None without one."""
    template = template_source(tokenizer, tools=tools)
    return _FIXED_CLOCK + template if template and "strftime_now" in template else template


# --- where turns stand ----------------------------------------------------------------------------


class Turns:
    """The turns of one conversation.

    Args:
        text: of the whole conversation, as `write` gives it.
        closer: matches what ends a turn.
    """

    def __init__(self, chat: Chat, text: str, write: Write, closer: re.Pattern[str]) -> None:
        self._chat, self._text, self._write, self._closer = chat, text, write, closer
        self._marker = ""

    def span(self, turn: int) -> Span:
        """Return the span of an assistant's answer with its end-of-turn token.

        Raises RenderError where the template leaves it unclear, as the methods below do."""
        text, start = self._text, self.start(turn)
        closer = self._closer.search(text, start)
        if closer and text[start : closer.start()].strip() == self._chat[turn].content.strip():
            return Span(start, closer.end(1), closed=True)  # the usual case, and certain as it is
        said = self.before_content(turn) if self._chat[turn].content.strip() else ""
        limit, after = self._limit(turn), max(start, common(said or "", text))
        if ends := [found.end(1) for found in self._closer.finditer(text, after, limit)]:
            return Span(start, ends[0 if said else -1], closed=True)
        stop = min(limit, common(self._until(turn, start), text))
        if stop < start:
            raise RenderError(f"the chat template leaves unclear where messages[{turn}] ends")
        return Span(start, max(start, len(text[:stop].rstrip())), closed=False)

    def words(self, turn: int) -> Span:
        """The content of any turn, and the token that ends it if one follows directly."""
        start, stop = self._content(turn)
        closer = self._closer.match(self._text, stop)
        return Span(start, closer.end(1) if closer else stop, closed=closer is not None)

    def start(self, turn: int) -> int:
        """Return the index of the answer's first character."""
        for find in (self.prompt, self.before_content):
            before = find(turn)
            if before is not None and self._text.startswith(before):
                return len(before)
        if (start := self._start_of_calls(turn)) is not None:
            return start
        raise RenderError(f"the chat template leaves unclear where messages[{turn}] begins")

    def prompt(self, turn: int) -> str | None:
        """The serving prompt H: the messages before, with the generation prompt; None where the
        template refuses them."""
        try:
            return self._write(self._chat[:turn], True) if turn else None
        except RenderError:
            return None

    def _limit(self, turn: int) -> int:
        """An offset after turn's end-of-turn token and before what anyone says next."""
        for later in range(turn + 1, len(self._chat)):
            if (before := self.before_content(later)) is not None:
                return common(before, self._text)
        return len(self._text)

    def _until(self, turn: int, start: int) -> str:
        """The messages up to and with turn's, rendered alone, without what closes the last one."""
        alone = self._write(self._chat[: turn + 1], False)
        closer = self._closer.search(alone, start)
        return alone[: closer.start()] if closer else alone

    def before_content(self, turn: int) -> str | None:
        """Return the text before a message's content; None if the template omits the content."""
        parts = self._around(turn)
        return parts[0] if parts else None

    def _content(self, turn: int) -> tuple[int, int]:
        before, after = self._around(turn) or ("?", "?")
        stop = len(self._text) - len(after)
        if self._text.startswith(before) and self._text.endswith(after) and len(before) <= stop:
            return len(before), stop
        raise RenderError(
            f"the chat template leaves unclear where the words of messages[{turn}] are"
        )

    def _around(self, turn: int) -> tuple[str, str] | None:
        """Return the text before and after a message's content; None if it is omitted."""
        chat, marked = self._chat, replace(self._chat[turn], content=self._mark())
        return self._parts([*chat[:turn], marked, *chat[turn + 1 :]])

    def _start_of_calls(self, turn: int) -> int | None:
        """Return the start of a turn with tool calls, whose content the template omits.

        The message takes the place of all up to the next user's, with words instead of calls: what
        is still the same then stands before what the model says.
        """
        chat, said = self._chat, Message("assistant", self._mark())
        if not (chat[turn].extra or {}).get("tool_calls"):
            return None
        later = range(turn + 1, len(chat))
        rest = next((i for i in later if chat[i].role == "user"), len(chat))
        if (parts := self._parts([*chat[:turn], said, *chat[rest:]])) is None:
            return None
        start = common(parts[0], self._text)
        return start if not turn or start >= self._content(turn - 1)[1] else None

    def _parts(self, marked: Chat) -> tuple[str, str] | None:
        try:
            before, found, after = self._write(marked, False).partition(self._mark())
        except RenderError:
            return None
        return (before, after) if found else None

    def _mark(self) -> str:
        """Text that stands nowhere else; digits alone survive case filters and escapes."""
        if not self._marker:
            marker = "6204819357"
            said = [self._text, *(message.content for message in self._chat)]
            while any(marker in text for text in said):
                marker += "0"
            self._marker = marker
        return self._marker


def common(left: str, right: str) -> int:
    """Length of the longest common prefix."""
    if right.startswith(left):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
