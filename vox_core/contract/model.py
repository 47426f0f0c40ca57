"""Interface of a backend: a `Model` scores and generates, a `Trainer` also learns.

The core drives and a backend computes: order, schedule, losses, skipped steps, checkpoints,
stopping and sampling are the core's. Plain Python and numpy cross the seam.

A model computes with adapters by name; `adapter=None` is the base. A `Trainer`'s learners are
adapters, too: under its name a learner is scored and sampled from as it is now. A learner of the
method `full` trains the base's own weights: it is the only one, and there is no base beside it.

Shape legend: T tokens of a batch, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from vox_core.contract.batch import Batch, Doubles, Floats, Ints
from vox_core.contract.spec import OptimizerSpec
from vox_core.contract.state import AdapterState, TrainState

Weigh: TypeAlias = "Callable[[Floats], Floats]"
"""From the log-probabilities of a batch, (T,), to its weights, (T,), both float32."""


@dataclass(frozen=True, slots=True)
class Update:
    """Hyperparameters of one AdamW step (Loshchilov & Hutter, arXiv:1711.05101).

    Args:
        number: of this update, from 1, for the bias correction. Skipped steps are not counted.
        lr: learning rate, schedule applied.
        total_weight: divides the accumulated gradients, before anything else is done with them.
        clip: bound of the global norm of the divided gradients; 0 disables clipping.
        beta1, beta2, eps, weight_decay: AdamW's. Every trained tensor decays, except with the
            method `full` those of one dimension: norms and biases, as in transformers' `Trainer`.
    """

    number: int
    lr: float
    total_weight: float
    clip: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    @classmethod
    def of(cls, spec: OptimizerSpec, number: int, lr: float, total_weight: float) -> Update:
        """Return update `number` of an optimizer."""
        return cls(
            number, lr, total_weight, spec.clip, spec.beta1, spec.beta2, spec.eps, spec.weight_decay
        )


class Model(ABC):
    """A base model in memory, with any number of adapters by name.

    Generation is one batch that rows enter and leave at any time:

        model.insert(0, prompt_T)                # adapter=None: the base
        logits = model.advance({})[0]            # (V,) behind the prompt
        while ...: logits = model.advance({0: token})[0]
        model.remove(0)
    """

    @abstractmethod
    def add_adapter(self, name: str, adapter: AdapterState) -> None:
        """Add an adapter that does not change.

        Raises:
            AdapterError: A002, it does not belong to the base.
        """

    @abstractmethod
    def remove_adapter(self, name: str) -> None:
        """Remove an adapter, and free its memory; no row of the running batch may use it."""

    @abstractmethod
    def log_probs(
        self, batch: Batch, adapter: str | None = None, seed: int | None = None
    ) -> Floats:
        """Return log p(target), float32 (T,): where `batch.scored_T`, and 0 elsewhere.

        Args:
            seed: of an adapter's dropout, the same as in `Trainer.accumulate` with this seed; None:
                no dropout.
        """

    @abstractmethod
    def logits(self, tokens_T: Ints, adapter: str | None = None, first: int = 0) -> Floats:
        """Return float32 logits (T - first, V) of one document, from position `first` < T on."""

    def logits_all(
        self, documents: Sequence[tuple[Ints, int]], adapter: str | None = None
    ) -> list[Floats]:
        """`logits` of one or more documents, each with its own `first`, which may share a pass."""
        return [self.logits(tokens_T, adapter, first) for tokens_T, first in documents]

    @abstractmethod
    def insert(self, row: int, tokens_T: Ints, adapter: str | None = None) -> None:
        """Let a row with a prompt of at least one token enter the running batch."""

    @abstractmethod
    def advance(self, tokens: Mapping[int, int]) -> Mapping[int, Floats]:
        """Take one decoding step: append each token to its row.

        Returns:
            Row -> float32 logits (V,) behind its last token, for each row of `tokens`, and for
            inserted rows once their prompt is computed. A prompt may be computed in parts, one for
            each call, so that long prompts do not hold up the others; a call that computes such
            parts alone returns an empty mapping only if another call will return more. A row's
            logits do not depend on the others in the batch, beyond the dtype's roundoff.
        """

    def reuse(self, row: int, source: int, count: int) -> bool:
        """Copy the cache of the first `count` tokens of another row to one that has just entered,
        with the same first tokens, the same adapter and a longer prompt; return whether it did."""
        return False

    @abstractmethod
    def remove(self, row: int) -> None:
        """Let a row leave the running batch, at any time, and free its cache."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and devices."""


class Trainer(Model):
    """A `Model` with adapters that learn. The base is in memory once, however many they are.

    A step of the core:

        log_probs_T = trainer.accumulate(batch, seed, learner)      # for each micro-batch
        norm = trainer.update(Update(...), learner)                 # or trainer.discard(learner)

    Numerics: the gradient of a step is that of `-sum(weight * log_prob)` over all its batches,
    divided by `Update.total_weight`, whatever the cut into batches; documents never see one
    another; accumulated gradients, master weights and moments are float32 or wider; dropout is a
    function of the seed.

    With the capability `distributed` several ranks (`RunContext.world`) make one trainer. A rank
    accumulates a stretch of a step's batches, those of lower ranks coming first. `update` and
    `share` are collective: every rank calls them, in the same order. With `TrainJob.shard` other
    methods may exchange parts of the base, which the backend has the other ranks follow.
    """

    @abstractmethod
    def add_learner(self, name: str, state: TrainState) -> None:
        """Add an adapter that learns, with its optimizer state. The first one is added before any
        other call; a further one needs the capability `learners`.

        Raises:
            AdapterError: A002, it does not belong to the base.
        """

    @abstractmethod
    def remove_learner(self, name: str) -> None:
        """Remove a learner, and free its memory."""

    @abstractmethod
    def accumulate(
        self, batch: Batch, seed: int, learner: str, weigh: Weigh | None = None
    ) -> Floats:
        """Add the gradient of `-sum(weights_T * log_probs_T)`; change no weight.

        Args:
            seed: of the dropout.
            weigh: called once with the log-probabilities, between the forward of the model's body
                and the backward of its head; its result replaces `batch.weights_T`, and is 0 where
                `batch.scored_T` is false. Only with the capability `one-pass`.

        Returns:
            Float32, of the shape of `batch.targets_T`: log p(target) where `batch.scored_T`, and 0
            elsewhere.

        Raises:
            TrainingError: T002, out of memory.
        """

    def accumulate_all(self, calls: Sequence[tuple[Batch, int, str, Weigh | None]]) -> list[Floats]:
        """`accumulate` for several learners, whose tokens may share the base's computation."""
        return [self.accumulate(*call) for call in calls]

    @abstractmethod
    def update(self, update: Update, learner: str) -> float:
        """Divide, clip and apply what was accumulated, and forget it.

        The gradients of all ranks are added batch by batch, in the order of ranks, so that their
        sum is that of one process: bit for bit, or where a base is split and trained, to rounding.

        Returns:
            The global norm of the divided gradients before clipping, over all ranks. If it is not
            finite, nothing was changed.

        Raises:
            TrainingError: T006, a rank cannot be reached; nothing was changed.
        """

    @abstractmethod
    def discard(self, learner: str) -> None:
        """Forget what was accumulated."""

    @abstractmethod
    def state(self, learner: str) -> TrainState:
        """Return float32 copies of values and moments; with the method `full` they may be views,
        in mappings that read on access, valid until the next update or `close` and read by the
        calling thread alone. `step` is the number of updates that the learner was added with or
        has had since, `skipped` is 0; the core sets both."""

    def share(self, values_N: Doubles) -> Doubles:
        """Return the elementwise sum of the ranks' arrays.

        The core fills an element on one rank alone, and the others with zeros.

        Raises:
            TrainingError: T006, another rank cannot be reached.
        """
        return values_N

    def peak_memory(self) -> int | None:
        """Return the peak bytes in use on the device; None where that is the process's memory."""
        return None


class RowByRow(Model):
    """`insert`, `advance` and `remove` from `logits`, for a backend without a cache: each step
    computes each row anew."""

    def insert(self, row: int, tokens_T: Ints, adapter: str | None = None) -> None:
        self._rows[row] = [int(token) for token in tokens_T], adapter
        self._new.append(row)

    def advance(self, tokens: Mapping[int, int]) -> Mapping[int, Floats]:
        for row, token in tokens.items():
            self._rows[row][0].append(token)
        wanted, self._new[:] = [*tokens, *self._new], []
        return {row: self._last_logits(*self._rows[row]) for row in wanted}

    def remove(self, row: int) -> None:
        del self._rows[row]
        if row in self._new:
            self._new.remove(row)

    def _last_logits(self, tokens: list[int], adapter: str | None) -> Floats:
        import numpy as np

        logits_V: Floats = self.logits(np.array(tokens, np.int64), adapter, len(tokens) - 1)[0]
        return logits_V

    @cached_property
    def _rows(self) -> dict[int, tuple[list[int], str | None]]:
        return {}

    @cached_property
    def _new(self) -> list[int]:
        return []
