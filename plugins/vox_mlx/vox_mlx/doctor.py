"""What works here, and what would make the rest work."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vox_core.contract import Check
from vox_mlx.blas import in_use

_SLOW = (
    "the reference BLAS, about 70 times slower than OpenBLAS; install that, and vox finds it "
    "(Debian, Ubuntu: apt install libopenblas0-pthread)"
)


def checks() -> Iterator[Check]:
    """MLX's device and, on the CPU of Linux, its BLAS."""
    import mlx.core as mx

    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    yield Check(
        "device", True, f"MLX {mx.__version__} computes on the {'GPU' if on_gpu else 'CPU'}"
    )
    if sys.platform == "linux" and not on_gpu:
        yield Check("blas", True, f"matrix products by {in_use() or _SLOW}")
