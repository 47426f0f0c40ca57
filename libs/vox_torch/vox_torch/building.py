"""Models built on the meta device without torch's symbols.

There torch computes shapes in Python, by functions that also take symbols for sizes, and imports
sympy for that: a third of a second, for ranges and for filling what has no memory.

This module imports torch, and is imported when there is a model to build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FILLS = "normal_"
"""The name of torch's function, and of transformers', which takes its place while it builds."""


class WithoutSymbols(TorchFunctionMode):
    """For the calling thread: ranges are made on the CPU in place of the meta device, and nothing
    happens where random numbers are to fill a tensor there.

    Of ranges, frequencies of rotary positions are made, which transformers computes again when the
    weights are there. Nothing else may be another device's: transformers makes a tensor to see
    whether it is building on the meta device.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.arange and str(named.get("device")) == "meta":
            named["device"] = "cpu"
        elif getattr(func, "__name__", None) == _FILLS:
            tensor = args[0] if args else named.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **named)
