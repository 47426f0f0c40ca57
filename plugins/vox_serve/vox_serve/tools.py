"""Tool calls in the text of an answer, in the forms that chat templates teach.

No template names its form. `format_of` renders a conversation with one call: the format is the one
that reads this call back. Templates whose calls none of `FORMATS` reads are refused by the API.
What looks like a call but is not JSON, or names none of the request's functions, stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from vox_core.api.files import JsonFault, is_deep, parse_json

_ID = "a1b2c3d4e"
_PROBE = {"name": "probe", "arguments": {"k": "v"}}
_TOOL = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
_ASKED = {"role": "user", "content": "7305918264"}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _ID, "type": "function", "function": _PROBE}],
}


@dataclass(frozen=True, slots=True)
class Format:
    """A family's format of tool calls: `head`, the calls with `joint` between them, `tail`.

    Args:
        arguments: key of the arguments, beside `name`.
        marker: what calls begin with; empty: they are the whole answer.
        end: what a block of calls ends with; empty: the end of the answer.
        joint: None: there is only one call.
    """

    name: str
    arguments: str
    marker: str
    head: str
    joint: str | None
    tail: str
    end: str = ""

    def read(self, block: str, functions: Collection[str]) -> list[Call] | None:
        """Return the calls of a block without its marker and end; None: it is none."""
        try:
            document = parse_json(block.encode("utf-8", "surrogatepass"))
        except JsonFault:
            return None
        found = document if isinstance(document, list) and self.joint == ", " else [document]
        calls = [self._call(each, functions) for each in found]
        return None if None in calls or is_deep(document) else [call for call in calls if call]

    def _call(self, value: object, functions: Collection[str]) -> Call | None:
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get(self.arguments, {})
        if not isinstance(name, str) or name not in functions or not isinstance(arguments, dict):
            return None
        try:
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return None
        return Call(name, written)


@dataclass(frozen=True, slots=True)
class Call:
    """A call; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


FORMATS = (
    Format(
        "Hermes", "arguments", "<tool_call>", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>", "</tool_call>",
    ),
    Format("Mistral", "arguments", "[TOOL_CALLS]", "[TOOL_CALLS][", ", ", "]"),
    Format("Llama 3", "parameters", "", "", None, ""),
)  # fmt: skip
"""Hermes' is also that of Qwen 2.5, Qwen 3 and Granite 4."""


def format_of(prompt: Callable[..., str], turn_ends: Sequence[str]) -> Format | None:
    """Return the format of a model's calls; None: it is none of `FORMATS`.

    Args:
        prompt: `Served.prompt`.
        turn_ends: the tokens that end a turn, as text.

    Raises:
        RenderError: the chat template writes no tools or no calls.
    """
    asked, said = prompt([_ASKED], [_TOOL]), prompt([_ASKED, _CALLED], [_TOOL], generation=False)
    answer = said.removeprefix(asked)
    answer = re.split("|".join(map(re.escape, turn_ends)) or "(?!)", answer)[0]
    expected = Call("probe", json.dumps(_PROBE["arguments"]))
    for each in FORMATS:
        if expected in Calls(each, {"probe"}).feed(answer, last=True):
            return each
    return None


class Calls:
    """Separates the calls of one answer from its words, as the text comes.

    Args:
        functions: names of the functions of the request.

    Attributes:
        count: calls so far.
    """

    def __init__(self, format: Format, functions: Collection[str]) -> None:
        self._format, self._functions = format, functions
        self._held, self._said, self._after_call = "", False, False
        self.count = 0

    def feed(self, text: str, *, last: bool) -> Iterator[str | Call]:
        """Yield the words and the calls that are complete, in order.

        Args:
            last: the answer ends with `text`.
        """
        self._held += text
        while block := self._block(last):
            start, stop, body = block
            calls = self._format.read(body, self._functions)
            yield from self._words(self._held[:start].rstrip() if calls else self._held[:stop])
            yield from calls or ()
            self._held = self._held[stop:]
            if calls:
                self._after_call, self.count = True, self.count + len(calls)
        ready = self._ready(last)
        yield from self._words(self._held[:ready])
        self._held = self._held[ready:]

    def _words(self, text: str) -> Iterator[str]:
        if text and (text.strip() or not self._after_call):
            self._said, self._after_call = True, False
            yield text

    def _block(self, last: bool) -> tuple[int, int, str] | None:
        """Return start, stop and content of the first complete block of calls."""
        held, form = self._held, self._format
        if not form.marker:
            whole = last and not self._said and held.lstrip().startswith("{")
            return (0, len(held), held) if whole else None
        if (start := held.find(form.marker)) < 0:
            return None
        inside = start + len(form.marker)
        stop = held.find(form.end, inside) if form.end else -1
        if stop < 0:
            return (start, len(held), held[inside:]) if last else None
        return start, stop + len(form.end), held[inside:stop]

    def _ready(self, last: bool) -> int:
        """Return how many of the held characters are certainly prose."""
        held, marker = self._held, self._format.marker
        if last:
            return len(held)
        if not marker:
            return 0 if not self._said and held.lstrip()[:1] in ("", "{") else len(held)
        begun = max(n for n in range(len(marker)) if held.endswith(marker[:n]))
        start = held.find(marker)
        return len(held[: start if start >= 0 else len(held) - begun].rstrip())


def new_id() -> str:
    """Return the id of a call, in the nine characters that Mistral's templates require."""
    return secrets.token_hex(5)[:9]
