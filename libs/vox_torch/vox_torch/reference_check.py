"""Compare a run's fast path with the model as transformers and PEFT compute it.

Before the first step, one document of the run goes through transformers and PEFT, in the run's
dtype and in float32, and then through vox's own functions. The fast path may differ from float32 as
much as transformers in that dtype does, and a little more. So a family whose modules changed with a
release of transformers, or a wrong table entry, costs speed but not correctness.

Gradients are not checked here; the tests compare those of each function with finite differences.

This module imports torch; import it lazily.

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
    from transformers import PreTrainedModel

_FACTORS = (2.0, 4.0)
"""Fast path and transformers round in different orders, each as often as the other. Over the
families of the tests, SmolLM2 and Gemma 3 in bf16 and fp16 the ratio of their distances from
float32 was 0.7 to 1.2. Where a text repeats itself few positions have most of the error: SmolLM2 in
bf16 had ratios of 0.4 to 1.6 over `_MOST` of the positions, and up to 2.3 over all."""

_MOST = 0.75
"""Fraction of the positions that the first distance is taken over, the nearest ones."""

_NATS = 1e-3
"""What two float32 computations may differ by: seen were up to 5e-5, and 1e-3 would move a loss in
its fourth digit."""

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
        model: the model as transformers and PEFT made it, with no module replaced.
        document: the document to score.
        parameters: the adapter's, by name. Noise is added during the comparison, since a fresh
            adapter has no effect.

    Raises:
        TrainingError: T001, transformers' own forward is not finite in this dtype.
        RuntimeError: the model cannot be computed this way, or the device is out of memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        document: Batch,
        parameters: Mapping[str, nn.Parameter],
        device: str,
    ) -> None:
        plain = Padded(model.eval(), device)
        self._document, self._dtype = document, model.dtype
        self._parameters = parameters
        with torch.no_grad(), _stirred(parameters):
            self._plain_K = plain.log_probs(document).log_probs_K
            if not bool(self._plain_K.isfinite().all()):
                raise _overflows(self._dtype)
            self._exact_K = self._plain_K
            if self._dtype in (torch.bfloat16, torch.float16):
                with computed_in_float32(model):
                    self._exact_K = plain.log_probs(document).log_probs_K

    def fault(self, fast: Loss) -> str | None:
        """Return how `fast` differs from this reference; None if it agrees. Its `log_probs`, which
        is not called, has the same body and the same logits.

        Raises:
            Exception: out of memory.
        """
        try:
            with torch.no_grad(), _stirred(self._parameters):
                loss, scores = fast(self._document)
        except NOT_UNDERSTOOD as error:
            if is_out_of_memory(error):
                raise
            return f"{type(error).__name__}: {error}"
        total = -float(scores.log_probs_K.sum())
        if not math.isclose(loss, total, rel_tol=1e-2):
            return f"its loss is {loss:.4g}, and the sum of its log-probabilities {total:.4g}"
        apart, own = self._distances(scores.log_probs_K), self._distances(self._plain_K)
        if all(a <= f * o + _NATS for a, f, o in zip(apart, _FACTORS, own, strict=True)):
            return None
        dtype = str(self._dtype).removeprefix("torch.")
        return (
            f"log-probabilities differ from float32 by {apart[1]:.2g} nats "
            f"(transformers in {dtype}: {own[1]:.2g})"
        )

    def _distances(self, log_probs_K: torch.Tensor) -> tuple[float, float]:
        """Return distances from float32, in nats: the mean over most positions, and the root mean
        square over all."""
        apart_K = (log_probs_K - self._exact_K).double().abs().sort().values
        most = apart_K[: math.ceil(_MOST * len(apart_K))]
        return float(most.mean()), float(apart_K.square().mean().sqrt())


@contextmanager
def _stirred(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Add noise to every B of the adapter that moves log-probabilities as much as training does."""
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
    """Make forwards of `model` compute in float32, from the weights in their rounded dtype.

    A large parameter is widened only while its module runs; rows of an embedding are widened when
    looked up.
    """
    with ExitStack() as stack:
        own = [p for p in model.parameters() if not hasattr(p, "to_local")]  # not FSDP2's
        small = [p for p in own if p.requires_grad or p.numel() <= _SMALL]
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
