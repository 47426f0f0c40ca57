"""The mistakes that trainers make, put into the MLX backend one at a time: each has to show.

A trap is caught if
the losses that test_backends.py compares are apart by more than a hundred times its tolerance. The
traps of adapter files (scale, transposition, layer numbers) are in test_interchange.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.parity import held, tolerances
from vox_core.contract import Batch, Step
from vox_mlx import loss, optimizer, train

STEPS = 4
Trap = Callable[[pytest.MonkeyPatch], None]


def a_pad_token_trained(patch: pytest.MonkeyPatch) -> None:
    """As mlx-lm's default loss does: the mask reaches one position beyond each short row."""

    def rows(batch: Batch, lengths: int = 1) -> loss.Rows:
        laid = loss.rows(batch, lengths)
        documents, length = list(batch.documents()), laid.tokens_NL.shape[1]
        ends = [
            row * length + (d.stop - d.start) - 1
            for row, d in enumerate(documents)
            if d.stop - d.start < length
        ]
        more = mx.zeros(len(ends), mx.int32)
        return loss.Rows(
            laid.tokens_NL,
            mx.concatenate([laid.index_K, mx.array(ends, mx.int32)]),
            mx.concatenate([laid.targets_K, more]),
            mx.concatenate([laid.weights_K, mx.ones(len(ends))]),
        )

    patch.setattr(train, "rows", rows)


def micro_batch_means_averaged(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch counts the same, however many tokens it trains."""
    right = train.Trainer.step

    def step(self: train.Trainer, given: Step) -> Any:
        share = given.total_weight / len(given.batches)
        evened = [
            replace(b, weights_T=b.weights_T * np.float32(share / b.weights_T.sum()))
            for b in given.batches
        ]
        return right(self, replace(given, batches=tuple(evened)))

    patch.setattr(train.Trainer, "step", step)


def no_bias_correction(patch: pytest.MonkeyPatch) -> None:
    """As MLX's Adam, unless it is asked: both corrections are those of a step far in the future."""
    right = optimizer.AdamW.__init__

    def begin(self: optimizer.AdamW, *args: Any) -> None:
        right(self, *args)
        self._step = 10**9

    patch.setattr(optimizer.AdamW, "__init__", begin)


def documents_see_one_another(patch: pytest.MonkeyPatch) -> None:
    """All documents of a micro-batch in one row, as packing without a mask would lay them."""

    def rows(batch: Batch, lengths: int = 1) -> loss.Rows:
        return loss.rows(replace(batch, starts_D=batch.starts_D[:1]), lengths)

    patch.setattr(train, "rows", rows)


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
