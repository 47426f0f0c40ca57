"""Attention of documents by matrix products against torch's own attention of each document."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from vox_torch import attention, cpu_attention
from vox_torch.cpu_attention import CausalAttention, grouped, layout
from vox_torch.layout import Extents

LENGTHS = [300, 5, 60, 1, 50, 130, 128]
"""In groups of one and of several documents, of one block and of several, with padding."""


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def bounds_of(lengths: list[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lengths, initial=0))


def qkv(length: int, dtype: torch.dtype, size: float = 1.0) -> list[torch.Tensor]:
    """Six heads over two key heads."""
    rows = [(size * torch.randn(1, length, heads, 8)).to(dtype) for heads in (6, 2, 2)]
    return [each.transpose(1, 2).requires_grad_() for each in rows]


def one_by_one(
    given: list[torch.Tensor], bounds: tuple[int, ...], scale: float, window: int | None = None
) -> torch.Tensor:
    """Return (1, T, H, D)."""
    out = []
    for start, stop in itertools.pairwise(bounds):
        seen_LL = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        if window is not None:
            seen_LL = seen_LL.triu(1 - window)
        document = [each[:, :, start:stop] for each in given]
        out.append(scaled_dot_product_attention(*document, seen_LL, scale=scale, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2)


def gradients(
    output: torch.Tensor, inputs: list[torch.Tensor], g: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(output, inputs, g.to(output.dtype))


@pytest.mark.parametrize("window", [None, 4, 100])
def test_attention_by_products_is_torch_s_own(window):
    bounds = bounds_of(LENGTHS)
    given = qkv(bounds[-1], torch.float64)
    out = CausalAttention.apply(*given, bounds, 0.3, window)
    expected = one_by_one(given, bounds, 0.3, window)
    torch.testing.assert_close(out, expected)
    g = torch.randn(out.shape)
    torch.testing.assert_close(gradients(out, given, g), gradients(expected, given, g))


@pytest.mark.parametrize("window", [None, 3])
def test_the_gradients_of_attention_are_those_of_finite_differences(monkeypatch, window):
    """In blocks of 2 queries, so that whole blocks, cut ones, masked keys and padding occur."""
    monkeypatch.setattr(cpu_attention, "_BLOCK", 2)
    given, bounds = qkv(9, torch.float64), (0, 5, 9)
    layout.cache_clear()
    try:
        assert torch.autograd.gradcheck(
            lambda *each: CausalAttention.apply(*each, bounds, 0.3, window), given
        )
    finally:
        layout.cache_clear()


def test_documents_of_about_one_length_are_one_group():
    groups = list(grouped(LENGTHS, heads=6))
    assert groups == [[0], [5, 6], [2, 4, 1, 3]]
    # Ten documents of 128 tokens: their scores together would leave the cache.
    assert [len(each) for each in grouped([128] * 10, heads=9)] == [1] * 10
    assert [len(each) for each in grouped([32] * 10, heads=9)] == [10]


@pytest.mark.parametrize("size", [1.0, 2.5])
def test_attention_by_products_is_as_near_in_bfloat16_as_torch_s_kernel(size):
    """Relative distances of the three gradients from float64, measured: 3.4e-3 to 5.3e-3, torch's
    kernel 3.3e-3 to 6.2e-3. With scores in bfloat16: 1.1e-2 to 1.9e-2 at the larger size."""
    bounds = bounds_of(LENGTHS)
    given = qkv(bounds[-1], torch.bfloat16, size)
    exact = [each.detach().double().requires_grad_() for each in given]
    of = one_by_one(exact, bounds, 8**-0.5)
    g = torch.randn(of.shape)
    expected = gradients(of, exact, g)
    by_products = gradients(CausalAttention.apply(*given, bounds, 8**-0.5, None), given, g)
    by_kernel = gradients(one_by_one(given, bounds, 8**-0.5), given, g)
    for ours, theirs, right in zip(by_products, by_kernel, expected, strict=True):
        assert (ours - right).norm() <= 1.5 * (theirs - right).norm()


def test_scores_are_exact_to_float32_and_leave_torch_s_setting_as_it_was():
    before = torch.backends.mkldnn.matmul.fp32_precision
    Q, K = (torch.randn(2, 40, 64).bfloat16().float() for _ in range(2))
    found = cpu_attention._scores(Q, K, 0.3)
    exact = 0.3 * Q.double() @ K.double().transpose(1, 2)
    # Sums of 64 products in float32: 64 * 2^-24 of the largest sum of absolute values.
    bound = 64 * 2**-24 * (0.3 * Q.abs() @ K.abs().transpose(1, 2)).max()
    assert (found - exact).abs().max() <= bound
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_several_threads_leave_torch_s_setting_as_it_was():
    settings, products = torch.backends.mkldnn.matmul, cpu_attention._BFLOAT16_PRODUCTS
    before = settings.fp32_precision
    products.__enter__()  # one thread, and then another
    with products:
        products.__exit__()  # the first one leaves first
        assert settings.fp32_precision == "bf16"
    assert settings.fp32_precision == before


@pytest.mark.parametrize("window", [None, 4])
def test_documents_attend_by_products_where_the_processor_is_one_for_them(monkeypatch, window):
    documents = Extents((0, 3, 10), torch.tensor([0, 3, 10], dtype=torch.int32), 7)
    given, outs, calls = qkv(10, torch.bfloat16), [], []
    apply = CausalAttention.apply
    monkeypatch.setattr(
        CausalAttention, "apply", lambda *each: calls.append(each[3:]) or apply(*each)
    )
    for is_one in (False, True):
        monkeypatch.setattr(attention, "_bf16_without_amx", lambda is_one=is_one: is_one)
        out, _ = attention.attend(
            torch.nn.Module(), *given, None, documents=documents, sliding_window=window
        )
        outs.append(out)
    assert calls == [((0, 3, 10), 8**-0.5, window)]
    # Both round probabilities and sums to bfloat16, by 2^-9 of values up to 3.
    torch.testing.assert_close(*outs, rtol=0, atol=2**-6)


# --- an accelerator's kernel ----------------------------------------------------------------------


@pytest.mark.parametrize("later", [True, False])
def test_the_kernel_gets_the_arguments_that_its_version_takes(later, monkeypatch):
    """torch 2.11 takes grouped heads as they are; later versions have an argument for them."""

    def eleven(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
        return max_q, max_k, scale, window_size

    def twelve(*given, enable_gqa=False, **named):
        return *eleven(*given, **named), enable_gqa

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", twelve if later else eleven)
    uncached = attention._asks_for_groups.__wrapped__
    monkeypatch.setattr(attention, "_asks_for_groups", uncached)
    query_THD, *kv = (torch.zeros(5, heads, 8) for heads in (6, 2, 2))
    bounds = (torch.tensor([0, 2, 5]),) * 2
    found = attention.varlen(query_THD, *kv, bounds, (3, 3), 0.5, 4)
    assert found == (3, 3, 0.5, (3, 0), True)[: 5 if later else 4]
