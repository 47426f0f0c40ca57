"""Hold a run's fast path against the model as transformers and PEFT compute it.

Before the first step, one document of the run goes through the model that transformers built and
PEFT adapted, in the run's dtype and in float32, and then through vox's own functions. The fast path
may lie as far from float32 as the dtype puts transformers itself, and a little more. So a family
whose modules changed with a release of transformers, or an entry of a table that is wrong for the
weights of one model, costs speed and never a run.

It does not check gradients: the tests hold those of each function against finite differences.

This module imports torch, and is imported when there is a model to compute with.

Shape legend: K scored positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from vox_core.contract import Batch
from vox_core.errors import TrainingError
from vox_torch.forward import Loss, Padded
from vox_torch.memory import is_out_of_memory

if TYPE_CHECKING:
    from peft import PeftModel

_FACTOR = 2.0
"""Fast path and transformers round in different orders, each as often as the other. Over the
families of the tests, SmolLM2 and Gemma 3 in bf16 and fp16 the ratio of their distances from
float32 was 0.7 to 1.2."""

_NATS = 1e-3
"""What two float32 computations may differ by, as a root mean square: seen were up to 5e-5, and
1e-3 would move a loss in its fourth digit."""

_NOISE = 0.01
"""Standard deviation of what is added to B. A run at a learning rate of 1e-3 moves its numbers so
far in some ten steps of AdamW."""

_SMALL = 2**18
"""Elements of a parameter that is widened for the whole forward: a norm's, a convolution's, which
some modules read without calling the module that owns it."""

NOT_UNDERSTOOD = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What a model raises that cannot be computed one of these ways."""


class Reference:
    """Log-probabilities of one document by transformers and PEFT.

    Args:
        model: as PEFT made it; nothing of it is replaced yet.
        document: what is scored.
        parameters: the adapter's, by name. While both ways are computed it has noise added, since a
            fresh one changes nothing.

    Raises:
        TrainingError: T001, transformers' own forward is not finite in this dtype.
        RuntimeError: the model cannot be computed so, or the device has no memory for it.
    """

    def __init__(
        self,
        model: PeftModel,
        document: Batch,
        parameters: Mapping[str, nn.Parameter],
        device: str,
    ) -> None:
        plain = Padded(model.eval(), device)
        self._document, self._dtype = document, model.get_base_model().dtype
        self._parameters = parameters
        with torch.no_grad(), _stirred(parameters):
            self._plain_K = plain.log_probs(document)
            if not bool(self._plain_K.isfinite().all()):
                raise _overflows(self._dtype)
            self._exact_K = self._plain_K
            if self._dtype in (torch.bfloat16, torch.float16):
                with computed_in_float32(model):
                    self._exact_K = plain.log_probs(document)

    def fault(self, fast: Loss) -> str | None:
        """Why `fast` does not compute this model; None if it does.

        Raises:
            Exception: the device has not got the memory.
        """
        try:
            with torch.no_grad(), _stirred(self._parameters):
                found_K = fast.log_probs(self._document)
                loss = float(fast(self._document))
        except NOT_UNDERSTOOD as error:
            if is_out_of_memory(error):
                raise
            return f"{type(error).__name__}: {error}"
        total = -float(found_K.sum())
        if not math.isclose(loss, total, rel_tol=1e-2):
            return f"its loss is {loss:.4g}, and the sum of its log-probabilities {total:.4g}"
        apart, own = self._distance(found_K), self._distance(self._plain_K)
        if apart <= _FACTOR * own + _NATS:
            return None
        dtype = str(self._dtype).removeprefix("torch.")
        return (
            f"log-probabilities differ from float32 by {apart:.2g} nats "
            f"(transformers in {dtype}: {own:.2g})"
        )

    def _distance(self, log_probs_K: torch.Tensor) -> float:
        """Root mean square of the distance from float32, in nats."""
        return float((log_probs_K - self._exact_K).double().square().mean().sqrt())


@contextmanager
def _stirred(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Add noise to every B of the adapter, of a size that moves log-probabilities like training."""
    kept = [(p, p.data) for name, p in parameters.items() if name.endswith("lora_B.weight")]
    try:
        for parameter, data in kept:
            noise = torch.randn(data.shape, generator=torch.Generator().manual_seed(0))
            parameter.data = data + (noise * _NOISE).to(data)
        yield
    finally:
        _restore(kept)


def _overflows(dtype: torch.dtype) -> TrainingError:
    name = str(dtype).removeprefix("torch.")
    return TrainingError(
        "T001",
        f"transformers' own forward of this model is not finite in {name}",
        found="NaN or infinite log-probabilities of a document, before the first step",
        remedy="use a dtype with a larger range: --dtype bf16 or --dtype fp32",
    )


@contextmanager
def computed_in_float32(model: nn.Module) -> Iterator[None]:
    """Have forwards of `model` compute in float32, with the weights as they are rounded.

    A large parameter is widened while its module runs, so that memory for one is enough; rows of an
    embedding are widened when they are looked up.
    """
    with ExitStack() as stack:
        small = [p for p in model.parameters() if p.requires_grad or p.numel() <= _SMALL]
        stack.callback(_restore, [(p, p.data) for p in small])
        for parameter in small:
            parameter.data = _wide(parameter.data)
        for module in model.modules():
            for handle in _widening(module):
                stack.callback(handle.remove)
        yield


def _widening(module: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
    if isinstance(module, nn.Embedding):
        yield module.register_forward_hook(lambda _module, _ids, rows: _wide(rows))
        return
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []

    def widen(module: nn.Module, _args: object) -> None:
        for parameter in module.parameters(recurse=False):
            kept.append((parameter, parameter.data))
            parameter.data = _wide(parameter.data)

    def restore(_module: nn.Module, _args: object, _out: object) -> None:
        _restore(kept)
        kept.clear()

    if next(module.parameters(recurse=False), None) is not None:
        yield module.register_forward_pre_hook(widen)
        yield module.register_forward_hook(restore, always_call=True)


def _restore(kept: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    for parameter, data in kept:
        parameter.data = data


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
