"""AdamW on float32 master weights, in any dtype of the adapter; adamw.py has the update.

Gradients of a micro-batch are accumulated in float32; after the update the masters are copied
(rounded once) into the adapter.

An adapter in float64 has float64 masters, gradients and moments. Its step is computed in float64
and ends in a state that float32 can hold, so that a resumed run is the uninterrupted one, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vox_core.contract import AdapterState, OptimizerSpec, TrainState
from vox_torch.adamw import make_update
from vox_torch.arrays import at_least_float32

if TYPE_CHECKING:
    import torch


class MasterAdamW:
    """The trained parameters, their master weights and their moments."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], spec: OptimizerSpec) -> None:
        import torch

        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._clip = spec.clip
        self._masters = [at_least_float32(p.detach()).clone() for p in self._parameters]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._adamw = make_update(self._masters, spec)

    def collect(self, factor: float) -> None:
        """Move the parameters' gradients, times `factor`, to the masters'."""
        import torch

        pairs = [
            (m.grad, p.grad.to(m.dtype))
            for p, m in zip(self._parameters, self._masters, strict=True)
            if p.grad is not None
        ]
        totals, gradients = zip(*pairs, strict=True)
        torch._foreach_add_(totals, gradients, alpha=factor)
        for parameter in self._parameters:
            parameter.grad = None

    def norm(self) -> torch.Tensor:
        """Return the global gradient norm, a scalar on the device."""
        import torch

        return torch.nn.utils.get_total_norm([m.grad for m in self._masters])

    def forget(self) -> None:
        """Drop the gradients of a skipped step."""
        import torch

        torch._foreach_zero_([m.grad for m in self._masters])
        for parameter in self._parameters:
            parameter.grad = None

    def update(self, lr: float, norm: float) -> None:
        """Clip the gradients, update the masters and copy them to the adapter.

        Args:
            norm: the global gradient norm.
        """
        import torch

        if self._clip and norm > self._clip:
            gradients = [m.grad for m in self._masters]
            torch._foreach_mul_(gradients, self._clip / (norm + 1e-6))
        self._adamw.step(lr)
        self.forget()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)

    def restore(self, state: TrainState) -> None:
        """Load masters and moments from a state; at step 0 there are no moments."""
        import torch

        values = state.adapter.tensors()
        for name, master in zip(self._names, self._masters, strict=True):
            master.copy_(torch.tensor(values[name], dtype=torch.float32))
            if name in state.moments:
                first, second = (torch.tensor(m) for m in state.moments[name])
                self._adamw.restore(master, state.updates, (first, second))

    def state(self, step: int, structure: AdapterState) -> TrainState:
        """Return masters and moments as numpy, under canonical names."""
        named = dict(zip(self._names, self._masters, strict=True))
        adapter = structure.with_tensors({n: _numpy(m) for n, m in named.items()})
        moments = {
            name: (_numpy(kept[0]), _numpy(kept[1]))
            for name, master in named.items()
            if (kept := self._adamw.moments(master))
        }
        return TrainState(step, adapter, moments)


def _numpy(tensor: torch.Tensor) -> object:
    return tensor.detach().float().cpu().numpy().copy()
