"""Compute the loss of documents at the trained positions only.

Logits are computed only where weight > 0, which saves the (T, V) matrix that dominates memory with
today's vocabularies. `weighted_nll` is the reference: padded rows, any model.
`HeadLoss` computes one chunk of positions at a time and takes its gradient at once, so that only
one chunk of logits exists.

Both call the model's own forward for the head, so that a family's scaling or soft-capping of logits
and PEFT's wrapper of the head stay in force.

Shape legend: N documents, L longest document, K trained positions, C positions of a chunk, H hidden
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vox_torch.arrays import at_least_float32
from vox_torch.layout import Rows, Trained

if TYPE_CHECKING:
    import torch
    from torch import nn

CHUNK_ELEMENTS = 16 * 2**20
"""Logits computed at once: 32 MiB in bfloat16, 64 MiB more while they are float32."""


def weighted_nll(model: nn.Module, head: nn.Module, batch: Rows) -> torch.Tensor:
    """Return `sum(weight * nll)` of the batch, undivided: a scalar in float32 or wider."""
    return (nll(model, head, batch) * batch.trained.weights_K).sum()


def nll(model: nn.Module, head: nn.Module, batch: Rows) -> torch.Tensor:
    """Return `-log p(target)`, (K,), at the trained positions, in float32 or wider."""
    with only_at(head, batch.chosen_K):
        logits_KV = model(input_ids=batch.tokens_NL, use_cache=False).logits
    return negative_log_likelihood(logits_KV, batch.trained.targets_K)


def negative_log_likelihood(logits_KV: torch.Tensor, targets_K: torch.Tensor) -> torch.Tensor:
    """Return `-log softmax(logits)[target]`, (K,), in float32 or wider.

    Uses `logsumexp`, which sums pairwise. On the CPU, torch's `cross_entropy` sums a vocabulary
    sequentially: in float32 it is 7e-7 nats too low for 49k entries and 1e-5 for 262k, every time.
    """
    logits_KV = at_least_float32(logits_KV)
    score_K = logits_KV.gather(1, targets_K[:, None]).squeeze(1)
    return logits_KV.logsumexp(dim=1) - score_K


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
    """The loss from hidden states, one chunk at a time.

    Args:
        logits: maps hidden states (1, C, H) to logits (1, C, V).
        parameters: trained parameters inside `logits`; often none.
        vocabulary: V.
    """

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        parameters: list[torch.nn.Parameter],
        vocabulary: int,
    ) -> None:
        self._logits, self._parameters = logits, parameters
        self._chunk = max(1, CHUNK_ELEMENTS // vocabulary)

    def __call__(self, hidden_KH: torch.Tensor, trained: Trained) -> torch.Tensor:
        """Return `sum(weight * nll)`, a scalar in float32 or wider."""
        import torch

        from vox_torch.functions import gradient_in_forward

        chunks = list(self._chunks(trained))
        if not chunks:
            return hidden_KH.sum()  # without rows: zero, with a gradient
        if torch.is_grad_enabled():
            return gradient_in_forward(self._of, hidden_KH, chunks, self._parameters)
        losses = [self._of(hidden_KH[at], part) for at, part in chunks]
        return torch.stack(losses).sum()

    def _chunks(self, trained: Trained) -> Iterator[tuple[slice, Trained]]:
        for start in range(0, len(trained.targets_K), self._chunk):
            at = slice(start, start + self._chunk)
            yield at, Trained(trained.targets_K[at], trained.weights_K[at])

    def _of(self, hidden_CH: torch.Tensor, part: Trained) -> torch.Tensor:
        """Return the loss of one chunk."""
        from vox_torch.functions import WeightedNll

        logits_CV = self._logits(hidden_CH[None])[0]
        loss: torch.Tensor = WeightedNll.apply(logits_CV, part.targets_K, part.weights_K)
        return loss
