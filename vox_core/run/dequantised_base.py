"""The base as training saw it: each weight as its quantisation left it.

A backend quantises when it loads a model, from the weights as the files have them. Here the same is
computed by the references in `vox_formats.quant.CODECS`, so that any backend can merge onto those
weights, or be held against them, without knowing of the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core.adapter.initial import initial_adapter
from vox_core.adapter.targets import format_of, quantised_modules
from vox_core.contract import AdapterState, DType, ExecutionPlan, ModuleShape, Quant
from vox_core.weights import STORED_AS, TensorInfo, Weights, numpy_dtype
from vox_formats.quant import CODECS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vox_core.run.reference import ModelReference


class TrainedWeights:
    """`weights` after a quantisation, as `Weights`.

    Args:
        modules: the modules that are quantised.
        computed_in: the dtype that the run computed in; without it each tensor's own.
        exact: show a quantised weight in a dtype that holds it; else in that of its file.
    """

    def __init__(
        self,
        weights: Weights,
        quant: Quant,
        modules: Mapping[str, ModuleShape],
        computed_in: np.dtype[Any] | None,
        exact: bool = True,
    ) -> None:
        self._weights, self._format, self._computed_in = weights, quant, computed_in
        self._modules = modules
        self._packed = {m.tensor: (m, CODECS[format_of(p, quant)]) for p, m in modules.items()}
        self.folder: Path = weights.folder
        self.files = weights.files
        self.tensors: Mapping[str, TensorInfo] = weights.tensors
        if exact and computed_in is not None:
            self.tensors = {n: self._holding(n, info) for n, info in weights.tensors.items()}
        self.index = weights.index
        self.quant: Quant = "none"
        self.quantised: frozenset[str] = frozenset()

    def file_of(self, name: str) -> str:
        return self._weights.file_of(name)

    def read(self, name: str) -> NDArray[Any]:
        W = self._weights.read(name)
        if name not in self._packed:
            return W
        shape, codec = self._packed[name]
        left = codec.round_trip(W.T if shape.transposed else W, self._computed_in)
        dtype = numpy_dtype(self.tensors[name].dtype)
        return (left.T if shape.transposed else left).astype(dtype, copy=False)

    def rounded(self) -> TrainedWeights:
        """The same in the dtypes of the files, for a merged model to be stored in."""
        if self.tensors == self._weights.tensors:
            return self
        weights, modules = self._weights, self._modules
        return TrainedWeights(weights, self._format, modules, self._computed_in, exact=False)

    def _holding(self, name: str, info: TensorInfo) -> TensorInfo:
        """The tensor in a dtype that loses nothing: the file's, or float32."""
        import numpy as np

        own, computed_in = numpy_dtype(info.dtype), self._computed_in
        if name not in self._packed or np.promote_types(own, computed_in or own) == own:
            return info
        return TensorInfo("F32", info.shape, 0, 4 * math.prod(info.shape))


def trained_weights(source: ModelReference) -> Weights:
    """What the adapter of `source` was trained on."""
    return as_trained(source.weights, source.quant, source.base.model_type, source.trained_in)


def as_trained(weights: Weights, quant: Quant, model_type: str, dtype: DType | None) -> Weights:
    """`weights` as a run sees them.

    Args:
        dtype: what the run computes in; None if that is not known.
    """
    if weights.quant != "none" or quant == "none":
        return weights
    computed_in = numpy_dtype(STORED_AS[dtype]) if dtype else None
    modules = quantised_modules(weights.tensors, model_type, quant)
    return TrainedWeights(weights, quant, modules, computed_in)


def seeded(plan: ExecutionPlan, weights: Weights) -> AdapterState:
    """The adapter that a run begins with.

    Args:
        weights: the base's, as its files have them. DoRA's magnitudes are the norms of what the
            backend makes of them.
    """
    contract = plan.contract
    seen = as_trained(weights, contract.quant, contract.model.model_type, plan.dtype)
    return initial_adapter(plan.modules, contract.adapter, contract.seed, seen.read, plan.saved)
