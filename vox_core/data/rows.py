"""Parse a JSON object of a data file: recognise its row form, and return a `Record`.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}     ShareGPT
    {"prompt": "…", "completion": "…"}                        or two lists of messages, as for TRL
    {"question": "…", "answer": "…"}
    {"prompt": "…", "response": "…", "rating": 4.5, "category": "…"}              prompt/response
    {"instruction": "…", "input": "…", "output": "…"}                                       Alpaca
    {"text": "…"}
    {"prompt": "…", "chosen": "…", "rejected": "…"}                                     preference
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}
    {"prompt": "…"}                        or a list of messages, where the model answers: no answer

A row has exactly one of these forms. A `system` beside any but text is the first message. The
lists of a preference may be whole conversations, which begin alike, or the answers alone, with the
prompt (a text or a list of messages) in a field of its own; both end with an answer, and differ.

fields.py has the names, their aliases and the attributes, messages.py what a conversation is made
of. Other fields are not used, and their names are kept for the report; one that looks like a
misspelt field of vox's is a fault. A `RowError` has all faults of a row.

Supervised training makes one document of a row. An objective that compares makes several, its
sides, each a row of its own in a form of supervised training: the chosen and the rejected answer.
Where the model learns from its own answers, the document is the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from vox_core.config.sections import RewardSource
from vox_core.contract import SFT, Need, Objective, ObjectiveSpec, Reward
from vox_core.data.faults import RowError, all_of, faulty, json_type, text_of
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
from vox_core.errors import ConfigError
from vox_core.host.load import broken, call_hook, format_error, provider

Kind: TypeAlias = Literal["chat", "completion", "text", "preference"]
Answers: TypeAlias = Literal["some", "last", "optional"]
Rewards: TypeAlias = tuple[tuple[RewardSource, Reward], ...]
Tools: TypeAlias = tuple[Mapping[str, Any], ...]
Messages: TypeAlias = tuple[Message, ...]

NO_FILE = Path()


@dataclass(frozen=True, slots=True)
class Record:
    """A parsed row of a data file.

    Args:
        line: from 1; of a file that is no JSONL, the row.
        messages: of chat and completion (a user's and an assistant's); of a preference, those up
            to and with the chosen answer; None for text.
        text: of text; None for the others.
        unused: names of fields that mean nothing to vox.
        rejected: of a preference, all messages up to and with the rejected answer.
        tools: JSON schemas of the functions that the assistant may call.
        form: name of the row's form, such as "Alpaca".
        answered: the last message is an answer to train; False: the model answers the messages.
        others: names and values of a prompt's other fields, which a reward may read; no null.
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
    answered: bool = True
    others: tuple[tuple[str, object], ...] = ()

    @property
    def place(self) -> str:
        return place_of(self.source, self.line)


def read_row(
    line: bytes | None, source: Path = NO_FILE, number: int = 0, *, answers: Answers = "some"
) -> Record:
    """The row in one line of a JSONL file, or a RowError with everything that is wrong with it;
    None stands for a line that was too long to read. For `answers` see `parse_row`."""
    return parse_row(parse_object(line), source, number, answers=answers)


def parse_row(
    values: dict[str, object], source: Path = NO_FILE, line: int = 0, *, answers: Answers = "some"
) -> Record:
    """Read a row; the `RowError` has everything that is wrong with it.

    Args:
        answers: "some": a row without an answer is a fault; "last": so are messages that do not end
            with one; "optional": a prompt alone is a row, too. Unless "some", an answer is for a
            reward to read, and may be any JSON value.
    """
    if answers != "some":
        texts = ((name, answer_text(values.get(name))) for name in (*ANSWERS, QUESTION[1]))
        values = {**values, **{name: text for name, text in texts if text is not None}}
    fields = Fields(values)
    if values.keys() == {"messages"}:  # the usual case, which none of the rest can object to
        return replace(_chat(fields, answers), source=source, line=line)
    read = _reader(fields)
    if read is _chat:
        read = partial(_chat, answers=answers)
    elif answers == "optional" and read is _completion and not fields.has((*ANSWERS, QUESTION[1])):
        read = _prompt_alone if fields.has((*PROMPTS, QUESTION[0])) else read
    said, attributes, tools, _, unused = all_of(
        partial(read, fields),
        partial(attributes_of, values),
        partial(_tools, fields, read),
        partial(_refuse_unsupported, values, ("documents",)),
        fields.unused,
    )
    names = () if said.answered else sorted({*unused, *ATTRIBUTES})
    others = tuple((name, values[name]) for name in names if values.get(name) is not None)
    said = replace(said, source=source, line=line, unused=unused, tools=tools)
    record: Record = replace(said, attributes=attributes, others=others)
    return record


def answer_text(value: object) -> str | None:
    """Return the text that a reward reads, JSON of other values; None for null and messages."""
    if value is None or isinstance(value, str):
        return value
    items = value if isinstance(value, list) else [value]
    if any(isinstance(each, dict) and ("role" in each or "from" in each) for each in items):
        return None
    return json.dumps(value, ensure_ascii=False)


def refuse_columns(names: Sequence[str]) -> None:
    """Refuse the columns of a table from which no row can be read."""
    forms = [form for form in _READERS if not set(form).isdisjoint(names)]
    if len(forms) > 1 or not {*CHATS, *SHAREGPT, *PAIR}.isdisjoint(names):
        refuse_misspelt(names)
    else:
        other = {*TOOLS, "system", *ATTRIBUTES}
        parse_row({name: name for name in names if name not in other}, answers="optional")


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


def _refuse_unsupported(values: Mapping[str, object], names: Sequence[str]) -> None:
    if found := [name for name in names if values.get(name) is not None]:
        raise faulty("unsupported", (), f"{', '.join(found)}, which vox does not support", "none")


# --- forms ----------------------------------------------------------------------------------------


def _chat(fields: Fields, answers: Answers = "some") -> Record:
    name = fields.one((*CHATS, *SHAREGPT))
    turns = turns_of(fields.values[name], name)
    form = "ShareGPT" if any(turn.sharegpt for turn in turns) else "messages"
    messages = conversation(_with_system(fields, turns), answered=answers != "optional")
    if not messages:
        raise faulty("empty", (name,), "no message", "one or more")
    if answers == "last" and (role := messages[-1].role) != "assistant":
        raise faulty("roles", (), f'"{name}" that end with the {role}', "the assistant's answer")
    answered = answers != "optional" or messages[-1].role == "assistant"
    return Record("chat", messages=messages, form=form, answered=answered)


def _with_system(fields: Fields, turns: list[Turn]) -> list[Turn]:
    """The turns after the system message in a field of its own, unless they begin with one."""
    said, first = fields.values.get("system"), turns[0].value if turns else None
    if isinstance(first, dict) and first.get("role", first.get("from")) in ("system", "developer"):
        if said in (first.get("content"), first.get("value")):
            fields.used.add("system")
        return turns
    if (said := fields.take("system")) is None or not str(said).strip():
        return turns
    return [Turn(("system",), {"role": "system", "content": text_of(said, ("system",))}), *turns]


def _completion(fields: Fields) -> Record:
    turns = fields.values[name] if (name := fields.first((*ANSWERS, QUESTION[1]))) else None
    if isinstance(turns, str) and isinstance(asks := fields.values.get("prompt"), list) and asks:
        turns = [{"role": "assistant", "content": turns}]  # as rows for TRL's GRPO
    if name and isinstance(turns, list) and any(isinstance(each, dict) for each in turns):
        said = _answered(fields, _before(fields, turns), turns, name)
        n = len(said) - len(turns)
        asked = (replace(m, weight=0.0 if m.role == "assistant" else None) for m in said[:n])
        return Record("chat", messages=(*asked, *said[n:]), form="prompt/completion")
    if isinstance(fields.values.get("prompt"), list):
        _answer(fields)  # the fault is there: a list has been read above
    (asked, prompt), (answered, answer) = all_of(partial(_prompt, fields), partial(_answer, fields))
    system = conversation(_with_system(fields, []), answered=False)
    messages = (*system, Message("user", prompt), Message("assistant", answer))
    kind: Kind = "chat" if system else "completion"
    return Record(kind, messages=messages, form=form_of_completion(asked, answered))


def _prompt_alone(fields: Fields) -> Record:
    turns = _before(fields, [])
    messages = conversation(_with_system(fields, turns), answered=False)
    if not turns or messages[-1].role == "assistant":
        found = "a prompt that ends with the assistant" if turns else "an empty prompt"
        raise faulty("roles", (), found, "the user's words at its end")
    kind: Kind = "completion" if len(messages) == len(turns[0].place) == 1 else "chat"
    return Record(kind, messages=messages, form="prompt", answered=False)


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
    """Return the name of a row form by the names of its two fields."""
    if answer == "completion":
        return "prompt/completion"
    if (prompt, answer) == QUESTION:
        return "question/answer"
    return "Alpaca" if (prompt, answer) == ("instruction", "output") else "prompt/response"


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
    sides = (partial(_answered, fields, before, *side) for side in zip(answers, PAIR, strict=True))
    chosen, rejected = pair = all_of(*sides)
    first, second = (next(m for m in side if m.role != "system") for side in pair)
    if first != second:
        found = '"chosen" and "rejected" that begin differently'
        raise faulty("preference pair", (), found, "one prompt")
    if chosen == rejected:
        found = 'the same as "chosen" and as "rejected"'
        raise faulty("preference pair", (), found, "two answers")
    return Record("preference", messages=chosen, rejected=rejected, form="preference")


def _answered(fields: Fields, before: list[Turn], answer: object, name: str) -> Messages:
    messages = conversation(_with_system(fields, [*before, *turns_of(answer, name)]))
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


Values: TypeAlias = Mapping[str, object]
Examples: TypeAlias = Callable[[Values, Callable[[], Values]], Mapping[str, Values | Record]]
"""From a row, and what reads another one, to the row's sides, by label; ValueError if they cannot
be made."""
WHOLE = ""
"""Label of a row that is one document."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a data file, as the records of its documents.

    Args:
        sides: label -> record, in order; empty if the row does not fit.
        misfit: what the objective lacks in it.
    """

    source: Path
    line: int
    sides: Mapping[str, Record]
    misfit: str = ""

    @classmethod
    def of(cls, record: Record) -> Row:
        """A row that is one document."""
        return cls(record.source, record.line, {WHOLE: record})


def row_of(
    line: bytes | None,
    path: Path,
    number: int,
    examples: Examples | None = None,
    other: bytes | None = None,
) -> Row:
    """Read a line of a JSONL file; RowError if it is no row at all.

    Args:
        examples: makes the sides of the row; None for supervised training.
        other: the line of another row, for an objective that looks at two; None: there is none.
    """
    if examples is None:
        return Row.of(read_row(line, path, number))

    def beside() -> Values:
        if other is None:
            raise ValueError("found no other row, expected one to compare this one with")
        return parse_object(other)

    values = parse_object(line)
    try:
        made = examples(values, beside)
        sides = {
            label: replace(side, source=path, line=number)
            if isinstance(side, Record)
            else parse_row(dict(side), path, number)
            for label, side in made.items()
        }
    except ValueError as error:
        return Row(path, number, {}, " ".join(str(error).split()))
    except (LookupError, TypeError) as error:  # of an objective that expects another row
        return Row(path, number, {}, format_error(error))
    except RowError as error:
        return Row(path, number, {}, "; ".join(map(str, error.faults)))
    return Row(path, number, sides)


def rows_of(
    lines: Sequence[tuple[int, bytes | None]], path: Path, examples: Examples | None = None
) -> Iterator[Row]:
    """Read lines, each beside the next one, and the last beside the first; see `row_of`."""
    others = [None] if len(lines) == 1 else [line for _, line in (*lines[1:], *lines[:1])]
    for (number, line), other in zip(lines, others, strict=True):
        yield row_of(line, path, number, examples, other)


@cache
def load_objective(name: str, options: tuple[tuple[str, str], ...] = ()) -> Objective:
    """Load an objective of a plugin, with its options checked.

    Raises:
        BackendError: B013, no plugin provides it.
        ConfigError: an option is unknown or wrong.
    """
    plugin = provider("objectives", name)
    spec = ObjectiveSpec(name, dict(options))
    objective: Objective = call_hook(plugin, "vox_objective", Objective, spec=spec)
    if unknown := {*objective.needs} - {*get_args(Need)}:
        expected = f"a set of {', '.join(get_args(Need))}"
        raise broken(plugin, f"needs of {name!r}: {', '.join(sorted(unknown))}", expected)
    return objective


def load_rewards(named: Iterable[str]) -> Rewards:
    """Load rewards: each a plugin's, by name, or a function of a file.

    Raises:
        BackendError: B013, no plugin provides one.
        ConfigError: C004, there is no such function.
    """
    found = []
    for source in map(RewardSource.of, named):
        plugin = provider("rewards", "FILE.py:FUNCTION" if source.file else source.name)
        name = str(source._replace(weight=1))
        found.append((source, call_hook(plugin, "vox_reward", Reward, name=name)))
    return tuple(found)


def objective_of(spec: ObjectiveSpec) -> Objective | None:
    """Return the objective of a contract; None for supervised training.

    Raises:
        InputError: as `load_objective`; options for supervised training, which has none.
    """
    if spec.name != SFT.name:
        return load_objective(spec.name, tuple(sorted(spec.options.items())))
    if spec.options:
        raise ConfigError(
            "C004",
            "supervised training has no options",
            where="--objective-option",
            found=", ".join(f"{name}={value}" for name, value in spec.options.items()),
            remedy="leave it out, or choose another --objective",
        )
    return None


def identity_of(spec: ObjectiveSpec) -> list[object]:
    """Return what decides the documents of a row: name, options and the plugin's version; the same
    for all objectives that learn from answers.

    Raises:
        InputError: as `load_objective`.
    """
    objective = objective_of(spec)
    if objective is None:
        return [SFT.name, [], None]
    if learns_from_answers(objective):
        return ["prompts", [], None]
    deciding = objective.options_of_examples
    options = [each for each in spec.options.items() if deciding is None or each[0] in deciding]
    plugin = provider("objectives", spec.name)
    return [spec.name, sorted(options), {plugin.id: plugin.shown_version}]


def learns_from_answers(objective: Objective | None) -> bool:
    """Whether the model answers prompts, and learns from its answers."""
    return objective is not None and "rollouts" in objective.needs


def answers_for(objective: Objective | None, rewards: Rewards = ()) -> Answers:
    """Return which answers the rows need, for the objective and for the rewards."""
    if not learns_from_answers(objective):
        return "some"
    return "last" if any(reward.reads_answer for _, reward in rewards) else "optional"


def examples_of(spec: ObjectiveSpec) -> Examples | None:
    """Return what makes the sides of a row; None for supervised training. Errors as for
    `load_objective`."""
    objective = objective_of(spec)
    if objective is None:
        return None
    return _prompted if learns_from_answers(objective) else examples_by(objective)


def _prompted(row: Values, _other: Callable[[], Values]) -> Mapping[str, Record]:
    """Return the prompt of a row, its messages without an answer at the end; ValueError where there
    may be several, or none."""
    record = parse_row(dict(row), answers="optional")
    if record.form in ("text", "preference"):
        raise ValueError(f"found a {record.form} row, expected a prompt, or messages")
    if not record.answered:
        return {WHOLE: replace(record, form="prompt")}
    if not (messages := (record.messages or ())[:-1]):
        raise ValueError("found an answer alone, expected a prompt before it")
    return {WHOLE: replace(record, messages=messages, answered=False)}


def examples_by(objective: Objective) -> Examples:
    """Return what makes the sides of a row for an objective."""

    def examples(row: Values, other: Callable[[], Values]) -> Mapping[str, Values]:
        sides = dict(objective.examples(row))
        if "mismatched" in objective.needs:
            sides |= objective.mismatched(row, other())
        return sides

    return examples
