"""The loss of documents, on the positions that are trained and on no others.

Documents of a batch become rows, padded on the right. A causal model's real positions never see
what lies to their right, so padding needs no mask, and rows never see one another: documents are
isolated for attention and for recurrent state alike. Logits are computed only where weight > 0,
which saves the (T, V) matrix that dominates memory with today's vocabularies.

Shape legend: N documents, L longest document, K trained positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vox_core.contract import Batch
from vox_torch.arrays import at_least_float32

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch as torch tensors.

    Args:
        tokens_NL: int64, padded with 0.
        trained_NL: bool, where weight > 0.
        targets_K: int64, in the order of `trained_NL`.
        weights_K: float32.
    """

    tokens_NL: torch.Tensor
    trained_NL: torch.Tensor
    targets_K: torch.Tensor
    weights_K: torch.Tensor


def rows(batch: Batch, device: str) -> Rows:
    """Lay a batch out as padded rows."""
    import numpy as np
    import torch

    documents = list(batch.documents())
    longest = max(d.stop - d.start for d in documents)
    tokens_NL = np.zeros((len(documents), longest), np.int64)
    trained_NL = np.zeros((len(documents), longest), bool)
    for row, document in enumerate(documents):
        length = document.stop - document.start
        tokens_NL[row, :length] = batch.tokens_T[document]
        trained_NL[row, :length] = batch.weights_T[document] > 0
    trained_T = batch.weights_T > 0
    arrays = (tokens_NL, trained_NL, batch.targets_T[trained_T], batch.weights_T[trained_T])
    return Rows(*(torch.from_numpy(array).to(device) for array in arrays))


def weighted_nll(model: nn.Module, head: nn.Module, batch: Rows) -> torch.Tensor:
    """`sum(weight * nll)` over the batch, not yet divided: a scalar in float32 or wider."""
    with only_at(head, batch.trained_NL):
        logits_KV = model(input_ids=batch.tokens_NL, use_cache=False).logits
    return (negative_log_likelihood(logits_KV, batch.targets_K) * batch.weights_K).sum()


def negative_log_likelihood(logits_KV: torch.Tensor, targets_K: torch.Tensor) -> torch.Tensor:
    """`-log softmax(logits)[target]`, (K,), in float32 or wider.

    From `logsumexp`, which sums pairwise. On the CPU, torch's `cross_entropy` adds a vocabulary up
    in one go: in float32 it is 7e-7 nats too low for 49k entries and 1e-5 for 262k, every time.
    """
    logits_KV = at_least_float32(logits_KV)
    score_K = logits_KV.gather(1, targets_K[:, None]).squeeze(1)
    return logits_KV.logsumexp(dim=1) - score_K


@contextmanager
def only_at(head: nn.Module, chosen_NL: torch.Tensor) -> Iterator[None]:
    """Let the output head see the chosen positions only.

    A hook on the head, and not a head of our own, so that whatever a family does to its logits
    (scaling, soft-capping) and whatever PEFT wraps around the head stays in force.
    """

    def choose(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        (hidden_NLH,) = args
        return (hidden_NLH[chosen_NL],)

    handle = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        handle.remove()
