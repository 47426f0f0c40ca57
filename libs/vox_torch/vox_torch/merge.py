"""Merge weights one tensor at a time: float32 arithmetic, rounded once to the result's dtype.

LoRA:  W + scale * B A          DoRA:  m * (W + scale * B A) / ||W + scale * B A||_row

Rows are processed in blocks, so that beside the stored tensor and the result only one float32
block is in memory.

Shape legend: R rank, I input features, O output features, P rows of a block.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vox_core.contract import AdapterState, MergeJob, MergeResult, MergeTarget
from vox_core.weights import STORED_AS, numpy_dtype
from vox_torch.arrays import float32, float32_blocks, rounded

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


def merge(job: MergeJob) -> MergeResult:
    """Yield every target of the job, lazily and in order."""
    return MergeResult((target.shape.tensor, merged_tensor(job, target)) for target in job.targets)


def merged_tensor(job: MergeJob, target: MergeTarget) -> NDArray[Any]:
    """Merge one tensor, in the job's dtype and the stored layout."""
    import numpy as np

    stored = job.read(target.shape.tensor)
    dtype = numpy_dtype(STORED_AS[job.dtype]) if job.dtype else stored.dtype
    if target.path in job.adapter.saved:
        return rounded(float32(job.adapter.saved[target.path]), dtype)
    merged = np.empty(stored.shape, dtype)
    merged_OI = merged.T if target.shape.transposed else merged
    read = partial(job.read, target.shape.tensor)
    for block, updated_PI in float32_blocks(read, target.shape.transposed):
        _add_update(updated_PI, job.adapter, target.path, block)
        merged_OI[block] = rounded(updated_PI, dtype)
    return merged


def _add_update(W_PI: torch.Tensor, adapter: AdapterState, path: str, block: slice) -> None:
    """Add the update to rows of W, in place."""
    module = adapter.modules[path]
    W_PI.addmm_(float32(module.B_OR[block]), float32(module.A_RI), alpha=adapter.scale(path))
    if module.magnitude_O is not None:
        W_PI *= _dora_factor(W_PI, float32(module.magnitude_O[block]))


def _dora_factor(updated_PI: torch.Tensor, magnitude_P: torch.Tensor) -> torch.Tensor:
    return (magnitude_P / updated_PI.norm(dim=1))[:, None]
