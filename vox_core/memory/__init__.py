"""How much memory a run will need, from `config.json` and the headers of the weights alone.

    architecture.py   what those two say: layers, their linear modules and norms, sizes
    storage.py        bytes of a weight, plain and quantised
    activations.py    what a layer keeps for the backward: the one place with what was calibrated
    predict.py        a `Demand` on an `Architecture` -> a `Prediction`, part by part
    fit.py            which settings fit into so much memory

Pure: numbers in, numbers out; nothing is read and no device is asked. What differs between backends
a backend says in `[memory]` of its manifest (`vox_core.host.manifest.MemoryProfile`). Where every
constant comes from stands beside it; `benchmarks/memory.py` holds the whole against real runs.
"""

from __future__ import annotations

from vox_core.memory.architecture import Architecture, Layer, read_architecture
from vox_core.memory.fit import Option, options, suggest
from vox_core.memory.predict import Demand, Prediction, predict

__all__ = [
    "Architecture",
    "Demand",
    "Layer",
    "Option",
    "Prediction",
    "options",
    "predict",
    "read_architecture",
    "suggest",
]
