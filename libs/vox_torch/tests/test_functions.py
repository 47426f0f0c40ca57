"""The autograd functions of attention and of the loss, without a model."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from vox_torch import attention, functions
from vox_torch.functions import CausalAttention, WeightedNll
from vox_torch.layout import Extents


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def qkv(length: int, dtype: torch.dtype, size: float = 1.0) -> list[torch.Tensor]:
    """Six heads over two key heads, as a model has them: slices of longer rows."""
    shapes = [(1, length + 3, heads, 8) for heads in (6, 2, 2)]
    rows = [(size * torch.randn(shape)).to(dtype).transpose(1, 2)[:, :, 3:] for shape in shapes]
    return [each.detach().requires_grad_() for each in rows]


def gradients(output: torch.Tensor, inputs: list[torch.Tensor], g: torch.Tensor):
    return torch.autograd.grad(output, inputs, g.to(output.dtype))


def test_the_gradients_of_attention_are_those_of_finite_differences(monkeypatch):
    """In blocks of 2 queries, so that whole blocks, cut ones and masked keys occur."""
    blocks = [slice(0, 2), slice(2, 4), slice(4, 5)]
    monkeypatch.setattr(functions, "_query_blocks", lambda length: blocks)
    given = qkv(5, torch.float64)
    assert torch.autograd.gradcheck(lambda *each: CausalAttention.apply(*each, 0.3), given)


@pytest.mark.parametrize("length", [1, 128, 300])
def test_attention_by_products_is_torch_s_own(length):
    given = qkv(length, torch.float64)
    out = CausalAttention.apply(*given, 0.3)
    expected = scaled_dot_product_attention(*given, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    g = torch.randn(out.shape)
    torch.testing.assert_close(gradients(out, given, g), gradients(expected, given, g))


@pytest.mark.parametrize("size", [1.0, 2.5])
def test_attention_by_products_is_as_near_in_bfloat16_as_torch_s_kernel(size):
    """Relative distances of the three gradients from float64, measured: 3.4e-3 to 5.3e-3, torch's
    kernel 3.3e-3 to 6.2e-3. With scores in bfloat16: 1.1e-2 to 1.9e-2 at the larger size."""
    given = qkv(300, torch.bfloat16, size)
    exact = [each.detach().double().requires_grad_() for each in given]
    of = scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    g = torch.randn(of.shape)
    expected = gradients(of, exact, g)
    found = gradients(CausalAttention.apply(*given, 8**-0.5), given, g)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 8e-3 * theirs.norm()


@pytest.mark.parametrize("window", [None, 4])
def test_documents_attend_by_products_where_the_processor_is_one_for_them(monkeypatch, window):
    calls: list[int] = []
    apply = CausalAttention.apply
    monkeypatch.setattr(
        CausalAttention, "apply", lambda q, *rest: calls.append(q.shape[2]) or apply(q, *rest)
    )
    documents = Extents((0, 3, 10), torch.tensor([0, 3, 10], dtype=torch.int32), 7)
    given, outs = qkv(10, torch.bfloat16), []
    for is_one in (False, True):
        monkeypatch.setattr(attention, "_bf16_without_amx", lambda is_one=is_one: is_one)
        out, _ = attention.attend(
            torch.nn.Module(), *given, None, documents=documents, sliding_window=window
        )
        outs.append(out)
    # A document that its window cuts is left to torch's kernel.
    assert calls == ([3, 7] if window is None else [3])
    # Both round probabilities and sums to bfloat16, by 2^-9 of values up to 3.
    torch.testing.assert_close(*outs, rtol=0, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("several", [False, True])
def test_blocks_of_logits_change_no_bit_of_the_loss(monkeypatch, dtype, several):
    logits = torch.randn(7, 50).to(dtype).requires_grad_()
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
