"""Two libraries that need care when they are imported.

bitsandbytes looks for the package `kernels` when it is imported on a processor with bfloat16, and
fetches compiled code from the hub with it; without it, it says so in a warning. vox calls none of
what it would get. PEFT imports bitsandbytes wherever that is installed, which takes most of a
second, for layers that vox does not use: hence `with absent("bitsandbytes")` around it.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


def import_bitsandbytes() -> ModuleType:
    """bitsandbytes, with nothing fetched and nothing said."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with absent("kernels"):
            return importlib.import_module("bitsandbytes")
    finally:
        logger.setLevel(level)


@contextmanager
def absent(name: str) -> Iterator[None]:
    """Let the library seem not to be installed."""
    before = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
