"""The loop of `vox train`: steps in their order, validations, checkpoints, and the wish to stop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

from vox_core.contract import (
    Evaluation,
    ExecutionPlan,
    LoadJob,
    Model,
    Notice,
    ObjectiveMetrics,
    OptimizerSpec,
    Step,
    StepDone,
    Trainer,
    TrainJob,
    TrainState,
    Validation,
    probe_document,
)
from vox_core.data.batching import (
    StepBatches,
    ValidationBatches,
    cut,
    cut_groups,
    documents_in_step,
    epochs_after,
)
from vox_core.data.rows import learns_from_answers
from vox_core.errors import StorageError, TrainingError, WorkError, command
from vox_core.host.load import Context
from vox_core.run.artifacts import emergency_save, versions
from vox_core.run.checkpoint import BackendUse, CheckpointWriter, NoCheckpoints, Origin
from vox_core.run.folder import EVALUATIONS
from vox_core.run.learner import NAME, Learner, Untouched, before_update, facts_of, require_same
from vox_core.run.load import open_trained
from vox_core.run.rollouts import Rollouts, Scorer, take_old_log_probs
from vox_core.run.start import REFERENCE
from vox_core.run.weighing import Scores, scores_of, total_weight

if TYPE_CHECKING:
    from vox_core.data.dataset import Dataset
    from vox_core.run.run_plan import RunPlan
    from vox_core.run.session import Session


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The state after the last step taken.

    Args:
        stopped: more steps were planned.
        trainer: open as long as the context.
        learner: the name of the state's adapter in it.
    """

    state: TrainState
    stopped: bool
    trainer: Trainer
    learner: str


@contextlib.contextmanager
def run_training(session: Session) -> Iterator[Trained]:
    """Take every step, or stop on the way, and write the last checkpoint.

    The trainer is open within the context: the state may be views of its memory.

    Raises:
        WorkError: a step, a checkpoint or the backend failed.
    """
    with contextlib.closing(_checkpoint_writer(session)) as writer:
        session.controller.settle = writer.settle
        with _take_steps(session, writer) as trained:
            try:
                writer.finish(trained.state)
            except StorageError as error:
                raise emergency_save(error, session.plan, trained.state) from error
            yield trained


@contextlib.contextmanager
def _take_steps(session: Session, writer: CheckpointWriter) -> Iterator[Trained]:
    plan, start = session.plan, session.start
    contract, inputs = plan.contract, plan.inputs

    dtype, updates = plan.execution.dtype, plan.settings.updates
    check = partial(take_old_log_probs, dtype=dtype, updates=updates)
    context = Context(session.emit, session.world)
    # A run that was killed after its last step has none left, and is only written.
    first = next(steps_of(plan, min(start.step + 1, contract.total_steps)))
    document = probe_document(first.batches)
    session.emit(Notice("loading the model …"))
    job = TrainJob(plan.execution, inputs.model.path, document, plan.settings.shard)
    with contextlib.closing(inputs.backend.train(job, context)) as trainer:
        if len(first.batches) < session.world.size and not plan.settings.reward:
            tokens = sum(batch.tokens_T.size for batch in first.batches)
            text = f"step {first.number} has micro-batches for {len(first.batches)} of "
            text += f"{session.world.size} processes: lower --micro-batch-tokens, for example to "
            session.emit(Notice(text + f"{tokens // session.world.size}", "warning"))
        require_same(trainer, session.world, partial(facts_of, plan, start))
        learner = Learner(
            trainer,
            start,
            contract.optimizer,
            contract.seed,
            objective=inputs.objective,
            one_pass=inputs.backend.manifest.capabilities.one_pass,
            check=check if learns_from_answers(inputs.objective) else None,
            world=session.world,
        )
        with _source(plan, trainer, context) as source:
            try:
                evaluate = partial(_evaluate, session, writer, trainer, learner)
                stopped = _follow(session, writer, learner, source, evaluate)
            except (Untouched, WorkError) as error:
                if error.before_update and _at_boundary(plan, learner.step):
                    with contextlib.suppress(WorkError):  # the first error is the one to report
                        writer.submit(learner.state())
                raise
        unfinished = stopped and learner.step < contract.total_steps
        yield Trained(learner.state(), unfinished, trainer, NAME)


def _follow(
    session: Session,
    writer: CheckpointWriter,
    learner: Learner,
    source: StepSource,
    evaluate: Callable[[Callable[[], bool]], None],
) -> bool:
    """Take the steps, with validations, checkpoints and evaluations; return whether the run was
    stopped.

    The state after a step is complete, with all its events sent, before the next one begins; an
    interrupt or an error before that step's update keeps it. Time alone ends a run only after a
    step, so that a run that is started again goes on.
    """
    plan = session.plan

    def validate() -> None:
        with before_update():  # an error or an interrupt keeps the state
            validation = source.validation(learner)
        session.emit(validation)

    if _is_unvalidated(session, learner.step):
        validate()
    evaluate(session.signalled)  # after a kill, completes what is there
    # Early stopping by the validation that a kill had interrupted.
    if session.progress.exhausted or learner.any_of(session.signalled):
        return True
    session.metrics.begin()
    for step in steps_of(plan, learner.step + 1, source):
        done = learner.take(step)
        if measured := {**source.metrics, **learner.metrics}:
            session.emit(ObjectiveMetrics(step.number, measured))
        session.emit(session.metrics.measured(done) if isinstance(done, StepDone) else done)
        if not _at_boundary(plan, learner.step):
            continue  # neither validated nor kept: a run cannot go on from here
        if step.evaluate:
            validate()
        # The last checkpoint is written when all is done, its evaluation included.
        if writer.due(learner.step) and learner.step < plan.contract.total_steps:
            writer.submit(learner.state())
        evaluate(session.interrupted)
        if learner.any_of(session.stop_requested):
            return True
    return False


def _evaluate(
    session: Session,
    writer: CheckpointWriter,
    trainer: Trainer,
    learner: Learner,
    stop: Callable[[], bool],
) -> None:
    """Evaluate the model as it is now, if it is due after this step; `stop` ends it. An interrupt
    or a failure leaves a checkpoint."""
    plan, step = session.plan, learner.step
    evaluator, total = plan.inputs.evaluator, plan.contract.total_steps
    due = step == 0 or is_validated(step, total, plan.settings.eval_every)
    if evaluator is None or not due or not session.world.leads:
        return
    state, folder = learner.state(), plan.run.path / EVALUATIONS / f"step-{step}"
    try:
        with open_trained(plan.inputs, plan.execution, trainer, state.adapter, step) as model:
            scores = evaluator.evaluate(model, folder, session.emit, stop)
    except BaseException:
        if step:
            with contextlib.suppress(WorkError):  # the first error is the one to report
                writer.submit(state)
        raise
    if scores is not None:
        named = {f"eval/{task}": score for task, score in scores.items()}
        session.emit(Evaluation(step, named, str(folder)))


def _is_unvalidated(session: Session, step: int) -> bool:
    plan = session.plan
    due = step == 0 or is_validated(step, plan.contract.total_steps, plan.settings.eval_every)
    known = {validated for validated, _ in session.progress.validations}
    return plan.data.valid is not None and due and step not in known


def _at_boundary(plan: RunPlan, step: int) -> bool:
    """Whether a run can go on from the state after `step`: it has no answers left to learn from."""
    return step % plan.settings.updates == 0


def is_validated(step: int, total: int, every: int) -> bool:
    """Whether a validation comes after `step` of `total`, with `--eval-every` at `every`."""
    return step == total or bool(every and not step % every)


def learning_rate(spec: OptimizerSpec, step: int, total_steps: int) -> float:
    """The learning rate of step `step`, counted from 1.

    Curves are those of transformers, one step later: warm-up takes `round(warmup * total_steps)`
    steps and begins above zero, and all but constant reach zero after the last step, so that every
    step trains. `wsd` (arXiv:2404.06395) falls linearly in the last fifth of all steps.
    """
    warmup = round(spec.warmup * total_steps)
    if step <= warmup:
        return spec.lr * step / (warmup + 1)
    if spec.schedule == "wsd":
        return spec.lr * min(1.0, (total_steps + 1 - step) / max(1, round(0.2 * total_steps)))
    done = (step - 1 - warmup) / max(1, total_steps - warmup)
    if spec.schedule == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr * (1 - done) if spec.schedule == "linear" else spec.lr


def steps_of(plan: RunPlan, first: int, source: StepSource | None = None) -> Iterator[Step]:
    """The steps from `first` on.

    Args:
        source: of their batches; None: the documents, without what an objective compares them with.
    """
    contract, every = plan.contract, plan.settings.eval_every
    total, validated = contract.total_steps, plan.data.valid is not None
    source = source or Documents(plan)
    for number in range(first, total + 1):
        with before_update():
            batches, weight, groups = source.batches(number)
        yield Step(
            number=number,
            batches=batches,
            total_weight=weight,
            lr=learning_rate(contract.optimizer, number, total),
            evaluate=validated and is_validated(number, total, every),
            groups=groups,
        )


StepSource: TypeAlias = "Documents | Rollouts"
"""Source of a run's batches: its documents, or the model's own answers."""


class Documents:
    """Batches of a run's documents.

    Args:
        train, valid: scores; None if no objective needs them, or the batches are only looked at.
    """

    def __init__(
        self, plan: RunPlan, train: Scores | None = None, valid: Scores | None = None
    ) -> None:
        self._plan, self._train, self._valid = plan, train, valid
        self.metrics: Mapping[str, float] = {}

    def batches(self, number: int) -> StepBatches:
        """Return batches, total weight and groups of the step `number`."""
        made, contract, dataset = self._plan.execution, self._plan.contract, self._plan.data.train
        chosen = documents_in_step(dataset, contract.batch_size, contract.seed, number).tolist()
        if self._plan.inputs.objective is None:
            documents = [dataset[index] for index in chosen]
            return *cut(documents, made.micro_batch_tokens, made.packing), ()
        return _compared(made, dataset, chosen, self._train)

    def validation(self, learner: Learner) -> Validation:
        """Measure the learner on the validation rows."""
        made, valid = self._plan.execution, self._plan.data.valid
        assert valid is not None
        if self._plan.inputs.objective is None:
            batches = ValidationBatches(valid, made.micro_batch_tokens, made.packing)
            return Validation(learner.step, learner.evaluate(batches))
        parts, _, groups = _compared(made, valid, range(len(valid)), self._valid)
        return Validation(learner.step, learner.evaluate(parts, groups))


def _compared(
    made: ExecutionPlan, dataset: Dataset, chosen: Sequence[int], scores: Scores | None
) -> StepBatches:
    batches, groups = cut_groups(
        [dataset[index] for index in chosen],
        made.micro_batch_tokens,
        made.packing,
        scores.log_probs(chosen) if scores else (),
        scores.targets(chosen) if scores else (),
    )
    return batches, total_weight(batches), groups


@contextlib.contextmanager
def _source(plan: RunPlan, trainer: Trainer, context: Context) -> Iterator[StepSource]:
    needs = plan.inputs.objective.needs if plan.inputs.objective else frozenset()
    compared = bool(needs & {"reference", "teacher"})
    if "rollouts" not in needs:
        yield Documents(plan, *(_scores(plan, trainer, context) if compared else ()))
        return
    with contextlib.ExitStack() as stack:
        reference: Scorer | None = None
        if compared:
            model = stack.enter_context(_compared_with(plan, trainer, context))
            if adapter := plan.inputs.reference_adapter:
                model.add_adapter(REFERENCE, adapter)
            reference = partial(model.log_probs, adapter=REFERENCE if adapter else None)
        for _, reward in plan.inputs.rewards:
            stack.callback(reward.close)
        yield Rollouts(plan, trainer, reference, context.world)


def _scores(plan: RunPlan, trainer: Trainer, context: Context) -> list[Scores]:
    """Score the documents with a model that is freed then."""
    with contextlib.ExitStack() as stack:

        @cache
        def opened() -> Model:
            return stack.enter_context(_compared_with(plan, trainer, context))

        both = filter(None, (plan.data.train, plan.data.valid))
        return [scores_of(plan, dataset, opened, context.emit) for dataset in both]


def _compared_with(
    plan: RunPlan, trainer: Trainer, context: Context
) -> contextlib.AbstractContextManager[Model]:
    """Open the model that the learner is compared with: the teacher, or the base, which the trainer
    has unless the base itself learns."""
    inputs, dtype = plan.inputs, plan.execution.dtype
    if teacher := inputs.teacher:
        job = LoadJob(teacher.base.path, dtype, teacher.quant)
    elif plan.contract.adapter.method == "full":
        job = LoadJob(inputs.model.path, dtype, inputs.quant)
    else:
        return contextlib.nullcontext(trainer)
    try:
        return contextlib.closing(plan.inputs.backend.load(job, context))
    except TrainingError as error:
        resume = command("vox", "train", "--resume", plan.run.path)
        remedy = f"free memory and resume with {resume}, or use smaller models"
        raise error.but(what=f"{error.what} (for a second model)", remedy=remedy) from error


def _checkpoint_writer(session: Session) -> CheckpointWriter:
    settings, made = session.plan.settings, session.plan.execution
    if not session.world.leads:
        return NoCheckpoints(session.plan.run.checkpoints, session.emit, settings)
    contract, before = made.contract, session.origin
    backends = before.backends
    if not backends or backends[-1].backend != made.backend:
        first, device = session.start.step + 1, made.device
        use = BackendUse(first_step=first, backend=made.backend, device=device, dtype=made.dtype)
        backends = (*backends, use)
    origin = Origin(
        contract=contract.digest,
        backends=backends,
        seed=contract.seed,
        elapsed=before.elapsed,
        versions=versions(session.plan.inputs.backend),
        validated=contract.validated,
    )

    def epoch_of(step: int) -> float:  # several updates on the same answers count once
        return epochs_after(contract.data.rows, contract.batch_size, step) / settings.updates

    return CheckpointWriter(
        session.plan.run.checkpoints,
        session.emit,
        settings,
        origin=origin,
        progress=session.progress,
        epoch_of=epoch_of,
    )
