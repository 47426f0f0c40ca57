"""MLX on Linux: a fast BLAS, memory that stays in the process, and the checks of `vox doctor`.

MLX's wheel for Linux brings the reference BLAS, one scalar loop: 2 GFLOP/s in float32 where
OpenBLAS reaches 150. The loader prefers symbols of libraries already loaded globally, so loading
OpenBLAS before MLX suffices; no file is replaced. `VOX_MLX_BLAS` names another library that has
`cblas_sgemm`, or is `none`. Loading does not import MLX.

On the CPU, MLX allocates each array with malloc and frees it. glibc maps blocks over 32 MB from the
system each time, which zeroes every page: a fifth of a training step.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from vox_core.contract import Check
from vox_core.errors import ConfigError

VARIABLE = "VOX_MLX_BLAS"
_OPENBLAS = "libopenblas.so.0"
REMEDY = (
    f"apt install libopenblas0-pthread (Debian, Ubuntu), or set {VARIABLE} to a library that has "
    "cblas_sgemm"
)
"""No package on PyPI brings one: the names in scipy-openblas32 have a prefix, and its authors want
nobody to depend on it but NumPy and SciPy."""


def load_blas() -> None:
    """Load a BLAS library, if one is found and MLX is not yet imported.

    Raises:
        ConfigError: C002, the library in `VOX_MLX_BLAS` cannot be loaded.
    """
    named = os.environ.get(VARIABLE)
    if sys.platform != "linux" or "mlx.core" in sys.modules or named == "none":
        return
    try:
        ctypes.CDLL(named or _OPENBLAS, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if named:
            raise _unusable(named, error) from error


def slow() -> str | None:
    """Return a warning if matrix products use the reference BLAS; else None."""
    import mlx.core as mx

    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    if sys.platform != "linux" or on_gpu or in_use():
        return None
    return "MLX multiplies matrices with the reference BLAS, about 70 times slower than OpenBLAS"


def in_use() -> str | None:
    """Return the path of the OpenBLAS that this process has loaded; None if it has none."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    name = Path(os.environ.get(VARIABLE) or _OPENBLAS).name.partition(".so")[0]
    mapped = {line.split()[-1] for line in maps.splitlines() if ".so" in line}
    return next((path for path in sorted(mapped) if name in Path(path).name), None)


def _unusable(named: str, error: OSError) -> ConfigError:
    return ConfigError(
        "C002",
        "the BLAS library cannot be loaded",
        where=VARIABLE,
        found=f"{named}: {error}",
        expected="a shared library that has cblas_sgemm",
        remedy=f"correct {VARIABLE}, or unset it",
    )


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h
_NEVER = -1
_SET_BY_USERS = {
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
}


def keep_memory() -> None:
    """Make glibc keep freed memory, large blocks included, until the process ends.

    No effect with another C library, or if the user has set malloc options.
    """
    if sys.platform != "linux" or _SET_BY_USERS & os.environ.keys():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _NEVER)


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
