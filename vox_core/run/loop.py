"""Train: the steps of a run in their order, handed to the backend with a writer of checkpoints."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core.contract import (
    Event,
    OptimizerSpec,
    Step,
    StepDone,
    TrainJob,
    TrainResult,
    TrainState,
)
from vox_core.data.batching import epochs_after, make_step_batches, validation_batches
from vox_core.errors import StorageError
from vox_core.run import checkpoint
from vox_core.run.artifacts import emergency_save, versions
from vox_core.run.checkpoint import BackendUse, Retention
from vox_core.run.checkpoint.writer import CheckpointWriter, Due
from vox_core.run.context import Context

if TYPE_CHECKING:
    from vox_core.run.run_plan import RunPlan
    from vox_core.run.session import Session


def run_training(session: Session) -> TrainResult:
    """Take every step, or stop on the way; the last checkpoint is written.

    Raises:
        WorkError: a step, a checkpoint or the backend failed.
    """
    plan, contract = session.plan, session.plan.contract
    metrics = session.metrics

    def emit(event: Event) -> None:
        session.emit(metrics.measured(event) if isinstance(event, StepDone) else event)

    with (
        tempfile.TemporaryDirectory(prefix="vox-") as scratch,
        contextlib.closing(_checkpoint_writer(session)) as writer,
    ):
        session.controller.settle = writer.settle
        context = Context(
            seed=contract.seed,
            scratch=Path(scratch),
            observe=emit,
            checkpoints=writer,
            stop_requested=session.controller.stop_requested,
        )
        # Killed after its last step, before all was written: there is none to take.
        steps = () if session.progress.exhausted else steps_of(plan, session.start.step + 1)
        job = _job(plan, session.start, iter(steps))
        result = plan.inputs.backend.train(job, context)
        try:
            writer.finish(result.state)
        except StorageError as error:
            raise emergency_save(error, plan, result.state) from error
    return result


def is_validated(step: int, total: int, every: int) -> bool:
    """Whether a validation comes after `step` of `total`, with `--eval-every` at `every`."""
    return step == total or bool(every and not step % every)


def learning_rate(spec: OptimizerSpec, step: int, total_steps: int) -> float:
    """The learning rate of step `step`, counted from 1.

    Warm-up takes `round(warmup * total_steps)` steps and is never zero: step 1 of 10 warm-up steps
    has a tenth of the rate. Cosine and linear reach zero after the last step, not at it, so that
    every step trains. (These are transformers' `get_scheduler` curves, started one step later.)
    """
    warmup = round(spec.warmup * total_steps)
    if step <= warmup:
        return spec.lr * step / (warmup + 1)
    return spec.lr * _shape(spec.schedule, (step - 1 - warmup) / max(1, total_steps - warmup))


def _shape(schedule: str, done: float) -> float:
    if schedule == "constant":
        return 1.0
    return 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


def _job(plan: RunPlan, start: TrainState, steps: Iterator[Step]) -> TrainJob:
    made, valid = plan.execution, plan.data.valid
    cut = (made.micro_batch_tokens, made.packing)
    return TrainJob(
        plan=made,
        model=plan.inputs.model.path,
        steps=steps,
        start=start,
        validation=validation_batches(valid, *cut) if valid else (),
    )


def steps_of(plan: RunPlan, first: int) -> Iterator[Step]:
    """The steps from `first` on."""
    made, dataset = plan.execution, plan.data.train
    contract, every = made.contract, plan.settings.eval_every
    total, validated = contract.total_steps, plan.data.valid is not None
    for number in range(first, total + 1):
        batches, weight = make_step_batches(
            dataset,
            number,
            batch_size=contract.batch_size,
            micro_batch_tokens=made.micro_batch_tokens,
            seed=contract.seed,
            packing=made.packing,
        )
        yield Step(
            number=number,
            batches=batches,
            total_weight=weight,
            lr=learning_rate(contract.optimizer, number, total),
            evaluate=validated and is_validated(number, total, every),
            epoch=epochs_after(contract.data.rows, contract.batch_size, number),
        )


def _checkpoint_writer(session: Session) -> CheckpointWriter:
    settings, made = session.plan.settings, session.plan.execution
    contract, checkpoints = made.contract, session.plan.run.checkpoints
    before, first = checkpoint.origin(checkpoints, session.start.step), session.start.step + 1
    use = BackendUse(first_step=first, backend=made.backend, device=made.device, dtype=made.dtype)
    goes_on = before.backends and before.backends[-1].backend == made.backend
    return CheckpointWriter(
        checkpoints,
        session.emit,
        origin=replace(
            before,
            contract=contract.digest,
            backends=before.backends if goes_on else (*before.backends, use),
            seed=contract.seed,
            valid_digest=contract.data.valid_digest,
            versions=versions(),
        ),
        due=Due(
            steps=settings.save_every,
            minutes=settings.save_minutes,
            epochs=settings.save_epochs,
            epoch_of=partial(epochs_after, contract.data.rows, contract.batch_size),
        ),
        retention=Retention(settings.keep, settings.keep_every),
        progress=session.progress,
    )
