"""Steps that are not finite: written down, passed over, counted, and enough of them end the run."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.run.interrupted import assert_same_run, cut_after, killed, resumed
from vox_core.config import TrainSettings, validate
from vox_core.contract import CheckpointWritten, Notice, StepDone, StepSkipped, TrainState
from vox_core.errors import TrainingError
from vox_core.run import checkpoint, loop
from vox_core.run.checkpoint import _require_finite
from vox_core.run.learner import Learner
from vox_core.run.train import train


@pytest.fixture
def broken(monkeypatch):
    """`broken(2, 3)`: these steps have an infinite loss."""
    batches = loop.Documents.batches

    def make(*numbers: int) -> None:
        def made(self, number):
            found = batches(self, number)
            for each in found[0] if number in numbers else ():
                each.weights_T[each.weights_T > 0] = np.inf
            return found

        monkeypatch.setattr(loop.Documents, "batches", made)

    return make


def lines(run) -> list[dict]:
    return [json.loads(line) for line in (run / "bad_batches.jsonl").read_text().splitlines()]


def test_the_batch_is_written_down_with_its_rows(tiny, settings, broken, data):
    broken(2)
    told = []
    report = train(settings(tiny("llama")), observe=told.append)
    assert report.steps == 5
    assert [e.step for e in told if isinstance(e, StepDone)] == [1, 3, 4, 5]
    assert [e.step for e in told if isinstance(e, StepSkipped)] == [2]
    (line,) = lines(report.run)
    assert (line["step"], line["loss"]) == (2, "inf")
    assert line["grad_norm"] is None  # nothing was computed from such a loss
    assert len(line["documents"]) == 2
    for each in line["documents"]:
        assert each["file"] == str(data / "train.jsonl")
        assert each["line"] == each["document"] + 1  # every row is a document
    (warning,) = [e for e in told if isinstance(e, Notice) and "not applied" in e.message]
    assert warning.level == "warning"
    assert f"{data / 'train.jsonl'}:{line['documents'][0]['line']}" in warning.message
    state, _ = checkpoint.load_newest(report.run / "checkpoints")
    assert (state.step, state.skipped) == (5, 1)


@pytest.mark.parametrize("cut", [2, 3, 4])
def test_a_run_resumed_beside_bad_steps_is_the_run_that_would_have_been(
    tiny, settings, broken, tmp_path, cut
):
    broken(2, 3)
    whole = train(settings(tiny("llama"), out=tmp_path / "whole", max_steps=7)).run
    asked = settings(tiny("llama"), max_steps=7, save_every=1)
    killed(asked, cut_after(cut, CheckpointWritten))
    resumed(asked.out)
    assert_same_run(asked.out, whole)
    logged = {line["step"]: line for line in lines(asked.out)}
    assert [*logged.values()] == lines(whole)
    assert [line["step"] for line in lines(whole)] == [2, 3]


def test_too_many_in_a_row_end_the_run_and_name_the_checkpoint(tiny, settings, broken):
    broken(1, 3, 4, 5)
    asked = settings(tiny("llama"), max_steps=9, save_every=2, max_bad_steps=3)
    with pytest.raises(TrainingError) as caught:
        train(asked)
    assert caught.value.code == "VOX-T001"
    assert "3 steps in a row" in caught.value.what
    assert str(asked.out / "checkpoints" / "step-4") in caught.value.found
    assert f"vox train --resume {asked.out} --allow-change lr" in caught.value.remedy
    assert [line["step"] for line in lines(asked.out)] == [1, 3, 4, 5]
    with pytest.raises(TrainingError, match="3 steps in a row"):  # two before step 4, one after
        resumed(asked.out)
    report = train(validate(TrainSettings, {"resume": asked.out, "max_bad_steps": 4}))
    assert report.steps == 9


def test_one_alone_may_end_the_run(tiny, settings, broken):
    broken(2)
    with pytest.raises(TrainingError, match="of a step is not finite") as caught:
        train(settings(tiny("llama"), max_bad_steps=1))
    assert "none yet" in caught.value.found


def test_an_adapter_that_holds_no_numbers_is_no_checkpoint(tiny, settings, monkeypatch):
    """Should an update ever leave one, the checkpoint before it is what stays."""
    state = Learner.state

    def spoilt(learner) -> TrainState:
        made = state(learner)
        if made.step == 4:
            next(iter(made.adapter.modules.values())).A_RI[0, 0] = math.nan
        return made

    monkeypatch.setattr(Learner, "state", spoilt)
    asked = settings(tiny("llama"), save_every=2)
    with pytest.raises(TrainingError, match="the trained weights are not finite"):
        train(asked)
    assert [p.name for p in checkpoint.numbered(asked.out / "checkpoints")] == ["step-2"]
    _require_finite(checkpoint.load_newest(asked.out / "checkpoints")[0], asked.out)
