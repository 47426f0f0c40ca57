"""The mistakes that trainers make, put into the MLX backend one at a time: each has to show.

A trap is caught if
the losses that test_backends.py compares are apart by more than a hundred times its tolerance. The
traps of adapter files (scale, transposition, layer numbers) are in test_interchange.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.parity import held, tolerances
from vox_core.contract import Batch, Ints, Update
from vox_mlx import loss, model, optimizer, train

STEPS = 8
Trap = Callable[[pytest.MonkeyPatch], None]


def a_pad_token_trained(patch: pytest.MonkeyPatch) -> None:
    """As mlx-lm's default loss does: the mask reaches one position beyond each short row."""

    def rows(batch: Batch, documents: Sequence[slice]) -> tuple[loss.Rows, Ints]:
        laid, positions_K = loss.rows(batch, documents)
        length = laid.tokens_NL.shape[1]
        ends = [
            row * length + (d.stop - d.start) - 1
            for row, d in enumerate(documents)
            if d.stop - d.start < length
        ]
        more = mx.zeros(len(ends), mx.int32)
        reaching = loss.Rows(
            laid.tokens_NL,
            mx.concatenate([laid.index_K, mx.array(ends, mx.int32)]),
            mx.concatenate([laid.targets_K, more]),
            mx.concatenate([laid.weights_K, mx.ones(len(ends))]),
        )
        return reaching, positions_K

    patch.setattr(model, "rows", lambda batch, documents, *_: rows(batch, documents))


def micro_batch_means_averaged(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch counts the same, however many tokens it trains."""
    right = train.MlxTrainer.accumulate

    def accumulate(self: train.MlxTrainer, batch: Batch, seed: int, learner: str) -> Any:
        evened_T = batch.weights_T * np.float32(10 / batch.weights_T.sum())
        return right(self, replace(batch, weights_T=evened_T), seed, learner)

    patch.setattr(train.MlxTrainer, "accumulate", accumulate)


def no_bias_correction(patch: pytest.MonkeyPatch) -> None:
    """As MLX's Adam, unless it is asked: both corrections are those of a step far in the future."""
    right = optimizer.AdamW.update

    def update(self: optimizer.AdamW, gradients: Any, norm: float, by: Update) -> None:
        right(self, gradients, norm, replace(by, number=10**9))

    patch.setattr(optimizer.AdamW, "update", update)


def documents_see_one_another(patch: pytest.MonkeyPatch) -> None:
    """All documents of a micro-batch in one row, as packing without a mask would lay them."""

    def rows(batch: Batch, documents: Sequence[slice]) -> tuple[loss.Rows, Ints]:
        laid, positions_K = loss.rows(batch, documents)
        tokens_T = np.concatenate([batch.tokens_T[d] for d in documents]).astype(np.int32)
        scored_T = np.concatenate([batch.scored_T[d] for d in documents])
        index_K = np.flatnonzero(scored_T).astype(np.int32)
        one = laid._replace(tokens_NL=mx.array(tokens_T[None]), index_K=mx.array(index_K))
        return one, positions_K

    patch.setattr(model, "rows", lambda batch, documents, *_: rows(batch, documents))


TRAPS = [a_pad_token_trained, micro_batch_means_averaged, no_bias_correction]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def furthest(root: Path, family: str) -> float:
    """The largest relative distance of MLX's losses from the torch backend's."""
    folder = held.model(root, family)
    # A rate high enough for a wrong step to be seen in the next losses.
    curve = held.jobs.curve(STEPS, groups=2, lr=1e-2)
    start = held.jobs.start(folder, held.jobs.plan(folder))
    mine, other = (held.go_on(each, folder, start, curve).losses for each in ("mlx", "cpu"))
    return max(abs(a / b - 1) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("trap", TRAPS)
def test_the_trap_shows(root, monkeypatch, trap: Trap):
    assert furthest(root, "llama") < tolerances.LOSS
    trap(monkeypatch)
    assert furthest(root, "llama") > 100 * tolerances.LOSS


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_documents_that_see_one_another_show(root, monkeypatch, family: str):
    """In attention, in sliding windows, and in the recurrent state of Qwen3.5."""
    assert furthest(root, family) < tolerances.LOSS
    documents_see_one_another(monkeypatch)
    assert furthest(root, family) > 100 * tolerances.LOSS
