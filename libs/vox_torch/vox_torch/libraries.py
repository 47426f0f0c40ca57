"""Environment variables that oneDNN and bitsandbytes need.

oneDNN, which multiplies bfloat16 matrices on the CPU, keeps what it compiled for every shape, and
torch's layer above it (ideep) keeps that once more: 0.6 MB for a shape, 1024 of each. Where
document lengths vary, every micro-batch brings some fifty new shapes, and memory grew by 28 MB a
step. A layer needs far fewer from one step to the next.

On a CPU with bfloat16, bitsandbytes fetches compiled code from the hub when it is imported and the
package `kernels` is installed; without `kernels` it logs a warning. It also compiles functions of
its fallback backend, which imports torch's inductor (2.7 s); vox reaches those for NF4 weights of
odd width alone, where they run uncompiled. PEFT imports bitsandbytes wherever it is installed.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

# A micro-batch of four documents needs 75 shapes, and each further length some eight more. A cache
# smaller than what a step cycles through never hits.
_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512", "LRU_CACHE_CAPACITY": "16"}
"""Shapes: oneDNN's, and ideep's, which finds the rest in oneDNN's."""

_WHILE_IMPORTING = {
    "TORCHDYNAMO_DISABLE": "1",
    "LOCAL_KERNELS": f"kernels-community/quantization-bitsandbytes={os.devnull}",
}
"""Variables of torch and of `kernels`; a local path that holds no kernel replaces the download."""


def bound_primitives() -> None:
    """Limit oneDNN's cache of compiled shapes, unless the user has set it.

    Call before the first matrix product of a process.
    """
    for name, capacity in _PRIMITIVES.items():
        os.environ.setdefault(name, capacity)


def import_bitsandbytes() -> ModuleType:
    """Import bitsandbytes without a download, a warning or torch's inductor."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with _environment(_WHILE_IMPORTING):
            return importlib.import_module("bitsandbytes")
    finally:
        logger.setLevel(level)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore them on exit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
