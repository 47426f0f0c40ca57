"""What a merge needs at its peak, in the machine's own memory: it holds one tensor at a time.

Beside the process and the adapter in float32 there is the largest tensor as it is written (what is
read of a file is given back block by block); or, while the result is proven, the logits of base, of
base + adapter and of the merged model, and what they are compared with.

Merges by the CPU backend took 521 to 591 MB (SmolLM2-135M, rank 16, seven rounds), 609 to 648 MB
(rank 64, three), 613 MB (rank 128) and 623 MB (a llama of 1 GB whose largest tensor has 205 MB),
where this says 541, 600, 678 and 694. The bound that they keep to is that of
tests/run/test_merge_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PROCESS = 465_000_000
"""Interpreter, libraries and tokenizer on Linux, and the model without weights for the proof."""
_LOGITS = 4
"""Arrays of float32 logits at once, of 32 tokens (vox_core/run/proof.py)."""
_PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class MergePrediction:
    """Bytes at the peak of a merge.

    Args:
        runtime: the process and its libraries.
        adapter: A and B, and what is trained whole, in float32.
        tensors: the largest tensor, or the logits of the proof.
    """

    runtime: int
    adapter: int
    tensors: int

    @property
    def peak(self) -> int:
        return self.runtime + self.adapter + self.tensors


def predict_merge(largest: int, trained: Iterable[int], vocabulary: int) -> MergePrediction:
    """The peak of adding an adapter to a base.

    Args:
        largest: bytes of the largest tensor that is written.
        trained: elements of each tensor of the adapter.
        vocabulary: rows of the output head.
    """
    logits = _LOGITS * _PROBE_TOKENS * vocabulary * 4
    return MergePrediction(PROCESS, 4 * sum(trained), max(largest, logits))
