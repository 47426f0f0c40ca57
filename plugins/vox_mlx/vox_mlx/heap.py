"""Keep memory that MLX frees on the CPU in the process, for the next array.

On the CPU, MLX allocates each array with malloc and frees it. glibc maps blocks over 32 MB from the
system each time, which zeroes every page: a fifth of a training step.
"""

from __future__ import annotations

import ctypes
import os
import sys

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
