"""Micro-batches packed by tokens: the losses of padded ones, and padded ones where a model pads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from libs.vox_torch.tests.jobs import batch, documents, losses, plan, step, train
from libs.vox_torch.tests.test_train import ADAPTER, LOSS, frobenius

from vox_core.data.batching import grouped
from vox_torch.forward import Padded
from vox_torch.layout import in_rows

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
    assert frobenius(one, other) < ADAPTER


def test_a_model_that_pads_never_computes_more_than_its_budget(tiny, monkeypatch):
    folder, seen = tiny("llama"), []
    plain = Padded.__call__

    def watched(self, some, *given):
        lengths = [at.stop - at.start for at in some.documents()]
        seen.append((len(lengths), max(lengths)))
        return plain(self, some, *given)

    monkeypatch.setattr(Padded, "__call__", watched)
    made = dataclasses.replace(planned(folder, "end-to-end"), tuning={"layout": "padded"})
    _, told = train(folder, steps("end-to-end"), made)
    assert all(n == 1 or n * longest <= BUDGET for n, longest in seen)
    # No document twice, none left out, and one for the check before the first step.
    assert sum(n for n, _ in seen) == 1 + 6 * 8
    _, whole = train(folder, steps("rows"), planned(folder, "rows"))
    assert losses(told) == pytest.approx(losses(whole), rel=LOSS)


def test_cutting_anew_loses_and_repeats_nothing():
    some = batch(documents(9, seed=1, uneven=True))
    found = in_rows(some, 50)
    for part in found:
        lengths = [at.stop - at.start for at in part.batch.documents()]
        assert len(lengths) == 1 or len(lengths) * max(lengths) <= 50
        for name in ("tokens_T", "targets_T", "weights_T", "scored_T"):
            kept = getattr(part.batch, name)
            np.testing.assert_array_equal(kept, getattr(some, name)[part.positions])
        assert part.batch.starts_D.dtype == np.int64
    assert sorted(np.concatenate([part.positions for part in found])) == [
        *range(len(some.tokens_T))
    ]
