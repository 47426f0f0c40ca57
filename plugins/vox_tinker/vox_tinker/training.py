"""A training client's learner: gradients, steps, and its saved weights.

A datum has N input tokens and N targets. Its document in a batch is the inputs and the last target,
so that a batch of shifted tokens is the one that `vox train` makes of the same document, and the
numbers are the same bit for bit. Every target is scored, whatever its weight.

Every method runs on the engine's thread.

Shape legend: T positions of a batch, N of a datum; with several targets of a position, these stand
for two dimensions.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from tinker import types

from vox_core.api.files import write_json
from vox_core.api.models import linear_modules, positions
from vox_core.api.plans import Document, has_tied_head, seeded, vocabulary_size
from vox_core.api.runs import PLAN, RunFolder, locked
from vox_core.api.training import Telemetry, cut_groups, load_newest, micro_batch_seed
from vox_core.contract import Batch, Place, RunEnd, RunStart, StepDone, TrainState, Update
from vox_tinker.checkpoints import STATE, Shape
from vox_tinker.futures import Answer, Refused
from vox_tinker.losses import Loss, loss_named, weighed
from vox_tinker.wire import Example, Pass, pass_answer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.api.training import TrainingBase
    from vox_core.contract import ExecutionPlan, Floats
    from vox_tinker.engine import Call

REPEAT_SECONDS = 60.0
"""Work that is computed again, at most, after the server was killed."""
T = TypeVar("T")
Passing: TypeAlias = "Generator[Call, Floats, T]"
"""`vox_tinker.engine.Steps` with a result."""
_HEADS = ("lm_head", "embed_out", "output")


@dataclass(slots=True)
class Gradients:
    """Statistics of the gradients since the last step.

    Args:
        weighted: their weights are those of a negative log-likelihood, none below zero.
        failed: why they cannot be applied, whatever passes follow: the SDK sends a large batch as
            several requests.
    """

    passes: int = 0
    micro_batches: int = 0
    loss: float = 0.0
    weight: float = 0.0
    weighted: bool = True
    tokens: int = 0
    trained: int = 0
    seconds: float = 0.0
    failed: str = ""


class Training:
    """A learner on a base.

    Args:
        name: of the learner, and of the run.
        folder: of the run; it is made.
        state: to go on from; None: a new adapter.
    """

    def __init__(
        self,
        base: TrainingBase,
        name: str,
        folder: Path,
        shape: Shape,
        state: TrainState | None = None,
    ) -> None:
        self._base, self._name, self.folder = base, name, folder
        self.plan = planned(base, shape)
        self._unsaved = 0.0 if state is None else math.inf  # the saved weights may be deleted
        begin = state or TrainState(0, seeded(self.plan, base.inputs.weights))
        with ExitStack() as stack:
            stack.enter_context(locked(RunFolder(folder)))
            self._begin(begin)
            self._stack = stack.pop_all()

    def _begin(self, state: TrainState) -> None:
        plan, model = self.plan, self._base.inputs.model
        settings = {"model": str(model.path), "rank": plan.contract.adapter.rank}
        write_json(self.folder / PLAN, {**plan.to_json(), "settings": settings, "sources": {}})
        self._telemetry = Telemetry(self.folder / "telemetry.jsonl")
        start = RunStart(
            str(self.folder), model.id, plan.backend, plan.device, plan.dtype,
            plan.contract.digest, state.step + 1, total_steps=0, rows=0, tokens=0,
            trained_tokens=0, quant=plan.contract.quant,
        )  # fmt: skip
        self._telemetry(start)
        self._begin_at(state)

    def _begin_at(self, state: TrainState) -> None:
        self._base.trainer.add_learner(self._name, state)
        self._step, self._skipped = state.step, state.skipped
        self._gradients = Gradients()

    def close(self) -> None:
        """Free the memory, and end the run."""
        self._base.trainer.remove_learner(self._name)
        with self._stack:
            self._telemetry(RunEnd(self._step, "done", 0.0))

    # --- the verbs --------------------------------------------------------------------------------

    def run_pass(self, request: Pass) -> Passing[Answer]:
        """Score data, and add the gradient of their loss unless the request is `forward_only`.

        Yields:
            The arguments of `Trainer.accumulate` for each micro-batch; its result is sent back.

        Raises:
            Refused: a datum, the loss or an option of it is wrong.
        """
        try:
            return (yield from self._run_pass(request))
        except BaseException:
            if not request.forward_only:  # so that no step is taken without what failed
                self._base.trainer.discard(self._name)
                self._gradients = Gradients(
                    failed=f"forward_backward failed in request {request.seq_id}"
                )
            raise

    def _run_pass(self, request: Pass) -> Passing[Answer]:
        started = time.perf_counter()
        loss, options = loss_named(request.loss_fn, request.config)
        examples = request.examples()
        self._require_sound(examples, loss)
        batches = self._cut(examples, options)
        log_probs: list[Floats] = [np.zeros(0, np.float32)] * len(examples)
        losses = []
        for each in batches:
            value, log_probs_T = yield from self._compute(each, loss, options, request.forward_only)
            losses.append(value)
            for number, extent in each.extents.items():
                log_probs[number] = log_probs_T[extent]
        total, seconds = math.fsum(losses), time.perf_counter() - started
        if not request.forward_only:
            self._unsaved += seconds
            self._count(batches, total, seconds)
        return pass_answer(log_probs, {"loss:sum": total})

    def _compute(
        self, data: Data, loss: Loss, options: Mapping[str, float], forward_only: bool
    ) -> Passing[tuple[float, Floats]]:
        """Return the loss of a batch, and its log-probabilities, (T,)."""
        trainer, name = self._base.trainer, self._name
        given: dict[str, Any] = {**options, **data.inputs}
        if forward_only:
            log_probs_T = trainer.log_probs(data.batch, name)
            return weighed(loss, log_probs_T, given)[0], log_probs_T
        seed = micro_batch_seed(
            self.plan.contract.seed, self._step + 1, self._gradients.micro_batches
        )
        self._gradients.micro_batches += 1
        total = 0.0

        def weights_of(log_probs_T: Floats) -> Floats:
            nonlocal total
            total, weights_T = weighed(loss, log_probs_T, given)
            return weights_T

        if "weights" in loss.inputs:  # which are known before
            weights_T = data.inputs["weights"].astype(np.float32)
            log_probs_T = yield replace(data.batch, weights_T=weights_T), seed, name, None
            weights_of(log_probs_T)
        elif self._base.inputs.backend.manifest.capabilities.one_pass:
            log_probs_T = yield data.batch, seed, name, weights_of
        else:
            log_probs_T = trainer.log_probs(data.batch, name, seed)
            weights_T = weights_of(log_probs_T)
            yield replace(data.batch, weights_T=weights_T), seed, name, None
        return total, log_probs_T

    def step(self, params: types.OptimParams) -> Answer:
        """Apply the gradients with AdamW.

        Raises:
            Refused: there are none, they are not finite, or a parameter is wrong; nothing changed.
        """
        if not isinstance(params, types.AdamParams):
            raise Refused(f"optim_params.type={params.type!r} is not supported; use AdamParams")
        _require_parameters(params)
        gradients, self._gradients = self._gradients, Gradients()
        if gradients.failed or not gradients.passes:
            self._base.trainer.discard(self._name)  # those of passes after the failed one
            if gradients.failed:
                raise Refused(f"{gradients.failed}; send all passes of this step again")
            raise Refused("there are no gradients to apply: call forward_backward first")
        update = Update(
            number=self._step - self._skipped + 1,
            lr=params.learning_rate,
            total_weight=1.0,
            clip=params.grad_clip_norm,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        norm = self._base.trainer.update(update, self._name)
        self._step += 1
        if not math.isfinite(norm):
            self._skipped += 1
            raise Refused(f"the gradient norm is {norm}; nothing was changed")
        # Per token: the mean NLL where the weights are those of an NLL.
        weight = gradients.weight if gradients.weighted else gradients.trained
        mean = gradients.loss / (weight or 1)
        done = StepDone(
            self._step, mean, params.learning_rate, norm,
            gradients.tokens, gradients.trained, gradients.seconds,
        )  # fmt: skip
        self._telemetry(done)
        return Answer.of(types.OptimStepResponse(metrics={"grad_norm": norm}))

    @property
    def worth_saving(self) -> bool:
        """Whether computing again what a killed server had computed would take too long."""
        gradients = self._gradients
        return not (gradients.passes or gradients.failed) and self._unsaved > REPEAT_SECONDS

    def save(self, folder: Path) -> None:
        """Write the state, which `saved_state` reads."""
        shutil.rmtree(folder, ignore_errors=True)  # of a server that was killed while it wrote
        self._base.save_state(folder, self.plan, self._state())
        self._unsaved = 0.0

    def _state(self) -> TrainState:
        state = self._base.trainer.state(self._name)
        return replace(state, step=self._step, skipped=self._skipped)

    def write(self, folder: Path, *, with_state: bool) -> None:
        """Write the adapter to a folder, and the state to `folder/state`."""
        state = self._state()
        self._base.write_adapter(folder, self.plan, state)
        if with_state:
            self._base.save_state(folder / STATE, self.plan, state)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Go on from the state in a folder, of weights of the same shape.

        Raises:
            Refused: their rank, alpha or modules differ.
        """
        state = saved_state(folder, optimizer=optimizer)
        own, saved = (
            {path: (each.alpha, each.A_RI.shape, each.B_OR.shape) for path, each in found.items()}
            for found in (self._state().adapter.modules, state.adapter.modules)
        )
        if own != saved:
            raise Refused(
                "path: the saved weights have another rank or alpha, or other modules; make a "
                "client of them with create_training_client_from_state"
            )
        self._base.trainer.remove_learner(self._name)
        self._begin_at(state)
        self._unsaved = math.inf  # as above

    # --- data -------------------------------------------------------------------------------------

    def _require_sound(self, examples: Sequence[Example], loss: Loss) -> None:
        """Refuse data that cannot be trained on, by the name of the field."""
        inputs, weights = self._base.inputs, self._base.inputs.weights
        longest = positions(inputs.config)
        vocabulary = vocabulary_size(inputs.config, weights.tensors)
        if not examples:
            raise Refused("data: there is none")
        for number, example in enumerate(examples):
            _require_inputs(example, loss, f"data[{number}]")
            count = len(example.tokens_N)
            if longest is not None and count + 1 > longest:
                raise Refused(
                    f"data[{number}].model_input: {count} tokens and the last target are more than "
                    f"the {longest} that the model can read; shorten it"
                )
            require_tokens(example.tokens_N, vocabulary, f"data[{number}].model_input")
            targets = example.inputs["target_tokens"]
            require_tokens(targets, vocabulary, f"data[{number}].loss_fn_inputs['target_tokens']")
        shapes = {each.inputs["target_tokens"].shape[1:] for each in examples}
        if shapes != {()}:
            if "weights" not in loss.inputs or len(shapes) > 1:
                raise Refused(
                    "loss_fn_inputs['target_tokens']: several targets per position need "
                    "cross_entropy, and the same number in each datum of a request"
                )
            if not inputs.backend.manifest.capabilities.several_targets:
                raise Refused(
                    "loss_fn_inputs['target_tokens']: the backend has one target per position"
                )

    def _cut(self, examples: Sequence[Example], options: Mapping[str, float]) -> list[Data]:
        """Lay data out as batches, as `vox train` does."""
        documents = [
            Document(
                np.append(each.tokens_N, each.inputs["target_tokens"].reshape(-1)[-1:]),
                np.zeros(len(each.tokens_N) + 1, np.float32),
                Path(self._name),
                number,
                0,
            )
            for number, each in enumerate(examples)
        ]
        plan = self.plan
        batches, groups = cut_groups(documents, plan.micro_batch_tokens, plan.packing)
        places = [place for (place,) in groups]
        return [
            Data.of(
                batch,
                {n: (p, examples[n]) for n, p in enumerate(places) if p.batch == index},
                options,
            )
            for index, batch in enumerate(batches)
        ]

    def _count(self, batches: Iterable[Data], loss: float, seconds: float) -> None:
        gradients = self._gradients
        gradients.passes += 1
        gradients.loss += loss
        gradients.seconds += seconds
        for data in batches:
            gradients.tokens += len(data.batch.tokens_T)
            weights = data.inputs.get("weights")
            gradients.weighted &= weights is not None and bool((weights >= 0).all())
            given = data.inputs["advantages"] if weights is None else weights
            gradients.trained += int((given != 0).sum())
            gradients.weight += float(given.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """A batch of data.

    Args:
        inputs: arrays of the loss, and `datum`, the number of the datum, (T,), 0 where there is no
            target.
        extents: number of a datum -> its positions.
    """

    batch: Batch
    inputs: Mapping[str, NDArray[Any]]
    extents: Mapping[int, slice]

    @classmethod
    def of(
        cls,
        batch: Batch,
        inside: Mapping[int, tuple[Place, Example]],
        options: Mapping[str, float],
    ) -> Data:
        """Make one of a batch whose documents lie at these places.

        Args:
            options: values of a datum that has no array of the name, where another one has.
        """
        (_, first), *_ = inside.values()
        shape = (len(batch.tokens_T), *first.inputs["target_tokens"].shape[1:])
        names = {name for _, example in inside.values() for name in example.inputs}
        arrays: dict[str, NDArray[Any]] = {
            name: np.full(shape, options.get(name, 0), np.float32) for name in names
        }
        arrays["target_tokens"] = np.zeros(shape, np.int64)
        arrays["datum"] = np.zeros(shape, np.int64)
        scored_T, extents = np.zeros(shape, bool), dict[int, slice]()
        for number, (place, example) in inside.items():
            start = place.extent.start
            extents[number] = at = slice(start, start + len(example.tokens_N))
            scored_T[at], arrays["datum"][at] = True, number
            for name, values in example.inputs.items():
                arrays[name][at] = values
        targets_T = arrays.pop("target_tokens")
        empty_T = np.zeros(shape, np.float32)
        made = Batch(batch.tokens_T, targets_T, empty_T, batch.starts_D, scored_T)
        return cls(made, arrays, extents)


def _require_inputs(example: Example, loss: Loss, where: str) -> None:
    """Refuse a datum whose arrays are not those of the loss, or that has other lengths."""
    needed = {"target_tokens", *loss.inputs}
    if missing := needed - example.inputs.keys():
        raise Refused(f"{where}.loss_fn_inputs: {min(missing)!r} is missing")
    if unknown := example.inputs.keys() - needed - {*loss.arrays}:
        raise Refused(
            f"{where}.loss_fn_inputs[{min(unknown)!r}] means nothing to this loss; leave it out"
        )
    shape, count = example.inputs["target_tokens"].shape, len(example.tokens_N)
    if not count or shape[:1] != (count,) or len(shape) > 2 or 0 in shape:
        raise Refused(
            f"{where}.loss_fn_inputs['target_tokens'] has the shape {list(shape)}, and model_input "
            f"{count} tokens; each needs a target"
        )
    for name, values in example.inputs.items():
        if values.shape != shape:
            raise Refused(
                f"{where}.loss_fn_inputs[{name!r}] has the shape {list(values.shape)}, and "
                f"target_tokens {list(shape)}"
            )
        if not np.isfinite(values).all():
            raise Refused(f"{where}.loss_fn_inputs[{name!r}] has a NaN or infinite value")
    if "sequence_ratio_mask" in loss.inputs and not example.inputs["sequence_ratio_mask"].any():
        raise Refused(f"{where}.loss_fn_inputs['sequence_ratio_mask'] marks no token")


def require_tokens(tokens: NDArray[Any], vocabulary: int, where: str) -> None:
    """Refuse tokens that the model has no embedding for."""
    if tokens.dtype.kind != "i":
        raise Refused(f"{where}: token ids must be int64")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (vocabulary and high >= vocabulary):
        wrong = low if low < 0 else high
        raise Refused(f"{where}: token {wrong} is outside of the vocabulary, 0 to {vocabulary - 1}")


LEAST_EPS = 1e-38
"""Smaller numbers may be 0 in float32."""


def _require_parameters(params: types.AdamParams) -> None:
    for name, value in params.model_dump().items():
        most = 1.0 if name.startswith("beta") else math.inf
        if not 0 <= value < most:
            raise Refused(f"adam_params.{name}={value}: it must be 0 or more, and below {most:g}")
    if params.eps < LEAST_EPS:
        what = "a parameter without a gradient would become NaN"
        raise Refused(f"adam_params.eps={params.eps}: below {LEAST_EPS:g}, {what}")


def saved_state(folder: Path, *, optimizer: bool) -> TrainState:
    """Read a state; without `optimizer`, AdamW starts anew.

    Raises:
        Refused: they were saved for a sampler, without their state.
    """
    if not folder.is_dir():
        raise Refused("path: these weights have no training state; save them with save_state", 404)
    state, _ = load_newest(folder)
    return state if optimizer else TrainState(0, state.adapter)


def planned(base: TrainingBase, shape: Shape) -> ExecutionPlan:
    """Plan a learner as a client asks for it.

    Raises:
        Refused: no module is left to train.
        PlanError: the base cannot be trained so.
    """
    lora, weights, model = shape.lora, base.inputs.weights, base.inputs.model
    paths = linear_modules(weights.tensors, model.model_type)
    asked = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": trains_head(base, lora)}
    targets = shape.targets or tuple(path for path in paths if asked.get(_kind_of(path)))
    if not targets:
        raise Refused(
            "train_attn, train_mlp, train_unembed: none of them has a module to train in this "
            "model; an output head that is the embedding's (tied) has none of its own"
        )
    return base.plan_with(
        method="lora",
        rank=lora.rank,
        alpha=shape.alpha,
        dropout=0.0,
        seed=lora.seed,
        targets=targets,
    )


def trains_head(base: TrainingBase, lora: types.LoraConfig) -> bool:
    """Whether the output head gets an adapter; a tied one has no weights of its own."""
    return lora.train_unembed and not has_tied_head(base.inputs.config)


def _kind_of(path: str) -> str:
    """Return whether a linear module is of attention, of the feed-forward layer, or the head."""
    *owners, leaf = path.split(".")
    if not owners:
        return "unembed" if leaf in _HEADS else "other"
    attention = any("attn" in each or "attention" in each for each in owners)
    return "attn" if attention else "mlp"
