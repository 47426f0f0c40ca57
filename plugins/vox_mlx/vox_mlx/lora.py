"""The adapter's modules: LoRA, rsLoRA and DoRA beside a linear layer, plain or quantised.

    LoRA:  y = W x + b + s B A drop(x)
    DoRA:  y = W x + b + (g - 1) W drop(x) + g s B A drop(x),   g = m / ||W + s B A||_row

A layer has any number of adapters, by name, and each row of an evaluation has one of them or none.
A is (R, I) and B is (O, R), as in `AdapterState`, so nothing is transposed on the way; mlx-lm's
own layers hold both the other way round. DoRA's row norm is a constant to the gradient (Liu et al.,
arXiv:2402.09353, section 4.3).

On the CPU, MLX's product with packed weights is a scalar loop, twenty times slower than
dequantising and calling the BLAS, so `unpack_on_cpu` does that. The dequantised weight is made anew
for the gradient, so that no more than one layer's is in memory. GPUs keep MLX's own kernels.

Shape legend: R rank, I input features, O output features, X positions of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn


class Dropout:
    """Keyed dropout of an adapter's inputs: the same key gives the same masks.

    One object is shared by all modules of a model. `begin` sets the key of an evaluation;
    without a key nothing is dropped.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._keys: mx.array | None = None

    def begin(self, key: mx.array | None, modules: int = 0) -> None:
        """Derive a key for each of this many modules."""
        used = key is not None and self.rate
        self._keys = mx.random.split(key, modules) if used else None

    def __call__(self, x: mx.array, index: int) -> mx.array:
        """Drop features of `x` and scale up the rest, for the module `index`."""
        if self._keys is None:
            return x
        kept = mx.random.bernoulli(1 - self.rate, x.shape, key=self._keys[index])
        return mx.where(kept, x / (1 - self.rate), 0).astype(x.dtype)


class Active:
    """The adapters of the next evaluation, one for each row; shared by all modules of a model.

    Attributes:
        groups: name -> its rows, for each adapter; None stands for all rows.
        decoding: each row is a single position, and nothing is dropped.
    """

    def __init__(self) -> None:
        self.groups: dict[str, mx.array | None] = {}
        self.decoding = False

    def choose(self, names: Sequence[str | None], *, decoding: bool = False) -> None:
        """Set the adapter of each row, or of all rows by a single name; None is the base."""
        self.decoding = decoding
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            if name is not None:
                rows.setdefault(name, []).append(row)
        whole = len(names)
        self.groups = {n: None if len(at) == whole else mx.array(at) for n, at in rows.items()}


class Terms(NamedTuple):
    """An adapter as decoding needs it: A^T, s B^T and DoRA's gain, if any."""

    A_IR: mx.array
    B_RO: mx.array
    gain_O: mx.array | None


class Lora(nn.Module):  # type: ignore[misc]
    """An adapter's tensors for one linear layer.

    `lora_A`, `lora_B` and `magnitude` are set from outside; `settle` precomputes what decoding
    needs of them, and `unsettle` forgets it when they change.
    """

    def __init__(self, scale: float, dropout: Dropout, index: int) -> None:
        super().__init__()
        self._scale, self._dropout, self._index = scale, dropout, index
        self.lora_A: mx.array | None = None
        self.lora_B: mx.array | None = None
        self.magnitude: mx.array | None = None
        self._settled: Terms | None = None

    def settle(self, linear: nn.Module) -> None:
        """Precompute `terms`."""
        self._settled = self._terms(linear)
        mx.eval([term for term in self._settled if term is not None])

    def unsettle(self) -> None:
        """Forget the result of `settle`."""
        self._settled = None

    def terms(self, linear: nn.Module) -> Terms:
        """Return A^T, s B^T and, with DoRA, its gain."""
        return self._settled or self._terms(linear)

    def _terms(self, linear: nn.Module) -> Terms:
        gain_O = None if self.magnitude is None else self._gain(linear).astype(self.lora_B.dtype)
        A_IR, B_RO = mx.contiguous(self.lora_A.T), mx.contiguous((self._scale * self.lora_B).T)
        return Terms(A_IR, B_RO, gain_O)

    def __call__(self, x: mx.array, linear: nn.Module) -> mx.array:
        """Return the output of `linear` with this adapter."""
        dropped = self._dropout(x, self._index)
        update = self._scale * ((dropped @ self.lora_A.T) @ self.lora_B.T)
        if self.magnitude is None:
            return _onto(linear, update, x)
        y = linear(x)
        without_bias = linear(dropped) - linear.get("bias", 0)
        gain_O = self._gain(linear).astype(y.dtype)
        return y + (gain_O - 1) * without_bias + gain_O * update

    def _gain(self, linear: nn.Module) -> mx.array:
        W_OI = weight_of(linear).astype(mx.float32)
        A_RI, B_OR = self.lora_A.astype(mx.float32), self.lora_B.astype(mx.float32)
        norm_O = mx.linalg.norm(W_OI + self._scale * (B_OR @ A_RI), axis=1)
        return self.magnitude / mx.stop_gradient(norm_O)


class Adapted(nn.Module):  # type: ignore[misc]
    """A linear layer with any number of adapters, by name; `active` says whose turn it is."""

    def __init__(self, linear: nn.Module, active: Active) -> None:
        super().__init__()
        self.linear, self._active = linear, active
        self.adapters: dict[str, Lora] = {}

    def __call__(self, x: mx.array) -> mx.array:
        groups = self._active.groups
        found = {name: rows for name, rows in groups.items() if name in self.adapters}
        if not found:
            return self.linear(x)
        if not self._active.decoding:
            (name,) = found
            return self.adapters[name](x, self.linear)
        name, rows = next(iter(found.items()))
        if rows is not None:
            return self._by_row(x, found)
        A_IR, B_RO, gain_O = self.adapters[name].terms(self.linear)
        return self._gained((x @ A_IR) @ B_RO, gain_O, x)

    def _by_row(self, x: mx.array, found: Mapping[str, mx.array | None]) -> mx.array:
        """Compute the base's product for all rows together, and each adapter's for its own."""
        outputs = len(self.linear.weight)
        update = mx.zeros((*x.shape[:-1], outputs), x.dtype)
        gain = None
        for name, rows in found.items():
            A_IR, B_RO, gain_O = self.adapters[name].terms(self.linear)
            update[rows] = (x[rows] @ A_IR) @ B_RO
            if gain_O is not None:
                if gain is None:
                    gain = mx.ones_like(update)
                gain[rows] = gain_O
        return self._gained(update, gain, x)

    def _gained(self, update: mx.array, gain: mx.array | None, x: mx.array) -> mx.array:
        """`gain * (W x + update) + b`"""
        # As one matrix: MLX would compute a product for each row, and read all weights for it.
        update_XO, x_XI = update.reshape(-1, update.shape[-1]), x.reshape(-1, x.shape[-1])
        y = _onto(self.linear, update_XO, x_XI).reshape(update.shape)
        if gain is None:
            return y
        bias = self.linear.get("bias", 0)
        return gain * (y - bias) + bias


def _onto(linear: nn.Module, update: mx.array, x: mx.array) -> mx.array:
    """`linear(x) + update`; for plain layers rounded once (docs/adr/0014)."""
    if type(linear) is not nn.Linear:
        y = linear(x)
        return y + update.astype(y.dtype)
    dtype = mx.result_type(x, linear.weight)
    y = mx.addmm(update.astype(dtype), x, linear.weight.T)
    return y + linear.bias if "bias" in linear else y


def weight_of(linear: nn.Module) -> mx.array:
    """Return the weight (O, I) of a linear layer, dequantised if needed."""
    if not isinstance(linear, nn.QuantizedLinear):
        weight: mx.array = linear.weight
        return weight
    return mx.dequantize(
        linear.weight,
        linear.scales,
        linear.get("biases"),
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
    )


def features(linear: Any) -> tuple[int, int] | None:
    """Return (O, I) of a linear layer; None for any other module."""
    if isinstance(linear, nn.QuantizedLinear):
        return linear.weight.shape[0], linear.weight.shape[1] * 32 // linear.bits
    if isinstance(linear, nn.Linear):
        return linear.weight.shape[0], linear.weight.shape[1]
    return None


# Rows of input from which dequantising is faster; decoding uses MLX's own product.
WORTH = 8


def unpack_on_cpu(model: nn.Module) -> None:
    """Replace the products of `model`'s quantised layers, if MLX runs on a CPU."""
    if mx.default_device().type == mx.DeviceType.gpu:
        return
    for module in model.modules():
        if type(module) is nn.QuantizedLinear:
            module.__class__ = Unpacked


class Unpacked(nn.QuantizedLinear):  # type: ignore[misc]
    """`nn.QuantizedLinear` with a fast product of many rows."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.size // x.shape[-1] < WORTH:
            return super().__call__(x)
        y: mx.array = self._product(x)
        return y + self.bias if "bias" in self else y

    def _product(self, x: mx.array) -> mx.array:
        @mx.custom_function
        def product(x: mx.array) -> mx.array:
            return x @ weight_of(self).astype(x.dtype).T

        @product.vjp
        def gradient(_x: mx.array, cotangent: mx.array, _y: mx.array) -> mx.array:
            return cotangent @ weight_of(self).astype(cotangent.dtype)

        result: mx.array = product(x)
        return result
