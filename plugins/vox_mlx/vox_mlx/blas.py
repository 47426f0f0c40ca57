"""Load a fast BLAS for MLX on Linux, or warn that there is none.

MLX's wheel for Linux brings the reference BLAS, one scalar loop: 2 GFLOP/s in float32 where
OpenBLAS reaches 150. The loader prefers
symbols of libraries already loaded globally, so loading OpenBLAS before MLX suffices; no file is
replaced.

`VOX_MLX_BLAS` names another library that has `cblas_sgemm`, or is `none`. Loading does not import
MLX.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

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
