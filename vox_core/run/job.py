"""What a backend is given to train: the steps in their order, and the writer of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from vox_core.contract import Step, TrainJob, TrainState
from vox_core.data.order import epochs_after, make_step_batches, validation_batches
from vox_core.run import card, checkpoint
from vox_core.run.checkpoint import Best, Retention
from vox_core.run.context import Observe
from vox_core.run.ready import Ready
from vox_core.run.schedule import learning_rate
from vox_core.run.writer import CheckpointWriter, Due


def train_job(ready: Ready, start: TrainState, enough: Callable[[], bool]) -> TrainJob:
    """The job that goes on from `start`.

    Args:
        enough: asked before the first step, whether there is to be none.
    """
    prepared, plan, valid = ready.prepared, ready.prepared.plan, ready.prepared.valid
    cut = (plan.micro_batch_tokens, plan.packing)
    return TrainJob(
        plan=plan,
        model=prepared.model.path,
        steps=_steps(ready, start.step + 1, enough),
        start=start,
        validation=validation_batches(valid, *cut) if valid else (),
    )


def is_validated(step: int, total: int, every: int) -> bool:
    """Whether a validation comes after `step` of `total`, with `--eval-every` at `every`."""
    return step == total or bool(every and not step % every)


def checkpoint_writer(
    ready: Ready,
    start: TrainState,
    observe: Observe,
    validated: Callable[[], tuple[Best | None, int]],
) -> CheckpointWriter:
    """The writer of a run that goes on from `start`; `validated` as `Policy.validated`."""
    settings, plan = ready.settings, ready.prepared.plan
    contract, checkpoints = plan.contract, ready.run.checkpoints
    return CheckpointWriter(
        checkpoints,
        observe,
        origin=replace(
            checkpoint.origin(checkpoints, start.step),
            contract=contract.digest,
            backend=plan.backend,
            seed=contract.seed,
            valid_digest=contract.data.valid_digest,
            versions=card.versions(),
        ),
        due=Due(
            steps=settings.save_every,
            minutes=settings.save_minutes,
            epochs=settings.save_epochs,
            epoch_of=partial(epochs_after, contract.data.rows, contract.batch_size),
        ),
        retention=Retention(settings.keep, settings.keep_every),
        validated=validated,
    )


def _steps(ready: Ready, first: int, enough: Callable[[], bool]) -> Iterator[Step]:
    plan, dataset = ready.prepared.plan, ready.prepared.train
    contract, every = plan.contract, ready.settings.eval_every
    total, validated = contract.total_steps, ready.prepared.valid is not None
    if enough():  # killed after its last step, before it had written all
        return
    for number in range(first, total + 1):
        batches, weight = make_step_batches(
            dataset,
            number,
            batch_size=contract.batch_size,
            micro_batch_tokens=plan.micro_batch_tokens,
            seed=contract.seed,
            packing=plan.packing,
        )
        yield Step(
            number=number,
            batches=batches,
            total_weight=weight,
            lr=learning_rate(contract.optimizer, number, total),
            evaluate=validated and is_validated(number, total, every),
            epoch=epochs_after(contract.data.rows, contract.batch_size, number),
        )
