"""Learning rate schedules against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from vox_core.contract import OptimizerSpec
from vox_core.run.loop import learning_rate


@pytest.mark.parametrize("total", [1, 2, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.1, 0.5])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_rates_are_those_of_transformers_one_step_later(
    schedule: Any, warmup: float, total: int
) -> None:
    spec = OptimizerSpec(2e-3, schedule, warmup, 0.0, 1.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=spec.lr)
    names = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}
    decay = {"num_decay_steps": max(1, round(0.2 * total)), "decay_type": "linear"}
    scheduler = get_scheduler(
        names.get(schedule, schedule),
        optimizer,
        num_warmup_steps=round(warmup * total) + 1,
        num_training_steps=total + 1,
        scheduler_specific_kwargs=decay if schedule == "wsd" else None,
    )
    expected = []
    for _ in range(total):
        optimizer.step()
        scheduler.step()
        expected += scheduler.get_last_lr()
    found = [learning_rate(spec, step, total) for step in range(1, total + 1)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert min(found) > 0
