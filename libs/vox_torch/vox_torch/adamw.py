"""AdamW's update, with its moments in full or in 8 bits.

`AdamW` is PyTorch's, fused. `AdamW8Bit` is bitsandbytes' (Dettmers et al. 2021, arXiv:2110.02861):
a moment is a code of 8 bits a value and a float32 scale for each block of 256. Tensors of fewer
than 4096 elements keep moments in float32, by the library's own rule. On a device with memory of
its own the codes lie in memory that moves to the host when the device has no room ("paged",
Dettmers et al. 2023, arXiv:2305.14314, section 3; the library pages tensors of 100,000 elements and
more). That has not been seen on such a device yet.

A state that leaves has float32 moments, and it comes back to the very codes and scales: each scale
is rounded to 16 significant bits after a step, so that the largest value of a block tells it.

Shape legend: N elements of a tensor, K blocks of it, S elements of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from vox_torch.libraries import import_bitsandbytes

if TYPE_CHECKING:
    import torch

    from vox_core.contract import OptimizerSpec

    Moments: TypeAlias = tuple[torch.Tensor, torch.Tensor]

BLOCK = 256
"""Elements that share a scale: bitsandbytes' block for 8-bit optimizers."""

# A block whose largest value is below this counts as zero: codes times scales stay normal numbers.
# Its root is nothing beside AdamW's epsilon.
_LEAST_SCALE = 2.0**-100


class Update(Protocol):
    """What `MasterAdamW` asks of an update."""

    def step(self, lr: float) -> None:
        """Update every master from its gradient."""

    def moments(self, master: torch.Tensor) -> Moments | None:
        """First and second moment, in at least float32; None before the first step."""

    def restore(self, master: torch.Tensor, step: int, moments: Moments) -> None:
        """Go on from moments of float32 after `step` updates."""


def make_update(masters: Sequence[torch.Tensor], spec: OptimizerSpec) -> Update:
    """The update that a contract names, over masters on one device."""
    return AdamW8Bit(masters, spec) if spec.name == "adamw-8bit" else AdamW(masters, spec)


class AdamW:
    """PyTorch's AdamW. Masters in float64 have moments in float64, which end a step as float32."""

    def __init__(self, masters: Sequence[torch.Tensor], spec: OptimizerSpec) -> None:
        import torch

        self._masters = masters
        self._adamw = torch.optim.AdamW(list(masters), fused=True, **_numbers(spec))

    def step(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._round_state()

    def moments(self, master: torch.Tensor) -> Moments | None:
        kept = self._adamw.state.get(master)
        return (kept["exp_avg"], kept["exp_avg_sq"]) if kept else None

    def restore(self, master: torch.Tensor, step: int, moments: Moments) -> None:
        import torch

        first, second = (moment.to(master) for moment in moments)
        self._adamw.state[master] = {
            "step": torch.tensor(float(step), device=master.device),
            "exp_avg": first,
            "exp_avg_sq": second,
        }

    def _round_state(self) -> None:
        """Leave nothing in masters and moments that a `TrainState` would not carry."""
        import torch

        for master in self._masters:
            if master.dtype != torch.float32:
                kept = self._adamw.state[master]
                for tensor in (master, kept["exp_avg"], kept["exp_avg_sq"]):
                    tensor.copy_(tensor.float())


class AdamW8Bit:
    """bitsandbytes' AdamW with 8-bit moments, on masters in float32."""

    def __init__(self, masters: Sequence[torch.Tensor], spec: OptimizerSpec) -> None:
        library = import_bitsandbytes()
        on_host = masters[0].device.type == "cpu"
        kind = library.optim.AdamW8bit if on_host else library.optim.PagedAdamW8bit
        self._masters = masters
        self._adamw: Any = kind(list(masters), **_numbers(spec))

    def step(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
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
            # Paged codes lie on the host, as far as PyTorch knows.
            dequantised(kept[f"state{n}"].to(master.device), kept[f"absmax{n}"], kept[f"qmap{n}"])
            for n in (1, 2)
        )
        return first, second

    def restore(self, master: torch.Tensor, step: int, moments: Moments) -> None:
        import torch

        place = next(i for i, each in enumerate(self._masters) if each is master)
        self._adamw.init_state(self._adamw.param_groups[0], master, 0, place)
        kept = self._adamw.state[master]
        kept["step"] = step
        for n, moment in enumerate(moments, 1):
            values = moment.to(master)
            if kept[f"state{n}"].dtype == torch.uint8:
                values, scales_K = quantised(values, kept[f"qmap{n}"])
                kept[f"absmax{n}"].copy_(scales_K)
            kept[f"state{n}"].copy_(values)


def quantised(values: torch.Tensor, levels: torch.Tensor) -> Moments:
    """Codes (uint8, as `values` is shaped) and scales (K,) of a moment in float32.

    The inverse of `dequantised`, bit for bit, for scales that `_storable` leaves as they are. The
    quantiser of bitsandbytes is not: its signed levels end at 1 and at -0.993, so that a block
    whose largest value is negative would shrink each time.

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
    """A moment in float32, shaped as `codes` are: level times scale."""
    values_N = levels[codes.flatten().int()]
    values_N *= scales_K.repeat_interleave(BLOCK)[: len(values_N)]
    return values_N.view_as(codes)


def _storable(scales: torch.Tensor) -> torch.Tensor:
    """Scales rounded to 16 significant bits, and to zero where they are too small to matter.

    A scale is told again from a value with a relative error of 2^-23 or so: far less than half the
    distance to the next one of 16 bits.
    """
    import torch

    bits = (scales.contiguous().view(torch.int32) + 0x80) & ~0xFF
    rounded = bits.view(torch.float32)
    return torch.where(rounded < _LEAST_SCALE, 0.0, rounded)


def _numbers(spec: OptimizerSpec) -> dict[str, Any]:
    return {
        "lr": spec.lr,
        "betas": (spec.beta1, spec.beta2),
        "eps": spec.eps,
        "weight_decay": spec.weight_decay,
    }
