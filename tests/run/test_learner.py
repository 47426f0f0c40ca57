"""Steps of a learner on a backend that records what it is given."""

from __future__ import annotations

import numpy as np
import pytest

from vox_core.contract import (
    AdapterState,
    Batch,
    Objective,
    OptimizerSpec,
    Place,
    Step,
    TrainState,
    Weighed,
)
from vox_core.errors import PluginError
from vox_core.run.learner import Learner, Untouched
from vox_core.run.weighing import total_weight

OPTIMIZER = OptimizerSpec(1e-3, "constant", 0.0, 0.0, 0.0)


class Recorder:
    """A trainer whose log-probabilities are all -1."""

    def __init__(self, interrupted: bool = False) -> None:
        self.interrupted = interrupted
        self.weights: list[np.ndarray] = []
        self.updates: list[float] = []

    def add_learner(self, name, state) -> None: ...

    def log_probs(self, batch, adapter=None, seed=None):
        return np.where(batch.scored_T, np.float32(-1), np.float32(0))

    def accumulate(self, batch, seed, learner, weigh=None):
        log_probs_T = self.log_probs(batch)
        self.weights.append(batch.weights_T if weigh is None else weigh(log_probs_T))
        if self.interrupted:
            raise KeyboardInterrupt
        return log_probs_T

    def update(self, update, learner) -> float:
        self.updates.append(update.total_weight)
        self.weights = []
        return 1.0

    def discard(self, learner) -> None:
        self.weights = []

    def peak_memory(self) -> None: ...


class Small(Objective):
    """Weights as small as the shares of a mean over many tokens."""

    def weigh(self, groups, totals):
        return Weighed(1.0, [[np.full(3, 1e-6, np.float32) for _ in group] for group in groups])


class Broken(Objective):
    def weigh(self, groups, totals):
        raise KeyError("reference")


def step(weight: float) -> Step:
    weights_T = np.array([1, 1, 1, 0], np.float32)
    batch = Batch(np.arange(4), np.arange(4), weights_T, np.zeros(1, np.int64))
    place = Place("only", 0, slice(0, 4))
    return Step(1, (batch,), weight, 1e-3, groups=((place,),))


def learner(trainer, objective=None, **options) -> Learner:
    state = TrainState(0, AdapterState("lora", {}))
    return Learner(trainer, state, OPTIMIZER, 0, objective=objective, **options)


@pytest.mark.parametrize("one_pass", [False, True])
def test_weights_of_an_objective_are_multiplied_by_what_the_update_divides_by(one_pass):
    trainer, seen = Recorder(), []
    trainer.update = lambda update, _: seen.append((trainer.weights, update.total_weight)) or 1.0
    learner(trainer, Small(), one_pass=one_pass).take(step(4096.0))
    (((weights_T,), divisor),) = seen
    # A power of two is exact.
    assert weights_T.tolist() == [*[float(np.float32(1e-6)) * 4096] * 3, 0]
    assert weights_T.dtype == np.float32
    assert divisor == 4096


def test_the_total_weight_is_a_power_of_two_near_the_trained_tokens():
    (batch,) = step(1.0).batches
    assert total_weight([batch] * 100) == 256
    assert total_weight([batch]) == 4  # 3 tokens


def test_an_interrupted_step_leaves_no_gradient():
    trainer = Recorder(interrupted=True)
    with pytest.raises(Untouched):
        learner(trainer).take(step(3.0))
    assert trainer.weights == []


def test_an_objective_that_fails_is_named():
    with pytest.raises(PluginError, match="'Broken' failed in weigh"):
        learner(Recorder(), Broken()).take(step(1.0))
