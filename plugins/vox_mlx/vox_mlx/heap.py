"""Memory that MLX frees on the CPU stays with the process, for the next array.

There, MLX asks the C library for each array and gives it back. glibc takes what is over 32 MB from
the system each time, which clears every page of it: a fifth of a training step.
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
    """Have glibc keep what is freed, large blocks too, until the process ends.

    Nothing happens where there is another C library, or where the user has set any of it.
    """
    if sys.platform != "linux" or _SET_BY_USERS & os.environ.keys():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _NEVER)
