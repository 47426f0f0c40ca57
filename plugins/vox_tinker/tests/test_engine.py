"""Which passes the engine hands to the trainer together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vox_core.api.generating import Generator as Rows
from vox_core.api.generating import Prompt, Sampling
from vox_core.contract import Batch, RowByRow
from vox_core.errors import DataError, StorageError
from vox_tinker.engine import Engine, Row, Steps
from vox_tinker.futures import failure

MOST = 10


def call(name: str, count: int) -> Any:
    tokens = np.zeros(count, np.int64)
    return Batch(tokens, tokens, np.zeros(count, np.float32), np.zeros(1, np.int64)), 0, name, None


class Trainer:
    """Answers each call with its number of tokens."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def accumulate_all(self, calls: Sequence[Any]) -> list[Any]:
        self.groups.append([learner for _, _, learner, _ in calls])
        if "bad" in self.groups[-1]:
            raise ValueError("bad")
        return [len(batch.tokens_T) for batch, *_ in calls]


def base(trainer: Trainer) -> Any:
    return SimpleNamespace(
        trainer=trainer,
        generator=SimpleNamespace(rows=lambda log_probs: None),
        plan=SimpleNamespace(micro_batch_tokens=MOST),
    )


def computed(jobs: Sequence[tuple[str, tuple[int, ...] | None]]) -> tuple[Trainer, list[object]]:
    """Queue jobs while the engine waits; a pass has the tokens of its batches, a step None."""
    trainer, told, done = Trainer(), list[object](), threading.Event()

    def passing(name: str, sizes: tuple[int, ...]) -> Steps:
        try:
            found = []
            for size in sizes:
                found.append((yield call(name, size)))
            told.append((name, found))
        except ValueError:
            told.append((name, "failed"))

    with closing(Engine(base(trainer))) as engine:
        begin = threading.Event()
        engine.run(lambda: begin.wait() and None)
        for name, sizes in jobs:
            if sizes is None:
                engine.run(lambda name=name: told.append(name), name)  # type: ignore[misc]
            else:
                engine.run(lambda n=name, s=sizes: passing(n, s), name, joins=True)  # type: ignore[misc]
        engine.run(done.set)
        begin.set()
        assert done.wait(60)
    return trainer, told


def test_passes_of_several_clients_are_taken_together_and_in_the_order_of_each() -> None:
    a, b, c = [("a", (2,)), ("a", None), ("a", (1,))], [("b", None), ("b", (3,))], [("c", (4, 5))]
    trainer, told = computed([*a, *b, *c, ("c", None)])
    assert trainer.groups == [["a", "b", "c"], ["c"], ["a"]]
    assert told == ["b", ("a", [2]), ("b", [3]), ("c", [4, 5]), "a", "c", ("a", [1])]


def test_more_tokens_than_a_micro_batch_are_taken_one_after_another() -> None:
    trainer, _ = computed([("a", (6,)), ("b", (4,)), ("c", (1,)), ("d", (30,))])
    assert trainer.groups == [["a", "b"], ["c"], ["d"]]


def test_a_pass_waits_for_the_clients_of_the_last_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for long, since they may have ended."""
    trainer = Trainer()

    def passing(name: str, done: Callable[[], object] = lambda: None) -> Steps:
        yield call(name, 1)
        done()

    def ran(engine: Engine, name: str, done: Callable[[], object] = lambda: None) -> None:
        engine.run(partial(passing, name, done), name, joins=True)
        while engine._jobs:  # taken from the queue
            time.sleep(0.001)

    with closing(Engine(base(trainer))) as engine:
        begin, done = threading.Event(), [threading.Event() for _ in range(3)]
        engine.run(lambda: begin.wait() and None)
        for name in ("a", "b"):
            engine.run(partial(passing, name), name, joins=True)
        engine.run(done[0].set)
        begin.set()
        assert done[0].wait(60)
        monkeypatch.setattr("vox_tinker.engine.LINGER_SECONDS", 60)
        ran(engine, "a")
        ran(engine, "b", done[1].set)
        assert done[1].wait(60)
        monkeypatch.setattr("vox_tinker.engine.LINGER_SECONDS", 0)
        ran(engine, "a", done[2].set)
        assert done[2].wait(60)
    assert trainer.groups == [["a", "b"], ["a", "b"], ["a"]]


def test_a_failure_is_each_client_s_own() -> None:
    trainer, told = computed([("a", (1,)), ("bad", (1,)), ("b", None)])
    assert told == ["b", ("a", "failed"), ("bad", "failed")]
    assert trainer.groups == [["a", "bad"]]


def test_a_job_that_raises_ends_alone() -> None:
    done = threading.Event()
    with closing(Engine(base(Trainer()))) as engine:
        engine.run(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        engine.run(done.set)
        assert done.wait(60)


def test_no_place_of_the_server_is_in_an_answer() -> None:
    """An error of the server names files; the user's own faults are told."""
    fault = "the adapter after step 3 is kept in /srv/runs"
    disk = failure(
        StorageError("S001", "the disk is full", where="/srv", faults=[fault], remedy="")
    )
    assert b"the disk is full (VOX-S001)" in disk.content and b"/srv" not in disk.content
    assert b"row 3" in failure(DataError("D003", "wrong", faults=["row 3"], remedy="")).content


class Flat(RowByRow):
    """All tokens are equally likely; the adapter `bad` computes no numbers."""

    def logits(self, tokens_T: Any, adapter: str | None = None, first: int = 0) -> Any:
        return np.full((1, 8), np.nan if adapter == "bad" else 0, np.float32)

    def add_adapter(self, name: str, adapter: Any) -> None:
        raise NotImplementedError

    remove_adapter = log_probs = close = add_adapter  # type: ignore[assignment]


def test_a_row_without_numbers_fails_alone() -> None:
    made, left = base(Trainer()), threading.Semaphore(0)
    made.generator = Rows(Flat())
    good, bad = (
        Row(Prompt([1], Sampling(max_tokens=3), adapter=adapter), left.release)
        for adapter in (None, "bad")
    )
    with closing(Engine(made)) as engine:
        engine.run(lambda: engine.sample([bad, good]))
        assert all(left.acquire(timeout=60) for _ in range(2))
    assert (len(good.tokens), good.failed) == (3, "")
    assert bad.failed == "sampling failed: the model's logits are not numbers"


class Reusing(Flat):
    """Has no memory for prompts of five tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[int] = []

    def insert(self, row: int, tokens_T: Any, adapter: str | None = None) -> None:
        if len(tokens_T) == 5:
            raise MemoryError
        self.entered.append(len(tokens_T))
        super().insert(row, tokens_T, adapter)

    def reuse(self, row: int, source: int, count: int) -> bool:
        return True


@pytest.mark.parametrize(("other", "failed"), [(3, [False] * 3), (5, [True, False, True])])
def test_a_row_that_waits_for_its_beginning_holds_up_no_other(
    other: int, failed: list[bool]
) -> None:
    """And is computed even if others fail meanwhile."""
    made, left, model = base(Trainer()), threading.Semaphore(0), Reusing()
    made.generator = Rows(model)
    sampling = Sampling(max_tokens=3)
    rows = [Row(Prompt([1] * size, sampling), left.release) for size in (40, 40, other)]
    with closing(Engine(made)) as engine:
        engine.run(lambda: engine.sample(rows))
        assert all(left.acquire(timeout=60) for _ in rows)
    assert [bool(row.failed) for row in rows] == failed
    assert model.entered == ([40, 3, 40] if other == 3 else [40, 40])
