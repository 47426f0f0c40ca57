"""What a JSON object of a data file means: which form its row has, and what that says.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}     ShareGPT
    {"prompt": "…", "completion": "…"}
    {"question": "…", "answer": "…"}
    {"prompt": "…", "response": "…", "rating": 4.5, "category": "…"}                        pairs
    {"instruction": "…", "input": "…", "output": "…"}                                       Alpaca
    {"text": "…"}
    {"prompt": "…", "chosen": "…", "rejected": "…"}                                     preference
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}

A row has exactly one of these forms. A `system` beside `conversations` is their first message. The
lists of a preference may be whole conversations, which begin alike, or the answers alone, with the
prompt (a text or a list of messages) in a field of its own; both end with an answer, and differ.

fields.py has the names, their aliases and the attributes, messages.py what a conversation is made
of. Other fields are not used, and their names are kept for the report; one that looks like a
misspelt field of vox's is a fault. A `RowError` has all faults of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vox_core.data.faults import all_of, faulty, json_type, text_of
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
    refuse_misspelt,
    refuse_unknown,
)
from vox_core.data.formats import place_of
from vox_core.data.json_rows import parse_object
from vox_core.data.messages import Message, Turn, conversation, tool_schemas, turns_of

Kind: TypeAlias = Literal["chat", "completion", "text", "preference"]
Tools: TypeAlias = tuple[Mapping[str, Any], ...]
Messages: TypeAlias = tuple[Message, ...]

NO_FILE = Path()


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
    source: Path = NO_FILE
    line: int = 0
    messages: Messages | None = None
    text: str | None = None
    unused: tuple[str, ...] = ()
    rejected: Messages = ()
    tools: Tools = ()
    attributes: Attributes = NO_ATTRIBUTES
    form: str = ""

    @property
    def place(self) -> str:
        return place_of(self.source, self.line)


def read_row(line: bytes | None, source: Path = NO_FILE, number: int = 0) -> Record:
    """The row in one line of a JSONL file; None stands for a line that was too long to read.

    Raises:
        RowError: with everything that is wrong with it.
    """
    return parse_row(parse_object(line), source, number)


def parse_row(values: dict[str, object], source: Path = NO_FILE, line: int = 0) -> Record:
    """Read a row; the `RowError` has everything that is wrong with it."""
    fields = Fields(values)
    if values.keys() == {"messages"}:  # the usual case, which none of the rest can object to
        return replace(_chat(fields), source=source, line=line)
    read = _reader(fields)
    said, attributes, tools, _, unused = all_of(
        partial(read, fields),
        partial(attributes_of, values),
        partial(_tools, fields, read),
        partial(_refuse_unsupported, values, ("documents",)),
        partial(_unused, fields),
    )
    record: Record = replace(
        said, source=source, line=line, unused=unused, tools=tools, attributes=attributes
    )
    return record


def refuse_columns(names: Sequence[str]) -> None:
    """Refuse the columns of a table from which no row can be read."""
    forms = [form for form in _READERS if not set(form).isdisjoint(names)]
    if len(forms) > 1 or not {*CHATS, *SHAREGPT, *PAIR}.isdisjoint(names):
        refuse_misspelt(names)
    else:
        other = {*TOOLS, "system", *ATTRIBUTES}
        parse_row({name: name for name in names if name not in other})


def _reader(fields: Fields) -> Callable[[Fields], Record]:
    """Return what reads a row of this form; refuse fields of no form, or of several."""
    if fields.has(("chosen",)):  # which may have the whole conversation beside it
        return _preference
    forms = [names for names in _READERS if fields.has(names)]
    forms = forms or [names for names in _READERS if not fields.values.keys().isdisjoint(names)]
    if len(forms) == 1:
        return _READERS[forms[0]]
    if not forms and fields.has(PAIR):
        return _preference
    if not forms and fields.has(QUESTION):
        return _completion
    if not forms:
        refuse_unknown(list(fields.values))
    named = [name for names in forms for name in names if name in fields.values]
    names = [name for name in named if fields.values[name] is not None] or named
    expected = f'those of one; to leave one out: [data.fields] {names[-1]} = ""'
    raise faulty("several forms", (), f"fields of several forms ({', '.join(names)})", expected)


def _tools(fields: Fields, read: Callable[[Fields], Record]) -> Tools:
    if read is _text:
        _refuse_unsupported(fields.values, TOOLS)
    return tuple(tool for name in TOOLS for tool in tool_schemas(fields.take(name), name))


def _unused(fields: Fields) -> tuple[str, ...]:
    unused = fields.unused()
    refuse_misspelt(unused)
    return unused


def _refuse_unsupported(values: Mapping[str, object], names: Sequence[str]) -> None:
    if found := [name for name in names if values.get(name) is not None]:
        raise faulty("unsupported", (), f"{', '.join(found)}, which vox does not support", "none")


# --- forms ----------------------------------------------------------------------------------------


def _chat(fields: Fields) -> Record:
    name = fields.first((*CHATS, *SHAREGPT))
    assert name is not None
    turns = turns_of(fields.values[name], name)
    form = "ShareGPT" if any(turn.sharegpt for turn in turns) else "messages"
    if name in SHAREGPT and fields.has(("system",)):
        said = text_of(fields.take("system"), ("system",))
        same = ({"role": "system", "content": said}, {"from": "system", "value": said})
        if not turns or turns[0].value not in same:
            turns.insert(0, Turn(("system",), same[0]))
    return Record("chat", messages=conversation(turns), form=form)


def _completion(fields: Fields) -> Record:
    (asked, prompt), (answered, answer) = all_of(partial(_prompt, fields), partial(_answer, fields))
    messages = (Message("user", prompt), Message("assistant", answer))
    return Record("completion", messages=messages, form=form_of_completion(asked, answered))


def _prompt(fields: Fields) -> tuple[str, str]:
    """The name of the prompt, and the prompt with the input that an instruction may have."""
    name = fields.one((*PROMPTS, QUESTION[0]))
    prompt = text_of(fields.values[name], (name,))
    if name == "instruction" and (extra := fields.take("input")) not in (None, ""):
        prompt = f"{prompt}\n\n{text_of(extra, ('input',))}"
    return name, prompt


def _answer(fields: Fields) -> tuple[str, str]:
    name = fields.one((*ANSWERS, QUESTION[1]))
    return name, text_of(fields.values[name], (name,))


def form_of_completion(prompt: str, answer: str) -> str:
    """What a form is called, by the names of its two fields."""
    if answer == "completion":
        return "prompt/completion"
    if (prompt, answer) == QUESTION:
        return "question/answer"
    return "Alpaca" if (prompt, answer) == ("instruction", "output") else "pairs"


def _text(fields: Fields) -> Record:
    return Record("text", text=text_of(fields.take("text"), ("text",)), form="text")


def _preference(fields: Fields) -> Record:
    chosen, rejected = both = [fields.take(name) for name in PAIR]
    if chosen is None or rejected is None:
        there, missing = PAIR if rejected is None else PAIR[::-1]
        raise faulty("preference pair", (), f'"{there}" without "{missing}"', "both")
    if isinstance(chosen, str) and isinstance(rejected, str):
        before = [Turn((), {"role": "user", "content": _prompt(fields)[1]})]
        texts = [text_of(fields.values[name], (name,)) for name in PAIR]
        answers = [[{"role": "assistant", "content": text}] for text in texts]
    elif isinstance(chosen, list) and isinstance(rejected, list):
        before, answers = _before(fields, [*chosen, *rejected]), [chosen, rejected]
    else:
        found = " and ".join(
            f'{json_type(value)} as "{name}"' for name, value in zip(PAIR, both, strict=True)
        )
        raise faulty("wrong type", (), found, "two strings or two lists of messages")
    chosen, rejected = all_of(
        *(partial(_answered, before, each, name) for name, each in zip(PAIR, answers, strict=True))
    )
    if chosen[0] != rejected[0]:
        found = '"chosen" and "rejected" that begin differently'
        raise faulty("preference pair", (), found, "one prompt")
    if chosen == rejected:
        found = 'the same as "chosen" and as "rejected"'
        raise faulty("preference pair", (), found, "two answers")
    return Record("preference", messages=chosen, rejected=rejected, form="preference")


def _answered(before: list[Turn], answer: object, name: str) -> Messages:
    messages = conversation([*before, *turns_of(answer, name)])
    if (last := messages[-1].role) != "assistant":
        raise faulty("roles", (), f'a "{name}" that ends with the {last}', "the assistant")
    return messages


def _before(fields: Fields, turns: list[object]) -> list[Turn]:
    """The messages of a prompt in a field of its own; a text that the lists repeat counts once."""
    prompts = (*PROMPTS, QUESTION[0])
    name = next((each for each in prompts if fields.values.get(each) is not None), "")
    prompt = fields.values.get(name)
    if isinstance(prompt, list):
        fields.first(prompts)
        return turns_of(prompt, name)
    objects = [turn for turn in turns if isinstance(turn, dict)]
    asks = any(
        turn.get("role") in ("user", "system") or turn.get("from") in ("human", "user", "system")
        for turn in objects
    )
    if not name or asks:
        if any(turn.get("content", turn.get("value")) == prompt for turn in objects):
            fields.used.add(name)
        return []
    return [Turn((name,), {"role": "user", "content": _prompt(fields)[1]})]


_READERS: dict[tuple[str, ...], Callable[[Fields], Record]] = {
    CHATS: _chat,
    SHAREGPT: _chat,
    (*PROMPTS, *ANSWERS): _completion,
    TEXTS: _text,
}
