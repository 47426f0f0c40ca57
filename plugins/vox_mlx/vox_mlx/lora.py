"""The adapter's modules: LoRA, rsLoRA and DoRA beside a linear layer, plain or quantised.

    LoRA:  y = W x + b + s B A drop(x)
    DoRA:  y = W x + b + (g - 1) W drop(x) + g s B A drop(x),   g = m / ||W + s B A||_row

A is (R, I) and B is (O, R), as in `AdapterState`, so nothing is transposed on the way; mlx-lm's
own layers hold both the other way round. DoRA's row norm is a constant to the gradient (Liu et al.,
arXiv:2402.09353, section 4.3).

On the CPU, MLX's product with packed weights is a scalar loop, twenty times slower than
dequantising and calling the BLAS, so `unpack_on_cpu` does that. The dequantised weight is made anew
for the gradient, so that no more than one layer's is in memory. GPUs keep MLX's own kernels.

Shape legend: R rank, I input features, O output features.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn


class Dropout:
    """Keyed dropout of an adapter's inputs: the same key gives the same masks.

    One object is shared by all modules of a model. `begin` sets the key of a micro-batch;
    without a key nothing is dropped.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._keys: mx.array | None = None

    def begin(self, key: mx.array | None, modules: int) -> None:
        """Derive a key for each of this many modules."""
        used = key is not None and self.rate
        self._keys = mx.random.split(key, modules) if used else None

    def __call__(self, x: mx.array, index: int) -> mx.array:
        """Drop features of `x` and scale up the rest, for the module `index`."""
        if self._keys is None:
            return x
        kept = mx.random.bernoulli(1 - self.rate, x.shape, key=self._keys[index])
        return mx.where(kept, x / (1 - self.rate), 0).astype(x.dtype)


class Adapted(nn.Module):
    """A linear layer with its low-rank update. `lora_A`, `lora_B` and `magnitude` are set from
    outside before every evaluation; `settle` speeds up decoding once they no longer change."""

    def __init__(self, linear: nn.Module, scale: float, dropout: Dropout, index: int) -> None:
        super().__init__()
        self.linear = linear
        self._scale, self._dropout, self._index = scale, dropout, index
        self.lora_A: mx.array | None = None
        self.lora_B: mx.array | None = None
        self.magnitude: mx.array | None = None
        self._settled: tuple[mx.array, mx.array, mx.array | None] | None = None

    def settle(self) -> None:
        """Precompute A^T, s B^T and DoRA's gain for inputs of a single row, as in decoding."""
        gain_O = None if self.magnitude is None else self._gain().astype(self.lora_B.dtype)
        A_IR, B_RO = self.lora_A.T, (self._scale * self.lora_B).T
        mx.eval(A_IR, B_RO, *([] if gain_O is None else [gain_O]))
        self._settled = A_IR, B_RO, gain_O

    def __call__(self, x: mx.array) -> mx.array:
        if self._settled is not None and x.size == x.shape[-1]:
            return self._decode(x, *self._settled)
        dropped = self._dropout(x, self._index)
        update = self._scale * ((dropped @ self.lora_A.T) @ self.lora_B.T)
        if self.magnitude is None:
            return self._onto(update, x)
        y = self.linear(x)
        without_bias = self.linear(dropped) - self.linear.get("bias", 0)
        gain_O = self._gain().astype(y.dtype)
        return y + (gain_O - 1) * without_bias + gain_O * update

    def _decode(
        self, x: mx.array, A_IR: mx.array, B_RO: mx.array, gain_O: mx.array | None
    ) -> mx.array:
        y = self._onto((x @ A_IR) @ B_RO, x)
        if gain_O is None:
            return y
        bias = self.linear.get("bias", 0)
        return gain_O * (y - bias) + bias

    def _onto(self, update: mx.array, x: mx.array) -> mx.array:
        """`linear(x) + update`; for plain layers rounded once (docs/adr/0014)."""
        if type(self.linear) is not nn.Linear:
            y = self.linear(x)
            return y + update.astype(y.dtype)
        dtype = mx.result_type(x, self.linear.weight)
        y = mx.addmm(update.astype(dtype), x, self.linear.weight.T)
        return y + self.linear.bias if "bias" in self.linear else y

    def _gain(self) -> mx.array:
        W_OI = weight_of(self.linear).astype(mx.float32)
        A_RI, B_OR = self.lora_A.astype(mx.float32), self.lora_B.astype(mx.float32)
        norm_O = mx.linalg.norm(W_OI + self._scale * (B_OR @ A_RI), axis=1)
        return self.magnitude / mx.stop_gradient(norm_O)


def settle(model: nn.Module) -> None:
    """Call `Adapted.settle` for each adapted layer of `model`."""
    for module in model.modules():
        if isinstance(module, Adapted):
            module.settle()


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
