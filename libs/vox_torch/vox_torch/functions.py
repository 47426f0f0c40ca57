"""Autograd functions of the training step that save less than torch's own.

    WeightedNll           softmax - onehot as one array, from logits in their own dtype
    gradient_in_forward   a loss by chunks: the gradient of each is taken at once
    LoraLinear            x W^T + scale * (x A^T) B^T, saving only x or what x is made of
    LoraLinears           the same, with an adapter for each stretch of tokens
    FrozenLinear          x W^T for a W that is dequantised on each use
    FrozenBlocks          the same, with a W for some rows and another for others
    BlockLinear           the same, a block of W's rows at a time

This module imports torch; import it lazily.

Shape legend: X tokens, P tokens of one adapter, I input features, O output features, R rank,
K scored positions, C positions of a chunk, M targets of a position, H hidden size, V vocabulary, N
rows of a block, S rows by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from vox_torch.arrays import at_least_float32, in_columns

Weight = Callable[[], torch.Tensor]
"""Returns a frozen (O, I) matrix."""

_BLOCK_ELEMENTS = 2**18
"""Logits in float32 at once: 1 MiB, which stays in a core's cache. A whole chunk, 64 MiB, would
take new pages from the system each time, which costs more than the arithmetic."""

Chunk = tuple[slice, torch.Tensor, torch.Tensor]
"""Rows of hidden states, their targets and their weights."""

ChunkLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From hidden states, targets and weights of a chunk to `sum(weight * nll)` and nll."""


class WeightedNll(torch.autograd.Function):
    """`sum(weight * nll)` of logits (C, V), and nll, in float32 or wider (see loss.py); targets,
    weights and nll are (C,) or (C, M).

        nll = logsumexp(logits) - logits[target]
        d logits = weight * (softmax(logits) - onehot(target))
    """

    @staticmethod
    def forward(
        ctx: Any, logits_CV: torch.Tensor, targets_C: torch.Tensor, weights_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (at_least_float32(logits_CV[at]) for at in _blocks(logits_CV))
        lse_C1 = torch.cat([part_NV.logsumexp(dim=1, keepdim=True) for part_NV in parts])
        ctx.save_for_backward(logits_CV, lse_C1, targets_C, weights_C)
        score_CM = logits_CV.gather(1, in_columns(targets_C)).to(lse_C1.dtype)
        nll_C = (lse_C1 - score_CM).view_as(targets_C)
        ctx.mark_non_differentiable(nll_C)
        return (nll_C * weights_C).sum(), nll_C

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, _nll_C: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        logits_CV, lse_C1, targets_C, weights_C = ctx.saved_tensors
        gradient_CV = torch.empty_like(logits_CV)
        weights_C = weights_C * gradient
        for at in _blocks(logits_CV):
            wide_NV = torch.sub(logits_CV[at], lse_C1[at], out=_wide(gradient_CV[at])).exp_()
            _gradient(wide_NV, targets_C[at], weights_C[at])
            if wide_NV.dtype != gradient_CV.dtype:
                gradient_CV[at] = wide_NV
        return gradient_CV, None, None


def _wide(part: torch.Tensor) -> torch.Tensor:
    """Return `part`, if its dtype is float32 or wider; else a new array of its shape."""
    wide = torch.promote_types(part.dtype, torch.float32)
    return part if part.dtype == wide else torch.empty_like(part, dtype=wide)


def _gradient(softmax_CV: torch.Tensor, targets_C: torch.Tensor, weights_C: torch.Tensor) -> None:
    """Turn softmax into `sum(weight * (softmax - onehot))` over a position's targets, in place."""
    weights_CM = in_columns(weights_C)
    if targets_C.ndim == 1:  # rounded less than with the sum below
        softmax_CV[torch.arange(len(targets_C), device=targets_C.device), targets_C] -= 1
        softmax_CV.mul_(weights_CM)
    else:
        softmax_CV.mul_(weights_CM.sum(1, keepdim=True))
        softmax_CV.scatter_add_(1, targets_C, -weights_CM.to(softmax_CV.dtype))


def _blocks(logits_CV: torch.Tensor) -> Iterator[slice]:
    """Rows computed together: on a CPU in half precision what stays in the cache, else all."""
    count, vocabulary = logits_CV.shape
    whole = not logits_CV.is_cpu or logits_CV.element_size() >= 4
    rows = max(1, count if whole else _BLOCK_ELEMENTS // vocabulary)
    return (slice(at, min(at + rows, count)) for at in range(0, count, rows))


def gradient_in_forward(
    loss: ChunkLoss,
    hidden_KH: torch.Tensor,
    chunks: Sequence[Chunk],
    parameters: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the chunks' losses, taking each gradient at once so that its graph is freed.

    Args:
        loss: loss and nll of one chunk, from its hidden states, targets and weights.
        chunks: rows of `hidden_KH`, and their targets and weights.
        parameters: trained parameters inside `loss`.

    Returns:
        The sum, and nll (K,). The gradient of either can be taken; that of nll needs weights of 1
        and no `parameters`.
    """
    total: tuple[torch.Tensor, torch.Tensor] = _Chunked.apply(hidden_KH, loss, chunks, *parameters)
    return total


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: torch.Tensor,
        loss: ChunkLoss,
        chunks: Sequence[Chunk],
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient_KH, sums = torch.empty_like(hidden_KH), [torch.zeros_like(p) for p in parameters]
        losses, parts = [], []
        for at, targets_C, weights_C in chunks:
            with torch.enable_grad():
                hidden_CH = hidden_KH[at].detach().requires_grad_()
                of_chunk, nll_C = loss(hidden_CH, targets_C, weights_C)
                gradient_CH, *gradients = torch.autograd.grad(of_chunk, [hidden_CH, *parameters])
            gradient_KH[at] = gradient_CH
            for so_far, gradient in zip(sums, gradients, strict=True):
                so_far.add_(gradient)
            losses.append(of_chunk.detach())
            parts.append(nll_C)
        ctx.save_for_backward(gradient_KH, *sums)
        ctx.set_materialize_grads(False)
        return torch.stack(losses).sum(), torch.cat(parts)

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None, weights_K: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:  # nll is a sum's terms, each a function of its own hidden states
            (hidden_KH,) = ctx.saved_tensors
            return (hidden_KH * weights_K[:, None]).to(hidden_KH.dtype), None, None
        hidden_KH, *parameters = (saved * gradient.to(saved.dtype) for saved in ctx.saved_tensors)
        return hidden_KH, None, None, *parameters


class LoraLinear(torch.autograd.Function):
    """A frozen linear layer with its adapter (Hu et al., arXiv:2106.09685).

    The product with the base is added to the adapter's part, in the accumulator, and their sum is
    rounded once (a bias, which may be large, is added to that). In the other order the adapter's
    part is added to rounded numbers and lost where it is less than half of their last bit: in
    bfloat16 two thirds of an update of a tenth of a bit, and the loss of a run stays 1 % above that
    of float32 (docs/adr/0014).

    The base is frozen and has no weight gradient. The backward pass recomputes x A^T, which costs
    R / O of what saving an output would.

    With `sources` it also recomputes x = make(*sources), to the bit, and x itself is not saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_XI: torch.Tensor,
        A_RI: torch.Tensor,
        B_OR: torch.Tensor,
        weight: Weight,
        bias_O: torch.Tensor | None,
        scale: float,
        make: Callable[..., torch.Tensor] | None = None,
        *sources: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(A_RI, B_OR, *(sources or (x_XI,)))
        ctx.weight, ctx.scale, ctx.make = weight, scale, make
        y_XO = scaled(x_XI @ A_RI.T, B_OR.T, scale).addmm_(x_XI, weight().T)
        return y_XO if bias_O is None else y_XO.add_(bias_O)

    @staticmethod
    def backward(ctx: Any, g_XO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        A_RI, B_OR, *sources = ctx.saved_tensors
        x_XI, gB_XR = ctx.make(*sources) if ctx.make else sources[0], g_XO @ B_OR
        gradient_A = scaled(gB_XR.T, x_XI, ctx.scale)
        gradient_B = scaled(g_XO.T, x_XI @ A_RI.T, ctx.scale)
        gradient_x = None
        if ctx.needs_input_grad[0]:
            gradient_x = scaled(gB_XR, A_RI, ctx.scale).addmm_(g_XO, ctx.weight())
        beside = (None,) * (len(ctx.needs_input_grad) - 3)
        return gradient_x, gradient_A, gradient_B, *beside


class LoraLinears(torch.autograd.Function):
    """`LoraLinear` with an adapter for each stretch of tokens; all share the product with the base.
    A stretch without an adapter has matrices of rank 0."""

    @staticmethod
    def forward(
        ctx: Any,
        x_XI: torch.Tensor,
        weight: Weight,
        bias_O: torch.Tensor | None,
        shares: Sequence[tuple[int, float]],
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_XI, *matrices)
        ctx.weight, ctx.shares = weight, shares
        updates = [
            scaled(x_PI @ A_RI.T, B_OR.T, scale)
            for x_PI, scale, A_RI, B_OR in _by_share(shares, matrices, x_XI)
        ]
        y_XO = torch.cat(updates).addmm_(x_XI, weight().T)
        return y_XO if bias_O is None else y_XO.add_(bias_O)

    @staticmethod
    def backward(ctx: Any, g_XO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_XI, *matrices = ctx.saved_tensors
        updates, gradients = [], []
        for x_PI, g_PO, scale, A_RI, B_OR in _by_share(ctx.shares, matrices, x_XI, g_XO):
            gB_PR = g_PO @ B_OR
            updates.append(scaled(gB_PR, A_RI, scale))
            gradients += [scaled(gB_PR.T, x_PI, scale), scaled(g_PO.T, x_PI @ A_RI.T, scale)]
        gradient_x = None
        if ctx.needs_input_grad[0]:
            gradient_x = torch.cat(updates).addmm_(g_XO, ctx.weight())
        return gradient_x, None, None, None, *gradients


def _by_share(
    shares: Sequence[tuple[int, float]], matrices: Sequence[torch.Tensor], *of_all: torch.Tensor
) -> Iterator[tuple[Any, ...]]:
    """Yield for each adapter its tokens of each array, its scale, A and B."""
    counts, scales = zip(*shares, strict=True)
    parts = (each.split(counts) for each in of_all)
    return zip(*parts, scales, matrices[::2], matrices[1::2], strict=True)


def scaled(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `scale * left @ right`, rounded once."""
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)


class FrozenLinear(torch.autograd.Function):
    """A frozen linear layer that recomputes its weight in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x_XI: torch.Tensor, weight: Weight, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.weight = weight
        return torch.nn.functional.linear(x_XI, weight().to(x_XI.dtype), bias_O)

    @staticmethod
    def backward(ctx: Any, g_XO: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        return (g_XO @ ctx.weight() if ctx.needs_input_grad[0] else None), None, None


class FrozenBlocks(torch.autograd.Function):
    """`x W^T` with another frozen W for each stretch of rows, recomputed in the backward pass.

    A block is (rows of x and y, columns of y, weight); W of some rows may be several blocks, one
    beside another. All of y is allocated before the first weight: what stays would otherwise lie in
    the memory that the last weight has left, and the next one would take more.
    """

    @staticmethod
    def forward(
        ctx: Any, x_SI: torch.Tensor, blocks: Sequence[tuple[slice, slice, Weight]]
    ) -> torch.Tensor:
        ctx.blocks, ctx.width = blocks, x_SI.shape[1]
        y_SO = x_SI.new_empty(len(x_SI), max(columns.stop for _, columns, _ in blocks))
        for rows, columns, weight in blocks:
            torch.mm(x_SI[rows], weight().to(x_SI.dtype).T, out=y_SO[rows, columns])
        return y_SO

    @staticmethod
    def backward(ctx: Any, g_SO: torch.Tensor) -> tuple[torch.Tensor, None]:
        g_SI = g_SO.new_zeros(len(g_SO), ctx.width)
        for rows, columns, weight in ctx.blocks:
            g_SI[rows].addmm_(g_SO[rows, columns], weight().to(g_SO.dtype))
        return g_SI, None


class BlockLinear(torch.autograd.Function):
    """A frozen linear layer computed a block of output features at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        rows: Callable[[slice], torch.Tensor],
        blocks: Sequence[slice],
        bias_O: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.rows, ctx.blocks = rows, blocks
        y = x.new_empty(*x.shape[:-1], blocks[-1].stop)
        for block in blocks:
            bias_N = None if bias_O is None else bias_O[block]
            y[..., block] = torch.nn.functional.linear(x, rows(block).to(x.dtype), bias_N)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        parts = [g[..., block] @ ctx.rows(block) for block in ctx.blocks]
        return torch.stack(parts).sum(0), None, None, None
