"""Where the turns of a conversation stand in its text, found by rendering variations of it.

`render.py` says what the rules are. Nothing here knows a template, tokens or weights: there is a
conversation, a way to write it, and a pattern for the tokens that end a turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from vox_core.data.messages import Message

Chat: TypeAlias = Sequence[Message]
Write: TypeAlias = Callable[[Chat, bool], str]
"""A conversation's text, with or without the generation prompt; raises RenderError."""


class RenderError(Exception):
    """Why a row cannot be rendered, or not with certainty about what is trained."""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters [start, stop) are trained; `closed` if they end with an end-of-turn token."""

    start: int
    stop: int
    closed: bool
    weight: float = 1.0


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
        """What the model says in an assistant's turn, and the token that ends it.

        Raises:
            RenderError: it is not clear where that begins or ends.
        """
        text, start = self._text, self.start(turn)
        closer = self._closer.search(text, start)
        if closer and text[start : closer.start()].strip() == self._chat[turn].content.strip():
            return Span(start, closer.end(), closed=True)  # the usual case, and certain as it is
        limit = self._limit(turn)
        if closer and closer.end() <= limit:
            return Span(start, closer.end(), closed=True)
        stop = min(limit, common(self._until(turn, start), text))
        if stop < start:
            raise RenderError(f"the chat template leaves unclear where messages[{turn}] ends")
        return Span(start, max(start, len(text[:stop].rstrip())), closed=False)

    def words(self, turn: int) -> Span:
        """What is said in anybody's turn, and the token that ends it if one follows directly.

        Raises:
            RenderError: it is not clear where that stands.
        """
        start, stop = self._content(turn)
        closer = self._closer.match(self._text, stop)
        return Span(start, closer.end() if closer else stop, closed=closer is not None)

    def start(self, turn: int) -> int:
        """Where the model begins to speak.

        Raises:
            RenderError: that is not clear.
        """
        prompt = self.prompt(turn)
        if prompt is not None and self._text.startswith(prompt):
            return len(prompt)
        before = self.before_content(turn)
        if before is not None and self._text.startswith(before):
            return len(before)
        if (start := self._start_of_calls(turn)) is not None:
            return start
        raise RenderError(f"the chat template leaves unclear where messages[{turn}] begins")

    def prompt(self, turn: int) -> str | None:
        """H: the messages before, with the generation prompt; None where the template refuses
        them."""
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
        """What the template writes before the content of a message; None if it leaves that out."""
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
        """What stands before and after the content of a message; None if that is left out."""
        chat, marked = self._chat, replace(self._chat[turn], content=self._mark())
        return self._parts([*chat[:turn], marked, *chat[turn + 1 :]])

    def _start_of_calls(self, turn: int) -> int | None:
        """Where a turn begins whose content the template leaves out because it calls tools.

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
