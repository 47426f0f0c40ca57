"""Backends with faults in the method `full`, each with the test that has to catch it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from libs.vox_testing.tests.broken_training import without_moments
from libs.vox_testing.tests.mutant import Mutant, answering

from vox_core.contract import TrainState
from vox_torch.forward import Together
from vox_torch.fused_modules import RmsNorm
from vox_torch.inject import Adapters
from vox_torch.running import Base


def _decaying(decays: bool) -> Any:
    """Every tensor decays, or none."""

    def groups(masters: Sequence[torch.Tensor], _decayed: Sequence[bool]) -> list[dict[str, Any]]:
        return [{"params": list(masters), "decays": decays}]

    return groups


class _NormsWithoutGradient(RmsNorm):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        gradient, of_weight, *rest = RmsNorm.backward(ctx, g)
        return gradient, None if of_weight is None else torch.zeros_like(of_weight), *rest


def _owning(self: Adapters, name: str, values: Mapping[str, object]) -> Any:
    """Keep the values of the folder."""
    self._keys[name] = None
    kept = {}
    for path, parameter in self.base.named_parameters():
        if path in values:
            kept[path] = torch.nn.Parameter(parameter.detach().clone())
            parameter.requires_grad_()
    return kept


def _below_the_head(
    self: Together,
    batch: Any,
    scale: float = 1.0,
    weigh: Any = None,
    right: Any = Together.__call__,
) -> Any:
    """One pass leaves the gradient of the head out."""
    if weigh is not None:
        self._above = list  # type: ignore[method-assign,assignment]
    return right(self, batch, scale, weigh)


def _from_the_first(right: Any, name: str, state: TrainState) -> None:
    """Resume with the weights, as if no update had been."""
    right.add_learner(name, replace(state, step=0, skipped=0, moments={}))


FULL: dict[str, Mutant] = {
    "norms decay": Mutant(
        "test_full_trains_the_weights", patch=("vox_torch.optimizer._groups", _decaying(True))
    ),
    "no weight decays": Mutant(
        "test_full_trains_the_weights", patch=("vox_torch.optimizer._groups", _decaying(False))
    ),
    "the head has no gradient of its own": Mutant(
        "test_full_trains_the_weights",
        patch=("vox_torch.forward.Together._above", lambda self: []),
    ),
    "norms are not trained": Mutant(
        "test_full_trains_the_weights",
        patch=("vox_torch.fused_modules.RmsNorm", _NormsWithoutGradient),
    ),
    "a copy of the weights is trained": Mutant(
        "test_full_is_scored_as_it_is_now", patch=("vox_torch.inject.Adapters._own", _owning)
    ),
    "rows are computed by the weights that the first row met": Mutant(
        "test_full_is_sampled_from_as_it_is_now",
        patch=("vox_torch.running.Base", lambda model, *rest: Base(deepcopy(model), *rest)),
    ),
    "one pass leaves the head out": Mutant(
        "test_full_in_one_pass_is_in_two",
        patch=("vox_torch.forward.Together.__call__", _below_the_head),
    ),
    "moments of weights do not come back": Mutant(
        "test_full_has_a_state_of_every_weight", answering(state=without_moments)
    ),
    "a resumed run begins with new moments": Mutant(
        "test_full_is_resumed", answering(add_learner=_from_the_first)
    ),
    "masters are in the dtype of the weights": Mutant(
        "test_full_has_masters_in_float32",
        patch=("vox_torch.optimizer.at_least_float32", lambda tensor: tensor.clone()),
    ),
}
