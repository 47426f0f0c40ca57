"""Check MLX's device and BLAS, with a remedy for each fault."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vox_core.contract import Check
from vox_mlx.blas import REMEDY, in_use, slow


def checks() -> Iterator[Check]:
    """Check MLX's device and, on the CPU of Linux, its BLAS."""
    import mlx.core as mx

    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    yield Check(
        "device", True, f"MLX {mx.__version__} computes on the {'GPU' if on_gpu else 'CPU'}"
    )
    if complaint := slow():
        yield Check("blas", False, complaint, REMEDY)
    elif sys.platform == "linux" and not on_gpu:
        yield Check("blas", True, f"matrix products by {in_use()}")
