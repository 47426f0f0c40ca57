"""AdamW on float32 masters, whatever dtype the adapter computes in.

Gradients of a micro-batch are added to float32 gradients of the masters, so accumulation loses
nothing; after the update the masters are copied (rounded once) into the adapter.

An adapter in float64 has float64 masters, gradients and moments. Its step is computed in float64
and ends in a state that float32 can hold, so that a resumed run is the uninterrupted one, bit for
bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vox_core.contract import AdapterState, OptimizerSpec, TrainState
from vox_core.contract.loop import not_finite
from vox_torch.arrays import at_least_float32

if TYPE_CHECKING:
    import torch


class MasterAdamW:
    """The trained parameters, their masters and their moments."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], spec: OptimizerSpec) -> None:
        import torch

        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._clip = spec.clip
        self._masters = [at_least_float32(p.detach()).clone() for p in self._parameters]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._adamw = torch.optim.AdamW(
            self._masters,
            lr=spec.lr,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            weight_decay=spec.weight_decay,
        )

    def collect(self) -> None:
        """Move the parameters' gradients onto the masters'."""
        import torch

        torch._foreach_add_([m.grad for m in self._masters], self._gradients())
        for parameter in self._parameters:
            parameter.grad = None

    def update(self, lr: float) -> float:
        """Clip, step and publish.

        Returns:
            The global gradient norm before clipping.

        Raises:
            TrainingError: T001, the norm is not finite; nothing was changed.
        """
        import torch

        gradients = [m.grad for m in self._masters]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not math.isfinite(total := norm.item()):
            raise not_finite("gradient norm", total)
        if self._clip:
            torch.nn.utils.clip_grads_with_norm_(self._masters, self._clip, norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._round_state()
        torch._foreach_zero_(gradients)
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)
        return total

    def restore(self, state: TrainState) -> None:
        """Take masters and moments from a state; at step 0 there are no moments."""
        import torch

        values = state.adapter.tensors()
        for name, master in zip(self._names, self._masters, strict=True):
            master.copy_(torch.tensor(values[name], dtype=torch.float32))
            if name in state.moments:
                first, second = (torch.tensor(m).to(master) for m in state.moments[name])
                self._adamw.state[master] = {
                    "step": torch.tensor(float(state.step)),
                    "exp_avg": first,
                    "exp_avg_sq": second,
                }

    def state(self, step: int, structure: AdapterState) -> TrainState:
        """Masters and moments as numpy, under canonical names."""
        named = dict(zip(self._names, self._masters, strict=True))
        adapter = structure.with_tensors({n: _numpy(m) for n, m in named.items()})
        moments = {
            name: (_numpy(kept["exp_avg"]), _numpy(kept["exp_avg_sq"]))
            for name, master in named.items()
            if (kept := self._adamw.state.get(master))
        }
        return TrainState(step, adapter, moments)

    def _round_state(self) -> None:
        """Leave nothing in masters and moments that a `TrainState` would not carry."""
        import torch

        for master in self._masters:
            if master.dtype != torch.float32:
                kept = self._adamw.state[master]
                for tensor in (master, kept["exp_avg"], kept["exp_avg_sq"]):
                    tensor.copy_(tensor.float())

    def _gradients(self) -> list[torch.Tensor]:
        import torch

        return [
            torch.zeros_like(m) if p.grad is None else p.grad.to(m.dtype)
            for p, m in zip(self._parameters, self._masters, strict=True)
        ]


def _numpy(tensor: torch.Tensor) -> object:
    return tensor.detach().float().cpu().numpy().copy()
