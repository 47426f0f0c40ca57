"""Libraries that need care: two when they are imported, one before it computes.

bitsandbytes looks for the package `kernels` when it is imported on a processor with bfloat16, and
fetches compiled code from the hub with it; without it, it says so in a warning. vox calls none of
what it would get. PEFT imports bitsandbytes wherever that is installed, which takes most of a
second, for layers that vox does not use: hence `with absent("bitsandbytes")` around it.

oneDNN, which multiplies bfloat16 matrices on the CPU, keeps what it compiled for every shape,
and torch's layer above it keeps that once more: 0.6 MB for a shape, 1024 of each. Where documents
have ever other lengths every micro-batch brings some fifty new shapes, and memory grew by 28 MB a
step. What a layer needs again in the next one has room in far less.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

# A micro-batch of four documents needs 75, and each further length some eight more. Who goes round
# in more than there is room for finds none again.
_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512", "LRU_CACHE_CAPACITY": "16"}
"""Shapes: oneDNN's, and those of ideep, torch's layer, which finds all it needs in oneDNN's."""


_HIDING = threading.Lock()
_hidden = Counter[str]()
_seen: dict[str, ModuleType] = {}


def bound_primitives() -> None:
    """Have oneDNN forget what it compiled for lengths long gone. Effective before the first product
    of a process; what the user has set stays."""
    for name, capacity in _PRIMITIVES.items():
        os.environ.setdefault(name, capacity)


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
    """Let the library seem not to be installed; it is back when nobody wants it away."""
    with _HIDING:
        if not _hidden[name] and name in sys.modules:
            _seen[name] = sys.modules[name]
        _hidden[name] += 1
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        with _HIDING:
            _hidden[name] -= 1
            if not _hidden[name]:
                del sys.modules[name]
                sys.modules.update({name: _seen.pop(name)} if name in _seen else {})
