"""Orders that are not the plain one: shares of sources and difficulty, pure at every step."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.data_samples import encode_one
from vox_core.config import DataSource, TrainSettings
from vox_core.data.batching import (
    Ordering,
    apportion,
    documents_in_step,
    documents_of_step,
    epoch_order,
    filled,
)
from vox_core.data.dataset import Dataset
from vox_core.data.encode import Document, Encoder
from vox_core.data.fields import Attributes, level
from vox_core.data.rows import Record
from vox_core.errors import DataError
from vox_core.run.inputs import in_order

FIRST = [[6, 2, 7, 7, 6, 5, 0, 5], [6, 7, 7, 3, 5, 6, 4, 5]]
seeds = st.integers(0, 2**64 - 1)


@st.composite
def orderings(draw: st.DrawFn) -> Ordering:
    """Of some documents, each source with at least one."""
    sources = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, sources - 1), max_size=25))
    of = [*range(sources), *more]
    weights = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=sources, max_size=sources))
    levels = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=len(of), max_size=len(of)))
    return Ordering(
        len(of),
        tuple(weights) if draw(st.booleans()) else (),
        np.array(of, np.int32),
        np.array(levels, np.float32) if draw(st.booleans()) else None,
    )


def of(ordering: Ordering) -> Ordering:
    """Without sources where there are no weights."""
    return ordering if ordering.weights else replace(ordering, sources_D=None)


def sources_in(ordering: Ordering, indices: np.ndarray) -> Counter[int]:
    assert ordering.sources_D is not None
    return Counter(ordering.sources_D[indices].tolist())


# --- epochs ---------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(orderings().map(of), seeds, st.integers(0, 5))
def test_an_epoch_is_pure_and_has_the_shares_of_the_weights(
    ordering: Ordering, seed: int, epoch: int
) -> None:
    order = ordering.epoch(seed, epoch)
    again = replace(ordering).epoch(seed, epoch)  # nothing is remembered of it
    assert order.tolist() == again.tolist()
    assert order.dtype == np.int64
    assert len(order) == ordering.documents
    if ordering.weights:
        counts = apportion(ordering.documents, ordering.weights)
        assert sources_in(ordering, order) == Counter(dict(enumerate(counts)))
    else:
        assert sorted(order.tolist()) == list(range(ordering.documents))
    if ordering.levels_D is not None:
        assert (np.diff(ordering.levels_D[order]) >= 0).all()


@settings(max_examples=30)
@given(orderings().filter(lambda ordering: bool(ordering.weights)), seeds, st.integers(1, 8))
def test_a_source_is_seen_whole_before_any_of_it_is_seen_again(
    ordering: Ordering, seed: int, epochs: int
) -> None:
    seen = Counter(int(i) for epoch in range(epochs) for i in ordering.epoch(seed, epoch))
    assert ordering.sources_D is not None
    for source in range(len(ordering.weights)):
        times = [seen[int(i)] for i in np.flatnonzero(ordering.sources_D == source)]
        assert max(times) - min(times) <= 1


@settings(max_examples=30)
@given(orderings().map(of), seeds, st.integers(1, 40))
def test_steps_cut_the_endless_row_of_epochs(
    ordering: Ordering, seed: int, batch_size: int
) -> None:
    rows = ordering.documents
    size = min(batch_size, rows)
    endless = np.concatenate([ordering.epoch(seed, epoch) for epoch in range(4)])
    for step in range(1, 3 * rows // size):
        chosen = documents_of_step(rows, batch_size, seed, step, ordering)
        assert chosen.tolist() == endless[(step - 1) * size : step * size].tolist()


def test_equals_of_a_curriculum_are_shuffled_anew() -> None:
    levels = np.array([1, 2] * 20, np.float32)
    ordering = Ordering(40, levels_D=levels)
    epochs = {tuple(ordering.epoch(seed, e)[:20]) for seed in range(3) for e in range(3)}
    assert len(epochs) == 9
    plain = epoch_order(40, 1, 0)
    assert ordering.epoch(1, 0)[:20].tolist() == [i for i in plain.tolist() if not i % 2]


def test_the_order_never_changes() -> None:
    """A run must find the same order after an upgrade: printed by the first version."""
    ordering = Ordering(8, (1.0, 3.0), np.array([0, 0, 0, 0, 0, 1, 1, 1], np.int32))
    assert [ordering.epoch(42, e).tolist() for e in range(2)] == FIRST


# --- difficulty -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "number"),
    [("easy", 1), ("Beginner ", 1), ("medium", 2), ("intermediate", 2), ("HARD", 3),
     ("advanced", 3), ("expert", 4), (2.5, 2.5), (-1, -1), ("7", 7), (0, 0)],
)  # fmt: skip
def test_what_a_row_says_of_its_difficulty(said: float | str, number: float) -> None:
    assert level(said) == number


@pytest.mark.parametrize("said", [None, "", "tricky", float("inf"), float("nan"), 1e300, "nan"])
def test_what_says_nothing_is_unknown(said: float | str | None) -> None:
    assert np.isnan(level(said))


def test_the_unknown_are_in_the_middle() -> None:
    levels = np.array([3, np.nan, 1, 2, 2, np.nan, 9], np.float32)
    assert filled(levels).tolist() == [3, 2, 1, 2, 2, 2, 9]
    assert filled(np.array([1, np.nan, 2], np.float32)).tolist() == [1, 1, 2]


def test_a_document_knows_what_its_row_says() -> None:
    from tests.core.tiny_tokenizer import tiny_tokenizer

    encoder = Encoder(tiny_tokenizer("chatml"), 16)
    row = Record(
        "text", Path("a"), 1, text="some words " * 20, attributes=Attributes(difficulty="hard")
    )
    pieces = encode_one(encoder, row).documents
    assert len(pieces) > 1
    assert {piece.difficulty for piece in pieces} == {3.0}
    dataset = Dataset.of((*pieces, document("b", 1)))
    assert dataset[0].difficulty == 3.0
    assert np.isnan(dataset[-1].difficulty)


# --- settings -------------------------------------------------------------------------------------


def document(file: str, line: int, difficulty: float = float("nan")) -> Document:
    tokens, weights = np.array([1, line], np.int32), np.array([0, 1], np.float32)
    return Document(tokens, weights, Path(file), line, 1, difficulty)


def dataset(*documents: Document) -> Dataset:
    return Dataset.of(documents)


def asked(tmp_path: Path, *weights: float, **given: object) -> TrainSettings:
    """Settings with a source for each weight, in files `0.jsonl` and so on."""
    for number in range(len(weights)):
        (tmp_path / f"{number}.jsonl").touch()
    sources = tuple(
        DataSource(path=tmp_path / f"{number}.jsonl", weight=weight)
        for number, weight in enumerate(weights)
    )
    return TrainSettings.model_validate({"source": sources, **given})


def test_without_either_nothing_changes(tmp_path: Path) -> None:
    plain = dataset(document("a", 1, 3), document("a", 2, 1))
    assert in_order(plain, TrainSettings()) is plain
    assert documents_in_step(plain, 2, 42, 1).tolist() == epoch_order(2, 42, 0).tolist()


def test_weights_and_difficulty_together(tmp_path: Path) -> None:
    rows = [document(str(tmp_path / f"{n % 2}.jsonl"), n, n % 3) for n in range(40)]
    settings = asked(tmp_path, 3, 1, curriculum="difficulty")
    made = in_order(dataset(*rows), settings)
    chosen = [rows[i] for i in documents_in_step(made, 40, 42, 1)]
    assert Counter(d.source.stem for d in chosen) == {"0": 30, "1": 10}
    assert [d.difficulty for d in chosen] == sorted(d.difficulty for d in chosen)
    assert made.ordering is not None
    assert made.ordering.spec().weights == (3, 1)
    assert made.ordering.spec().curriculum == "difficulty"


def test_what_is_looked_up_stays_looked_up(tmp_path: Path) -> None:
    rows = dataset(document("a", 1, 3), document("a", 2))
    rows.digest = "looked up"
    made = in_order(rows, asked(tmp_path, curriculum="difficulty"))
    assert made.digest == "looked up"
    assert made.notes == (
        "1 of 2 documents do not say how difficult they are, and are trained among those of the "
        "middle",
    )


def test_the_spec_tells_orders_apart() -> None:
    levels = np.array([1, 2, 3], np.float32)
    one = Ordering(3, levels_D=levels).spec()
    assert one == Ordering(3, levels_D=levels.copy()).spec()
    assert one != Ordering(3, levels_D=levels[::-1].copy()).spec()
    sources = np.array([0, 1, 1], np.int32)
    other = Ordering(3, (1.0, 2.0), sources)
    assert other.spec() != Ordering(3, (1.0, 2.0), sources[::-1].copy()).spec()
    assert other.spec() != Ordering(3, (1.0, 3.0), sources).spec()


def test_a_curriculum_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row says how difficult") as caught:
        in_order(dataset(document("a", 1)), asked(tmp_path, curriculum="difficulty"))
    assert caught.value.code == "VOX-D031"


def test_a_source_that_would_never_be_trained_is_refused(tmp_path: Path) -> None:
    rows = dataset(*(document(str(tmp_path / f"{n % 2}.jsonl"), n) for n in range(4)))
    with pytest.raises(DataError, match="never be trained") as caught:
        in_order(rows, asked(tmp_path, 1, 0.01, 1))
    assert caught.value.code == "VOX-D032"
    told = [fault.rpartition("/")[2] for fault in caught.value.faults]
    assert told == ["1.jsonl: weight 0.01 is too low", "2.jsonl: no document"]


def test_a_file_of_two_sources_is_of_each_of_them_once(tmp_path: Path) -> None:
    """A folder, and one of its files by itself: read twice, and weighed twice."""
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "a.jsonl")]
    for file in files:
        file.write_text(json.dumps({"text": file.name}) + "\n")
    sources = (DataSource(path=tmp_path, weight=1), DataSource(path=files[0], weight=2))
    settings = TrainSettings.model_validate({"source": sources})
    rows = dataset(*(document(str(file), 1) for file in files))
    rows = replace(rows, files=files)
    rows.documents_D["file"] = range(3)  # as files are numbered
    made = in_order(rows, settings).ordering
    assert made is not None and made.sources_D is not None
    assert made.sources_D.tolist() == [0, 0, 1]
