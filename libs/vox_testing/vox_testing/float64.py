"""Run a transformers model entirely in float64, as the oracle of float32.

Models of transformers in float64 still use float32: norms, rotary embeddings, softmax and recurrent
state convert to it by name, to be safe in half precision. Here these conversions give float64.
Constants computed when a model is built (rotary frequencies) keep their float32 values, as in every
other dtype: they belong to the model, not to its arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def compute_in_float64(model: nn.Module) -> None:
    """Widen the weights of `model`, and make its forward float64 throughout."""
    model.double()
    forward, float64_for_float32 = model.forward, _float64_for_float32()

    @functools.wraps(forward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with float64_for_float32:
            return forward(*args, **kwargs)

    model.forward = wide


def _float64_for_float32() -> AbstractContextManager[object]:
    import torch
    from torch.overrides import TorchFunctionMode

    def widened(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    class Widening(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., Any],
            types: object,
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            called = torch.Tensor.double if func is torch.Tensor.float else func
            named = {key: widened(value) for key, value in (kwargs or {}).items()}
            return called(*map(widened, args), **named)

    return Widening()
