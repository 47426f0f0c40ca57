"""What a run needs at its peak, part by part.

The peak of a step is in its largest micro-batch: there is what the layers kept, and beside it first
the logits, then what the layer needs whose backward is computed. With gradient checkpointing layers
keep their inputs alone, and in the backward one at a time has the rest.

Logits and a layer's backward need their memory one after the other, and both are counted all the
same: what one of them gave back an allocator does not always make fit the other. (On the CPU, glibc
was seen to keep either; the smaller one is a few percent of the whole.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vox_core.contract import DType, Method, ModuleShape, Optimizer, Quant
from vox_core.data.largest import Largest
from vox_core.host.manifest import MemoryProfile
from vox_core.memory.activations import kept_beside, kept_by_layer, working_of_layer
from vox_core.memory.architecture import Architecture, Layer
from vox_core.memory.storage import BYTES, dequantising, largest_weight, weight_bytes

# Beside logits and their float32 copy, where all of them go through torch's own functions: the
# gradients of logsumexp and of gather, exp of the difference, and their sum, in float32.
_WHOLE_GRADIENT = 4 * 4

_START = 2
"""Bytes a parameter of what a run begins with: float32, and the zeros of B take no page. One that
goes on has B and moments, 10 bytes more, which are not counted."""

_LEAST_8_BIT = 4096
"""Elements of a tensor from which on bitsandbytes keeps its moments in 8 bits."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a model.

    Args:
        modules: path -> shape of every linear module that gets an adapter.
        largest: the micro-batch that needs most.
        saved: tensor names of what is trained whole.
    """

    dtype: DType
    quant: Quant
    method: Method
    rank: int
    modules: Mapping[str, ModuleShape]
    largest: Largest
    gradient_checkpointing: bool = False
    dropout: bool = False
    saved: Collection[str] = field(default_factory=tuple)
    optimizer: Optimizer = "adamw"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes at the peak, on the device that trains.

    Args:
        runtime: the process and its libraries, before there is a model.
        weights: the base.
        adapter: the adapter with its masters, gradients and moments.
        activations: what the layers keep for the backward.
        transients: what exists for a moment: logits; the gradients and the dequantised weight of
            the layer whose backward is computed, and with checkpointing all else of that layer.
    """

    runtime: int
    weights: int
    adapter: int
    activations: int
    transients: int

    @property
    def peak(self) -> int:
        return self.runtime + self.weights + self.adapter + self.activations + self.transients

    def parts(self) -> dict[str, int]:
        """By name; they add up to the peak."""
        return {
            "runtime": self.runtime,
            "weights": self.weights,
            "adapter": self.adapter,
            "activations": self.activations,
            "transients": self.transients,
        }


def predict(model: Architecture, demand: Demand, profile: MemoryProfile) -> Prediction:
    """The peak of training `model` on a backend that is as `profile` says."""
    activations, transients = _of_a_step(model, demand, profile)
    return Prediction(
        runtime=profile.runtime_bytes,
        weights=weight_bytes(model, demand.quant, demand.dtype),
        adapter=adapter_bytes(model, demand, in_process=profile.in_process),
        activations=round(activations),
        transients=round(transients),
    )


def trained_tensors(model: Architecture, demand: Demand) -> Iterator[int]:
    """How many elements each has: A and B, DoRA's magnitudes, and what is trained whole."""
    for module in demand.modules.values():
        yield demand.rank * module.in_features
        yield demand.rank * module.out_features
        if demand.method == "dora":
            yield module.out_features
    for tensor in demand.saved:
        yield model.elements.get(tensor, 0)


def trainable_parameters(model: Architecture, demand: Demand) -> int:
    """All of them together."""
    return sum(trained_tensors(model, demand))


def adapter_bytes(model: Architecture, demand: Demand, *, in_process: bool = False) -> int:
    """Each parameter and its gradient in the compute dtype; in float32 its master, the master's
    gradient and two moments (AdamW), or these in 8 bits with a scale for 256. In the memory of the
    process, float32 masters and moments once more while a checkpoint is written, and the start."""
    tensors = list(trained_tensors(model, demand))
    eight_bit = [size for size in tensors if demand.optimizer != "adamw" and size >= _LEAST_8_BIT]
    spared = sum(2 * (4 * size - size - 4 * -(-size // 256)) for size in eight_bit)
    beside = 3 * 4 + _START if in_process else 0
    return sum(tensors) * (2 * BYTES[demand.dtype] + 4 * 4 + beside) - spared


def _of_a_step(model: Architecture, demand: Demand, profile: MemoryProfile) -> tuple[float, float]:
    """(activations, transients)."""
    laid, number = _laid(model, demand, profile), BYTES[demand.dtype]
    layers = [
        _kept(model, layer, demand, laid, model.model_type in profile.fused)
        for layer in _layers_with_gradients(model, demand)
    ]
    # The last norm's input and what it gives; where trained, that and its gradient.
    read = number if model.model_type in profile.fused else 4
    ends = model.hidden * (laid * (read + number) + demand.largest.trained * 2 * number)
    backward = _working(model, demand, laid)
    if demand.gradient_checkpointing:
        backward += max(layers, default=0.0)
        layers = [float(laid * model.hidden * number)] * len(layers)
    beside = _logits(model, demand, profile) + _dequantised(model, demand, profile)
    return profile.activations * (sum(layers) + ends), profile.working * backward + beside


def _laid(model: Architecture, demand: Demand, profile: MemoryProfile) -> int:
    padded = profile.padded_rows or model.state is not None
    return demand.largest.padded if padded else demand.largest.laid


def _layers_with_gradients(model: Architecture, demand: Demand) -> Sequence[Layer]:
    """Those from the first that trains anything; below it nothing is kept."""
    if any(tensor not in model.head for tensor in demand.saved):
        return model.layers
    for index, layer in enumerate(model.layers):
        if layer.linear.keys() & demand.modules.keys():
            return model.layers[index:]
    return ()


def _kept(model: Architecture, layer: Layer, demand: Demand, laid: int, fused: bool) -> float:
    number = BYTES[demand.dtype]
    kept = kept_by_layer(model, layer, demand.modules, fused=fused).bytes(number)
    kept += number * kept_beside(layer, demand.modules, demand.method == "dora", demand.dropout)
    # Soft-capped scores are kept as a matrix: tanh and weights in the compute dtype, the softmax in
    # float32 (transformers' eager attention, and vox_torch/attention.py).
    scores = model.heads * demand.largest.longest * (2 * number + 4) if model.softcap else 0
    return laid * (kept + scores)


def _working(model: Architecture, demand: Demand, laid: int) -> float:
    number = BYTES[demand.dtype]
    layers = _layers_with_gradients(model, demand)
    return laid * max((working_of_layer(model, each).bytes(number) for each in layers), default=0)


def _dequantised(model: Architecture, demand: Demand, profile: MemoryProfile) -> float:
    """The largest weight once more: dequantised, or with DoRA beside its update and their sum."""
    weight, needed = largest_weight(model), 0.0
    if demand.method == "dora":
        needed += 3 * BYTES[demand.dtype]
    if demand.quant != "none" and profile.dequantises:
        needed += dequantising(demand.quant, demand.dtype)
    return weight * needed


def _logits(model: Architecture, demand: Demand, profile: MemoryProfile) -> int:
    """Logits in the compute dtype, in float32, and softmax - onehot in float32."""
    number, every = BYTES[demand.dtype], demand.largest.trained * model.vocabulary
    wide = 4 if number < 4 else 0
    if not profile.logits_elements or model.state is not None:
        return every * (number + wide + _WHOLE_GRADIENT)
    return min(every, max(profile.logits_elements, model.vocabulary)) * (number + wide + 4)
