"""Runs with weights: what is trained, what the run remembers, and how it goes on."""

from __future__ import annotations

import json

import pytest

from tests.run.interrupted import assert_same_run, cut_after, killed, resumed
from vox_core.config import TrainSettings, validate
from vox_core.contract import CheckpointWritten
from vox_core.errors import PlanError
from vox_core.run.train import train


@pytest.fixture
def weighted(tiny, settings, data):
    """`weighted(first, second, **given)` -> settings with the two halves of the data as sources."""
    rows = (data / "train.jsonl").read_text().splitlines()
    halves = [data / "first.jsonl", data / "second.jsonl"]
    for path, some in zip(halves, (rows[::2], rows[1::2]), strict=True):
        path.write_text("\n".join(some))

    def make(*weights, **given):
        source = [{"path": p, "weight": w} for p, w in zip(halves, weights, strict=True)]
        return settings(tiny("llama"), data=halves, source=source, **given)

    return make


def plan_of(run) -> dict:
    return json.loads((run / "plan.json").read_text())


def test_a_run_with_weights_goes_on_as_it_began(weighted, tmp_path):
    whole = train(weighted(3, 1, out=tmp_path / "whole", save_every=1)).run
    killed(weighted(3, 1, save_every=1), cut_after(2, CheckpointWritten))
    assert_same_run(resumed(tmp_path / "run").run, whole)
    recorded = plan_of(whole)
    assert recorded["contract"]["order"]["weights"] == [3, 1]
    assert recorded["packing"] == "end-to-end"


def test_other_weights_are_another_run(weighted, tmp_path):
    killed(weighted(3, 1, save_every=1), cut_after(2, CheckpointWritten))
    other = validate(
        TrainSettings,
        {"resume": tmp_path / "run", "source": weighted(1, 1).source},
    )
    with pytest.raises(PlanError) as caught:
        train(other)
    assert caught.value.code == "VOX-P003"
    assert any("--source: the weights: [3.0, 1.0] when it began" in f for f in caught.value.faults)
    plain = validate(TrainSettings, {"resume": tmp_path / "run", "data": weighted(1, 1).data})
    with pytest.raises(PlanError) as caught:
        train(plain)
    assert any("--source: the weights" in fault for fault in caught.value.faults)
