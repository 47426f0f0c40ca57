"""`Model` and `Trainer` of vox's plugin API: passes of single documents.

Shape legend: T tokens of a batch, S scored ones of a document, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from vox_core.contract import AdapterState, Batch, Model, Trainer, TrainState, Update, Weigh
from vox_core.errors import TrainingError
from vox_numpy.adapter import Adapter
from vox_numpy.config import Llama
from vox_numpy.functions import Array
from vox_numpy.llama import Pass, Past

Scores: TypeAlias = tuple[Array, list[tuple[Array, Callable[[Array], None]]]]
"""Log-probabilities (T,), and each document's scored positions (S,) and backward."""
# A weight that is not finite makes a loss or a norm that is not; the core skips the step.
_unwarned = np.errstate(over="ignore", invalid="ignore")


class NumpyModel(Model):
    """A model that computes the rows of its batch one after another, each with its own cache.

    Args:
        dropout: of learners.
        recompute: keep only the inputs of layers for the backward.
    """

    def __init__(self, llama: Llama, dropout: float = 0.0, recompute: bool = True) -> None:
        self._llama, self._dropout, self._recompute = llama, dropout, recompute
        base = Adapter(TrainState(0, AdapterState("lora", {})), llama.dtype)
        self._adapters: dict[str | None, Adapter] = {None: base}
        self._rows: dict[int, tuple[Adapter, list[int], Past]] = {}

    def add_adapter(self, name: str, adapter: AdapterState) -> None:
        self._llama.require_fit(adapter)
        self._adapters[name] = Adapter(TrainState(0, adapter), self._llama.dtype)

    def remove_adapter(self, name: str) -> None:
        del self._adapters[name]

    def log_probs(self, batch: Batch, adapter: str | None = None, seed: int | None = None) -> Array:
        log_probs_T, _ = self._scores(batch, adapter, seed)
        return log_probs_T.astype(np.float32, copy=False)

    def logits(self, tokens_T: Array, adapter: str | None = None, first: int = 0) -> Array:
        return Pass(self._llama, self._adapters[adapter], tokens_T).logits(first).astype(np.float32)

    def insert(self, row: int, tokens_T: Array, adapter: str | None = None) -> None:
        self._rows[row] = self._adapters[adapter], tokens_T.tolist(), {}

    def advance(self, tokens: Mapping[int, int]) -> Mapping[int, Array]:
        for row, token in tokens.items():
            self._rows[row][1].append(token)
        return {row: self._last_logits(*parts) for row, parts in self._rows.items() if parts[1]}

    def _last_logits(self, adapter: Adapter, new: list[int], past: Past) -> Array:
        tokens_T = np.array(new)
        new.clear()
        logits_1V = Pass(self._llama, adapter, tokens_T, past=past).logits(-1)
        return np.asarray(logits_1V[0], np.float32)

    def remove(self, row: int) -> None:
        del self._rows[row]

    def close(self) -> None:
        self.__dict__.clear()

    def _scores(self, batch: Batch, adapter: str | None, seed: int | None) -> Scores:
        log_probs_T, backwards = np.zeros(len(batch.tokens_T), self._llama.dtype), []
        for extent in batch.documents():
            scored_S = np.flatnonzero(batch.scored_T[extent])
            if len(scored_S):
                at_S, key = extent.start + scored_S, None if seed is None else (seed, extent.start)
                tokens_T, chosen = batch.tokens_T[extent], self._adapters[adapter]
                one = Pass(self._llama, chosen, tokens_T, key, recompute=self._recompute)
                log_probs_T[at_S], backward = one.log_probs(scored_S, batch.targets_T[at_S])
                backwards.append((at_S, backward))
        return log_probs_T, backwards


class NumpyTrainer(NumpyModel, Trainer):
    """A model with learners. `accumulate` keeps the activations of a whole batch."""

    def add_learner(self, name: str, state: TrainState) -> None:
        self._llama.require_fit(state.adapter)
        self._adapters[name] = Adapter(state, self._llama.dtype, self._dropout)

    remove_learner = NumpyModel.remove_adapter

    @_unwarned
    def accumulate(
        self, batch: Batch, seed: int, learner: str, weigh: Weigh | None = None
    ) -> Array:
        try:
            scores_T, backwards = self._scores(batch, learner, seed)
            log_probs_T = scores_T.astype(np.float32)
            weights_T = weigh(log_probs_T) if weigh else batch.weights_T
            for at_S, backward in backwards:
                backward(-weights_T[at_S].astype(scores_T.dtype))
        except MemoryError as error:
            remedy = "train with a smaller --micro-batch-tokens, or shorter documents"
            raise TrainingError("T002", "out of memory", found=error, remedy=remedy) from error
        return log_probs_T

    @_unwarned
    def update(self, update: Update, learner: str) -> float:
        return self._adapters[learner].step(update)

    def discard(self, learner: str) -> None:
        self._adapters[learner].gradients = {}

    def state(self, learner: str) -> TrainState:
        return self._adapters[learner].state()
