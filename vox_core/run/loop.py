"""Train: the steps of a run in their order, handed to the backend with a writer of checkpoints."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
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
)
from vox_core.data.batching import epochs_after, make_step_batches, validation_batches
from vox_core.errors import StorageError
from vox_core.run.artifacts import emergency_save, versions
from vox_core.run.checkpoint import BackendUse, Origin, Retention
from vox_core.run.checkpoint_writer import CheckpointWriter, Due
from vox_core.run.context import Context

if TYPE_CHECKING:
    from vox_core.run.run_plan import RunPlan
    from vox_core.run.session import Session


def run_training(session: Session) -> TrainResult:
    """Take every step, or stop on the way, and write the last checkpoint. WorkError if a step, a
    checkpoint or the backend failed."""
    plan, controller, metrics = session.plan, session.controller, session.metrics

    def emit(event: Event) -> None:
        session.emit(metrics.measured(event) if isinstance(event, StepDone) else event)

    with (
        tempfile.TemporaryDirectory(prefix="vox-") as scratch,
        contextlib.closing(_checkpoint_writer(session)) as writer,
    ):
        controller.settle = writer.settle
        context = Context(
            seed=plan.contract.seed,
            scratch=Path(scratch),
            observe=emit,
            checkpoints=writer,
            stop_requested=controller.stop_requested,
        )
        # Killed after its last step, before all was written: there is none to take.
        steps = () if session.progress.exhausted else steps_of(plan, session.start.step + 1)
        made, valid = plan.execution, plan.data.valid
        job = TrainJob(
            plan=made,
            model=plan.inputs.model.path,
            steps=iter(steps),
            start=session.start,
            validation=validation_batches(valid, made.micro_batch_tokens, made.packing)
            if valid
            else (),
        )
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
    done = (step - 1 - warmup) / max(1, total_steps - warmup)
    if spec.schedule == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr * (1 - done) if spec.schedule == "linear" else spec.lr


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
    contract, before = made.contract, session.origin
    backends = before.backends
    if not backends or backends[-1].backend != made.backend:
        first, device = session.start.step + 1, made.device
        use = BackendUse(first_step=first, backend=made.backend, device=device, dtype=made.dtype)
        backends = (*backends, use)
    origin = {
        "contract": contract.digest,
        "backends": backends,
        "seed": contract.seed,
        "elapsed": before.elapsed,
        "versions": versions(),
        "valid_digest": contract.data.valid_digest,
    }
    return CheckpointWriter(
        session.plan.run.checkpoints,
        session.emit,
        origin=Origin.model_validate(origin),
        due=Due(
            steps=settings.save_every,
            minutes=settings.save_minutes,
            epochs=settings.save_epochs,
            epoch_of=partial(epochs_after, contract.data.rows, contract.batch_size),
        ),
        retention=Retention(settings.keep, settings.keep_every),
        progress=session.progress,
    )
