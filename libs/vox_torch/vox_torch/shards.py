"""A base that is split among the ranks of a run, by torch's FSDP2 (`fully_shard`).

Each rank keeps a part of the matrices of every layer. A layer's are gathered before it computes, in
the forward and once more in the backward, and freed after it. Embeddings, the head, norms, biases
and adapters are whole on every rank. The gathered matrices have the stored bits, so a rank computes
what one process does. With the method `full` the parts are float32 masters, rounded to the run's
dtype when they are gathered; after a layer's backward each rank has the sum of its part's
gradients.

All ranks take part when a layer is gathered, but one may have more micro-batches to compute than
another. So the ranks first agree on the kind of the next pass, and those that have no such pass
gather the layers in the same order, without computing. `Ranks.settle` is where a rank does so that
has nothing left to compute. A rank that reads a tensor whole is followed in the same way.

Loading reads tensor by tensor; one layer is whole in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vox_core.adapter.targets import is_beside
from vox_core.errors import PlanError
from vox_torch.arrays import as_tensor
from vox_torch.base import fill_buffers, fill_parameters, stored_names, without_weights
from vox_torch.experts import model_weights
from vox_torch.memory import no_holes

if TYPE_CHECKING:
    import torch
    from torch import distributed
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from transformers import PreTrainedModel

    from vox_torch.ranks import Ranks

_NOTHING, _FORWARD, _BACKWARD, _READ = range(4)
"""Kinds of a pass: none, a forward alone, a forward with its backward; from `_READ` on, tensor
number `kind - _READ` of `parts`, read whole."""


class Shards:
    """The layers of a base that is split among `ranks`.

    Attributes:
        parts: number -> a split tensor that any rank may read whole. The learner sets it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._layers: list[FSDPModule] = []
        self._first = 0
        self.parts: Callable[[int], torch.Tensor]
        # Gathered matrices would lie among activations in glibc's heap: after a forward, 0.9 GB of
        # holes on a base of 1.4 GB.
        self._open = ExitStack()
        self._open.enter_context(no_holes())
        ranks.settle = self._settle

    def load(
        self, folder: Path, dtype: torch.dtype, trained: Collection[str] = ()
    ) -> PreTrainedModel:
        """Load the model of `folder`, frozen and in evaluation mode, with this rank's parts. All
        ranks take part.

        Args:
            trained: names of parameters whose parts are float32 masters.

        Raises:
            ModelError: M002, transformers cannot build this model or its weights do not fit.
            PlanError: P001, it has no layers that transformers marks as such.
        """
        import torch
        from torch.distributed import group
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        model = without_weights(folder, dtype)
        weights = model_weights(model, folder)
        names = stored_names(model, weights)
        mesh = DeviceMesh.from_group(group.WORLD, "cpu")
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
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
            whole = {p for p in layer.parameters() if p.ndim < 2 or p.dtype != dtype}
            for name, parameter in layer.named_parameters():
                if f"{path}.{name}" in trained and parameter not in whole:
                    parameter.data = parameter.data.float()
            # By default FSDP2 would not reshard a root, which each layer is.
            fully_shard(
                layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=whole
            )
            _take_part_in(layer)
        fill_parameters(model, weights, names, dtype)
        fill_buffers(model, weights, lambda tensor: as_tensor(weights.read(tensor)).clone())
        model.tie_weights()
        model.requires_grad_(False)
        model.base_model.register_forward_pre_hook(self._before_pass)
        self._layers = list(layers.values())
        # FSDP2 keeps the buffers of the first gathering. Made within a validation's inference mode
        # they could not be written to by a later backward.
        for layer in self._layers:
            layer.unshard()
            layer.reshard()
        return model.eval()

    def learn(self, model: PreTrainedModel) -> None:
        """Find the first layer that has a backward: above a trained embedding, or the first with a
        trained parameter."""
        trained = [any(p.requires_grad for p in layer.parameters()) for layer in self._layers]
        self._first = trained.index(True) if True in trained else len(trained)
        if next(model.get_input_embeddings().parameters()).requires_grad:
            self._first = 0

    def whole(self, number: int) -> torch.Tensor:
        """Return tensor `number` of `parts` from all ranks, which follow."""
        self._agree(_READ + number)
        return self._whole(number)

    def close(self) -> None:
        """Restore glibc's own rule for large blocks."""
        self._open.close()

    def _before_pass(self, *_: object) -> None:
        import torch

        self._agree(_BACKWARD if torch.is_grad_enabled() else _FORWARD)

    def _settle(self) -> None:
        self._agree(_NOTHING)

    def _agree(self, own: int) -> None:
        """Follow the passes of other ranks until all agree to one of this kind, or have none."""
        while (kind := self._ranks.most(own)) != own:
            if kind >= _READ:
                self._whole(kind - _READ)
            else:
                self._follow(kind)

    def _follow(self, kind: int) -> None:
        """Gather the layers as a pass does, and sum their gradients, without computing."""
        import torch

        with self._ranks.computing(), torch.inference_mode(False), torch.enable_grad():
            if kind == _FORWARD:
                for layer in self._layers:
                    layer.unshard()
                    layer.reshard()
                return
            passed = torch.zeros(1)
            for number, layer in enumerate(self._layers):
                if number == self._first:
                    passed.requires_grad_()
                passed = layer.take_part(passed)  # type: ignore[operator]
            if passed.requires_grad:
                passed.backward()

    def _whole(self, number: int) -> torch.Tensor:
        with self._ranks.computing():
            return cast("DTensor", self.parts(number)).full_tensor()


def is_split(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "to_local")


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank's part of a split parameter or gradient."""
    return cast("DTensor", parameter.detach()).to_local()


def part_of(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a value of `parameter`; all of it if that is not split."""
    if not is_split(parameter):
        return whole
    from torch.distributed.tensor import distribute_tensor

    like = cast("DTensor", parameter)
    split = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return split.to_local()


def joined_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is split as `parameter` is, and of which this rank has `part`."""
    from torch.distributed.tensor import DTensor

    like = cast("DTensor", parameter)
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=shape, stride=stride)


class _InOrder:
    """A reduce-scatter that adds in the order of ranks.

    gloo's own sends twice as much, as an all-reduce. The input is freed, which FSDP2 would keep
    until the end of the backward, for each layer. It is the sum whatever `op` FSDP2 passes, such as
    a mean over ranks: `Update` divides by the weight of the step.
    """

    def allocate(
        self, size: torch.Size, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        import torch

        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        import torch
        from torch.distributed import all_to_all_single

        received = torch.empty_like(input_tensor)
        all_to_all_single(received, input_tensor, group=group)
        input_tensor.untyped_storage().resize_(0)
        torch.sum(received.view(group.size(), -1), 0, out=output_tensor)


def _take_part_in(layer: FSDPModule) -> None:
    """Give a layer a forward without computation: `take_part`. All of its gradients are summed, as
    those of the ranks that compute are."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    layer.set_custom_reduce_scatter(_InOrder())  # type: ignore[arg-type]
    layer.set_reduce_scatter_unused_params(True)
    layer.take_part = lambda passed: passed * 1
    register_fsdp_forward_method(layer, "take_part")  # type: ignore[arg-type]


def _undivided(model: PreTrainedModel) -> PlanError:
    return PlanError(
        "P001",
        "the base model cannot be split among the processes",
        where="--shard",
        found=f"{type(model).__name__}, whose layers transformers does not mark",
        expected="layers of transformers' GradientCheckpointingLayer",
        remedy="leave out --shard, or choose another model",
    )
