"""Compute loss and log-probabilities of documents at the scored positions only.

Logits are computed only where they are wanted, which saves the (T, V) matrix that dominates memory
with today's vocabularies. `weighted_nll` is the reference: padded rows, any model.
`HeadLoss` computes one chunk of positions at a time and takes its gradient at once, so that only
one chunk of logits exists. Positions that are scored and not trained cost no gradient.

Both call the model's own forward for the head, so that a family's scaling or soft-capping of logits
and PEFT's wrapper of the head stay in force.

Shape legend: N documents, L longest document, K scored positions, C positions of a chunk, H hidden
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vox_torch.arrays import at_least_float32, in_columns
from vox_torch.layout import Rows, Scored

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vox_torch.functions import Chunk

CHUNK, CHUNK_ON_CPU = 64 * 2**20, 16 * 2**20
"""Logits computed at once: on a CPU 32 MiB in bfloat16, and 64 MiB more while they are float32. An
accelerator reads the head's weight again for each chunk, which costs more there than the memory."""


def weighted_nll(model: nn.Module, head: nn.Module, batch: Rows) -> torch.Tensor:
    """Return `sum(weight * nll)` of the batch, undivided: a scalar in float32 or wider."""
    return weighted(nll(model, head, batch), batch.scored)


def weighted(nll_K: torch.Tensor, scored: Scored) -> torch.Tensor:
    """Return `sum(weight * nll)` over the trained positions."""
    return (nll_K[: scored.trained] * scored.weights_K[: scored.trained]).sum()


def nll(model: nn.Module, head: nn.Module, batch: Rows) -> torch.Tensor:
    """Return `-log p(target)`, shaped as the targets, at the scored positions, in float32 or
    wider."""
    with only_at(head, batch.chosen_K):
        logits_KV = model(input_ids=batch.tokens_NL, use_cache=False).logits
    return negative_log_likelihood(logits_KV, batch.scored.targets_K)


def negative_log_likelihood(logits_KV: torch.Tensor, targets_K: torch.Tensor) -> torch.Tensor:
    """Return `-log softmax(logits)[target]`, shaped as the targets, in float32 or wider.

    Uses `logsumexp`, which sums pairwise. On the CPU, torch's `cross_entropy` sums a vocabulary
    sequentially: in float32 it is 7e-7 nats too low for 49k entries and 1e-5 for 262k, every time.
    """
    logits_KV = at_least_float32(logits_KV)
    score_KM = logits_KV.gather(1, in_columns(targets_K))
    return (logits_KV.logsumexp(dim=1, keepdim=True) - score_KM).view_as(targets_K)


@contextmanager
def only_at(head: nn.Module, chosen_K: torch.Tensor) -> Iterator[None]:
    """Restrict the output head to the chosen positions."""

    def choose(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        (hidden_NLH,) = args
        return (hidden_NLH.flatten(0, 1).index_select(0, chosen_K),)

    handle = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        handle.remove()


class HeadLoss:
    """Loss and log-probabilities from hidden states, one chunk at a time.

    Args:
        logits: maps hidden states (1, C, H) to logits (1, C, V).
        vocabulary: V.
    """

    def __init__(
        self, logits: Callable[[torch.Tensor], torch.Tensor], vocabulary: int, device: str
    ) -> None:
        self._logits = logits
        self._chunk = max(1, (CHUNK_ON_CPU if device == "cpu" else CHUNK) // vocabulary)

    def __call__(
        self, hidden_KH: torch.Tensor, scored: Scored, parameters: Sequence[torch.nn.Parameter]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `sum(weight * nll)`, and log p(target) (K,) without a gradient.

        Args:
            parameters: trained parameters inside `logits`; often none.
        """
        import torch

        trained = slice(0, scored.trained)
        untrained_K = self.log_probs(hidden_KH, scored, scored.trained)
        chunks = list(self._chunks(scored, trained))
        if not chunks:
            return hidden_KH[trained].sum(), untrained_K  # zero, with a gradient
        hidden_NH = hidden_KH if len(untrained_K) == 0 else hidden_KH[trained]
        if torch.is_grad_enabled():
            loss, nll_N = self._with_gradients(hidden_NH, chunks, parameters)
        else:
            parts = [self._of(hidden_NH[at], *given) for at, *given in chunks]
            loss = torch.stack([of_chunk for of_chunk, _ in parts]).sum()
            nll_N = torch.cat([nll_C for _, nll_C in parts])
        return loss, torch.cat([-nll_N.detach(), untrained_K])

    def nll(self, hidden_KH: torch.Tensor, scored: Scored) -> torch.Tensor:
        """Return `-log p(target)`, (K,), with the gradient of each position taken at once, for
        weights that follow from it. Positions have one target, and nothing is trained inside
        `logits`."""
        import torch

        if len(hidden_KH) == 0:
            return hidden_KH.sum(1)
        ones = replace(scored, weights_K=torch.ones_like(scored.weights_K))
        chunks = list(self._chunks(ones, slice(0, len(hidden_KH))))
        return self._with_gradients(hidden_KH, chunks, ())[1]

    def log_probs(self, hidden_KH: torch.Tensor, scored: Scored, first: int = 0) -> torch.Tensor:
        """Return log p(target) of the positions from `first` on, in float32 or wider, without a
        gradient."""
        import torch

        with torch.no_grad():
            parts = [
                -negative_log_likelihood(self._logits(hidden_KH[at][None])[0], targets_C)
                for at, targets_C, _ in self._chunks(scored, slice(first, len(hidden_KH)))
            ]
            empty = at_least_float32(hidden_KH.new_zeros(0, *scored.targets_K.shape[1:]))
            return torch.cat(parts) if parts else empty

    def _with_gradients(
        self, hidden_KH: torch.Tensor, chunks: list[Chunk], parameters: Sequence[torch.nn.Parameter]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from vox_torch.functions import gradient_in_forward

        return gradient_in_forward(self._of, hidden_KH, chunks, parameters)

    def _chunks(self, scored: Scored, within: slice) -> Iterator[Chunk]:
        for start in range(within.start, within.stop, self._chunk):
            at = slice(start, min(start + self._chunk, within.stop))
            yield at, scored.targets_K[at], scored.weights_K[at]

    def _of(
        self, hidden_CH: torch.Tensor, targets_C: torch.Tensor, weights_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of one chunk, and nll (C,)."""
        from vox_torch.functions import WeightedNll

        # A view; the gradient of `[0]` would be a copy of all logits.
        logits_CV = self._logits(hidden_CH[None]).flatten(0, 1)
        both: tuple[torch.Tensor, torch.Tensor] = WeightedNll.apply(logits_CV, targets_C, weights_C)
        return both
