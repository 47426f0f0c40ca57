"""Rows of preferences -> documents, as rows of supervised training.

    {"prompt": "…", "chosen": "…", "rejected": "…"}                       explicit prompt
    {"prompt": […], "chosen": […], "rejected": […]}                       messages
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}    implicit prompt
    {"prompt": "…", "completion": "…", "label": true}                     unpaired, for KTO
    {"messages": […], "label": false}

The implicit prompt is what both conversations begin with. Only what follows the prompt is trained.
Messages may be ShareGPT's. What a document's own form requires, such as roles, is checked when it
is read as a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

Row: TypeAlias = Mapping[str, object]
Turn: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = str | Sequence[Turn]

PAIR = ("chosen", "rejected")
PROMPTS = ("prompt", "instruction", "question")
ANSWERS = ("completion", "response", "output", "answer")
CHATS = ("messages", "turns", "conversations")
_ASSISTANTS = ("gpt", "chatgpt", "bing", "bard", "function_call")
_SPEAKERS = {"human": "user", **dict.fromkeys(_ASSISTANTS, "assistant")}
_OWN = {*PAIR, *PROMPTS, "input", *ANSWERS, *CHATS, "text", "label"}


@dataclass(frozen=True)
class Prompt:
    """A prompt: messages, or a text if there are none.

    Args:
        shared: other fields of the row, such as tools, that all of its documents have.
    """

    turns: Sequence[Turn]
    text: str
    shared: Row

    def with_answer(self, answer: Answer) -> Row:
        """Return a document, of which the answer alone is trained."""
        if isinstance(answer, str) and not self.turns:
            return {**self.shared, "prompt": self.text, "completion": answer}
        if isinstance(answer, str):
            answer = [_turn("assistant", answer, self.turns)]
        turns = self.turns or [_turn("user", self.text, answer)]
        return {**self.shared, "messages": [*map(_untrained, turns), *answer]}


def pair(row: Row) -> dict[str, Row]:
    """Return the documents `chosen` and `rejected` of a row.

    Raises:
        ValueError: a side is missing, both are equal, or they have no prompt in common.
    """
    prompt, answers = _pair(row)
    return {label: prompt.with_answer(answer) for label, answer in answers.items()}


def judged(row: Row) -> dict[str, Row]:
    """Return the document of an unpaired row, labelled `chosen` or `rejected`, or both of a pair.

    Raises:
        ValueError: the row has no label and is no pair, or has no answer.
    """
    if any(row.get(name) is not None for name in PAIR):
        return pair(row)
    if (label := row.get("label")) not in (True, False):  # 1 and 0, too
        found = "no label" if label is None else f"the label {label!r}"
        raise ValueError(f'found {found}, expected "label": true or false, or a pair')
    prompt, answer = _single(row)
    return {PAIR[not label]: prompt.with_answer(answer)}


def mismatched(row: Row, other: Row) -> Row:
    """Return the prompt of a row with the answer of another, of a pair the chosen one.

    Raises:
        ValueError: as for `judged`.
    """
    (prompt, _), (_, answer) = _any(row), _any(other)
    return prompt.with_answer(answer)


def _any(row: Row) -> tuple[Prompt, Answer]:
    if all(row.get(name) is None for name in PAIR):
        return _single(row)
    prompt, answers = _pair(row)
    return prompt, answers["chosen"]


def _single(row: Row) -> tuple[Prompt, Answer]:
    """Split a row into its prompt and the last answer."""
    chat = next((row[name] for name in CHATS if row.get(name) is not None), None)
    if _is_chat(chat):
        _require_answer("messages", chat)
        return Prompt(chat[:-1], "", _shared(row)), chat[-1:]
    answer = next((row[name] for name in ANSWERS if row.get(name) is not None), None)
    if not isinstance(answer, str) and not _is_chat(answer):
        raise ValueError('found no answer, expected a "completion"')
    return _prompt(row), answer


def _pair(row: Row) -> tuple[Prompt, dict[str, Answer]]:
    chosen, rejected = (_side(row, name) for name in PAIR)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError("found a text and a list of messages, expected two of a kind")
    if chosen == rejected:
        raise ValueError('found the same as "chosen" and as "rejected", expected two answers')
    if isinstance(chosen, str) or isinstance(rejected, str):
        return _prompt(row), {"chosen": chosen, "rejected": rejected}
    for name, side in zip(PAIR, (chosen, rejected), strict=True):
        _require_answer(name, side)
    both = zip(chosen[:-1], rejected[:-1], strict=False)
    common = len(list(itertools.takewhile(lambda turns: turns[0] == turns[1], both)))
    before = _before(row, chosen)
    if not before and not common:
        raise ValueError('found "chosen" and "rejected" of different prompts, expected one')
    prompt = Prompt([*before, *chosen[:common]], "", _shared(row))
    return prompt, {"chosen": chosen[common:], "rejected": rejected[common:]}


def _side(row: Row, name: str) -> Answer:
    if (value := row.get(name)) is None:
        raise ValueError(f'found no "{name}", expected "chosen" and "rejected"')
    if isinstance(value, str) or _is_chat(value):
        return value
    raise ValueError(f'found "{name}" that is neither a text nor a list of messages')


def _before(row: Row, chosen: Sequence[Turn]) -> Sequence[Turn]:
    """Return the messages of a prompt beside lists; a text counts unless the lists ask."""
    asks = any(_role(turn) in ("user", "system") for turn in chosen)
    if not _is_chat(row.get("prompt")) and (asks or not _text(row)):
        return []
    prompt = _prompt(row)
    return prompt.turns or [_turn("user", prompt.text, chosen)]


def _prompt(row: Row) -> Prompt:
    """Return the prompt in a field of its own."""
    if _is_chat(turns := row.get("prompt")):
        return Prompt(turns, "", _shared(row))
    if not (text := _text(row)):
        raise ValueError('found no "prompt", expected a text or a list of messages')
    return Prompt([], text, _shared(row))


def _text(row: Row) -> str:
    """Return the prompt as a text, with the input that an instruction may have."""
    asked = next(((name, row[name]) for name in PROMPTS if isinstance(row.get(name), str)), None)
    name, text = asked or ("", "")
    extra = row.get("input") if name == "instruction" else None
    return f"{text}\n\n{extra}" if extra else str(text)


def _shared(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in _OWN}


def _is_chat(value: object) -> TypeGuard[list[Turn]]:
    return isinstance(value, list) and value != [] and all(isinstance(each, dict) for each in value)


def asked(row: Row) -> Sequence[Turn] | str:
    """Return the prompt of a row, messages or a text; an answer at the end of messages is left out.

    Raises:
        ValueError: there is none.
    """
    chat = next((row[name] for name in CHATS if row.get(name) is not None), None)
    if _is_chat(chat):
        return chat[:-1] if is_answer(chat[-1]) else chat
    prompt = _prompt(row)
    return prompt.turns or prompt.text


def is_answer(turn: object) -> bool:
    """Whether this is a message of the assistant."""
    return isinstance(turn, Mapping) and _role(turn) == "assistant"


def _require_answer(name: str, turns: Sequence[Turn]) -> None:
    if _role(turns[-1]) == "user":
        raise ValueError(f'found "{name}" without an answer, expected the assistant to end it')


def _role(turn: Turn) -> object:
    role = turn.get("role", turn.get("from"))
    return _SPEAKERS.get(str(role), role)


def _turn(role: str, text: str, like: Sequence[Turn]) -> Turn:
    """Return a message in the style of others: ShareGPT's, or with a role."""
    if all("role" in turn for turn in like):
        return {"role": role, "content": text}
    return {"from": {"user": "human", "assistant": "gpt"}[role], "value": text}


def _untrained(turn: Turn) -> Turn:
    if _role(turn) != "assistant" and "weight" not in turn and "train" not in turn:
        return turn
    return {**{name: value for name, value in turn.items() if name != "train"}, "weight": 0}
