"""vox: fine-tune Hugging Face causal language models on the hardware you have.

    import vox_core as vox

    run = vox.train(model="smollm2-135m", data="train.jsonl")

The names below are the public Python API (library.py), imported when they are used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vox_core.library import Model, Run, load, merge, open_trainer, plan, runs, train
    from vox_core.run.own_documents import Document

# How many times a waiting OpenMP thread spins before it sleeps. libgomp's default, until the other
# threads are scheduled again, makes each of two runs at once five times as slow; this value 2.2
# times, and one alone by 2 to 7 % (docs/dev/performance-log.md). libgomp reads the variable when
# the first library that uses it is imported, so it must be set before.
SPIN_COUNT = "1000"

__all__ = ["Document", "Model", "Run", "load", "merge", "open_trainer", "plan", "runs", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    from vox_core import library

    if name == "Document":
        from vox_core.run.own_documents import Document

        return Document
    return getattr(library, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
