"""Answers as OpenAI writes them: completions, chunks of a stream, usage, log-probabilities.

`Chat` and `Text` are the two forms; each writes one answer whole or in chunks. A token's `bytes`
are null where it is a part of a character.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vox_serve.engine import Piece
from vox_serve.served import Served
from vox_serve.tools import Call, Calls, new_id

if TYPE_CHECKING:
    from vox_core.api.generating import Token

DONE = b"data: [DONE]\n\n"
_PART = "\ufffd"


def encoded(body: object) -> bytes:
    """Return JSON in UTF-8, with a question mark for half of a surrogate pair."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")


def event(body: object) -> bytes:
    """Return a server-sent event."""
    return b"data: " + encoded(body) + b"\n\n"


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return all pieces of an answer as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        pieces[-1].finish,
    )


class Form(ABC):
    """Format of the answers to a request.

    Args:
        logprobs: whether log-probabilities were requested.
        usage: whether a stream ends with the usage.
    """

    prefix: str
    whole: str
    chunk: str

    def __init__(self, model: Served, *, logprobs: bool, usage: bool) -> None:
        self._model, self._logprobs, self._usage = model, logprobs, usage
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def completion(
        self, answers: Sequence[Piece], prompt_tokens: int, generated: int
    ) -> dict[str, Any]:
        """Return the body of a response that is not streamed.

        Args:
            prompt_tokens, generated: the counts of tokens, without those that end a turn.
        """
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return {
            **self._head(self.whole),
            "choices": choices,
            "usage": _usage(prompt_tokens, generated),
        }

    def opening(self, index: int) -> Iterable[bytes]:
        """Return the events before an answer's first text."""
        return ()

    def piece(self, index: int, piece: Piece) -> Iterable[bytes]:
        """Return the events of one piece of a streamed answer."""
        yield self._chunk(self._delta(index, piece))

    def closing(self, prompt_tokens: int, generated: int) -> Iterable[bytes]:
        """Return the events after all answers; the counts are those of `completion`."""
        if self._usage:
            counts = _usage(prompt_tokens, generated)
            yield event({**self._head(self.chunk), "choices": [], "usage": counts})
        yield DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        rest = {"usage": None} if self._usage else {}
        return event({**self._head(self.chunk), "choices": [choice], **rest})

    def _head(self, kind: str) -> dict[str, Any]:
        name = self._model.name
        return {"id": self._id, "object": kind, "created": self._created, "model": name}

    @abstractmethod
    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a whole answer."""

    @abstractmethod
    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a piece of an answer."""


class Chat(Form):
    """`/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: Served,
        *,
        logprobs: bool,
        usage: bool,
        calls: Callable[[], Calls] | None = None,
    ) -> None:
        super().__init__(model, logprobs=logprobs, usage=usage)
        self._readers = None if calls is None else defaultdict[int, Calls](calls)

    def opening(self, index: int) -> Iterable[bytes]:
        """Return the chunk with the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        rest = {"logprobs": None, "finish_reason": None}
        yield self._chunk({"index": index, "delta": delta, **rest})

    def piece(self, index: int, piece: Piece) -> Iterable[bytes]:
        """See `Form`; text that may become a call is held back."""
        choice = self._delta(index, piece)
        if choice["delta"] or choice["finish_reason"] or choice["logprobs"]:
            yield self._chunk(choice)

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        piece, calls, _ = self._said(index, piece)
        content = None if calls and not piece.text else piece.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [_called(call) for call in calls]
        return {"index": index, "message": message, **self._rest(piece)}

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        piece, calls, before = self._said(index, piece)
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if calls:
            found = enumerate(calls, start=before)
            delta["tool_calls"] = [{"index": number, **_called(call)} for number, call in found]
        return {"index": index, "delta": delta, **self._rest(piece)}

    def _said(self, index: int, piece: Piece) -> tuple[Piece, list[Call], int]:
        """Return the words of a piece, its calls, and how many calls were before it."""
        if self._readers is None:
            return piece, [], 0
        reader = self._readers[index]
        before = reader.count
        parts = list(reader.feed(piece.text, last=piece.finish is not None))
        finish: Any = piece.finish
        if finish == "stop" and reader.count:
            finish = "tool_calls"
        words = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if isinstance(part, Call)]
        return Piece(words, piece.tokens, finish), calls, before

    def _rest(self, piece: Piece) -> dict[str, Any]:
        found = [self._token(token) for token in piece.tokens]
        logprobs = {"content": found, "refusal": None} if self._logprobs else None
        return {"logprobs": logprobs, "finish_reason": piece.finish}

    def _token(self, token: Token) -> dict[str, Any]:
        top = [self._entry(*each) for each in token.top]
        return {**self._entry(token.id, token.log_prob), "top_logprobs": top}

    def _entry(self, token: int, log_prob: float | None) -> dict[str, Any]:
        text = self._model.decode(token)
        data = None if _PART in text else list(text.encode())
        return {"token": text, "logprob": log_prob, "bytes": data}


def _called(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_id(), "type": "function", "function": function}


class Text(Form):
    """`/v1/completions`."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: Served, *, logprobs: bool, usage: bool) -> None:
        super().__init__(model, logprobs=logprobs, usage=usage)
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._lists(index, piece) if self._logprobs else None,
            "finish_reason": piece.finish,
        }

    _delta = _choice

    def _lists(self, index: int, piece: Piece) -> dict[str, list[Any]]:
        """Log-probabilities in lists, the chosen token among the most likely ones; offsets count
        the characters of the tokens' own texts."""
        decode = self._model.decode
        texts = [decode(token.id) for token in piece.tokens]
        offsets, at = [], self._offsets.get(index, 0)
        for text in texts:
            offsets.append(at)
            at += len(text)
        self._offsets[index] = at
        return {
            "tokens": texts,
            "token_logprobs": [token.log_prob for token in piece.tokens],
            "top_logprobs": [
                {decode(id): p for id, p in (*token.top, (token.id, token.log_prob))}
                for token in piece.tokens
            ],
            "text_offset": offsets,
        }


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
