"""Packing: nothing lost, nothing twice, within bounds, and no more packs than best fit makes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.test_data_order import contents, datasets, seeds
from vox_core.contract import padded_groups
from vox_core.data.batching import ValidationBatches, cut, documents_in_step, grouped
from vox_core.data.dataset import Dataset

lengths = st.lists(st.integers(1, 40), max_size=40)
budgets = st.integers(1, 100)
packings = st.sampled_from(["rows", "end-to-end"])


@given(lengths, budgets)
def test_packs_lose_and_repeat_nothing_and_keep_to_the_budget(
    lengths: list[int], budget: int
) -> None:
    packs = grouped(lengths, budget, "end-to-end")
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    for pack in packs:
        assert len(pack) == 1 or sum(lengths[index] for index in pack) <= budget
        assert [lengths[i] for i in pack] == sorted((lengths[i] for i in pack), reverse=True)
    assert packs == grouped(lengths, budget, "end-to-end")


@given(lengths, budgets)
def test_packs_are_at_most_as_many_as_plain_best_fit_makes(lengths: list[int], budget: int) -> None:
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [left for left in room if left >= length]
        if fits:
            room.remove(min(fits))
        room.append((min(fits) if fits else budget) - length)
    packs = grouped(lengths, budget, "end-to-end")
    assert len(packs) <= len(room)
    assert len(packs) <= len(padded_groups(lengths, budget))


def test_neighbours_in_length_share_a_pack_where_that_costs_none() -> None:
    assert grouped([10, 1, 10, 1, 9], 20, "end-to-end") == [[0, 2], [4, 1, 3]]
    # One after the other would take three: 12 | 9, 8 | 7.
    assert grouped([12, 9, 8, 7], 20, "end-to-end") == [[0, 2], [1, 3]]


@given(lengths, budgets)
def test_rows_are_grouped_as_ever(lengths: list[int], budget: int) -> None:
    assert grouped(lengths, budget, "rows") == padded_groups(lengths, budget)


@settings(max_examples=25)
@given(datasets(), st.integers(1, 6), seeds, st.integers(1, 40), budgets)
def test_a_step_is_the_same_however_it_is_packed(
    dataset: Dataset, batch_size: int, seed: int, step: int, budget: int
) -> None:
    chosen = [dataset[index] for index in documents_in_step(dataset, batch_size, seed, step)]
    rows, packs = cut(chosen, budget, "rows"), cut(chosen, budget, "end-to-end")
    assert contents(rows[0]) == contents(packs[0])
    assert rows[1] == packs[1]
    assert packs[1] == sum(float(batch.weights_T.sum()) for batch in packs[0])
    assert len(packs[0]) <= len(rows[0])


@settings(max_examples=25)
@given(datasets(), budgets)
def test_validation_sees_every_document_once_in_packs(dataset: Dataset, budget: int) -> None:
    rows, packs = (ValidationBatches(dataset, budget, way) for way in ("rows", "end-to-end"))
    assert contents(tuple(rows)) == contents(tuple(packs))
