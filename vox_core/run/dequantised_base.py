"""The base as training saw it: each weight as its quantisation left it.

A backend quantises when it loads a model, from the weights as the files have them. Here the same is
computed by the references in `vox_formats.quant.CODECS`, so that any backend can merge onto those
weights, or be held against them, without knowing of the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vox_core.adapter.initial import initial_adapter
from vox_core.adapter.targets import format_of, quantised_modules
from vox_core.contract import AdapterState, DType, ExecutionPlan, Quant
from vox_core.weights import STORED_AS, TensorInfo, Weights, numpy_dtype
from vox_formats.quant import CODECS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.run.reference import ModelReference


def trained_weights(source: ModelReference, *, exact: bool = True) -> Weights:
    """What the adapter of `source` was trained on; see `as_trained`."""
    model_type = source.base.model_type
    return as_trained(source.weights, source.quant, model_type, source.trained_in, exact=exact)


def as_trained(
    weights: Weights, quant: Quant, model_type: str, dtype: DType | None, *, exact: bool = True
) -> Weights:
    """`weights` as a run sees them.

    Args:
        dtype: what the run computes in; None if that is not known.
        exact: show a quantised weight in a dtype that holds it; else in that of its file.
    """
    import numpy as np

    if weights.quant != "none" or quant == "none":
        return weights
    computed_in = numpy_dtype(STORED_AS[dtype]) if dtype else None
    modules = quantised_modules(weights.tensors, model_type, quant)
    packed = {m.tensor: (m, CODECS[format_of(path, quant)]) for path, m in modules.items()}

    def shown(name: str, info: TensorInfo) -> TensorInfo:
        own = numpy_dtype(info.dtype)
        holds = computed_in is None or np.promote_types(own, computed_in) == own
        return TensorInfo("F32", info.shape) if exact and name in packed and not holds else info

    tensors = {name: shown(name, info) for name, info in weights.tensors.items()}

    def read(name: str) -> NDArray[Any]:
        W = weights.read(name)
        if name not in packed:
            return W
        module, codec = packed[name]
        left = codec.round_trip(W.T if module.transposed else W, computed_in)
        stored = left.T if module.transposed else left
        return stored.astype(numpy_dtype(tensors[name].dtype), copy=False)

    return Weights(weights.folder, tensors, weights.where, read)


def seeded(plan: ExecutionPlan, weights: Weights) -> AdapterState:
    """The adapter that a run begins with.

    Args:
        weights: the base's, as its files have them. DoRA's magnitudes are the norms of what the
            backend makes of them.
    """
    contract = plan.contract
    seen = as_trained(weights, contract.quant, contract.model.model_type, plan.dtype)
    return initial_adapter(plan.modules, contract.adapter, contract.seed, seen.read, plan.saved)
