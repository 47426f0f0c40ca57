"""Runs with an objective: what is compared, sampled, judged and refused."""

from __future__ import annotations

import json

import pytest

from tests.run.conftest import TALK
from tests.run.lines import read
from vox_core.errors import ConfigError
from vox_core.run.train import train


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Count to {n}.", "chosen": "one two", "rejected": "no"} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def steps(report):
    return [line for line in read(report.run / "telemetry.jsonl") if line["event"] == "step"]


def test_dpo_starts_at_the_loss_of_the_reference(tiny, settings, pairs):
    report = train(
        settings(tiny("llama"), data=(str(pairs),), valid=None, objective="dpo", max_steps=2)
    )
    # The adapter has B = 0, so every log-ratio is 0: -log sigmoid(0).
    assert steps(report)[0]["loss"] == pytest.approx(0.6931472, rel=1e-5)


def test_updates_need_rollouts(tiny, settings, pairs):
    with pytest.raises(ConfigError) as caught:
        train(settings(tiny("llama"), data=(str(pairs),), objective="dpo", updates=2))
    assert "--updates 2" in str(caught.value)


def test_grpo_with_two_updates_saves_after_both_and_after_an_epoch_of_prompts(
    tiny, settings, tmp_path
):
    judge = tmp_path / "judge.py"
    judge.write_text("def length(row, answer):\n    return len(answer)\n")
    given = {
        "objective": "grpo",
        "reward": f"{judge}:length",
        "rollouts": 2,
        "rollout_tokens": 4,
        "updates": 2,
        "max_steps": 6,
        "batch_size": -(-len(TALK) // 2),
        "save_epochs": True,
        "keep": 9,
    }
    report = train(settings(tiny("llama"), **given))
    saved = {path.name for path in (report.run / "checkpoints").iterdir()}
    assert saved == {"step-4", "step-6"}
    answers = read(report.run / "rollouts.jsonl")
    assert {answer["step"] for answer in answers} == {1, 3, 5}
    plan = json.loads((report.run / "plan.json").read_text())
    assert plan["contract"]["rollouts"]["reward"].startswith("judge.py:length ")
