"""Test generation: a batch that rows enter and leave, against the logits of the same model.

Rows are fed the same tokens alone and together, so that their logits can be compared in any dtype,
however near to each other two of them are.

Shape legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from vox_core.adapter.initial import generator
from vox_core.contract import AdapterState, Floats, Ints, Model, Trainer, Update
from vox_testing.jobs import batch, documents, stirred
from vox_testing.llama import write_llama
from vox_testing.subject import NAME, Subject, learn
from vox_testing.suite.load import TOKENS, effective, require_near
from vox_testing.suite.requirements import loads, needs, trains

# Longer than a cache that a backend may have made for itself.
MANY = 80
# More than backends compute at once of a prompt, and than the positions of the other tests.
LONG = 1200
TEXTS = {
    "one byte": "a",
    "several scripts": "Grüße aus Köln; 東京 \N{SLIGHTLY SMILING FACE}",
    "long": " ".join(str(number**2) for number in range(70)),
}


@dataclass(frozen=True)
class Row:
    """A prompt, its adapter, and the tokens that follow it.

    Args:
        enters: calls of `advance` after which it does.
        places: logits after which it leaves; None: those behind its last token.
    """

    prompt_T: Ints
    adapter: str | None = None
    following: tuple[int, ...] = ()
    enters: int = 0
    places: int | None = None


@loads
def test_a_row_has_the_logits_of_its_text(vox_subject: Subject) -> None:
    """Behind its prompt and each greedy token, for 12 on the base and 80 with an adapter."""
    with vox_subject.loaded(effective(vox_subject)) as model:
        for adapter, count in ((None, 12), ("a", MANY)):
            said, found = _greedy(model, Row(TOKENS, adapter), count)
            assert all((each.dtype, each.ndim) == (np.dtype("float32"), 1) for each in found)
            require_logits(vox_subject, model, Row(TOKENS, adapter, said), found)


@loads
@pytest.mark.parametrize("text", TEXTS)
def test_any_text_can_be_continued(vox_subject: Subject, text: str) -> None:
    """Prompts of one byte, several scripts and 300 tokens."""
    prompt_T = np.frombuffer(TEXTS[text].encode(), np.uint8).astype(np.int64)
    with vox_subject.loaded() as model:
        said, found = _greedy(model, Row(prompt_T), 4)
        require_logits(vox_subject, model, Row(prompt_T, None, said), found)


@loads
@pytest.mark.parametrize("order", ["at once", "the other way round", "one after another"])
def test_rows_together_are_rows_alone(vox_subject: Subject, order: str) -> None:
    """Prompts of unequal lengths, on the base and two adapters, of which rows share one."""
    with vox_subject.loaded(*_two_adapters(vox_subject)) as model:
        rows = _rows(model)
        expected = [_alone(model, row) for row in rows]
        numbers = list(range(len(rows)))
        if order == "the other way round":
            numbers.reverse()
        if order == "one after another":
            rows = [replace(row, enters=2 * number) for number, row in enumerate(rows)]
        found = together(model, {number: rows[number] for number in numbers})
        for number in numbers:
            _require_alike(vox_subject, found[number], expected[number])


@loads
@pytest.mark.parametrize("left", [False, True])
def test_a_row_takes_its_beginning_from_another(vox_subject: Subject, left: bool) -> None:
    """From a row that goes on, alone or in a batch, or that has ended and stays; with an adapter.
    Both rows have the logits of their texts afterwards."""
    with vox_subject.loaded(*_two_adapters(vox_subject)) as model:
        longer_T = np.concatenate([TOKENS, TOKENS[::-1]])
        first, second = Row(TOKENS, "a", (7, 8, 9)), Row(longer_T, "a", (5, 6))
        expected = [_alone(model, row) for row in (first, second)]
        for number in (0, 2):
            model.insert(number, TOKENS, "a")
        found = dict(model.advance({}))
        while len(found) < 2:
            found |= model.advance({})
        logits = {0: [found[0]], 1: []}
        logits[0].append(model.advance({0: 7, 2: 4})[0])
        if left:
            logits[0] += [model.advance({0: token})[0] for token in first.following[1:]]
        model.insert(1, longer_T, "a")
        model.reuse(1, 0, len(TOKENS) - 1)
        steps = iter([] if left else first.following[1:])
        fed = list(second.following)
        while len(logits[1]) < 3:
            chosen = {0: token} if (token := next(steps, None)) is not None else {}
            if logits[1]:
                chosen[1] = fed.pop(0)
            for number, logits_V in model.advance(chosen).items():
                logits[number].append(logits_V)
        for number, wanted in enumerate(expected):
            _require_alike(vox_subject, logits[number], wanted)


@loads
def test_a_row_that_leaves_does_not_disturb_the_others(vox_subject: Subject) -> None:
    """In the middle of its text, or before its first step; another one enters in its place."""
    with vox_subject.loaded(*_two_adapters(vox_subject)) as model:
        rows = dict(enumerate(_rows(model)[:4]))
        expected = {number: _alone(model, row) for number, row in rows.items()}
        model.insert(7, TOKENS)
        model.remove(7)
        rows[1] = replace(rows[1], places=3)
        rows[3] = replace(rows[3], enters=4)
        for number, found in together(model, rows).items():
            _require_alike(vox_subject, found, expected[number][: rows[number].places])


@loads
@needs(family="llama")
def test_a_long_prompt_enters_a_running_batch(vox_subject: Subject, tmp_path: Path) -> None:
    """All 1200 tokens are read, in parts or at once, while another row goes on."""
    folder = write_llama(tmp_path, config={"max_position_embeddings": 2 * LONG})
    prompt_T = generator("prompt").integers(0, 256, LONG)
    with vox_subject.loaded(model=folder) as model:
        short = Row(TOKENS, None, tuple(range(100, 110)))
        long = Row(prompt_T, None, tuple(range(200, 204)), enters=3)
        found = together(model, {0: short, 1: long})
        for number, row in enumerate((short, long)):
            require_logits(vox_subject, model, row, found[number])


@trains
def test_a_learner_is_sampled_from_as_it_is_now(vox_subject: Subject) -> None:
    """Before and after an update, and beside the base."""
    start = stirred(vox_subject.start(vox_subject.plan()))
    said = tuple(range(100, 104))
    rows = [Row(TOKENS, NAME, said), Row(TOKENS[:9], None, said)]
    with vox_subject.learning(start=start) as trainer:
        require_sampled_as_it_is_now(vox_subject, trainer, rows)


def require_sampled_as_it_is_now(subject: Subject, trainer: Trainer, rows: Sequence[Row]) -> None:
    """Require the model's own logits of rows that enter before an update, and after it."""
    for number in (1, 2):
        found = together(trainer, dict(enumerate(rows)))
        for each, row in enumerate(rows):
            require_logits(subject, trainer, row, found[each])
        learn(trainer, batch(documents(2)), Update(number, 1e-2, 1.0))


def _two_adapters(subject: Subject) -> tuple[AdapterState, AdapterState]:
    methods = subject.adapter_methods
    return effective(subject, methods[0], seed=1), effective(subject, methods[-1], seed=2)


def _rows(model: Model) -> list[Row]:
    """Return rows of unequal lengths, each with its greedy text."""
    adapters = (None, "a", "b", "a", None)
    lengths = (17, 1, 40, 5, 30)
    rows = []
    for number, (adapter, length) in enumerate(zip(adapters, lengths, strict=True)):
        row = Row(generator("row", number).integers(0, 256, length), adapter)
        rows.append(Row(row.prompt_T, adapter, _greedy(model, row, 8)[0]))
    return rows


def _greedy(model: Model, row: Row, count: int) -> tuple[tuple[int, ...], list[Floats]]:
    """Return tokens of a row alone, and the logits before and behind each."""
    model.insert(0, row.prompt_T, row.adapter)
    found, said = [_first(model)], []
    for _ in range(count):
        said.append(int(found[-1].argmax()))
        found.append(model.advance({0: said[-1]})[0])
    model.remove(0)
    return tuple(said), found


def _first(model: Model) -> Floats:
    """Return the logits behind the prompt of row 0, which may take several calls."""
    for _ in range(LONG):
        if found := model.advance({}):
            return found[0]
    raise AssertionError("advance never returns the logits of a prompt")


def _alone(model: Model, row: Row) -> list[Floats]:
    return together(model, {0: row})[0]


def together(model: Model, rows: Mapping[int, Row]) -> dict[int, list[Floats]]:
    """Feed rows their texts, each from when it enters; return the logits behind their prompts and
    behind each token."""
    waiting, ends = dict(rows), {n: row.places or len(row.following) + 1 for n, row in rows.items()}
    found: dict[int, list[Floats]] = {number: [] for number in rows}
    tokens: dict[int, int] = {}
    for call in range(LONG):
        for number in [number for number, row in waiting.items() if row.enters <= call]:
            row = waiting.pop(number)
            model.insert(number, row.prompt_T, row.adapter)
        returned = model.advance(tokens)
        assert tokens.keys() <= returned.keys(), "a row that was given a token has no logits"
        tokens = {}
        for number, logits_V in returned.items():
            found[number].append(logits_V)
            if len(found[number]) == ends[number]:
                model.remove(number)
            else:
                tokens[number] = rows[number].following[len(found[number]) - 1]
        if all(len(found[number]) == end for number, end in ends.items()):
            return found
    raise AssertionError("advance never returns the logits of a prompt")


def require_logits(subject: Subject, model: Model, row: Row, found: Sequence[Floats]) -> None:
    """Require `logits` of the whole text at each place behind the prompt."""
    text_T = np.concatenate([row.prompt_T, row.following]).astype(np.int64)
    expected = model.logits(text_T, row.adapter)[len(row.prompt_T) - 1 :]
    assert len(found) == len(expected)
    require_near(subject, np.stack(found), expected)


def _require_alike(subject: Subject, found: Sequence[Floats], expected: Sequence[Floats]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        require_near(subject, one, other)
