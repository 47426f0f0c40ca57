"""A frozen base that is split among the ranks of a run, by torch's FSDP2 (`fully_shard`).

Each rank keeps a part of the matrices of every layer. A layer's are gathered before it computes, in
the forward and once more in the backward, and freed after it. Embeddings, the head, norms, biases
and adapters are whole on every rank. The gathered matrices have the stored bits, so a rank computes
what one process does.

All ranks take part when a layer is gathered, but one may have more micro-batches to compute than
another. So the ranks first agree on the kind of the next pass, and those that have no such pass
gather the layers in the same order, without computing. `Ranks.settle` is where a rank does so that
has nothing left to compute.

Loading reads tensor by tensor; one layer is whole in memory at a time.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core.adapter.targets import is_beside
from vox_core.errors import PlanError
from vox_core.weights import WeightFolder
from vox_torch.arrays import as_tensor
from vox_torch.base import fill_buffers, fill_parameters, stored_names, without_weights
from vox_torch.memory import no_holes

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel

    from vox_torch.ranks import Ranks

_NOTHING, _FORWARD, _BACKWARD = range(3)
"""Kinds of a pass: none, a forward alone, and a forward with its backward."""


class Shards:
    """The layers of a base that is split among `ranks`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._layers: list[FSDPModule] = []
        self._learning: list[FSDPModule] = []
        # Gathered matrices would lie among activations in glibc's heap: after a forward, 0.9 GB of
        # holes on a base of 1.4 GB.
        self._open = ExitStack()
        self._open.enter_context(no_holes())
        ranks.settle = self._settle

    def load(self, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
        """Load the model of `folder`, frozen and in evaluation mode, with this rank's parts.

        Raises:
            ModelError: M002, transformers cannot build this model or its weights do not fit.
            PlanError: P001, it has no layers that transformers marks as such.
        """
        from torch.distributed import group
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        model, weights = without_weights(folder, dtype), WeightFolder(folder)
        names = stored_names(model, weights)
        mesh = DeviceMesh.from_group(group.WORLD, "cpu")
        layers = {
            path: layer
            for path, layer in model.named_modules()
            if isinstance(layer, GradientCheckpointingLayer) and not is_beside(path)
        }
        if not layers:
            raise _undivided(model)
        for path, layer in layers.items():
            fill_parameters(model, weights, names, dtype, below=f"{path}.")
            layer.requires_grad_(False)
            small = {each for each in layer.parameters() if each.ndim < 2}
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=small)
        fill_parameters(model, weights, names, dtype)
        fill_buffers(model, weights, lambda tensor: as_tensor(weights.read(tensor)).clone())
        model.tie_weights()
        model.requires_grad_(False)
        model.base_model.register_forward_pre_hook(self._before_pass)
        self._layers = list(layers.values())
        return model.eval()

    def learn(self) -> None:
        """Find the layers that have a backward: the first with an adapter, and those above."""
        trained = [any(p.requires_grad for p in layer.parameters()) for layer in self._layers]
        first = trained.index(True) if True in trained else len(trained)
        self._learning = self._layers[first:]

    def close(self) -> None:
        """Restore glibc's own rule for large blocks."""
        self._open.close()

    def _before_pass(self, *_: object) -> None:
        """Follow other passes until all ranks agree to one of this kind, or have none."""
        import torch

        own = _BACKWARD if torch.is_grad_enabled() else _FORWARD
        while (kind := self._ranks.most(own)) != own:
            self._follow(kind)

    def _settle(self) -> None:
        """Follow the passes of other ranks until they have none left."""
        while kind := self._ranks.most(_NOTHING):
            self._follow(kind)

    def _follow(self, kind: int) -> None:
        """Gather the layers as a pass does, without computing."""
        backward = reversed(self._learning) if kind == _BACKWARD else ()
        with self._ranks.computing():
            for layer in (*self._layers, *backward):
                layer.unshard()
                layer.reshard()


def _undivided(model: PreTrainedModel) -> PlanError:
    return PlanError(
        "P001",
        "the base model cannot be split among the processes",
        where="--shard",
        found=f"{type(model).__name__}, whose layers transformers does not mark",
        expected="layers of transformers' GradientCheckpointingLayer",
        remedy="leave out --shard, or choose another model",
    )
