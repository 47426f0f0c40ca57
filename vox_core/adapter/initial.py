"""Initialise an adapter: A from the seed, B zero, so that the first loss is the base model's.

A is drawn per module from a generator keyed by run seed and module path, so the initial values do
not depend on the other modules, on their order or on the backend.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vox_core.contract import AdapterSpec, AdapterState, Floats, LazyMapping, LowRank, ModuleShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    ReadTensor = Callable[[str], NDArray[Any]]


def initial_adapter(
    modules: Mapping[str, ModuleShape],
    spec: AdapterSpec,
    seed: int,
    read: ReadTensor,
    saved: Mapping[str, str] | None = None,
) -> AdapterState:
    """Return the adapter before the first step.

    Args:
        modules: path -> shape of each module to train.
        read: returns a tensor of the base by its name in the files; used for DoRA's magnitudes
            (the row norms of W) and for `saved`.
        saved: parameter name -> tensor name, for `modules_to_save`; with the method `full` they
            are read on access.
    """
    whole = LazyMapping(saved or {}, lambda name: np.asarray(read((saved or {})[name]), np.float32))
    if spec.method == "full":
        return AdapterState("full", {}, whole)

    start = {
        path: LowRank(
            A_RI=_seeded_A(path, spec.rank, shape.in_features, seed),
            B_OR=np.zeros((shape.out_features, spec.rank), np.float32),
            alpha=spec.alpha,
            magnitude_O=_row_norms(read(shape.tensor), shape) if spec.method == "dora" else None,
        )
        for path, shape in modules.items()
    }
    return AdapterState(spec.method, start, {name: value.copy() for name, value in whole.items()})


def generator(*key: object) -> np.random.Generator:
    """Return a numpy generator that is a function of `key` (Philox; Salmon et al. 2011)."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def _seeded_A(path: str, rank: int, in_features: int, seed: int) -> Floats:
    # Kaiming-uniform with a = sqrt(5), as in PEFT: U(-1/sqrt(I), 1/sqrt(I)).
    bound = 1 / math.sqrt(in_features)
    A_RI = generator("lora_A", seed, path).uniform(-bound, bound, (rank, in_features))
    return A_RI.astype(np.float32)


def _row_norms(W: NDArray[Any], shape: ModuleShape) -> Floats:
    norms_O: Floats = np.linalg.norm(W.astype(np.float32), axis=0 if shape.transposed else 1)
    return norms_O
