"""A `Trainer` in numpy: the embedding and the output head of a Llama, with nothing between them.

The adapter is on `lm_head`. Float64 inside, so that sums do not depend on their order.

Shape legend: T tokens of a batch, V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

import vox_core.run.load  # noqa: F401 (takes `choose_for` from inputs before a test replaces it)
from vox_core.contract import AdapterState, Batch, RowByRow, Trainer, TrainState
from vox_core.host.judge import Verdict
from vox_core.host.probe import Device, Hardware
from vox_core.host.select import Seen, Selection
from vox_core.run import inputs
from vox_core.weights import WeightFolder

if TYPE_CHECKING:
    import pytest

HEAD = "lm_head"


class Bigram(RowByRow, Trainer):
    """Predicts a token from the one before it alone."""

    def __init__(self, folder) -> None:
        read = WeightFolder(folder).read
        self.embedding_VH = read("model.embed_tokens.weight").astype(np.float64)
        self.head_VH = read("lm_head.weight").astype(np.float64)
        self.adapters: dict[str, AdapterState] = {}
        self.learners: dict[str, TrainState] = {}
        self.gradients: dict[str, np.ndarray] = {}
        self.accumulated: list[Batch] = []
        self.closed = False

    def logits(self, tokens_T, adapter=None, first=0):
        head_VH = self.head_VH
        if adapter is not None:
            state = self._adapter(adapter)
            module = state.modules[HEAD]
            head_VH = head_VH + state.scale(HEAD) * (module.B_OR @ module.A_RI).astype(np.float64)
        return (self.embedding_VH[tokens_T[first:]] @ head_VH.T).astype(np.float32)

    def log_probs(self, batch, adapter=None, seed=None):
        scores_TV = self.logits(batch.tokens_T, adapter).astype(np.float64)
        scores_TV -= np.log(np.exp(scores_TV).sum(axis=1, keepdims=True))
        found_T = scores_TV[np.arange(len(batch.tokens_T)), batch.targets_T]
        return np.where(batch.scored_T, found_T, 0).astype(np.float32)

    def accumulate(self, batch, seed, learner, weigh=None):
        assert batch.weights_T.any()
        logits_TV = self.logits(batch.tokens_T, learner).astype(np.float64)
        odds_TV = np.exp(logits_TV)
        slope_TV = odds_TV / odds_TV.sum(axis=1, keepdims=True)
        slope_TV[np.arange(len(batch.tokens_T)), batch.targets_T] -= 1
        slope_TV *= batch.weights_T[:, None]
        self.gradients[learner] += slope_TV.T @ self.embedding_VH[batch.tokens_T]
        self.accumulated.append(batch)
        return self.log_probs(batch, learner)

    def update(self, update, learner):
        state, scale = self.learners[learner], self.adapters[learner].scale(HEAD)
        module = state.adapter.modules[HEAD]
        slope_VH = self.gradients[learner] / update.total_weight * scale
        slopes = {
            f"{HEAD}.lora_A.weight": module.B_OR.T @ slope_VH,
            f"{HEAD}.lora_B.weight": slope_VH @ module.A_RI.T,
        }
        self.discard(learner)
        norm = float(np.sqrt(sum((slope**2).sum() for slope in slopes.values())))
        if not np.isfinite(norm):
            return norm
        named, moments = state.adapter.tensors(), {}
        factor = min(1.0, update.clip / norm) if update.clip else 1.0
        for name, slope in slopes.items():
            first, second = state.moments.get(name, (0.0, 0.0))
            first = update.beta1 * first + (1 - update.beta1) * factor * slope
            second = update.beta2 * second + (1 - update.beta2) * (factor * slope) ** 2
            moments[name] = np.float32(first), np.float32(second)
            mean = first / (1 - update.beta1**update.number)
            spread = np.sqrt(second / (1 - update.beta2**update.number))
            decayed = named[name] * (1 - update.lr * update.weight_decay)
            named[name] = np.float32(decayed - update.lr * mean / (spread + update.eps))
        adapter = state.adapter.with_tensors(named)
        self.adapters[learner] = adapter
        self.learners[learner] = TrainState(state.step + 1, adapter, moments)
        return norm

    def add_learner(self, name, state):
        assert name not in self.adapters
        self.learners[name] = replace(state, step=state.updates, skipped=0)
        self.adapters[name] = state.adapter
        self.discard(name)

    def remove_learner(self, name):
        del self.learners[name], self.adapters[name]

    def discard(self, learner):
        self.gradients[learner] = np.zeros_like(self.head_VH)

    def state(self, learner):
        return self.learners[learner]

    def add_adapter(self, name, adapter):
        assert name not in self.adapters
        self.adapters[name] = adapter

    def remove_adapter(self, name):
        del self.adapters[name]

    def close(self):
        self.closed = True

    def _adapter(self, name: str) -> AdapterState:
        return self.adapters[name]


def chosen_for_all(monkeypatch: pytest.MonkeyPatch) -> list[Bigram]:
    """Let every run train with `Bigram`; return the list of those that are made."""
    made: list[Bigram] = []

    def train(job, context):
        made.append(Bigram(job.model))
        return made[-1]

    able = SimpleNamespace(learners=True, one_pass=False)
    manifest = SimpleNamespace(
        capabilities=able,
        memory=SimpleNamespace(padded_rows=True),
        requires=SimpleNamespace(distributions=("numpy>=2",)),
    )
    backend = SimpleNamespace(
        id="bigram",
        manifest=manifest,
        found=SimpleNamespace(shown_version="1", distribution="vox-bigram"),
        train=train,
    )
    verdict = Verdict("bigram", "1", "bigram", "chosen", "")
    hardware = Hardware(True, (Device("a CPU", "cpu"),), "")
    selection = Selection("bigram", "backend bigram, for a test", hardware, (verdict,))
    monkeypatch.setattr(inputs, "choose_for", lambda *_: (backend, selection))
    monkeypatch.setattr(Seen, "select", lambda *_: selection)
    return made
