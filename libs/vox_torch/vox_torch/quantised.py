"""Layers with a frozen, packed weight that is dequantised on each use.

    nf4, nf4-single   bitsandbytes' 4-bit blocks, with and without double quantisation
    int8              one scale an output feature
    nf4-embeddings    nf4, with the token embedding and the output head in int8

`vox_formats.quant` specifies the arithmetic. Activations stay in the compute dtype on every device:
the weight is dequantised, then multiplied. Weights are packed on the device, tensor by tensor from
the files: the full-precision model is never in memory, and the packed weights are the same on every
machine and device. An embedding dequantises only the rows looked up, a head one block at a time,
except a head with its own adapter.

This module imports torch; import it lazily.

Shape legend: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from vox_core.adapter.targets import experts, format_of, quantised_modules
from vox_core.contract import Quant
from vox_core.errors import ModelError
from vox_core.weights import WeightFolder, Weights
from vox_formats.quant import BLOCK, LEAST_SCALE, LEVELS, SCALE_BLOCK, pack_scales, scale_levels
from vox_torch.arrays import as_tensor
from vox_torch.base import fill_buffers, fill_parameters, stored_names, without_weights
from vox_torch.experts import PACKED, ModelWeights, experts_of, model_weights
from vox_torch.functions import BlockLinear, FrozenBlocks, FrozenLinear
from vox_torch.libraries import import_bitsandbytes
from vox_torch.memory import no_holes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


BLOCK_ELEMENTS = 4 * 2**20
"""Weights of an output head that are dequantised at once: 8 MiB in bfloat16."""

PACKED_ELEMENTS = 4 * 2**20
"""Weights that are quantised at once, whole blocks or rows: 16 MiB in float32, a few times."""


class QuantisedLinear(nn.Linear):
    """A frozen linear layer over a packed weight.

    PEFT and others see a linear layer: reading `weight` dequantises it, to `dtype`.
    """

    def __init__(self, packed: Packed, out_features: int, in_features: int) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = out_features, in_features
        self.packed, self.dtype = packed, packed.dtype
        self.register_parameter("bias", None)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The dequantised weight (O, I), in the compute dtype."""
        return self.packed.weight()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x W^T + b`, saving neither x nor W for the backward pass."""
        y: torch.Tensor = FrozenLinear.apply(x, self.packed.weight, self.bias)
        return y


class QuantisedHead(QuantisedLinear):
    """A packed output head, computed by blocks of the vocabulary."""

    packed: Int8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x W^T + b`, one block of W at a time."""
        size = max(1, BLOCK_ELEMENTS // self.in_features)
        starts = range(0, self.out_features, size)
        blocks = [slice(start, min(start + size, self.out_features)) for start in starts]
        y: torch.Tensor = BlockLinear.apply(x, self.packed.rows, blocks, self.bias)
        return y


class QuantisedEmbedding(nn.Embedding):
    """A mixin before an embedding's own class, which still processes the rows looked up."""

    packed: Int8
    _rows: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """(V, H), or during a lookup only the rows of its tokens; in the compute dtype."""
        return self.packed.weight() if self._rows is None else self._rows

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of `tokens`, of any shape."""
        self._rows = self.packed.rows(tokens.flatten())
        each = torch.arange(tokens.numel(), device=tokens.device)
        try:
            return super().forward(each.view_as(tokens))
        finally:
            self._rows = None


def _embedding(old: nn.Embedding, packed: Int8) -> nn.Embedding:
    """Return `old` with a packed weight, as a subclass of its class, so that Gemma's scaling
    stays."""
    kind = type(old)
    del old.weight
    old.__class__ = type(f"Quantised{kind.__name__}", (QuantisedEmbedding, kind), {})
    old.padding_idx = None  # a row of no gradient, and no row has one
    cast("QuantisedEmbedding", old).packed = packed
    return old


class Nf4:
    """A weight in bitsandbytes' NF4 (arXiv:2305.14314), in blocks of 64."""

    def __init__(self, W_OI: torch.Tensor, dtype: torch.dtype, *, double: bool) -> None:
        library = import_bitsandbytes().functional
        self._data, scale_G = nf4_codes(W_OI)
        self.shape, self.dtype = W_OI.shape, dtype
        self._state = library.QuantState(
            absmax=scale_G,
            # Blocks run on from row to row. bitsandbytes' kernel for AVX512 believes that each row
            # begins one, unless there is one row.
            shape=torch.Size((1, W_OI.numel())),
            code=library.get_4bit_type("nf4", W_OI.device),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=dtype,
        )
        if double:
            _pack_scales(self._state, library.QuantState)
        self._dequantise: Callable[..., torch.Tensor] = library.dequantize_4bit

    def weight(self) -> torch.Tensor:
        """Return the dequantised weight (O, I), in the compute dtype."""
        return self._dequantise(self._data, self._state).view(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        second = self._state.state2
        scales = [self._state.absmax, *([second.absmax] if second else [])]
        return sum(tensor.nbytes for tensor in (self._data, *scales))


def nf4_codes(W_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight to NF4.

    Each operation is one of IEEE float32, so that an accelerator finds the codes of a CPU.
    bitsandbytes' kernel for GPUs does not: it gives a value next to a midpoint, or a zero, another.

    Returns:
        Codes, uint8 (N / 2, 1), two values each, the first in the high bits; scales (G,), float32.
    """
    levels, codes, scales = torch.from_numpy(LEVELS).to(W_OI.device), [], []
    for part_N in W_OI.flatten().split(PACKED_ELEMENTS):
        filled_N = functional.pad(part_N.float(), (0, -len(part_N) % BLOCK))
        blocks_GS = filled_N.view(-1, BLOCK)
        scale_G = blocks_GS.abs().amax(dim=1)
        least_G1 = scale_G.clamp(min=LEAST_SCALE)[:, None]
        scaled_GS = blocks_GS * (1 / least_G1)
        if len(part_N) % BLOCK:  # of a short block bitsandbytes divides
            scaled_GS[-1] = blocks_GS[-1] / least_G1[-1]
        code_N = _nearest(scaled_GS.flatten(), levels)
        codes.append(code_N[: len(part_N) + len(part_N) % 2])
        scales.append(scale_G)
    code_N = torch.cat(codes)
    return ((code_N[::2] << 4) | code_N[1::2])[:, None], torch.cat(scales)


_BINS = 16  # from 0 to 1; no two midpoints between levels are as near


def _nearest(x_N: torch.Tensor, levels_L: torch.Tensor) -> torch.Tensor:
    """Return the number of the level nearest to each value of -1 to 1, uint8.

    A table says how many midpoints between levels lie below a value's bin, and which is in it: four
    times as fast as `torch.bucketize`, and the same, since bins of larger values are no lower.
    """

    def bins(v_N: torch.Tensor) -> torch.Tensor:
        return ((v_N + 1) * _BINS).int().clamp_(0, 2 * _BINS)

    middle_M = (levels_L[:-1] + levels_L[1:]) / 2
    below_B = torch.bucketize(
        torch.arange(2 * _BINS + 1, device=x_N.device), bins(middle_M), out_int32=True
    )
    inside_B = torch.full(below_B.shape, torch.inf, device=x_N.device)
    inside_B[bins(middle_M).long()] = middle_M
    bin_N = bins(x_N)
    above_N = x_N > inside_B.index_select(0, bin_N)
    return below_B.to(torch.uint8).index_select(0, bin_N) + above_N


def _pack_scales(state: Any, kind: Callable[..., Any]) -> None:
    """Pack the scales again (double quantisation), with the same mean and levels on every
    machine."""
    device = state.absmax.device
    packed = pack_scales(state.absmax.cpu().numpy())
    state.absmax = torch.from_numpy(packed.codes_G).to(device)
    state.offset = torch.tensor(packed.offset, device=device)
    state.state2 = kind(
        absmax=torch.from_numpy(packed.most_C).to(device),
        code=torch.tensor(scale_levels(), device=device),
        blocksize=SCALE_BLOCK,
        dtype=torch.float32,
    )
    state.nested = True


class Int8:
    """A weight as int8 with one float32 step per output feature."""

    def __init__(self, W_OI: torch.Tensor, dtype: torch.dtype) -> None:
        self.shape = W_OI.shape
        self._data = torch.empty_like(W_OI, dtype=torch.int8)
        self._step_O1 = W_OI.new_empty((len(W_OI), 1), dtype=torch.float32)
        rows = max(1, PACKED_ELEMENTS // W_OI.shape[1])
        for at in (slice(start, start + rows) for start in range(0, len(W_OI), rows)):
            self._data[at], self._step_O1[at] = int8_codes(W_OI[at])
        self.dtype = dtype

    def weight(self) -> torch.Tensor:
        """Return the dequantised weight (O, I), in the compute dtype."""
        return self._times(self._data, self._step_O1)

    def rows(self, chosen: torch.Tensor | slice) -> torch.Tensor:
        """Return (N, I), some of the output features, in the compute dtype."""
        return self._times(self._data[chosen], self._step_O1[chosen])

    def _times(self, data_NI: torch.Tensor, step_N1: torch.Tensor) -> torch.Tensor:
        """Multiply in float32 and round once."""
        out_NI = torch.empty_like(data_NI, dtype=self.dtype)
        return torch.mul(data_NI, step_N1, out=out_NI)

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return self._data.nbytes + self._step_O1.nbytes


def int8_codes(W_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight to INT8; return codes, (O, I), and steps, (O, 1)."""
    wide_OI = W_OI.float()
    scale_O1 = wide_OI.abs().amax(dim=1, keepdim=True).clamp(min=1e-36)
    # torch multiplies by the inverse of a Python number on some devices: another last bit.
    step_O1 = scale_O1 / torch.full_like(scale_O1, 127)
    return (wide_OI * (1 / scale_O1 * 127)).round().to(torch.int8), step_O1


Packed: TypeAlias = Nf4 | Int8


def pack(W_OI: torch.Tensor, quant: Quant, dtype: torch.dtype, device: str) -> Packed:
    """Pack a stored weight on `device`, to be dequantised to `dtype`."""
    W_OI = W_OI.to(device)
    if quant == "int8":
        return Int8(W_OI, dtype)
    assert quant in ("nf4", "nf4-single"), quant
    return Nf4(W_OI, dtype, double=quant == "nf4")


class PackedExperts:
    """Stands for a parameter (E, O, I) or (E, I, O) of a mixture: each expert's packed matrices.

    Args:
        experts: for each expert the matrices whose rows follow one another, as gate and up.
    """

    def __init__(self, experts: Sequence[Sequence[Packed]]) -> None:
        self._experts = experts

    def linear(self, x_SI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return (S, O), the product of each row with the matrix of its expert.

        Args:
            x_SI: rows by expert.
            counts: how many rows each expert has.
        """
        blocks, end = [], 0
        for packed, count in zip(self._experts, counts, strict=True):
            rows, width = slice(end, end := end + count), 0
            for each in packed if count else ():
                columns = slice(width, width := width + each.shape[0])
                blocks.append((rows, columns, each.weight))
        y_SO: torch.Tensor = FrozenBlocks.apply(x_SI, blocks)
        return y_SO


def packed_forward(
    module: Any, hidden_XH: torch.Tensor, chosen_XK: torch.Tensor, weights_XK: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum (X, H) of what K experts make of each token, as `forward` of
    transformers' classes of experts, with one dequantised matrix at a time."""
    expert_S, order_S = chosen_XK.flatten().sort(stable=True)
    counts = expert_S.bincount(minlength=module.num_experts).tolist()

    def linear(name: str, x_SI: torch.Tensor) -> torch.Tensor:
        y_SO: torch.Tensor = getattr(module, name).linear(x_SI, counts)
        return y_SO + getattr(module, f"{name}_bias")[expert_S] if module.has_bias else y_SO

    x_SH = hidden_XH[order_S // chosen_XK.shape[1]]
    if module.has_gate:
        x_SI = module._apply_gate(linear("gate_up_proj", x_SH))
    else:
        x_SI = module.act_fn(linear("up_proj", x_SH))
    y_SH = linear("down_proj", x_SI)
    if module.has_post_expert_norm:
        y_SH = module.post_expert_norm(y_SH)
    y_XKH = y_SH[order_S.argsort()].view(*chosen_XK.shape, -1)
    return (y_XKH * weights_XK[..., None]).sum(dim=1).to(hidden_XH.dtype)


def load_quantised(folder: Path, dtype: torch.dtype, device: str, quant: Quant) -> PreTrainedModel:
    """Load the model of `folder` with the layers packed that `quant` covers; the rest in `dtype`.

    Raises:
        ModelError: M002, transformers cannot build this model, or computes its experts in a way of
            the family's own; or its weights do not fit.
    """
    model, stored = without_weights(folder, dtype), WeightFolder(folder)
    weights = model_weights(model, folder)
    names = stored_names(model, weights)
    _require_packable(model, stored)
    stacks = experts(stored.tensors, model.config.model_type)
    reached = quantised_modules(stored.tensors, model.config.model_type, quant).keys() - stacks
    with no_holes():
        for paths in _tied(model, reached):
            W = as_tensor(weights.read(names[f"{paths[0]}.weight"]))
            W_OI = _out_by_in(model.get_submodule(paths[0]), W)
            packed = pack(W_OI, format_of(paths[0], quant), dtype, device)
            for path in paths:
                _replace(model, path, packed, W_OI.shape)
        _pack_experts(model, weights, lambda W: pack(W, format_of("", quant), dtype, device))
    fill_parameters(model, weights, names, dtype, device)
    fill_buffers(model, weights, lambda tensor: as_tensor(weights.read(tensor)).clone())
    if quant != "nf4-embeddings":  # the two share the packed weight
        model.tie_weights()
    return cast("PreTrainedModel", model.to(device))


def _require_packable(model: PreTrainedModel, stored: Weights) -> None:
    if any(experts_of(model)) or not (found := experts(stored.tensors, model.config.model_type)):
        return
    raise ModelError(
        "M002",
        "the experts of this family cannot be quantised: transformers computes them in another way",
        where=stored.folder,
        found=next(iter(found)),
        remedy="leave out --quant",
    )


def _pack_experts(
    model: PreTrainedModel, weights: ModelWeights, pack_one: Callable[[torch.Tensor], Packed]
) -> None:
    for path, module in experts_of(model):
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 3:
                packed = [
                    [pack_one(as_tensor(W.T if module.is_transposed else W)) for W in parts]
                    for parts in weights.matrices(f"{path}.{leaf}")
                ]
                delattr(module, leaf)
                setattr(module, leaf, PackedExperts(packed))
        ALL_EXPERTS_FUNCTIONS.register(PACKED, packed_forward)
        model.set_experts_implementation(PACKED)


def _tied(model: nn.Module, reached: Collection[str]) -> list[list[str]]:
    """Group `reached` and everything that shares a weight with it: paths by weight."""
    paths: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.endswith(".weight"):
            paths.setdefault(id(parameter), []).append(name.removesuffix(".weight"))
    found = [alike for alike in paths.values() if any(path in reached for path in alike)]
    assert {path for alike in found for path in alike} >= set(reached)
    return found


def _out_by_in(module: nn.Module, stored: torch.Tensor) -> torch.Tensor:
    from transformers.pytorch_utils import Conv1D

    return stored.T.contiguous() if isinstance(module, Conv1D) else stored


def _replace(model: PreTrainedModel, path: str, packed: Packed, shape: torch.Size) -> None:
    """Replace a layer by a packed one; its bias is loaded with the other parameters."""
    old = model.get_submodule(path)
    if isinstance(old, nn.Embedding):
        model.set_submodule(path, _embedding(old, cast("Int8", packed)))
        return
    head = old is model.get_output_embeddings() and isinstance(packed, Int8)
    kind = QuantisedHead if head else QuantisedLinear
    layer = kind(packed, *shape)
    layer.bias = cast("torch.Tensor | None", old.bias)
    model.set_submodule(path, layer)
