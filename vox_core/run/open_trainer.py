"""`vox.open_trainer`: a trainer for a loop of one's own.

`forward_backward` adds gradients, `optim_step` applies them; scores and samples are those of the
adapter as it is now.

own_documents.py has the rows, documents and samples, and what an objective is given as.

Shape legend: T tokens of a batch, K trained positions of a document.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from vox_core import files, models
from vox_core.config import GenerateSettings, TrainSettings, in_python, require_keywords, validate
from vox_core.contract import (
    Batch,
    DataIdentity,
    ExecutionPlan,
    Floats,
    ModelIdentity,
    Notice,
    Objective,
    Trainer,
    TrainJob,
    TrainState,
    Update,
)
from vox_core.data.batching import cut_groups
from vox_core.data.encode import Encoder
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import BackendError, ConfigError, PlanError
from vox_core.host.load import Context, Observe, ignore
from vox_core.models import identity
from vox_core.run import checkpoint
from vox_core.run.artifacts import versions, write_adapter_folder
from vox_core.run.generate import Generator
from vox_core.run.hf_checkpoint import first_state
from vox_core.run.inputs import RunInputs, build_datasets, read_inputs
from vox_core.run.learner import NAME, micro_batch_seed
from vox_core.run.load import OpenModel, batch_generator
from vox_core.run.own_documents import (
    Documents,
    Given,
    OwnObjective,
    Sample,
    documents_of,
    objective_named,
    probe,
    require_readable,
    with_samples,
)
from vox_core.run.plan import make_plan, positions, vocabulary_size
from vox_core.run.start import REFERENCE, find_adapter, require_same_adapter, starting_adapter
from vox_core.run.weighing import Groups, totals_of, weigh, weighted

if TYPE_CHECKING:
    from vox_core.data import encode


SETTINGS = (
    "model", "revision", "template", "backend", "dtype", "quant", "adapter", "method", "rank",
    "alpha", "dropout", "targets", "modules_to_save", "seq_len", "micro_batch_tokens",
    "gradient_checkpointing", "optimizer", "lr", "weight_decay", "clip", "seed", "allow_cpu",
)  # fmt: skip
"""Settings of `[train]` that mean something without data and schedule."""

LEAST = 1e-38
"""Smaller numbers may be 0 in float32."""
Prompts: TypeAlias = "str | Sequence[str | Sequence[Mapping[str, str]]]"


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBase:
    """A base in memory that learners share.

    Args:
        plan: of a learner with these settings.
        groups: numbers the prompts of all samples.
        learners: names of those that are open, and of the adapter to compare with.
    """

    settings: TrainSettings
    inputs: RunInputs
    plan: ExecutionPlan
    trainer: Trainer
    encoder: Encoder
    generator: Generator
    groups: Iterator[int] = field(default_factory=itertools.count)
    learners: set[str] = field(default_factory=lambda: {NAME, REFERENCE})

    def plan_with(self, **changed: Any) -> ExecutionPlan:
        """Plan a learner whose adapter has other settings, such as `rank`, `targets` or `seed`.

        Raises:
            ConfigError: a setting is not valid.
            PlanError: the base cannot be trained so.
        """
        given = {name: getattr(self.settings, name) for name in self.settings.model_fields_set}
        chosen = validate(TrainSettings, {**given, **changed})
        return _planned(chosen, self.inputs, self.plan.contract.model)

    def write_adapter(self, folder: Path, plan: ExecutionPlan, state: TrainState) -> None:
        """Write an adapter to an empty folder, in files that vox and PEFT load."""
        write_adapter_folder(folder, self.inputs, plan, state)

    def save_state(self, folder: Path, plan: ExecutionPlan, state: TrainState) -> Path:
        """Write adapter, optimizer state and step to `folder/step-N`."""
        contract, made_with = plan.contract, versions(self.inputs.backend)
        about = {"contract": contract.digest, "seed": contract.seed, "versions": made_with}
        return checkpoint.save(folder, state, checkpoint.Origin.model_validate(about))


class OpenTrainer:
    """A learner, and the model that it may share with others.

    Attributes:
        step: number of calls of `optim_step`.
        close: frees the memory; a second call does nothing.
    """

    def __init__(
        self, shared: TrainingBase, name: str, seed: int, close: Callable[[], None]
    ) -> None:
        self._plan = replace(shared.plan, contract=replace(shared.plan.contract, seed=seed))
        self._shared, self._name, self.close = shared, name, close
        self._trainer = shared.trainer
        self._add(first_state(self._plan, shared.inputs))

    @in_python
    def forward_backward(
        self,
        documents: Documents,
        objective: OwnObjective = "sft",
        *,
        weights: Sequence[float | Floats] | None = None,
        rewards: Sequence[float] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> Gradients:
        """Add the gradients of some documents.

        Args:
            documents: rows as in a data file, or `Document`s, such as those of `sample`.
            objective: `sft`, the name of a plugin's objective, an `Objective`, or a function from
                the log-probabilities of all documents, (K,) each, to the weights of their tokens.
            weights: for each document a factor of its weights, or an array (K,) of weights. The
                gradient is that of `-sum(weights * log_probs)`.
            rewards: of samples, for an objective that learns from rollouts.
            options: of an objective named.

        Raises:
            DataError: rows or documents cannot be trained on.
            WorkError: the backend failed; all gradients since the last step are forgotten.
        """
        chosen = objective_named(objective, weights, options or {})
        batches, places = self._cut(documents_of(documents, chosen, self._shared.encoder))
        groups = with_samples(places, documents, chosen, rewards)
        return self._gradients.add(batches, groups, chosen, self.step + 1)

    @in_python
    def optim_step(
        self,
        lr: float | None = None,
        *,
        weight_decay: float | None = None,
        clip: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        total_weight: float | None = None,
    ) -> float:
        """Apply the gradients with AdamW; settings left out are those of `open_trainer`.

        Args:
            total_weight: divides the gradients. By default the sum of all weights in supervised
                training, and 1 otherwise.

        Returns:
            The gradient norm before clipping. If it is not finite, nothing was changed.

        Raises:
            ConfigError: C002, a number is out of its range; C004, there are no gradients.
        """
        spec, norm, (beta1, beta2) = self._plan.contract.optimizer, math.nan, betas
        given = {"lr": lr, "weight_decay": weight_decay, "clip": clip}
        chosen = {name: getattr(spec, name) if n is None else n for name, n in given.items()}
        number, total = self.step - self._skipped + 1, self._gradients.total_weight(total_weight)
        update = Update(number, total_weight=total, beta1=beta1, beta2=beta2, eps=eps, **chosen)
        for name, each in asdict(update).items():
            least = LEAST if name in ("eps", "total_weight") else 0
            most = 1 if name.startswith("beta") else math.inf
            if not least <= each < most:
                what, where = f"AdamW cannot step with {name}={each:g}", "optim_step"
                remedy = f"give a number from {least:g} up, below {most:g}"
                raise ConfigError("C002", what, where=where, remedy=remedy)
        if self._gradients.finite:
            norm = self._trainer.update(update, self._name)
        else:
            self._trainer.discard(self._name)
        self.step += 1
        self._skipped += not math.isfinite(norm)
        self._begin_step()
        return norm

    @in_python
    def log_probs(self, documents: Documents, *, base: bool = False) -> list[Floats]:
        """Return the log-probabilities of each document's trained tokens, float32 (K,).

        Args:
            base: of the base model, without the adapter.
        """
        batches, groups = self._cut(documents_of(documents, None, self._shared.encoder))
        adapter = None if base else self._name
        scores = [self._trainer.log_probs(batch, adapter) for batch in batches]
        return by_document(batches, groups, scores)

    @in_python
    def sample(
        self,
        prompts: Prompts,
        n: int = 1,
        *,
        base: bool = False,
        seed: int | None = None,
        **sampling: Any,
    ) -> list[Sample]:
        """Sample `n` completions of each prompt in one batch; those of a prompt are neighbours.

        Args:
            prompts: a text or several, or conversations.
            base: from the base model, without the adapter.
            seed: by default another one in each call.
            sampling: settings of `[generate]`, such as `max_tokens`; the temperature is 1 unless
                given.

        Raises:
            DataError: a prompt cannot be rendered, or is too long.
        """
        shared, adapter = self._shared, None if base else self._name
        if seed is None:
            self._samplings += 1
            seed = micro_batch_seed(self._plan.contract.seed, self.step, -self._samplings)
        require_keywords(GenerateSettings, sampling, loaded=True)
        said = {"temperature": 1.0, **sampling, "seed": seed, "n": n}
        chosen, tokenizer = validate(GenerateSettings, said), shared.encoder.tokenizer
        limit = positions(shared.inputs.config)
        model = OpenModel("", shared.generator, tokenizer, chosen, adapter=adapter, positions=limit)
        asked = [prompts] if isinstance(prompts, str) else [*prompts]
        questions = [
            model.question([{"role": "user", "content": p}] if isinstance(p, str) else p, row)
            for row, p in enumerate(each for each in asked for _ in range(chosen.n))
        ]
        groups = [next(shared.groups) for _ in asked]
        found = dict(model.replies(questions, log_probs=True))
        return [
            Sample.of(question.tokens, found[row], groups[row // chosen.n])
            for row, question in enumerate(questions)
        ]

    # --- learners and files -----------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """The adapter and its optimizer state, float32."""
        return replace(self._trainer.state(self._name), step=self.step, skipped=self._skipped)

    def add(self, name: str, *, seed: int | None = None) -> OpenTrainer:
        """Add another learner on the same base, with the same settings.

        Args:
            seed: of its adapter weights, dropout and samples; by default that of this learner.

        Raises:
            ConfigError: C002, there is one of this name.
            BackendError: B002, the backend has one learner at a time.
        """
        shared = self._shared
        if name in shared.learners:
            what, remedy = f"the name {name!r} is taken", "choose another one"
            raise ConfigError("C002", what, where="add", remedy=remedy)
        if not shared.inputs.backend.manifest.capabilities.learners:
            what = f"backend {shared.plan.backend!r} has one learner at a time"
            remedy = "open a second trainer, or choose a backend with the capability `learners`"
            raise BackendError("B002", what, where="add", remedy=remedy)
        stack = ExitStack()
        seed = self._plan.contract.seed if seed is None else seed
        made = OpenTrainer(shared, name, seed, stack.close)
        stack.callback(self._trainer.remove_learner, name)
        shared.learners.add(name)
        stack.callback(shared.learners.remove, name)
        return made

    @in_python
    def save(self, path: str | Path) -> Path:
        """Write the adapter to a new folder that vox and PEFT load.

        Raises:
            OutputError: O001, the path exists.
        """
        files.require_absent(Path(path), "save to another path, or remove this one first")
        with files.atomic_folder(Path(path)) as folder:
            self._shared.write_adapter(folder, self._plan, self.state)
        return Path(path)

    @in_python
    def load(self, reference: str | Path) -> None:
        """Replace the adapter by another of the same base and settings; AdamW starts anew.

        Raises:
            AdapterError: there is none, or it belongs to another base.
            ConfigError: its settings differ.
        """
        _, adapter = find_adapter(str(reference), base=str(self._shared.inputs.model.path))
        require_same_adapter(adapter, self._plan, reference)
        self._replace(TrainState(0, adapter))

    @in_python
    def save_state(self, folder: str | Path) -> Path:
        """Write adapter, optimizer state and step to `folder/step-N`; gradients are not kept."""
        return self._shared.save_state(Path(folder), self._plan, self.state)

    @in_python
    def load_state(self, folder: str | Path) -> None:
        """Go on from the newest state that `save_state` wrote to `folder`.

        Raises:
            PlanError: P003, there is none, or it is one of other settings.
        """
        state, _ = checkpoint.load_newest(Path(folder))
        found = checkpoint.origin(Path(folder), state.step).contract
        if found != self._plan.contract.digest:
            raise PlanError(
                "P003",
                "the state belongs to other settings",
                where=folder,
                found=f"{found[:12]}…",
                expected=f"{self._plan.contract.digest[:12]}…, the digest of these settings",
                remedy="open the trainer with the settings that it was saved with",
            )
        self._replace(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, state: TrainState) -> None:
        self._trainer.add_learner(self._name, state)
        self.step, self._skipped = state.step, state.skipped
        self._begin_step()

    def _begin_step(self) -> None:
        reference = REFERENCE if self._shared.inputs.start else None
        seed = self._plan.contract.seed
        self._gradients = Pending(self._trainer, self._name, seed, reference)
        self._samplings = 0

    def _replace(self, state: TrainState) -> None:
        self._trainer.remove_learner(self._name)
        self._add(state)

    def _cut(self, documents: Sequence[encode.Document]) -> tuple[Sequence[Batch], Groups]:
        inputs = self._shared.inputs
        vocabulary = vocabulary_size(inputs.config, inputs.weights.tensors)
        require_readable(documents, positions(inputs.config), vocabulary)
        return cut_groups(documents, self._plan.micro_batch_tokens, self._plan.packing)


def open_trainer(
    settings: TrainSettings, *, observe: Observe = ignore, progress: models.Progress | None = None
) -> OpenTrainer:
    """Load a model to train; close the result. See `open_training_base`."""
    with ExitStack() as stack:
        base = stack.enter_context(open_training_base(settings, observe, progress))
        made = OpenTrainer(base, NAME, base.plan.contract.seed, stack.close)
        if base.inputs.start:
            base.trainer.add_adapter(REFERENCE, base.inputs.start.adapter)
        made.close = stack.pop_all().close
    return made


@contextmanager
def open_training_base(
    settings: TrainSettings, observe: Observe = ignore, progress: models.Progress | None = None
) -> Iterator[TrainingBase]:
    """Load a model that learners are added to, for as long as the block lasts.

    Args:
        settings: those named in `SETTINGS` count.

    Raises:
        InputError: the model or the adapter cannot be had, no installed backend can train it, or
            the method is `full`.
    """
    given = {name: getattr(settings, name) for name in settings.model_fields_set & {*SETTINGS}}
    chosen = validate(TrainSettings, given)
    if chosen.method == "full":
        what = "a loop of one's own trains adapters, and not the method full"
        remedy = "use lora, rslora or dora, or vox.train(method='full')"
        raise ConfigError("C004", what, where="vox.open_trainer", remedy=remedy)
    start = starting_adapter(chosen, progress)
    chosen = start.adopted(chosen) if start else chosen
    inputs = read_inputs(chosen, None, progress, only_planned=True, start=start)
    observe(Notice(inputs.selection.why))
    plan = _planned(chosen, inputs, identity(inputs.model))
    if start:
        require_same_adapter(start.adapter, plan, start.name)
    encoder = Encoder(load_tokenizer(inputs.model.tokenizer), inputs.seq_len)
    job = TrainJob(plan, inputs.model.path, probe(encoder))
    hardware = inputs.selection.hardware
    with (
        closing(inputs.backend.train(job, Context(observe))) as trainer,
        closing(
            batch_generator(trainer, inputs.config, plan.dtype, hardware, inputs.weights)
        ) as generator,
    ):
        yield TrainingBase(chosen, inputs, plan, trainer, encoder, generator)


def _planned(settings: TrainSettings, inputs: RunInputs, model: ModelIdentity) -> ExecutionPlan:
    """Return the plan of a learner without data and schedule."""
    plan = make_plan(settings, inputs, build_datasets(settings, inputs), model)
    contract = replace(plan.contract, data=DataIdentity("", 0, 0, 0), total_steps=0)
    return replace(plan, contract=contract)


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """The result of `forward_backward`.

    Args:
        loss: of these documents: the weighted mean of the negative log-likelihood, or what the
            objective computes.
        log_probs: of each document, float32 (K,), before the update.
        metrics: of the objective.
    """

    loss: float
    log_probs: list[Floats]
    metrics: Mapping[str, float] = field(default_factory=dict)


class Pending:
    """The gradients of one learner since its last step.

    Args:
        reference: adapter that an objective compares with; None: the base.

    Attributes:
        finite: whether every loss was.
    """

    def __init__(self, trainer: Trainer, name: str, seed: int, reference: str | None) -> None:
        self._trainer, self._name, self._seed, self._reference = trainer, name, seed, reference
        self._clear()

    def _clear(self) -> None:
        self.finite: bool = True
        self._micro_batches: int = 0
        self._supervised: float = 0.0
        self._kinds: set[bool] = set()

    def add(
        self, batches: Sequence[Batch], groups: Groups, objective: Objective | None, step: int
    ) -> Gradients:
        """Accumulate the gradients of some documents; an error discards those of the whole step."""
        first = self._micro_batches
        self._micro_batches += len(batches)
        seeds = [micro_batch_seed(self._seed, step, n) for n in range(first, self._micro_batches)]
        self._kinds.add(objective is None)
        try:
            if objective is None or isinstance(objective, Given):
                made = self._in_one_pass(batches, groups, objective, seeds)
            else:
                made = self._in_two_passes(batches, groups, objective, seeds)
        except BaseException:
            self._clear()  # first: a closed trainer refuses the second
            self._trainer.discard(self._name)
            raise
        self.finite = self.finite and math.isfinite(made.loss)
        return made

    def total_weight(self, given: float | None) -> float:
        """Return what divides the gradients.

        Raises:
            ConfigError: C004, there are none, or of two kinds without a divisor given.
        """
        if not self._kinds:
            what = "there are no gradients to apply"
            remedy = "call forward_backward before each optim_step"
            raise ConfigError("C004", what, where="optim_step", remedy=remedy)
        if given is None and len(self._kinds) > 1:
            raise ConfigError(
                "C004",
                "supervised gradients are divided by their weights, others are not",
                where="optim_step",
                found="both since the last step",
                remedy="give total_weight, or call optim_step between them",
            )
        return given if given is not None else self._supervised if True in self._kinds else 1.0

    def _in_one_pass(
        self,
        batches: Sequence[Batch],
        groups: Groups,
        objective: Given | None,
        seeds: Sequence[int],
    ) -> Gradients:
        """With weights that do not depend on the log-probabilities."""
        weights = [batch.weights_T for batch in batches]
        if objective is not None:
            nothing = [0 * weights_T for weights_T in weights]
            totals = totals_of(batches, groups)
            weights = list(weigh(objective, batches, groups, nothing, totals).weights)
        total = sum(float(weights_T.astype(float).sum()) for weights_T in weights)
        if objective is None and total <= 0:
            raise ConfigError(
                "C002",
                "supervised gradients are divided by the sum of the weights",
                where="forward_backward",
                found=f"documents whose weights add up to {total:g}",
                expected="a sum above 0",
                remedy="to make tokens less likely, give weights= with negative numbers",
            )
        scores, loss = [], 0.0
        for batch, weights_T, seed in zip(batches, weights, seeds, strict=True):
            changed = replace(batch, weights_T=weights_T)
            scores.append(
                self._trainer.accumulate(changed, seed, self._name)
                if weights_T.any()
                else self._trainer.log_probs(changed, self._name, seed)
            )
            loss -= float((weights_T.astype(float) * scores[-1]).sum())
        if objective is None:
            self._supervised += total
            loss /= total
        return Gradients(loss, by_document(batches, groups, scores))

    def _in_two_passes(
        self, batches: Sequence[Batch], groups: Groups, objective: Objective, seeds: Sequence[int]
    ) -> Gradients:
        scores = [
            self._trainer.log_probs(batch, self._name, seed)
            for batch, seed in zip(batches, seeds, strict=True)
        ]
        if "reference" in objective.needs:  # the base, or the adapter that training started from
            theirs = [self._trainer.log_probs(batch, self._reference) for batch in batches]
            found = iter(by_document(batches, groups, theirs))
            groups = [
                [replace(each, reference_K=next(found)) for each in group] for group in groups
            ]
        outcome = weigh(objective, batches, groups, scores, totals_of(batches, groups))
        for batch, weights_T, seed in zip(batches, outcome.weights, seeds, strict=True):
            if weights_T.any():
                self._trainer.accumulate(weighted(batch, weights_T), seed, self._name)
        return Gradients(outcome.loss, by_document(batches, groups, scores), outcome.metrics)


def by_document(batches: Sequence[Batch], groups: Groups, scores: Sequence[Floats]) -> list[Floats]:
    """Return the log-probabilities at each document's trained positions, in order."""
    return [
        scores[place.batch][place.extent][batches[place.batch].weights_T[place.extent] != 0]
        for group in groups
        for place in group
    ]
