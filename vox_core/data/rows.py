"""What a JSON object of a data file means: which form its row has, and what that says.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}     ShareGPT
    {"prompt": "…", "completion": "…"}
    {"question": "…", "answer": "…"}
    {"prompt": "…", "response": "…", "rating": 4.5, "category": "…"}                        pairs
    {"instruction": "…", "input": "…", "output": "…"}                                       Alpaca
    {"text": "…"}
    {"prompt": "…", "chosen": "…", "rejected": "…"}                                     preference

A row has exactly one of these forms. fields.py has the names, their aliases and the attributes,
conversations.py ShareGPT and preference pairs, messages.py what a conversation is made of.
Other fields are not used, and their names are kept so that somebody can be told; one that looks
like a misspelt field of vox's is a fault. All faults of a row are told together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from vox_core.data.conversations import (
    is_sharegpt,
    prompt_of,
    read_preference,
    read_sharegpt,
    renamed,
)
from vox_core.data.faults import RowError, RowFault
from vox_core.data.fields import (
    ANSWERS,
    ATTRIBUTES,
    CHATS,
    NO_ATTRIBUTES,
    PAIR,
    PROMPTS,
    QUESTION,
    SHAREGPT,
    TEXTS,
    TOOLS,
    Attributes,
    Fields,
    attributes_of,
    misspelt,
    refuse_unknown,
    text_of,
)
from vox_core.data.formats import place_of
from vox_core.data.jsonl import parse_object
from vox_core.data.messages import Message, conversation, refuse_unsupported
from vox_core.data.tools import tool_schemas

Kind: TypeAlias = Literal["chat", "completion", "text", "preference"]
Tools: TypeAlias = tuple[Mapping[str, Any], ...]

NO_FILE = Path()
_UNSUPPORTED_IN_ROW = ("documents",)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a data file.

    Args:
        source: the file.
        line: from 1; of a file that is no JSONL, the row.
        messages: of chat and completion (a user's and an assistant's); of a preference, those up
            to and with the chosen answer; None for text.
        text: of text; None for the others.
        unused: names of fields that mean nothing to vox.
        rejected: of a preference, all messages up to and with the rejected answer.
        tools: JSON schemas of the functions that the assistant may call.
        form: what the row's form is called, such as "Alpaca".
    """

    kind: Kind
    source: Path
    line: int
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    unused: tuple[str, ...] = ()
    rejected: tuple[Message, ...] = ()
    tools: Tools = ()
    attributes: Attributes = NO_ATTRIBUTES
    form: str = ""

    @property
    def place(self) -> str:
        return place_of(self.source, self.line)


@dataclass(frozen=True, slots=True)
class _Said:
    """What the fields of one form say."""

    kind: Kind
    form: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    rejected: tuple[Message, ...] = ()


def read_row(line: bytes | None, source: Path = NO_FILE, number: int = 0) -> Record:
    """The row in one line of a JSONL file; None stands for a line that was too long to read.

    Raises:
        RowError: with everything that is wrong with it.
    """
    return parse_row(parse_object(line), source, number)


def parse_row(values: dict[str, object], source: Path = NO_FILE, line: int = 0) -> Record:
    """Read a row.

    Raises:
        RowError: with everything that is wrong with it.
    """
    if values.keys() == {"messages"}:  # the usual case, which none of the rest can object to
        return Record("chat", source, line, conversation(values["messages"]), form="messages")
    fields, faults = Fields(values), list[RowFault]()
    read = _form(fields)
    said = _try(lambda: read(fields), faults)
    attributes = _try(lambda: attributes_of(values), faults)
    tools = _try(lambda: _tools(fields, said), faults)
    _try(lambda: refuse_unsupported(values, _UNSUPPORTED_IN_ROW), faults)
    unused = fields.unused()
    faults += (hint for name in unused if (hint := misspelt(name)))
    if faults:
        raise RowError(*faults)
    assert said is not None and attributes is not None and tools is not None
    return Record(
        said.kind,
        source,
        line,
        said.messages,
        said.text,
        unused,
        said.rejected,
        tools,
        attributes,
        said.form,
    )


def refuse_columns(names: Sequence[str]) -> None:
    """Refuse the columns of a table of which no row can be made, whatever the cells say.

    Raises:
        RowError: with everything that is wrong with the names.
    """
    forms = _forms(lambda form: not set(form).isdisjoint(names))
    if len(forms) > 1 or not {*CHATS, *SHAREGPT, *PAIR}.isdisjoint(names):
        if faults := [hint for name in names if (hint := misspelt(name))]:
            raise RowError(*faults)
        return
    other = {*TOOLS, "system", *ATTRIBUTES}
    parse_row({name: name for name in names if name not in other})


def _try(read: Callable[[], _T], faults: list[RowFault]) -> _T | None:
    try:
        return read()
    except RowError as fault:
        faults += fault.faults
        return None


def _form(fields: Fields) -> Callable[[Fields], _Said]:
    """Who reads the row.

    Raises:
        RowError: its fields are of no form, or of several.
    """
    if fields.has(("chosen",)):  # which may have the whole conversation beside it
        return _preference
    there = _forms(fields.has)
    there = there or _forms(lambda names: not fields.values.keys().isdisjoint(names))
    if not there and fields.has(PAIR):
        return _preference
    if not there and fields.has(QUESTION):
        return _completion
    if not there:
        refuse_unknown(list(fields.values))
    if len(there) > 1:
        named = [n for names in there for n in names if n in fields.values]
        names = [n for n in named if fields.values[n] is not None] or named
        found = f"fields of several forms ({', '.join(names)})"
        expected = f'those of one; to leave one out: [data.fields] {names[-1]} = ""'
        raise RowError(RowFault("several forms", (), found, expected))
    return _READERS[next(iter(there))]


def _forms(has: Callable[[tuple[str, ...]], bool]) -> list[tuple[str, ...]]:
    return [names for names in _READERS if has(names)]


def _chat(fields: Fields) -> _Said:
    name = fields.first(CHATS)
    assert name is not None
    value = fields.values[name]
    length = len(value) if isinstance(value, list) else 0
    return _Said("chat", "messages", renamed(value, [(name, length, False)]))


def _sharegpt(fields: Fields) -> _Said:
    form = "ShareGPT" if is_sharegpt(fields.values["conversations"]) else "messages"
    return _Said("chat", form, read_sharegpt(fields))


def _completion(fields: Fields) -> _Said:
    faults = list[RowFault]()
    asked = _try(lambda: prompt_of(fields), faults)
    answered = _try(lambda: _answer(fields), faults)
    if asked is None or answered is None:
        raise RowError(*faults)
    messages = (Message("user", asked[1]), Message("assistant", answered[1]))
    return _Said("completion", form_of_completion(asked[0], answered[0]), messages)


def _answer(fields: Fields) -> tuple[str, str]:
    name = fields.one((*ANSWERS, QUESTION[1]))
    return name, text_of(name, fields.values[name])


def form_of_completion(prompt: str, answer: str) -> str:
    """What a form is called, by the names of its two fields."""
    if answer == "completion":
        return "prompt/completion"
    if (prompt, answer) == QUESTION:
        return "question/answer"
    return "Alpaca" if (prompt, answer) == ("instruction", "output") else "pairs"


def _text(fields: Fields) -> _Said:
    return _Said("text", "text", text=text_of("text", fields.take("text")))


def _preference(fields: Fields) -> _Said:
    chosen, rejected = read_preference(fields)
    return _Said("preference", "preference", chosen, rejected=rejected)


_READERS: dict[tuple[str, ...], Callable[[Fields], _Said]] = {
    CHATS: _chat,
    SHAREGPT: _sharegpt,
    (*PROMPTS, *ANSWERS): _completion,
    TEXTS: _text,
}


def _tools(fields: Fields, said: _Said | None) -> Tools:
    if said is not None and said.kind == "text":
        refuse_unsupported(dict(fields.values), TOOLS)
    return tuple(tool for name in TOOLS for tool in tool_schemas(fields.take(name), name))
