"""Merge weights one tensor at a time: float32 arithmetic, rounded once to the result's dtype.

LoRA:  W + scale * B A          DoRA:  m * (W + scale * B A) / ||W + scale * B A||_row

Rows are processed in blocks, so that beside the stored tensor and the result only one float32
block is in memory.

Shape legend: R rank, I input features, O output features, P rows of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vox_core.contract import AdapterState, MergeJob, MergeResult, MergeTarget
from vox_core.weights import STORED_AS, numpy_dtype
from vox_mlx.arrays import float32, rounded

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_ELEMENTS = 1024 * 1024  # 4 MiB of float32


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
    W_OI, merged_OI = (stored.T, merged.T) if target.shape.transposed else (stored, merged)
    rows = max(1, BLOCK_ELEMENTS // W_OI.shape[1])
    for start in range(0, len(W_OI), rows):
        block = slice(start, start + rows)
        updated_PI = _updated(float32(W_OI[block]), job.adapter, target.path, block)
        merged_OI[block] = rounded(updated_PI, dtype)
    return merged


def _updated(W_PI: mx.array, adapter: AdapterState, path: str, block: slice) -> mx.array:
    module = adapter.modules[path]
    B_PR, A_RI = float32(module.B_OR[block]), float32(module.A_RI)
    updated_PI = mx.addmm(W_PI, B_PR, A_RI, alpha=adapter.scale(path))
    if module.magnitude_O is None:
        return updated_PI
    norm_P = mx.linalg.norm(updated_PI, axis=1)
    return updated_PI * (float32(module.magnitude_O[block]) / norm_P)[:, None]
