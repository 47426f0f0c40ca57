"""Forecast a planned run's memory, compare it with the device's, and find settings that fit.

The grid goes over what changes memory and leaves the adapter as it is: the quantisation of the
base, gradient checkpointing, tokens per micro-batch. Suggestions change the numbers last: first no
quantisation, then no recomputing, then as many tokens as fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vox_core.api.generating import cache_bytes, most_rows
from vox_core.api.models import positions, quantised_modules
from vox_core.api.plans import Device, MemoryProfile, RunPlan, width_faults
from vox_core.contract import Quant
from vox_core.errors import PlanError
from vox_plan.architecture import Architecture, read_architecture
from vox_plan.memory import (
    BYTES,
    Demand,
    Prediction,
    WorstCase,
    predict,
    predict_merge,
    rollout_batch,
    split_bytes,
    split_trained,
    trained_tensors,
    weight_bytes,
    worst_case_batch,
)

OVERESTIMATE = 1.2
"""How far a prediction may exceed what a run takes: predicted over measured was 0.89 to 1.04 in
benchmarks/results/plan_accuracy.json, and up to 1.17 by `benchmarks/memory.py`
(docs/dev/performance-log.md)."""

SPARE = 0.1
"""Share of the memory that settings which fit leave free: other programs take some, and real runs
differ from what is predicted by up to 15 % (benchmarks/memory.py)."""

MICRO_BATCH_TOKENS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Option:
    """Settings, and the peak that is predicted for them."""

    quant: Quant
    gradient_checkpointing: bool
    micro_batch_tokens: int
    peak: int

    def flags(self, quant: Quant) -> str:
        """As typed by somebody whose `--quant` is `quant`."""
        quantised = f"--quant {self.quant} " if self.quant != quant else ""
        recompute = "--gradient-checkpointing " if self.gradient_checkpointing else ""
        return f"{quantised}{recompute}--micro-batch-tokens {self.micro_batch_tokens}"


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """The memory of one run.

    Args:
        total, free: bytes of the device, or of each rank's share of it; None if unknown.
    """

    prediction: Prediction
    batch: WorstCase
    total: int | None
    free: int | None

    @property
    def limit(self) -> int | None:
        """Bytes that the run can have: the free ones, or else all."""
        return self.total if self.free is None else self.free

    @property
    def hopeless(self) -> bool:
        """More than the device has in all, by more than a prediction is ever off."""
        return self.total is not None and self.prediction.peak > OVERESTIMATE * self.total

    @property
    def fits(self) -> bool | None:
        """None if unknown."""
        return None if self.limit is None else self.prediction.peak <= self.limit


def forecast(run: RunPlan) -> MemoryForecast:
    """Predict the run as planned."""
    demand, device = _demand(run), _device(run)

    def share(size: int | None) -> int | None:
        return None if size is None else size // run.settings.processes

    return MemoryForecast(
        prediction=predict(_architecture(run), demand, run.inputs.backend.manifest.memory),
        batch=demand.batch,
        total=share(device.memory_bytes),
        free=share(device.available_bytes),
    )


def wire_bytes(run: RunPlan) -> int:
    """Bytes that a rank of N sends in an average step.

    All send 2 (N - 1) gradients together: the sum from rank to rank, and the total. With `--shard`
    a rank sends its part of a layer to the N - 1 others, in each forward and each backward. If the
    layers are trained, it also sends them their parts of a layer's gradient.
    """
    others, processes = run.settings.processes - 1, run.settings.processes
    sent = 2 * others * (gradient_bytes(run) - _split_gradient(run))
    if run.settings.shard:
        layers = sum(split_bytes(_architecture(run), run.execution.dtype))
        sent += _passes(run) * others * (2 * layers + _split_gradient(run))
    return sent // processes


def gradient_bytes(run: RunPlan) -> int:
    """Bytes of the gradients that ranks send: float32."""
    return 4 * run.trained_elements


def _kept(run: RunPlan) -> int:
    """Bytes of what a rank keeps of an average step: a gradient for each of its micro-batches; if
    the layers are split and trained, one of all else."""
    if split := _split_gradient(run):
        return gradient_bytes(run) - split
    return gradient_bytes(run) * _passes(run) if run.settings.processes > 1 else 0


def _split_gradient(run: RunPlan) -> int:
    """Bytes of the gradients that ranks have in parts."""
    plan = run.execution
    if not run.settings.shard or plan.contract.adapter.method != "full":
        return 0
    return 4 * sum(split_trained(_architecture(run), {*plan.saved.values()}))


def step_tokens(run: RunPlan) -> float:
    """Tokens of an average step."""
    if samples_answers(run):
        return _answers(run) * sum(_rollout(run))
    documents = run.data.train
    return documents.tokens * min(run.contract.batch_size, documents.groups) / documents.groups


def _passes(run: RunPlan) -> int:
    """Micro-batches of a rank in an average step."""
    micro_batches = math.ceil(step_tokens(run) / run.execution.micro_batch_tokens)
    return math.ceil(micro_batches / run.settings.processes)


def _of_each(run: RunPlan) -> str:
    processes = run.settings.processes
    return f" for each of {processes} processes" if processes > 1 else ""


def samples_answers(run: RunPlan) -> bool:
    """Whether the run learns from its own answers."""
    objective = run.inputs.objective
    return objective is not None and "rollouts" in objective.needs


def forecast_merge(run: RunPlan) -> dict[str, int]:
    """Predict what `vox merge` of the run needs of the machine's memory."""
    model = _architecture(run)
    largest = max(info.nbytes for info in run.inputs.weights.tensors.values())
    return predict_merge(largest, trained_tensors(model, _demand(run)), model.vocabulary)


def alternatives(run: RunPlan) -> list[Option]:
    """The same run under other settings that change its memory."""
    batches = {tokens: _batch(run, tokens) for tokens in MICRO_BATCH_TOKENS}
    model, demand = _architecture(run), _demand(run)
    return options(model, demand, run.inputs.backend.manifest.memory, _quants(run), batches)


def options(
    model: Architecture,
    demand: Demand,
    profile: MemoryProfile,
    quants: Collection[Quant],
    batches: Mapping[int, WorstCase],
) -> list[Option]:
    """The grid, from what changes the numbers least to what saves most.

    Args:
        demand: everything else.
        quants: quantisations that the backend has and the model can have.
        batches: `micro_batch_tokens` -> the micro-batch that needs most.
    """
    grid = []
    for quant in sorted(quants, key=lambda quant: -weight_bytes(model, quant, demand.dtype)):
        for recompute in (False, True):
            changed = replace(demand, quant=quant, gradient_checkpointing=recompute)
            for tokens, batch in batches.items():
                peak = predict(model, replace(changed, batch=batch), profile).peak
                grid.append(Option(quant, recompute, tokens, peak))
    return grid


def fitting(grid: Iterable[Option], memory: int) -> list[Option]:
    """Return the options that leave a tenth of `memory` free."""
    return [option for option in grid if option.peak <= (1 - SPARE) * memory]


def suggest(
    grid: Sequence[Option], memory: int, quant: Quant = "none", tokens: int = 0
) -> Option | None:
    """The one to begin with in so many bytes; None if nothing fits.

    Args:
        quant: the user's, kept where it fits; `none` for no wish.
        tokens: `micro_batch_tokens` as set, kept where others are no gain.
    """
    fits = fitting(grid, memory)
    if not fits:
        return None
    first = next((option for option in fits if quant in ("none", option.quant)), fits[0])
    settings = (first.quant, first.gradient_checkpointing)
    alike = [each for each in fits if (each.quant, each.gradient_checkpointing) == settings]
    # Beyond the largest step of the data, more tokens at once change nothing.
    return max(
        alike,
        key=lambda each: (each.peak, each.micro_batch_tokens == tokens, -each.micro_batch_tokens),
    )


def refusal(run: RunPlan, seen: MemoryForecast) -> PlanError:
    """P004, with settings that fit."""
    assert seen.total is not None
    return PlanError(
        "P004",
        "the run needs more memory than the device has",
        where=run.execution.device,
        found=f"about {gigabytes(seen.prediction.peak)} predicted at the peak",
        expected=f"at most {gigabytes(round(OVERESTIMATE * seen.total))}: the device's "
        f"{gigabytes(seen.total)}{_of_each(run)}, and {OVERESTIMATE - 1:.0%} for the error of the "
        "prediction",
        remedy=f"{_way_out(run, seen)}; --allow-overcommit trains all the same",
    )


def shortage(run: RunPlan, seen: MemoryForecast) -> str | None:
    """The warning where more is predicted than is free."""
    if seen.fits is not False or seen.limit is None:
        return None
    where = f"{gigabytes(seen.limit)} {'free' if seen.free is not None else 'in all'}"
    where += _of_each(run)
    return (
        f"memory may run out: about {gigabytes(seen.prediction.peak)} at the peak, and "
        f"{run.execution.device} has {where}; {_way_out(run, seen)}; see `vox plan`"
    )


def gigabytes(size: int) -> str:
    """`1.9 GB`, of 10^9 bytes."""
    return f"{size / 1e9:.1f} GB"


def _way_out(run: RunPlan, seen: MemoryForecast) -> str:
    """Settings that fit into the free memory, or else into all of it. What a resumed run computes
    cannot change any more."""
    contract, grid = run.contract, alternatives(run)
    if not run.fresh:
        grid = [option for option in grid if _may_change_to(option, run)]
    sizes = [size for size in (seen.limit, seen.total) if size is not None]
    found = next((fit for size in sizes if (fit := suggest(grid, size, contract.quant))), None)
    if found:
        return f"this fits: {found.flags(contract.quant)} ({gigabytes(found.peak)})"
    if not run.fresh:
        return "no setting that a resumed run may change makes it fit"
    processes = run.settings.processes
    able = processes > 1 and run.inputs.backend.manifest.capabilities.sharding
    shared = "use fewer --processes, " if processes > 1 else ""
    shared += "split the base with --shard, " if able and not run.settings.shard else ""
    return (
        f"no --quant, --gradient-checkpointing or --micro-batch-tokens makes it fit: {shared}"
        f"shorten examples with --seq-len (the longest has {seen.batch.longest} tokens), or choose "
        "a smaller model"
    )


def _may_change_to(option: Option, run: RunPlan) -> bool:
    """Whether a resumed run may have these settings: they compute the same numbers."""
    plan = run.execution
    same_cut = option.micro_batch_tokens == plan.micro_batch_tokens
    drops = plan.contract.adapter.dropout > 0
    return option.quant == plan.contract.quant and (same_cut or not drops)


def _architecture(run: RunPlan) -> Architecture:
    weights = run.inputs.weights
    return read_architecture(weights.tensors, run.inputs.config, weights.quantised)


def _demand(run: RunPlan) -> Demand:
    plan = run.execution
    adapter = plan.contract.adapter
    return Demand(
        dtype=plan.dtype,
        quant=plan.contract.quant,
        method=adapter.method,
        rank=adapter.rank,
        modules=plan.modules,
        batch=_batch(run, plan.micro_batch_tokens),
        gradient_checkpointing=plan.gradient_checkpointing,
        dropout=adapter.dropout > 0,
        saved=tuple(plan.saved.values()),
        optimizer=plan.contract.optimizer.name,
        caches=_caches(run),
        copies=_copies(run),
        reference=_reference(run),
        kept=_kept(run),
        shards=run.settings.processes if run.settings.shard else 1,
    )


def _caches(run: RunPlan) -> int:
    """Bytes of the KV caches of a full batch of answers; 0 where none are sampled."""
    if not samples_answers(run):
        return 0
    rows = min(most_rows(run.inputs.selection.hardware), _answers(run))
    each = cache_bytes(run.inputs.config, run.execution.dtype) or 0
    return rows * sum(_rollout(run)) * each


def _copies(run: RunPlan) -> int:
    """Bytes of the matrices of layers and head that are packed where answers are sampled."""
    model, dtype = _architecture(run), run.execution.dtype
    if not samples_answers(run) or run.settings.shard or dtype != "bf16":
        return 0
    packed = {*model.head}
    if run.contract.quant == "none":
        packed.update(each.tensor for layer in model.layers for each in layer.linear.values())
    return BYTES[dtype] * sum(model.elements[tensor] for tensor in packed)


def _reference(run: RunPlan) -> int:
    """Bytes of the weights that score answers: the teacher's, and with the method `full` those of
    the base as it was."""
    objective, dtype, size = run.inputs.objective, run.execution.dtype, 0
    needs = objective.needs if objective else frozenset()
    if run.contract.adapter.method == "full" and {"rollouts", "reference"} <= needs:
        size += weight_bytes(_architecture(run), run.contract.quant, dtype)
    if teacher := run.inputs.teacher:
        config = json.loads((teacher.base.path / "config.json").read_bytes())
        model = read_architecture(teacher.weights.tensors, config, teacher.weights.quantised)
        size += weight_bytes(model, teacher.quant, dtype)
    return size


def _answers(run: RunPlan) -> int:
    """Answers that a step samples."""
    prompts = min(run.contract.batch_size, run.data.train.groups)
    return prompts * run.settings.rollouts


def _rollout(run: RunPlan) -> tuple[int, int]:
    """Tokens of the longest prompt, and of the longest answer to it."""
    data, limit = run.data.train, positions(run.inputs.config)
    prompt, answer = int((data.lengths_D - data.trained_D()).max()), run.settings.rollout_tokens
    return prompt, answer if limit is None else min(answer, limit - prompt)


def _batch(run: RunPlan, tokens: int) -> WorstCase:
    contract = run.contract
    if samples_answers(run):
        prompt, answer = _rollout(run)
        return rollout_batch(prompt, answer, count=_answers(run), micro_batch_tokens=tokens)
    return worst_case_batch(
        run.data.train,
        steps=contract.total_steps,
        batch_size=contract.batch_size,
        micro_batch_tokens=tokens,
        seed=contract.seed,
        packing=run.execution.packing,
    )


def _quants(run: RunPlan) -> Collection[Quant]:
    """The backend's quantisations that are possible for the model."""
    weights, config = run.inputs.weights, run.inputs.config
    if run.settings.shard:
        return {run.contract.quant}
    if weights.quant != "none":
        return {weights.quant}
    full = run.contract.adapter.method == "full"
    saved = weights.tensors if full else run.execution.saved.values()
    model_type = str(config.get("model_type"))

    def possible(quant: Quant) -> bool:
        modules = quantised_modules(weights.tensors, model_type, quant)
        whole = any(module.tensor in saved for module in modules.values())
        return not (whole or any(width_faults(quant, modules)))

    has = run.inputs.backend.manifest.capabilities.quantisations
    return tuple(quant for quant in has if quant == "none" or possible(quant))


def _device(run: RunPlan) -> Device:
    """The first, which is the one that the plan names."""
    return run.inputs.selection.hardware.devices[0]
