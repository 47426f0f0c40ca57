"""Micro-batches packed by tokens: the losses of padded ones, and padded ones where a model pads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from libs.vox_torch.tests.jobs import batch, documents, losses, plan, step, train
from libs.vox_torch.tests.test_train import ADAPTER, LOSS, frobenius

from vox_core.contract import Step, cut_to_rows
from vox_core.data.batching import grouped
from vox_torch.forward import Padded

BUDGET = 60


def steps(packing, count=6):
    """Steps of eight documents of unequal lengths, cut so."""
    made = []
    for number in range(1, count + 1):
        some = documents(8, seed=number, uneven=True)
        groups = grouped([len(tokens) for tokens, _ in some], BUDGET, packing)
        made.append(step(number, [[some[i] for i in group] for group in groups]))
    return made


def planned(folder, packing, **given):
    made = plan(folder, total_steps=6, **given)
    return dataclasses.replace(made, micro_batch_tokens=BUDGET, packing=packing)


def test_packs_train_what_padded_groups_train(tiny):
    folder = tiny("llama")
    rows, packs = steps("rows"), steps("end-to-end")
    assert sum(len(s.batches) for s in packs) < sum(len(s.batches) for s in rows)
    one, told = train(folder, rows, planned(folder, "rows"))
    other, told_too = train(folder, packs, planned(folder, "end-to-end"))
    assert losses(told_too) == pytest.approx(losses(told), rel=LOSS)
    assert frobenius(one.state, other.state) < ADAPTER


@pytest.mark.parametrize("tokens", [0, 45])
def test_a_model_that_pads_never_computes_more_than_its_budget(tiny, monkeypatch, tokens):
    """Whatever the packs; `tokens` are those that a step says it was cut by."""
    folder, seen = tiny("llama"), []
    plain = Padded.__call__

    def watched(self, some, scale=1.0):
        lengths = [at.stop - at.start for at in some.documents()]
        seen.append((len(lengths), max(lengths)))
        return plain(self, some, scale)

    monkeypatch.setattr(Padded, "__call__", watched)
    made = dataclasses.replace(planned(folder, "end-to-end"), tuning={"layout": "padded"})
    packs = [dataclasses.replace(s, micro_batch_tokens=tokens) for s in steps("end-to-end")]
    validation = [] if tokens else [batch(documents(9, seed=1))]
    _, told = train(folder, packs, made, validation=validation)
    assert all(n == 1 or n * longest <= (tokens or BUDGET) for n, longest in seen)
    # No document twice, none left out, and one for the check before the first step.
    assert sum(n for n, _ in seen) == 1 + 6 * 8 + 9 * len(validation)
    _, whole = train(folder, steps("rows"), planned(folder, "rows"))
    assert losses(told) == pytest.approx(losses(whole), rel=LOSS)


def test_cutting_anew_loses_and_repeats_nothing():
    batches = [batch(documents(5, seed=n, uneven=True)) for n in (1, 2)]
    found = cut_to_rows(batches, 50)
    assert contents(found) == contents(batches)
    for each in found:
        lengths = [at.stop - at.start for at in each.documents()]
        assert len(lengths) == 1 or len(lengths) * max(lengths) <= 50
    assert {a.dtype for b in found for a in (b.tokens_T, b.starts_D)} == {np.dtype(np.int64)}


def contents(batches):
    return sorted(
        tuple(map(bytes, (b.tokens_T[at], b.targets_T[at], b.weights_T[at])))
        for b in batches
        for at in b.documents()
    )


def test_a_step_says_by_what_it_was_cut():
    assert Step(1, (), 1.0, 0.1).micro_batch_tokens == 0  # by the plan's
