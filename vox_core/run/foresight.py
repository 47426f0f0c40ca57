"""Predict a prepared run's memory, and hold it against the device's: refuse, or warn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vox_core.contract import Notice, Quant
from vox_core.data.largest import Largest, largest_micro_batch
from vox_core.errors import PlanError
from vox_core.host.manifest import MemoryProfile
from vox_core.host.probe import Device
from vox_core.memory import (
    Architecture,
    Demand,
    Option,
    Prediction,
    options,
    predict,
    read_architecture,
    suggest,
)
from vox_core.memory.merging import MergePrediction, predict_merge
from vox_core.memory.predict import trained_tensors
from vox_core.run.plan import possible_quants
from vox_core.run.prepare import Prepared

OVERESTIMATE = 1.2
"""How far a prediction may exceed what a run takes: predicted over measured was 0.89 to 1.04 in
benchmarks/results/plan_accuracy.json, and up to 1.17 by `benchmarks/memory.py`
(docs/dev/performance-log.md)."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """The memory of one run.

    Args:
        largest: the micro-batch that needs most.
        total, free: bytes of the device; None where nobody knows.
    """

    prediction: Prediction
    largest: Largest
    total: int | None
    free: int | None

    @property
    def limit(self) -> int | None:
        """What there is to be had: what is free, or else all."""
        return self.total if self.free is None else self.free

    @property
    def hopeless(self) -> bool:
        """More than the device has in all, by more than a prediction is ever off."""
        return self.total is not None and self.prediction.peak > OVERESTIMATE * self.total

    @property
    def fits(self) -> bool | None:
        """None where nobody knows."""
        return None if self.limit is None else self.prediction.peak <= self.limit


def foresee(prepared: Prepared) -> Foresight:
    """Predict the run as it is planned."""
    demand = _demand(prepared)
    device = _device(prepared)
    return Foresight(
        prediction=predict(_architecture(prepared), demand, _profile(prepared)),
        largest=demand.largest,
        total=device.memory_bytes if device else None,
        free=device.available_bytes if device else None,
    )


def foresee_merge(prepared: Prepared) -> MergePrediction:
    """Predict what `vox merge` of the run will need of the machine's memory."""
    model = _architecture(prepared)
    largest = max(info.nbytes for info in prepared.weights.tensors.values())
    return predict_merge(largest, trained_tensors(model, _demand(prepared)), model.vocabulary)


def alternatives(prepared: Prepared) -> list[Option]:
    """The same run under other settings that change its memory."""
    return options(
        _architecture(prepared),
        _demand(prepared),
        _profile(prepared),
        _quants(prepared),
        lambda budget: _largest(prepared, budget),
    )


def require_memory(prepared: Prepared, *, allowed: bool = False, resumed: bool = False) -> None:
    """Refuse a run that the device cannot hold.

    Args:
        allowed: `--allow-overcommit`.
        resumed: what it computes cannot be changed any more.

    Raises:
        PlanError: P004.
    """
    seen = foresee(prepared)
    if allowed or seen.total is None or not seen.hopeless:
        return
    raise PlanError(
        "P004",
        "the run needs more memory than the device has",
        where=prepared.plan.device,
        found=f"about {gigabytes(seen.prediction.peak)} predicted at the peak",
        expected=f"at most {gigabytes(round(OVERESTIMATE * seen.total))}: the device's "
        f"{gigabytes(seen.total)}, and {OVERESTIMATE - 1:.0%} for the error of the prediction",
        remedy=f"{_way_out(prepared, seen, resumed)}; --allow-overcommit trains all the same",
    )


def warning(prepared: Prepared, *, resumed: bool = False) -> Notice | None:
    """Warn where more is predicted than is free; `resumed` as for `require_memory`."""
    seen = foresee(prepared)
    if seen.fits is not False or seen.limit is None:
        return None
    where = f"{gigabytes(seen.limit)} {'free' if seen.free is not None else 'in all'}"
    return Notice(
        f"memory may run out: about {gigabytes(seen.prediction.peak)} at the peak, and "
        f"{prepared.plan.device} has {where}; {_way_out(prepared, seen, resumed)}; see `vox plan`",
        "warning",
    )


def _way_out(prepared: Prepared, seen: Foresight, resumed: bool) -> str:
    """Settings that fit into what is free, or else into all that there is."""
    contract, grid = prepared.plan.contract, alternatives(prepared)
    if resumed:
        grid = [option for option in grid if _may_change_to(option, prepared)]
    sizes = [size for size in (seen.limit, seen.total) if size is not None]
    found = next((fit for size in sizes if (fit := suggest(grid, size, contract.quant))), None)
    if found:
        return f"this fits: {found.flags(contract.quant)} ({gigabytes(found.peak)})"
    if resumed:
        return "no setting that a resumed run may change makes it fit"
    return (
        "no --quant, --gradient-checkpointing or --micro-batch-tokens makes it fit: shorten "
        f"examples with --seq-len (the longest has {seen.largest.longest} tokens), or choose a "
        "smaller model"
    )


def _may_change_to(option: Option, prepared: Prepared) -> bool:
    """Whether a resumed run may have these settings: they compute the same numbers."""
    plan = prepared.plan
    same_cut = option.micro_batch_tokens == plan.micro_batch_tokens
    drops = plan.contract.adapter.dropout > 0
    return option.quant == plan.contract.quant and (same_cut or not drops)


def gigabytes(size: int) -> str:
    """`1.9 GB`, of 10^9 bytes."""
    return f"{size / 1e9:.1f} GB"


def vocabulary(prepared: Prepared) -> int:
    """Tokens that the model predicts among."""
    return _architecture(prepared).vocabulary


def _architecture(prepared: Prepared) -> Architecture:
    weights = prepared.weights
    return read_architecture(weights.tensors, prepared.config, weights.quantised)


def _demand(prepared: Prepared) -> Demand:
    plan = prepared.plan
    adapter = plan.contract.adapter
    return Demand(
        dtype=plan.dtype,
        quant=plan.contract.quant,
        method=adapter.method,
        rank=adapter.rank,
        modules=plan.modules,
        largest=_largest(prepared, plan.micro_batch_tokens),
        gradient_checkpointing=plan.gradient_checkpointing,
        dropout=adapter.dropout > 0,
        saved=tuple(plan.saved.values()),
        optimizer=plan.contract.optimizer.name,
    )


def _largest(prepared: Prepared, budget: int) -> Largest:
    contract = prepared.plan.contract
    return largest_micro_batch(
        prepared.train,
        steps=contract.total_steps,
        batch_size=contract.batch_size,
        micro_batch_tokens=budget,
        seed=contract.seed,
        packing=prepared.plan.packing,
    )


def _profile(prepared: Prepared) -> MemoryProfile:
    manifest = prepared.backend.found.manifest
    return manifest.memory if manifest else MemoryProfile()


def _quants(prepared: Prepared) -> Sequence[Quant]:
    manifest, weights = prepared.backend.found.manifest, prepared.weights
    has: Sequence[Quant] = manifest.capabilities.quantisations if manifest else ()
    saved = tuple(prepared.plan.saved.values())
    return possible_quants(has, weights.quant, prepared.config, weights.tensors, saved)


def _device(prepared: Prepared) -> Device | None:
    """The first, which is the one that the plan names."""
    return next(iter(prepared.selection.hardware.devices), None)
