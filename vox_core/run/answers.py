"""Answer many prompts in order, into a file that an interrupted call continues.

A file of prompts is JSONL. Other fields are ignored, and assistant messages at the end are left
out, so that rows of training data in these forms are prompts, too:

    {"prompt": "…"}
    {"messages": [{"role": "user", "content": "…"}]}

A file of answers has one `Answered` a line, in the order of the prompts; a line is appended when
those before it are there. Each has a digest of everything that decides it, so that only the same
prompts, settings and model continue a file.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

import numpy as np

from vox_core import bounded_json, files
from vox_core.config import SamplingSettings
from vox_core.contract import Notice
from vox_core.data.faults import RowError, faulty, text_of
from vox_core.data.json_rows import file_faults, parse_object, raw_lines
from vox_core.data.messages import conversation, turns_of
from vox_core.data.records import Placed, empty, malformed, readable
from vox_core.errors import DataError, OutputError
from vox_core.host.load import Observe, ignore
from vox_core.run.folder import continued
from vox_core.run.generate import Finish
from vox_core.run.load import Message, OpenModel, Question, Reply

Conversation: TypeAlias = Sequence[Message]
PROGRESS_LINES = 20
_DIGITS = 16
_ELSEWHERE = {"backend", "adapter", "dtype", "quant", "system"}
"""Settings that the model's identity or the prompt's tokens stand for. The backend may change:
answers are the same up to its roundoff."""
_FORMS = '{"prompt": "…"} or {"messages": […]}'


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer of many.

    Args:
        row: number of the prompt, from 1.
        index: of the answer among several to one prompt, from 0.
        digest: of model and settings, then of the prompt.
    """

    row: int
    index: int
    answer: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: Finish
    seed: int
    digest: str


# --- prompts --------------------------------------------------------------------------------------


def read_prompts(path: Path) -> list[Conversation]:
    """Read a file of prompts; blank lines are skipped.

    Raises:
        DataError: D001, it cannot be read; D002, it is empty; D003, with every malformed line.
    """
    prompts: list[Conversation] = []
    faults: list[Placed] = []
    with readable(path):
        faults += [Placed(path, 0, fault) for fault in file_faults(path)]
        for number, _, line in raw_lines(path) if not faults else ():
            try:
                prompts.append(conversation_of(parse_object(line)))
            except RowError as error:
                faults += [Placed(path, number, fault) for fault in error.faults]
    expected = f"a line each of {_FORMS}"
    if faults:
        remedy = "correct these lines; nothing was generated"
        raise malformed([path], faults).but(expected=expected, remedy=remedy)
    if not prompts:
        raise empty([path]).but(expected=expected, remedy="write prompts to it")
    return prompts


def conversation_of(values: dict[str, object]) -> Conversation:
    """Return the messages of a line, or a RowError with everything that is wrong with it."""
    names = [name for name in ("prompt", "messages") if values.get(name) is not None]
    if not names:
        raise faulty("unknown form", (), f"the fields {', '.join(values) or 'none'}", _FORMS)
    if len(names) > 1:
        raise faulty("several forms", (), '"prompt" and "messages"', "one of them")
    (name,) = names
    if isinstance(values[name], str):
        return [{"role": "user", "content": text_of(values[name], (name,))}]
    messages = [*conversation(turns_of(values[name], name), answered=False)]
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages:
        raise faulty("empty", (name,), "no message to answer", "a user's message")
    return [{"role": it.role, "content": it.content, **(it.extra or {})} for it in messages]


# --- answers --------------------------------------------------------------------------------------


def answer_all(
    model: OpenModel,
    prompts: Sequence[Conversation],
    settings: SamplingSettings,
    *,
    n: int = 1,
    out: Path | None = None,
    observe: Observe = ignore,
) -> Iterator[Answered]:
    """Answer all prompts, many at once; yield the answers in order.

    Args:
        n: answers to each prompt. Each has random numbers of its own.
        out: file of answers; those that it has are yielded from it.
        observe: gets about twenty notices of progress.

    Raises:
        DataError: D005 or D007, before any work, with the row.
        OutputError: O001, `out` has answers of something else; O002.
        StorageError: the disk; `out` keeps the answers before.
    """
    questions = _questions(model, prompts, settings, n)
    digests = _digests(model, questions, settings) if out else [""] * len(questions)
    kept = _continued(out, digests) if out else []
    yield from kept
    start = done = len(kept)
    progress = _Progress(start, len(questions), observe)
    ended: dict[int, Reply] = {}
    for index, reply in model.replies(questions[start:]):
        ended[start + index] = reply
        progress.add(reply)
        while following := ended.pop(done, None):
            row, number = divmod(done, n)
            answered = Answered(
                row + 1,
                number,
                following.text,
                following.prompt_tokens,
                following.completion_tokens,
                following.finish_reason,
                settings.seed,
                digests[done],
            )
            if out:
                files.append(out, f"{json.dumps(asdict(answered), ensure_ascii=False)}\n".encode())
            done += 1
            yield answered


class _Progress:
    """Notices of how many answers there are."""

    def __init__(self, start: int, total: int, observe: Observe) -> None:
        self._start, self._done, self._total, self._observe = start, start, total, observe
        self._every = -(-(total - start) // PROGRESS_LINES)
        self._tokens, self._began = 0, time.perf_counter()
        if start:
            observe(Notice(f"{start}/{total} answers are there from an earlier call"))

    def add(self, reply: Reply) -> None:
        self._done += 1
        self._tokens += reply.completion_tokens
        if (self._done - self._start) % self._every == 0 or self._done == self._total:
            rate = self._tokens / (time.perf_counter() - self._began)
            self._observe(Notice(f"{self._done}/{self._total} answers, {rate:,.0f} tokens/s"))


def _questions(
    model: OpenModel, prompts: Sequence[Conversation], settings: SamplingSettings, n: int
) -> list[Question]:
    questions = []
    for number, messages in enumerate(prompts):
        try:
            first = model.question(messages, number * n, settings)
        except DataError as error:
            if len(prompts) == 1:
                raise
            raise error.but(where=f"prompt {number + 1} of {len(prompts)}") from error
        rows = range(number * n, number * n + n)
        questions += [replace(first, sampling=replace(first.sampling, row=row)) for row in rows]
    return questions


def _digests(
    model: OpenModel, questions: Sequence[Question], settings: SamplingSettings
) -> list[str]:
    """Return the digest of each answer, as it stands in its line."""
    sampling = settings.model_dump(mode="json", exclude=_ELSEWHERE)
    common = _digest(json.dumps([model.identity(), sampling], sort_keys=True).encode())
    return [
        f"{common}-{_digest(np.asarray(question.tokens, np.int64).tobytes())}"
        for question in questions
    ]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def _continued(out: Path, digests: Sequence[str]) -> list[Answered]:
    """Return the answers in `out`, which is created if it does not exist."""

    def parse(lines: list[bytes]) -> list[Answered]:
        kept = [_parsed(out, line) for line in lines]
        for number, (answered, digest) in enumerate(zip_longest(kept, digests), start=1):
            if answered is None:
                break
            if digest is None or answered.digest != digest:
                raise _other_answers(out, number, answered.digest, digest)
        return kept

    files.make_folder(out.parent)
    return continued(out, parse)


def _parsed(out: Path, line: bytes) -> Answered:
    try:
        return Answered(**bounded_json.parse(line))
    except (bounded_json.JsonFault, TypeError) as error:
        raise OutputError(
            "O001",
            "the output file exists, and has other things than answers",
            where=out,
            found=line[:80].decode(errors="replace"),
            expected="the answers of an earlier call, or no file",
            remedy="choose another file with --out",
        ) from error


def _other_answers(out: Path, number: int, found: str, expected: str | None) -> OutputError:
    if expected is None:
        what = f"more than the {number - 1} answers to be generated"
    elif found.partition("-")[0] != expected.partition("-")[0]:
        what = "answers of another model, or with other settings"
    else:
        what = f"line {number} answers another prompt"
    return OutputError(
        "O001",
        "the output file has other answers",
        where=out,
        found=what,
        expected="answers to the same prompts, by the same model with the same settings",
        remedy="generate with the settings of then, or choose another file with --out",
    )
