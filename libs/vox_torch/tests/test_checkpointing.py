"""Gradient checkpointing: the same numbers, from activations that are not kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from libs.vox_torch.tests.jobs import documents, losses, plan, start, step, train

from vox_core.contract import Step, TrainState
from vox_testing.jobs import stirred

FAMILIES = ("gemma3", "gpt2", "llama", "qwen3_5")


def work(count: int) -> list[Step]:
    """Long documents, so that activations are most of what is kept."""
    return [step(n, [documents(4, seed=n, longest=120)] * 2) for n in range(1, count + 1)]


def trained(
    folder: Path, steps: Sequence[Step], recompute: bool, **spec: object
) -> tuple[list[float], TrainState]:
    made = plan(folder, total_steps=len(steps), **spec)
    made = replace(made, gradient_checkpointing=recompute)
    # B is zero at the start, and then the gradient of A is zero whatever dropout does.
    state, events = train(folder, steps, made, stirred(start(folder, made)))
    return losses(events), state


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_changes_no_number(tiny, family, dropout):
    """The same operations in the same order, on the same masks: bit for bit."""
    kept, state = trained(tiny(family), work(3), False, dropout=dropout)
    again, same = trained(tiny(family), work(3), True, dropout=dropout)
    assert again == kept
    mine, other = same.adapter.tensors(), state.adapter.tensors()
    assert all((mine[name] == other[name]).all() for name in other)


def test_dropout_is_on_when_it_is_compared(tiny):
    kept, _ = trained(tiny("llama"), work(1), False)
    dropped, _ = trained(tiny("llama"), work(1), True, dropout=0.1)
    assert dropped != pytest.approx(kept, rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_not_kept(tiny, family):
    """What autograd saves at the outside; recomputing saves within hooks of its own."""
    kept, recomputed = (saved_bytes(tiny(family), recompute) for recompute in (False, True))
    assert 0 < recomputed < kept / 2


def saved_bytes(folder: Path, recompute: bool) -> int:
    """Bytes that one step keeps for its gradients."""
    sizes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trained(folder, work(1), recompute, dropout=0.1)
    return sum(sizes)
