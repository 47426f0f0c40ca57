"""The autograd functions of the loss, without a model."""

from __future__ import annotations

import pytest
import torch

from vox_torch import functions
from vox_torch.functions import WeightedNll


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("several", [False, True])
def test_blocks_of_logits_change_no_bit_of_the_loss(monkeypatch, several):
    """In bfloat16; float32 has one block."""
    logits = torch.randn(7, 50).bfloat16().requires_grad_()
    targets = torch.randint(0, 50, (7, 3) if several else (7,))
    weights, found = torch.rand(targets.shape), []
    for elements in (2**18, 100, 1):
        monkeypatch.setattr(functions, "_BLOCK_ELEMENTS", elements)
        loss, nll = WeightedNll.apply(logits, targets, weights)
        (gradient,) = torch.autograd.grad(loss, logits, torch.tensor(3.0))
        found.append((loss, nll, gradient))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    wide = logits.detach().double().requires_grad_()
    expected = (torch.logsumexp(wide, 1, True) - wide.gather(1, targets.view(7, -1))).view_as(nll)
    (of_wide,) = torch.autograd.grad((expected * weights).sum() * 3, wide)
    torch.testing.assert_close(found[0][1].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), of_wide, rtol=2**-7, atol=1e-6)
