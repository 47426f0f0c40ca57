"""AdamW on float32 master weights, in any dtype of the adapter.

Gradients of a micro-batch are accumulated in float32; after the update the masters are copied
(rounded once) into the adapter.

An adapter in float64 has float64 masters, gradients and moments. Its step is computed in float64
and ends in a state that float32 can hold, so that a resumed run is the uninterrupted one, bit for
bit.

`AdamW` is PyTorch's, fused. `AdamW8Bit` is bitsandbytes' (Dettmers et al. 2021, arXiv:2110.02861):
a moment is a code of 8 bits a value and a float32 scale for each block of 256. Tensors of fewer
than 4096 elements keep moments in float32, by the library's own rule. On a device with its own
memory the codes are paged to the host when the device is full (Dettmers et al. 2023,
arXiv:2305.14314, section 3; the library pages tensors of 100,000 elements and more). Paging has not
been tested on a full device yet.

A saved state has float32 moments, and restoring it gives the same codes and scales: each scale is
rounded to 16 significant bits after a step, so that it can be recovered from the largest value of
its block.

Shape legend: N elements of a tensor, K blocks of it, S elements of a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_core.contract import Floats, LazyMapping, Optimizer, TrainState, Update
from vox_torch.arrays import at_least_float32
from vox_torch.libraries import import_bitsandbytes
from vox_torch.shards import is_split, joined_like, own_part, part_of

if TYPE_CHECKING:
    import torch

    from vox_torch.ranks import Ranks
    from vox_torch.shards import Shards

    Moments: TypeAlias = tuple[torch.Tensor, torch.Tensor]

BLOCK = 256
"""Elements that share a scale: bitsandbytes' block for 8-bit optimizers."""

# A block whose largest value is below this counts as zero, so that codes times scales stay normal
# numbers. Its root is negligible beside AdamW's epsilon.
_LEAST_SCALE = 2.0**-100


class AdamW:
    """PyTorch's AdamW; float64 masters have float64 moments, rounded to float32 after each step."""

    def __init__(self, masters: Sequence[torch.Tensor], decayed: Sequence[bool]) -> None:
        import torch

        self._masters = masters
        self._adamw = torch.optim.AdamW(_groups(masters, decayed), fused=True)

    def step(self, update: Update) -> None:
        """Update every master from its gradient."""
        _configure(self._adamw, update)
        self._adamw.step()
        self._round_state()

    def moments(self, master: torch.Tensor) -> Moments | None:
        """Return the first and second moment; None before the first step."""
        kept = self._adamw.state.get(master)
        return (kept["exp_avg"], kept["exp_avg_sq"]) if kept else None

    def has_moments(self, master: torch.Tensor) -> bool:
        return bool(self._adamw.state.get(master))

    def restore(self, master: torch.Tensor, step: int, moments: Moments) -> None:
        """Continue from float32 moments after `step` updates."""
        import torch

        first, second = (moment.to(master) for moment in moments)
        self._adamw.state[master] = {
            "step": torch.tensor(float(step), device=master.device),
            "exp_avg": first,
            "exp_avg_sq": second,
        }

    def _round_state(self) -> None:
        """Round masters and moments to the float32 that a `TrainState` holds."""
        import torch

        for master in self._masters:
            if master.dtype != torch.float32:
                kept = self._adamw.state[master]
                for tensor in (master, kept["exp_avg"], kept["exp_avg_sq"]):
                    tensor.copy_(tensor.float())


class AdamW8Bit:
    """bitsandbytes' AdamW with 8-bit moments, on float32 masters."""

    def __init__(self, masters: Sequence[torch.Tensor], decayed: Sequence[bool]) -> None:
        library = import_bitsandbytes()
        on_host = masters[0].device.type == "cpu"
        kind = library.optim.AdamW8bit if on_host else library.optim.PagedAdamW8bit
        self._masters = masters
        self._adamw: Any = kind(_groups(masters, decayed))

    def step(self, update: Update) -> None:
        _configure(self._adamw, update)
        self._adamw.step()
        for master in self._masters:
            kept = self._adamw.state[master]
            for scales in ("absmax1", "absmax2"):
                if scales in kept:
                    kept[scales].copy_(_storable(kept[scales]))

    def moments(self, master: torch.Tensor) -> Moments | None:
        import torch

        kept = self._adamw.state.get(master)
        if not kept:
            return None
        if kept["state1"].dtype != torch.uint8:
            return kept["state1"], kept["state2"]
        first, second = (
            # PyTorch believes that paged codes are on the host.
            dequantised(kept[f"state{n}"].to(master.device), kept[f"absmax{n}"], kept[f"qmap{n}"])
            for n in (1, 2)
        )
        return first, second

    def has_moments(self, master: torch.Tensor) -> bool:
        return bool(self._adamw.state.get(master))

    def restore(self, master: torch.Tensor, step: int, moments: Moments) -> None:
        import torch

        group, place = next(
            (at, place)
            for at, group in enumerate(self._adamw.param_groups)
            for place, each in enumerate(group["params"])
            if each is master
        )
        self._adamw.init_state(self._adamw.param_groups[group], master, group, place)
        kept = self._adamw.state[master]
        kept["step"] = step
        for n, moment in enumerate(moments, 1):
            values = moment.to(master)
            if kept[f"state{n}"].dtype == torch.uint8:
                values, scales_K = quantised(values, kept[f"qmap{n}"])
                kept[f"absmax{n}"].copy_(scales_K)
            kept[f"state{n}"].copy_(values)


def quantised(values: torch.Tensor, levels: torch.Tensor) -> Moments:
    """Quantise a float32 moment to codes (uint8, shaped as `values`) and scales (K,).

    The inverse of `dequantised`, bit for bit, for scales that `_storable` does not change.
    bitsandbytes' quantiser is not: its signed levels end at 1 and -0.993, so that a block whose
    largest value is negative would shrink each time.

    Args:
        levels: 256 of them, ascending, from -0.993 or 0 to 1.
    """
    import torch

    blocks_KS = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK))
    blocks_KS = blocks_KS.view(-1, BLOCK)
    scales_K = blocks_KS.amax(1) / levels[-1]
    if levels[0] < 0:
        scales_K = torch.maximum(scales_K, blocks_KS.amin(1) / levels[0])
    scales_K = _storable(scales_K)
    ratios_KS = blocks_KS / torch.where(scales_K > 0, scales_K, 1)[:, None]
    middles = (levels[1:] + levels[:-1]) / 2
    codes_N = torch.bucketize(ratios_KS, middles).to(torch.uint8).flatten()[: values.numel()]
    return codes_N.view_as(values), scales_K


def dequantised(codes: torch.Tensor, scales_K: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return a float32 moment, shaped as `codes`: level times scale."""
    values_N = levels[codes.flatten().int()]
    values_N *= scales_K.repeat_interleave(BLOCK)[: len(values_N)]
    return values_N.view_as(codes)


def _storable(scales: torch.Tensor) -> torch.Tensor:
    """Round scales to 16 significant bits, and negligible ones to zero.

    A scale is recovered from a value with a relative error of about 2^-23: far less than half the
    distance between neighbouring 16-bit scales.
    """
    import torch

    bits = (scales.contiguous().view(torch.int32) + 0x80) & ~0xFF
    rounded = bits.view(torch.float32)
    return torch.where(rounded < _LEAST_SCALE, 0.0, rounded)


def _groups(masters: Sequence[torch.Tensor], decayed: Sequence[bool]) -> list[dict[str, Any]]:
    """Return the parameter groups: tensors with weight decay, and those without."""
    pairs = list(zip(masters, decayed, strict=True))
    groups = {decays: [m for m, each in pairs if each == decays] for decays in (True, False)}
    return [{"params": some, "decays": decays} for decays, some in groups.items() if some]


def _configure(optimizer: torch.optim.Optimizer, update: Update) -> None:
    for group in optimizer.param_groups:
        group.update(
            lr=update.lr,
            betas=(update.beta1, update.beta2),
            eps=update.eps,
            weight_decay=update.weight_decay if group["decays"] else 0.0,
        )


class MasterAdamW:
    """The trained parameters of a learner, their master weights, gradients and moments.

    A parameter in float32 or wider is its own master. Of a split one this rank has a part, and the
    parts of its gradient are those of all ranks.

    Args:
        parameters: by canonical name.
        start: their values, and moments if there were updates.
        ranks: that train together; None for one process.
        shards: that hold the split parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        kind: Optimizer,
        start: TrainState,
        ranks: Ranks | None = None,
        shards: Shards | None = None,
    ) -> None:
        import torch

        self._ranks, self._kept = ranks, list[torch.Tensor]()
        self._named, self._structure = dict(parameters), start.adapter
        self._masters = {name: _master_of(each) for name, each in parameters.items()}
        whole = [name for name, each in parameters.items() if not is_split(each)]
        self._parameters = [parameters[name] for name in whole]
        self._wholes = [self._masters[name] for name in whole]
        pairs = zip(self._parameters, self._wholes, strict=True)
        self._rounded = [(p, m) for p, m in pairs if p.dtype != m.dtype]
        # PyTorch's fused AdamW on a CPU computes wrongly if a gradient has other strides.
        assert all(master.is_contiguous() for master in self._wholes)
        count = sum(master.numel() for master in self._wholes)
        self._gradients = next(iter(self._masters.values())).new_zeros(count)
        for master, gradient in zip(self._wholes, self._parts(self._gradients), strict=True):
            master.grad = gradient
        self._shards, self._split = shards, [name for name in parameters if name not in whole]
        if shards and self._split:
            shards.parts = self._split_tensor
        self._full = start.adapter.method == "full"
        masters = [*self._masters.values()]
        decayed = [not self._full or master.ndim > 1 for master in masters]
        made = AdamW8Bit if kind == "adamw-8bit" else AdamW
        self._adamw = made(masters, decayed)
        self._updates = start.updates
        self._restore(start)

    def collect(self, factor: float) -> None:
        """Move the parameters' gradients, times `factor`, to the masters'; on a rank above 0, keep
        them for `update`. Those of split parameters are added up where they are."""
        import torch

        if not self._parameters:
            return
        kept = self._ranks is not None and self._ranks.world.rank > 0
        added = bool(self._split and self._kept)  # one sum, as split ones are not kept apart either
        total = self._gradients
        if kept:
            total = self._kept[0] if added else torch.zeros_like(total)
        pairs = [
            (part, p.grad)
            for p, part in zip(self._parameters, self._parts(total), strict=True)
            if p.grad is not None
        ]
        totals, gradients = zip(*pairs, strict=True)
        torch._foreach_add_(totals, gradients, alpha=factor)
        if kept and not added:
            self._kept.append(total.cpu())
        self.drop()

    def is_finite(self) -> bool:
        """Whether every gradient of the parameters is."""
        import torch

        found = [p.grad.isfinite().all() for p in self._parameters if p.grad is not None]
        return bool(torch.stack(found).all())

    def drop(self) -> None:
        """Drop the gradients of parameters that are not split; the masters' stay."""
        for parameter in self._parameters:
            parameter.grad = None

    def forget(self) -> None:
        """Drop all gradients."""
        self._gradients.zero_()
        self._kept.clear()
        for name in self._split:
            self._named[name].grad = self._masters[name].grad = None
        self.drop()

    def update(self, update: Update) -> float:
        """Add the gradients of all ranks, divide and clip them, update the masters and copy them to
        the parameters.

        Returns:
            The global norm of the divided gradients. If it is not finite, only the gradients are
            dropped.
        """
        import torch

        if self._ranks and self._wholes:
            self._gradients.copy_(self._ranks.gather_sum(self._gradients.cpu(), self._kept))
        gradients = [m.grad for m in self._wholes]
        split = self._split_gradients()
        torch._foreach_mul_([*gradients, *split], 1 / update.total_weight)
        norm = self._norm(gradients, split)
        if math.isfinite(norm):
            if update.clip and norm > update.clip:
                torch._foreach_mul_([*gradients, *split], update.clip / (norm + 1e-6))
            self._count_from(update.number)
            self._adamw.step(update)
            if self._rounded:
                with torch.no_grad():
                    torch._foreach_copy_(*map(list, zip(*self._rounded, strict=True)))
        self.forget()
        return norm

    def _split_gradients(self) -> list[torch.Tensor]:
        """Let the masters of split parameters have their gradients, when no rank computes."""
        import torch

        if self._split and self._ranks:
            self._ranks.settle()
        for name in self._split:
            found, master = self._named[name].grad, self._masters[name]
            master.grad = torch.zeros_like(master) if found is None else own_part(found)
        return [self._masters[name].grad for name in self._split]

    def _norm(self, gradients: Sequence[torch.Tensor], split: Sequence[torch.Tensor]) -> float:
        """Return the norm of whole gradients, and of those of which this rank has a part."""
        import numpy as np
        import torch

        norm: float = torch.nn.utils.get_total_norm(gradients).item()
        if split and self._ranks:
            squares = np.zeros(self._ranks.world.size)
            squares[self._ranks.world.rank] = torch.nn.utils.get_total_norm(split).item() ** 2
            norm = math.sqrt(norm**2 + self._ranks.share(squares).sum())
        return norm

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole masters' parts of gradients in one piece, shaped as they are."""
        parts = flat.split([master.numel() for master in self._wholes]) if self._wholes else ()
        return [part.view_as(m) for part, m in zip(parts, self._wholes, strict=True)]

    def _count_from(self, number: int) -> None:
        """Make the next update the one with this number, for the bias correction."""
        import torch

        if number != self._updates + 1:
            for master in self._masters.values():
                moments = self._adamw.moments(master)
                zeros = torch.zeros_like(master), torch.zeros_like(master)
                self._adamw.restore(master, number - 1, moments or zeros)
        self._updates = number

    def _restore(self, state: TrainState) -> None:
        """Load masters and moments; at step 0 there are no moments."""
        import torch

        values = state.adapter.tensors()
        for name, master in self._masters.items():
            parameter = self._named[name]
            master.copy_(part_of(torch.tensor(values[name], dtype=torch.float32), parameter))
            if name in state.moments:
                first, second = (part_of(torch.tensor(m), parameter) for m in state.moments[name])
                self._adamw.restore(master, state.updates, (first, second))

    def state(self) -> TrainState:
        """Return masters and moments as numpy, under canonical names: copies, or with the method
        `full` views, and split ones gathered on access."""

        def moments(name: str) -> tuple[Floats, Floats]:
            return self._read(name, 1), self._read(name, 2)

        stepped = [name for name, m in self._masters.items() if self._adamw.has_moments(m)]
        values = LazyMapping(self._masters, lambda name: self._read(name, 0))
        adapter = self._structure.with_tensors(values)
        state = TrainState(self._updates, adapter, LazyMapping(stepped, moments))
        return state if self._full else state.copy()

    def _read(self, name: str, which: int) -> Floats:
        """Return a master (0) or a moment of it (1, 2), from all ranks if it is split."""
        if self._shards and name in self._split:
            return _numpy(self._shards.whole(3 * self._split.index(name) + which))
        return _numpy(self._own(name, which))

    def _split_tensor(self, number: int) -> torch.Tensor:
        name, which = self._split[number // 3], number % 3
        return joined_like(self._own(name, which), self._named[name])

    def _own(self, name: str, which: int) -> torch.Tensor:
        master = self._masters[name]
        if which == 0:
            return master
        kept = self._adamw.moments(master)
        assert kept is not None, name
        return kept[which - 1]


def _master_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    return own_part(parameter) if is_split(parameter) else at_least_float32(parameter.detach())


def _numpy(tensor: torch.Tensor) -> Floats:
    array: Floats = tensor.detach().float().cpu().numpy()
    return array
