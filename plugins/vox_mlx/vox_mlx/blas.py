"""A fast BLAS for MLX on Linux, and a warning where there is none.

MLX's wheel for Linux brings the reference BLAS, one scalar loop: 2 GFLOP/s in float32 where
OpenBLAS reaches 150. A library that is in the process for everybody when MLX is imported is found
first, so OpenBLAS only has to be loaded before; nothing is set up and nothing on the disk replaced.

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
    """Load the library for matrix products, if there is one and MLX is not imported yet.

    Raises:
        ConfigError: C002, the one that `VOX_MLX_BLAS` names cannot be loaded.
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
    """What to tell a user whose matrix products are those of the reference BLAS; None if not."""
    import mlx.core as mx

    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    if sys.platform != "linux" or on_gpu or in_use():
        return None
    return "MLX multiplies matrices with the reference BLAS, about 70 times slower than OpenBLAS"


def in_use() -> str | None:
    """The path of the OpenBLAS that this process has loaded; None if it has none."""
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
