"""`/v1/responses` without state: the request as a chat, and the answer as OpenAI's `Response`.

Input is text, messages, and functions' calls and results; output is a message and calls. What needs
a store (`previous_response_id`, `store`, `conversation`, `background`) is refused, as are OpenAI's
own tools.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError

from vox_serve.engine import Piece
from vox_serve.requests import UNUSED, ApiError, ChatRequest, Lenient, StreamOptions, as_api_error
from vox_serve.responses import Chat, encoded
from vox_serve.served import Served
from vox_serve.tools import Call, Calls, new_id

_NEUTRAL: dict[str, Sequence[object]] = {
    "background": (False,),
    "include": ([],),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_SENT_AS = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
}  # fmt: skip
"""Fields of the chat, as the request has them."""


class TextOptions(Lenient):
    """Options of the answer's text; the chat request checks `format`."""

    neutral: ClassVar[Mapping[str, Sequence[object]]] = {"verbosity": ("medium",)}
    format: str | dict[str, Any] = Field({"type": "text"})


class ResponsesRequest(Lenient):
    """The body of `/v1/responses`; items, tools and formats are checked as those of a chat."""

    neutral, unused = _NEUTRAL, UNUSED - {"store", "metadata"}
    model: str
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(gt=0)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    text: TextOptions = TextOptions()
    tools: list[dict[str, Any]] = Field([])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    metadata: dict[str, str] = Field({})

    @property
    def format(self) -> dict[str, Any]:
        """The format of the answer, as it was sent."""
        format = self.text.format
        return format if isinstance(format, dict) else {"type": format}

    def chat(self) -> ChatRequest:
        """Return the request as a chat.

        Raises:
            ApiError: 400, a part of it is malformed or not supported.
        """
        document = {
            "model": self.model,
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": [_wrapped(tool) for tool in self.tools],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.format,
        }
        if isinstance(self.tool_choice, dict):
            document["tool_choice"] = _wrapped(self.tool_choice)
        if self.format.get("type") == "json_schema":
            schema = {name: value for name, value in self.format.items() if name != "type"}
            document["response_format"] = {"type": "json_schema", "json_schema": schema}
        try:
            return ChatRequest.model_validate(document)
        except ValidationError as error:
            raise sent_as(as_api_error(error)) from None

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            match item.get("type", "message"):
                case "message":
                    messages.append(_message(item))
                case "function_call":
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant"})
                    messages[-1].setdefault("tool_calls", []).append(_call(item))
                case "function_call_output":
                    content, id = _text_parts(item.get("output")), item.get("call_id")
                    messages.append({"role": "tool", "content": content, "tool_call_id": id})
                case kind:
                    found = f"input: items of type {str(kind)[:80]!r} are not supported"
                    raise ApiError(400, found, param="input")
        return messages


class Stateless(Chat):
    """OpenAI's `Response`, whole or as typed events.

    Args:
        asked: its settings stand in the answer.
    """

    def __init__(
        self, model: Served, asked: ResponsesRequest, calls: Callable[[], Calls] | None
    ) -> None:
        super().__init__(model, logprobs=False, usage=False, calls=calls)
        self._id, self._asked = f"resp_{secrets.token_hex(12)}", asked
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._finish, self._events = "stop", 0

    def completion(
        self, answers: Sequence[Piece], prompt_tokens: int, generated: int
    ) -> dict[str, Any]:
        for answer in answers:
            list(self.piece(0, answer))
        return self._response(self._status(), prompt_tokens, generated)

    def opening(self, index: int) -> Iterable[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def piece(self, index: int, piece: Piece) -> Iterable[bytes]:
        piece, calls, _ = self._said(index, piece)
        if piece.text or (piece.finish and not calls and not self._output):
            yield from self._words(piece.text)
        for call in calls:
            yield from self._close()
            yield from self._called(call)
        if piece.finish:
            self._finish = piece.finish
            yield from self._close()

    def closing(self, prompt_tokens: int, generated: int) -> Iterable[bytes]:
        status = self._status()
        response = self._response(status, prompt_tokens, generated)
        yield self._event(f"response.{status}", response=response)

    def _words(self, text: str) -> Iterable[bytes]:
        if self._open is None:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._open = self._item("message", "msg", role="assistant", content=[part])
            yield self._item_event("added", {**self._open, "content": []})
            yield self._part_event("response.content_part.added", part=part)
        if text:
            self._open["content"][0]["text"] += text
            yield self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def _close(self) -> Iterable[bytes]:
        """End the message that is open, if one is."""
        if self._open is None:
            return
        (part,) = self._open["content"]
        text = part["text"]
        yield self._part_event("response.output_text.done", text=text, logprobs=[])
        yield self._part_event("response.content_part.done", part=part)
        self._open["status"], self._open = self._status(), None
        yield self._item_event("done", self._output[-1])

    def _called(self, call: Call) -> Iterable[bytes]:
        item = self._item("function_call", "fc", call_id=new_id(), name=call.name, arguments="")
        yield self._item_event("added", item)
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        kind, said = "response.function_call_arguments", call.arguments
        yield self._event(f"{kind}.delta", **place, delta=said)
        yield self._event(f"{kind}.done", **place, name=call.name, arguments=said)
        item |= {"arguments": said, "status": "completed"}
        yield self._item_event("done", item)

    def _item(self, kind: str, prefix: str, **fields: Any) -> dict[str, Any]:
        id = f"{prefix}_{secrets.token_hex(12)}"
        self._output.append({"type": kind, "id": id, "status": "in_progress", **fields})
        return self._output[-1]

    def _item_event(self, kind: str, item: Mapping[str, Any]) -> bytes:
        index = len(self._output) - 1
        return self._event(f"response.output_item.{kind}", output_index=index, item=item)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        index, id = len(self._output) - 1, self._output[-1]["id"]
        return self._event(kind, item_id=id, output_index=index, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._events += 1
        body = {"type": kind, "sequence_number": self._events - 1, **fields}
        return f"event: {kind}\ndata: ".encode() + encoded(body) + b"\n\n"

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(
        self, status: str, prompt_tokens: int | None = None, generated: int = 0
    ) -> dict[str, Any]:
        usage = None if prompt_tokens is None else _usage(prompt_tokens, generated)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        asked = self._asked
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": self._model.name,
            "output": list(self._output),
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": asked.format},
            "tool_choice": asked.tool_choice,
            "tools": asked.tools,
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": usage,
        }


def sent_as(error: ApiError) -> ApiError:
    """Give an error of the chat the request's own names of fields, in place; return it."""
    if error.param:
        name, dot, rest = error.param.partition(".")
        sent = f"{_SENT_AS.get(name, name)}{dot}{rest}"
        error.message, error.param = error.message.replace(error.param, sent, 1), sent
    return error


def _wrapped(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function or its choice as a chat has it."""
    if tool.get("type") != "function":
        return dict(tool)
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: item[name] for name in item if name not in ("type", "id", "status", "phase")}
    return {"role": "user", **rest, "content": _text_parts(item.get("content"))}


def _text_parts(content: Any) -> Any:
    """Return parts of input and output text as parts of text."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
        else part
        for part in content
    ]


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _usage(prompt_tokens: int, generated: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + generated,
    }
