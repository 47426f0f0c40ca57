"""Quantised layers on the CPU: dequantise, then multiply.

On the CPU, MLX's product with packed weights is a scalar loop, twenty times slower than
dequantising and calling the BLAS. The dequantised weight is made anew for the gradient, so that no
more than one layer's is in memory. GPUs keep MLX's own kernels.
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from vox_mlx.lora import weight_of

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
