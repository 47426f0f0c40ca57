"""Predict what a run and a merge need at their peak, from `config.json` and headers alone.

    read_architecture(...)  ->  Architecture         (architecture.py)
    worst_case_batch(...)   ->  WorstCase            the micro-batch that needs most
    predict(Architecture, Demand, MemoryProfile)  ->  Prediction, part by part

The peak of a step is in its largest micro-batch: what the layers keep (activations.py), and beside
it first the logits, then what the layer needs whose backward is computed. With gradient
checkpointing layers keep their inputs alone, and in the backward one at a time has the rest.

Logits and a layer's backward need their memory one after the other, and both are counted all the
same: what one of them gave back an allocator does not always make fit the other. (On the CPU, glibc
was seen to keep either; the smaller one is a few percent of the whole.)

Numbers in, numbers out: nothing is read and no device is queried. Where a constant comes from
stands beside it; `benchmarks/memory.py` holds the whole against real runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

import numpy as np

from vox_core.api.plans import Dataset, Document, MemoryProfile, documents_in_step, grouped
from vox_core.contract import DType, Method, ModuleShape, Optimizer, Packing, Quant
from vox_plan.activations import kept_beside, kept_by_layer, working_of_layer
from vox_plan.architecture import Architecture, Layer

BYTES: Mapping[DType, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a number."""

# Weights that share a scale in MLX's formats (vox_core.weights.MLX_FORMATS).
_AFFINE_GROUP, _MXFP4_GROUP, _NVFP4_GROUP = 64, 32, 16

# Bytes a weight, given its row's width and the bytes of a number in the compute dtype.
_PER_WEIGHT: Mapping[Quant, Callable[[int, int], float]] = {
    # Four bits; a byte for the scale of 64 weights; a float32 for the scale of 256 such bytes
    # (Dettmers et al., arXiv:2305.14314, section 3).
    "nf4": lambda width, number: 0.5 + 1 / 64 + 4 / (64 * 256),
    # The same with a float32 for each scale.
    "nf4-single": lambda width, number: 0.5 + 4 / 64,
    # A byte, and a float32 a row (Dettmers et al., arXiv:2208.07339, section 2).
    "int8": lambda width, number: 1 + 4 / width,
    # A scale and a bias a group, in the weight's own dtype (mlx.core.quantize).
    "affine4": lambda width, number: 0.5 + 2 * number / _AFFINE_GROUP,
    "affine8": lambda width, number: 1 + 2 * number / _AFFINE_GROUP,
    # A byte a group (mlx.core.quantize).
    "mxfp4": lambda width, number: 0.5 + 1 / _MXFP4_GROUP,
    "nvfp4": lambda width, number: 0.5 + 1 / _NVFP4_GROUP,
}


# Beside logits and their float32 copy, where all of them go through torch's own functions: the
# gradients of logsumexp and of gather, exp of the difference, and their sum, in float32.
_WHOLE_GRADIENT = 4 * 4

_START = 2
"""Bytes a parameter of what a run begins with: float32, and the zeros of B take no page. One that
goes on has B and moments, 10 bytes more, which are not counted."""

_LEAST_8_BIT = 4096
"""Elements of a tensor from which on bitsandbytes keeps its moments in 8 bits."""

_STEPS = 200
"""Steps whose micro-batches are formed; the longest document counts in any case."""

PROCESS = 465_000_000
"""Interpreter, libraries and tokenizer on Linux, and the model without weights for the proof."""
_LOGITS = 4
"""Arrays of float32 logits at once, of 32 tokens (vox_core/run/proof.py)."""
_PROBE_TOKENS = 32


class WorstCase(NamedTuple):
    """The most of each, over the micro-batches of training.

    Args:
        laid: tokens, documents end to end.
        padded: positions, documents as rows as long as the longest.
        trained: positions whose loss is computed.
        longest: tokens of a document.
    """

    laid: int
    padded: int
    trained: int
    longest: int


def worst_case_batch(
    dataset: Dataset,
    *,
    steps: int,
    batch_size: int,
    micro_batch_tokens: int,
    seed: int,
    packing: Packing = "rows",
) -> WorstCase:
    """Over the first 200 steps, and the longest document by itself.

    `padded` is that of rows, whatever the packing: a backend that pads cuts what it is given anew.
    """
    found = [_extent([dataset[int(dataset.lengths_D.argmax())]])]
    for step in range(1, min(steps, _STEPS) + 1):
        indices = documents_in_step(dataset, batch_size, seed, step)
        chosen = [dataset[index] for index in indices]
        lengths = [len(document) for document in chosen]
        rows = grouped(lengths, micro_batch_tokens)
        padded = max(len(group) * lengths[group[0]] for group in rows)
        groups = grouped(lengths, micro_batch_tokens, packing)
        found += [_extent([chosen[n] for n in group])._replace(padded=padded) for group in groups]
    return WorstCase(*(max(column) for column in zip(*found, strict=True)))


def rollout_batch(prompt: int, answer: int, *, count: int, micro_batch_tokens: int) -> WorstCase:
    """`count` answers to the longest prompt, none of which ends before its limit.

    Args:
        prompt, answer: tokens.
    """
    longest = prompt + answer
    together = max(1, min(count, micro_batch_tokens // longest))
    return WorstCase(together * longest, together * longest, together * answer, longest)


def _extent(documents: Sequence[Document]) -> WorstCase:
    lengths = [len(document) for document in documents]
    trained = sum(int(np.count_nonzero(document.weights_T)) for document in documents)
    return WorstCase(sum(lengths), len(lengths) * max(lengths), trained, max(lengths))


@dataclass(frozen=True, slots=True)
class Demand:
    """A training run, as far as its memory depends on it.

    Args:
        modules: path -> shape of every linear module that gets an adapter.
        batch: the micro-batch that needs most.
        saved: tensor names of what is trained whole.
        caches: bytes of the KV caches of answers that are sampled at once.
        copies: bytes of the matrices of all layers, if answers are sampled and these can be packed.
        reference: bytes of the weights of models that score answers beside the trained one.
        kept: bytes of gradients that a rank of several keeps until the update.
        shards: ranks among which the matrices of the layers are split; with the method `full` their
            masters, gradients and moments are.
    """

    dtype: DType
    quant: Quant
    method: Method
    rank: int
    modules: Mapping[str, ModuleShape]
    batch: WorstCase
    gradient_checkpointing: bool = False
    dropout: bool = False
    saved: Collection[str] = field(default_factory=tuple)
    optimizer: Optimizer = "adamw"
    caches: int = 0
    copies: int = 0
    reference: int = 0
    kept: int = 0
    shards: int = 1


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes at the peak, on the device that trains.

    Args:
        runtime: the process and its libraries, before there is a model.
        weights: the base, or a rank's part of it.
        adapter: the adapter with its masters, gradients and moments; with the method `full` those
            of the trained weights, which are the base's own.
        activations: what the layers keep for the backward.
        transients: what exists for a moment: logits; the gradients and the dequantised weight of
            the layer whose backward is computed, and with checkpointing all else of that layer;
            the gradient of a trained output head; a layer that is gathered, and what was received.
            With `full` also what the gradients of a micro-batch exceed activations by: they grow
            while activations are freed.
        caches: the KV caches of answers that are sampled at once; with the weights that a CPU packs
            while it samples, what these exceed activations and transients by.
        reference: the weights of models that score answers beside the trained one.
        kept: the gradients of micro-batches that a rank of several keeps until the update.
    """

    runtime: int
    weights: int
    adapter: int
    activations: int
    transients: int
    caches: int = 0
    reference: int = 0
    kept: int = 0

    @property
    def peak(self) -> int:
        return sum(astuple(self))


def predict(model: Architecture, demand: Demand, profile: MemoryProfile) -> Prediction:
    """The peak of training `model` on a backend that is as `profile` says."""
    activations, transients = _of_a_step(model, demand, profile)
    if demand.method == "full":
        gradients = _gradients(model, demand)
        transients = max(transients, gradients - activations)
    if BYTES[demand.dtype] < 4:
        transients = max(transients, _widened(model, demand.quant) - activations)
    weights = weight_bytes(model, demand.quant, demand.dtype)
    if demand.shards > 1:
        split, trained = split_bytes(model, demand.dtype), _split_trained(model, demand)
        weights -= sum(split) - sum(split) // demand.shards
        if BYTES[demand.dtype] < 4:  # gathered from the masters
            weights -= BYTES[demand.dtype] * sum(trained) // demand.shards
        # A layer, and what was received; or its gradients in float32, and what was received.
        summed = (8 + 4 // demand.shards) * max(trained, default=0)
        transients += max(2 * max(split, default=0), summed)
    copies = demand.copies if profile.in_process else 0
    return Prediction(
        runtime=profile.runtime_bytes,
        weights=weights,
        adapter=adapter_bytes(model, demand, in_process=profile.in_process),
        activations=round(activations),
        transients=round(transients),
        caches=demand.caches + max(0, copies - round(activations + transients)),
        reference=demand.reference,
        kept=demand.kept,
    )


def _widened(model: Architecture, quant: Quant) -> int:
    """Bytes of a layer's experts in float32, which the check of the fast path computes with before
    the first step (vox_torch/reference_check.py); quantised ones are widened one at a time."""
    if quant != "none":
        return 0
    return 4 * max((layer.matrices for layer in model.layers if layer.feed_forward), default=0)


def trained_tensors(model: Architecture, demand: Demand) -> Iterator[int]:
    """Elements of each trained tensor: A and B, DoRA's magnitudes, and modules trained whole."""
    for module in demand.modules.values():
        yield demand.rank * module.in_features
        yield demand.rank * module.out_features
        if demand.method == "dora":
            yield module.out_features
    for tensor in demand.saved:
        yield model.elements.get(tensor, 0)


def adapter_bytes(model: Architecture, demand: Demand, *, in_process: bool = False) -> int:
    """Each parameter and its gradient in the compute dtype; in float32 its master, the master's
    gradient and two moments (AdamW), or these in 8 bits with a scale for 256. In the memory of the
    process, float32 masters and moments once more while a checkpoint is written, and the start.

    With the method `full` the parameters are the base's, a float32 one is its own master, and
    gradients in the compute dtype exist during a micro-batch alone (`_gradients`). A checkpoint is
    written tensor by tensor."""
    tensors = list(trained_tensors(model, demand))
    eight_bit = [size for size in tensors if demand.optimizer != "adamw" and size >= _LEAST_8_BIT]
    spared = sum(2 * (4 * size - size - 4 * -(-size // 256)) for size in eight_bit)
    beside = 3 * 4 + _START if in_process else 0
    if demand.method == "full":
        masters, split = 4 if BYTES[demand.dtype] < 4 else 0, sum(_split_trained(model, demand))
        elements = sum(tensors) - split + split // demand.shards
        return elements * (masters + 3 * 4) - spared
    return sum(tensors) * (2 * BYTES[demand.dtype] + 4 * 4 + beside) - spared


def _gradients(model: Architecture, demand: Demand) -> int:
    """Gradients of a micro-batch in the compute dtype, at the end of its backward, and that of the
    embedding once more before it is added to that of a tied head. A split layer's are summed
    before those of the next one."""
    tensors, split = list(trained_tensors(model, demand)), _split_trained(model, demand)
    held = sum(tensors) - sum(split) + max(split, default=0)
    return BYTES[demand.dtype] * (held + max(tensors, default=0))


def _of_a_step(model: Architecture, demand: Demand, profile: MemoryProfile) -> tuple[float, float]:
    """(activations, transients)."""
    laid, number = _laid(model, demand, profile), BYTES[demand.dtype]
    layers = [
        _kept(model, layer, demand, laid, model.model_type in profile.fused)
        for layer in _layers_with_gradients(model, demand)
    ]
    # The last norm's input and what it gives; where trained, that and its gradient.
    read = number if model.model_type in profile.fused else 4
    ends = model.hidden * (laid * (read + number) + demand.batch.trained * 2 * number)
    backward = _working(model, demand, laid)
    if demand.gradient_checkpointing:
        backward += max(layers, default=0.0)
        layers = [float(laid * model.hidden * number)] * len(layers)
    beside = _logits(model, demand, profile) + _dequantised(model, demand, profile)
    beside += _of_the_head(model, demand)
    return profile.activations * (sum(layers) + ends), profile.working * backward + beside


def _laid(model: Architecture, demand: Demand, profile: MemoryProfile) -> int:
    padded = profile.padded_rows or model.state is not None
    return demand.batch.padded if padded else demand.batch.laid


def _layers_with_gradients(model: Architecture, demand: Demand) -> Sequence[Layer]:
    """Return the layers from the first trained one; those below keep no activations."""
    if any(tensor not in model.head for tensor in demand.saved):
        return model.layers
    for index, layer in enumerate(model.layers):
        if layer.linear.keys() & demand.modules.keys():
            return model.layers[index:]
    return ()


def _kept(model: Architecture, layer: Layer, demand: Demand, laid: int, fused: bool) -> float:
    number = BYTES[demand.dtype]
    adapted = () if demand.dropout else demand.modules  # which reads what dropout left
    trained = [p for p, m in layer.linear.items() if p in adapted or m.tensor in demand.saved]
    lora = adapted if demand.method in ("lora", "rslora") else ()
    kept = kept_by_layer(model, layer, trained, fused=fused, lora=lora).bytes(number)
    kept += number * kept_beside(layer, demand.modules, demand.method == "dora", demand.dropout)
    # Soft-capped scores are kept as a matrix: tanh and weights in the compute dtype, the softmax in
    # float32 (transformers' eager attention, and vox_torch/attention.py); beside sinks, the scores
    # and their weights.
    score = 2 * number + 4 if model.softcap else 2 * number if model.sinks else 0
    return laid * (kept + model.heads * demand.batch.longest * score)


def _working(model: Architecture, demand: Demand, laid: int) -> float:
    number = BYTES[demand.dtype]
    layers = _layers_with_gradients(model, demand)
    return laid * max((working_of_layer(model, each).bytes(number) for each in layers), default=0)


def _dequantised(model: Architecture, demand: Demand, profile: MemoryProfile) -> float:
    """The largest weight that a quantisation reaches, once more: dequantised, or with DoRA beside
    its update and their sum."""
    needed, number = 0.0, BYTES[demand.dtype]
    if demand.method == "dora":
        needed += 3 * number
    if demand.quant != "none" and profile.dequantises:
        # vox_torch/quantised.py: INT8's codes and their product with the scale are float32; NF4's
        # scales are, one in 64.
        needed += 8 if demand.quant == "int8" else number + 4 / 64
    return needed * model.largest


def _of_the_head(model: Architecture, demand: Demand) -> int:
    """The gradient of a trained output head, summed over chunks of logits, and that of one chunk
    (vox_torch/functions.py): both exist beside all activations. `adapter_bytes` has one of them,
    unless the method is `full`."""
    tied = {name for name, n in model.elements.items() if n == model.vocabulary * model.hidden}
    trained = (model.head or tied) & {*demand.saved}
    largest = max((model.elements[name] for name in trained), default=0)
    return BYTES[demand.dtype] * largest * (2 if demand.method == "full" else 1)


def _logits(model: Architecture, demand: Demand, profile: MemoryProfile) -> int:
    """Logits in the compute dtype, in float32, and softmax - onehot in float32."""
    number, every = BYTES[demand.dtype], demand.batch.trained * model.vocabulary
    wide = 4 if number < 4 else 0
    if not profile.logits_elements or model.state is not None:
        return every * (number + wide + _WHOLE_GRADIENT)
    return min(every, max(profile.logits_elements, model.vocabulary)) * (number + wide + 4)


def bytes_per_weight(quant: Quant, width: int, dtype: DType) -> float:
    """Of a weight in a row of `width`, with its share of what lies beside the codes."""
    number = BYTES[dtype]
    return _PER_WEIGHT[quant](width, number) if quant in _PER_WEIGHT else float(number)


def weight_bytes(model: Architecture, quant: Quant, dtype: DType) -> int:
    """All of the base: what `quant` reaches quantised, the rest in the compute dtype."""
    total = 0.0
    for tensor, elements in model.elements.items():
        packed = model.packed(tensor, quant)
        total += elements * (bytes_per_weight(*packed, dtype) if packed else BYTES[dtype])
    return round(total)


def split_bytes(model: Architecture, dtype: DType) -> list[int]:
    """Bytes of each layer's matrices, which `--shard` splits among the ranks."""
    return [BYTES[dtype] * layer.matrices for layer in model.layers]


def split_trained(model: Architecture, saved: Collection[str]) -> list[int]:
    """Elements of each layer's trained matrices, of which `--shard` splits all that is kept."""
    return [
        sum(model.elements[m.tensor] for m in layer.linear.values() if m.tensor in saved)
        for layer in model.layers
    ]


def _split_trained(model: Architecture, demand: Demand) -> list[int]:
    splits = demand.shards > 1 and demand.method == "full"
    return split_trained(model, {*demand.saved}) if splits else []


def predict_merge(largest: int, trained: Iterable[int], vocabulary: int) -> dict[str, int]:
    """The peak of adding an adapter to a base, in bytes part by part.

    `runtime` is the process and its libraries, `adapter` A and B and what is trained whole, in
    float32, and `tensors` the largest tensor, or the logits of the verification.

    Args:
        largest: bytes of the largest tensor that is written.
        trained: elements of each tensor of the adapter.
        vocabulary: rows of the output head.
    """
    logits = _LOGITS * _PROBE_TOKENS * vocabulary * 4
    return {"runtime": PROCESS, "adapter": 4 * sum(trained), "tensors": max(largest, logits)}
