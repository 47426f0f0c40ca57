"""Runs with an objective: what is compared, sampled, judged and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.run.conftest import TALK
from tests.run.lines import read
from vox_core.cache import file_sha256
from vox_core.config import TrainSettings
from vox_core.contract import World
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import ConfigError, DataError, InputError, PlanError, TrainingError
from vox_core.run.progress import StepMetrics
from vox_core.run.rollouts import Rollouts, margin
from vox_core.run.run_plan import plan_run
from vox_core.run.train import train
from vox_core.text import losses
from vox_testing.tiny import make_model


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
    assert "--updates, and nothing is sampled" in str(caught.value)


@pytest.fixture
def rewarded(tmp_path):
    """Settings of a run of two steps with a reward of its own."""
    judge = tmp_path / "judge.py"
    judge.write_text("def length(row, answer):\n    return row['level'] + len(answer) % 2\n")
    rows = tmp_path / "rows.jsonl"
    talk = [{"prompt": f"Say {n}.", "completion": "It is.", "level": n % 3} for n in range(6)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in talk))
    return {
        "data": (str(rows),),
        "valid": str(rows),
        "objective": "grpo",
        "reward": f"{judge}:length",
        "rollouts": 2,
        "rollout_tokens": 4,
        "max_steps": 1,
    }


def test_a_validation_has_the_mean_reward_with_its_interval(tiny, settings, rewarded, monkeypatch):
    order, sample = [], Rollouts.batches
    monkeypatch.setattr(StepMetrics, "begin", lambda _: order.append("begin"))
    monkeypatch.setattr(Rollouts, "batches", lambda *a: order.append("sampled") or sample(*a))
    report = train(settings(tiny("llama"), **rewarded), observe=lambda e: order.append(e.name))
    timed = [each for each in order if each in ("validation", "begin", "sampled", "step")]
    assert timed[:4] == ["validation", "begin", "sampled", "step"], "time left counts sampling"
    found = [x for x in read(report.run / "telemetry.jsonl") if x["event"] == "validation"]
    assert [line["step"] for line in found] == [0, 1]
    for line in found:
        assert line["reward"] == -line["loss"]
        # Rewards 0 to 3 with a standard deviation of at most 1.5 / sqrt(5 / 6), over six prompts.
        assert 0 < line["reward_margin"] <= 1.96 * 1.5 / 5**0.5
    card = (report.run / "README.md").read_text()
    before, after = (f"{line['reward']:.4f}" for line in found)
    assert f"| validation reward | {before} -> {after} |" in card
    assert "| objective | grpo, reward judge.py:length, 2 answers to a prompt" in card


SEVERAL = """
def length(row, answer):
    return len(answer)

def odd(completions, level, **others):
    return [float(each) if each % 2 else None for each in level]
"""


def test_several_rewards_are_summed_by_weight(tiny, settings, rewarded, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text(SEVERAL)
    names = (f"{judge}:length=0.5", f"{judge}:odd=-2")
    report = train(settings(tiny("llama"), **{**rewarded, "reward": names, "batch_size": 6}))
    told = read(report.run / "rollouts.jsonl")
    rows = [json.loads(line) for line in rewarded_rows(rewarded)]
    for line in told:
        row = rows[line["line"] - 1]
        assert row["prompt"] in line["prompt"] and Path(line["file"]).is_absolute()
        level = row["level"]
        length, odd = len(line["answer"]), level if level % 2 else None
        assert line["rewards"] == {"length": length, "odd": odd}
        assert line["reward"] == 0.5 * length - 2 * (odd or 0)
    assert {line["rewards"]["odd"] for line in told} == {None, 1}
    metrics = next(x for x in read(report.run / "telemetry.jsonl") if x["event"] == "objective")
    means = {name: mean for name, mean in metrics["metrics"].items() if name.endswith("/mean")}
    judged = {
        name: [x["rewards"][name] for x in told if x["rewards"][name] is not None]
        for name in ("length", "odd")
    }
    assert means == {
        f"rewards/{name}/mean": pytest.approx(sum(values) / len(values))
        for name, values in judged.items()
    }
    contract = json.loads((report.run / "plan.json").read_text())["contract"]
    first, second = (each.partition(" ") for each in contract["rollouts"]["rewards"])
    assert (first[0], second[0]) == ("judge.py:length=0.5", "judge.py:odd=-2.0")
    assert first[2] == second[2] == file_sha256(judge)
    assert (
        "reward judge.py:length=0.5, reward judge.py:odd=-2.0"
        in (report.run / "README.md").read_text()
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_the_answers_to_a_prompt_are_judged_together_in_one_process(
    tiny, settings, rewarded, tmp_path, monkeypatch, rank
):
    judge = tmp_path / "judge.py"
    judge.write_text(
        "def judge(prompts, completions, **others):\n"
        "    return [prompts.count(prompt) for prompt in prompts]\n"
    )
    seen, judged = [], Rollouts._judged

    def of_rank(self, *given):
        monkeypatch.setattr(self, "_world", World(rank, 2))
        seen.append(judged(self, *given))
        monkeypatch.setattr(self, "_world", World())
        return judged(self, *given)

    monkeypatch.setattr(Rollouts, "_judged", of_rank)
    monkeypatch.setattr("vox_core.run.rollouts.require_same", lambda *given: None)
    given = {**rewarded, "reward": f"{judge}:judge", "batch_size": 6, "rollouts": 3}
    train(settings(tiny("llama"), **given))
    (_, validation), (_, step), _ = seen
    assert validation[:, 0].tolist() == [1 - rank, rank] * 3
    assert step[:, 0].tolist() == ([3 - 3 * rank] * 3 + [3 * rank] * 3) * 3


def rewarded_rows(rewarded) -> list[str]:
    return Path(rewarded["data"][0]).read_text().splitlines()


def test_a_run_goes_on_with_a_corrected_reward(tiny, settings, rewarded, tmp_path, monkeypatch):
    judge = tmp_path / "judge.py"
    judge.write_text("def judge(row, answer):\n    return 1 / row['level']\n")
    monkeypatch.chdir(tmp_path)
    given = {**rewarded, "reward": "judge.py:judge", "batch_size": 6}
    with pytest.raises(TrainingError, match="ZeroDivisionError") as caught:
        train(settings(tiny("llama"), **given))
    judge.write_text("def judge(row, answer):\n    return len(answer)\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = tmp_path / "run"
    assert f"vox train --resume {run} --allow-change reward" in caught.value.remedy
    with pytest.raises(PlanError, match="--reward: the functions") as refused:
        train(TrainSettings(resume=run))
    assert "--allow-change reward would let this run go on" in str(refused.value)
    report = train(TrainSettings(resume=run, allow_change=("reward",)))
    told = read(report.run / "rollouts.jsonl")
    assert len(told) == 12 and all(line["reward"] == len(line["answer"]) for line in told)
    assert any("--allow-change" in text or "reward" in text for text in report.warnings)


def test_validations_by_another_reward_are_not_compared(tiny, settings, rewarded, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text("def judge(row, answer):\n    return 1.0\n")
    given = {**rewarded, "reward": f"{judge}:judge=100", "eval_every": 1, "load_best_at_end": True}
    report = train(settings(tiny("llama"), **{**given, "max_steps": 2, "epochs": 9}))
    changes = ("reward", "max-steps")
    resumed = train(
        TrainSettings(
            resume=report.run, reward=(f"{judge}:judge",), max_steps=4, allow_change=changes
        )
    )
    assert "-100" not in " ".join(notices_of(resumed))
    lines = read(resumed.run / "telemetry.jsonl")
    losses = [line["loss"] for line in lines if line["event"] == "validation"]
    assert losses[:3] == [-100.0] * 3 and {*losses[3:]} == {-1.0}


def notices_of(report) -> list[str]:
    lines = read(report.run / "telemetry.jsonl")
    starts = [at for at, line in enumerate(lines) if line["event"] == "run_start"]
    return [line["message"] for line in lines[starts[-1] :] if line["event"] == "notice"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("(row, answer):\n    return 1 / (row['level'] - 2)", "line 3: judge: raised Zero"),
        (
            "(completions, level):\n    return [1 / (each - 2) for each in level]",
            "line 1: judge: raised ZeroDivisionError: division by zero",
        ),
    ],
)
def test_the_error_of_a_reward_names_it_and_the_row(tiny, settings, rewarded, tmp_path, code, said):
    judge = tmp_path / "judge.py"
    judge.write_text(f"def judge{code}\n")
    names = (f"{judge}:judge",)
    with pytest.raises(TrainingError) as caught:
        train(settings(tiny("llama"), **{**rewarded, "reward": names}))
    where = str(caught.value.where).rpartition(", ")[2]
    assert f"{where}: {caught.value.found}".startswith(said)
    together = "of 6 answers at once; this is the first"
    assert (together in str(caught.value.found)) == ("completions" in code)


def test_an_answer_that_no_reward_judges_ends_the_run(tiny, settings, rewarded, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text("def judge(completions, **others):\n    return [None for _ in completions]\n")
    with pytest.raises(TrainingError, match="every reward returned None"):
        train(settings(tiny("llama"), **{**rewarded, "reward": f"{judge}:judge"}))


def test_a_row_without_a_field_of_the_function_is_found_before_the_run(
    tiny, settings, rewarded, tmp_path
):
    judge = tmp_path / "judge.py"
    judge.write_text("def judge(completions, level, unit):\n    return [1.0]\n")
    asked = settings(tiny("llama"), **{**rewarded, "reward": f"{judge}:judge"})
    with pytest.raises(DataError, match=r"unit \(for judge\)") as caught:
        train(asked)
    assert caught.value.code == "VOX-D003"
    assert not Path(asked.out).exists()


@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        (("exact", "exact=0.5"), "VOX-C002", "two have one name"),
        (("accuracy",), "VOX-B013", "one of FILE.py:FUNCTION, exact"),
        (("judge.py",), "VOX-C002", "give NAME or FILE.py:FUNCTION"),
        (("exact=nan",), "VOX-C002", "a weight stands behind it"),
        (("exact=half",), "VOX-C002", "a weight stands behind it"),
    ],
)
def test_rewards_that_cannot_be_had_are_refused(tiny, settings, rewarded, names, code, said):
    with pytest.raises(InputError) as caught:
        train(settings(tiny("llama"), **{**rewarded, "reward": names}))
    assert caught.value.code == code
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after"), [(0.0, -0.5), (-0.25, -0.5), (-0.0, 0.0), (3e-16, 1e-16)]
)
def test_losses_that_are_not_positive_have_no_percentage(before, after):
    assert losses(before, after) == f"{before:z.4f} -> {after:z.4f}"


def test_the_margin_is_that_of_a_mean():
    assert margin([1.0]) is None
    # The sample's standard deviation is 1 / sqrt(2).
    assert margin([0.0, 1.0]) == pytest.approx(1.96 * 0.5)


def test_a_run_on_own_answers_counts_prompts(tiny, settings, rewarded):
    first, *_ = plan_run(settings(tiny("llama"), **rewarded)).notices()
    assert first.message == "6 prompts; 1 step"


def test_a_prompt_without_a_template_has_no_character_of_the_answer(tmp_path, settings, rewarded):
    """Byte-pair encoding joins the prompt's last space and the answer's first letters."""
    base = make_model("llama", tmp_path / "base")
    config = json.loads((base / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["\u0120I"] = vocabulary.pop("\u00ff")  # the byte 255 is in no text
    tokenizer["model"]["merges"] = [["\u0120", "I"]]
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Say ", "completion": "It is.", "level": 0}\n')
    made = plan_run(settings(base, **{**rewarded, "data": (str(rows),), "valid": None}))
    assert [load_tokenizer(base).decode(each.tokens_T) for each in made.data.train] == ["Say "]


def test_a_reward_uses_every_field_of_a_row(tiny, settings, rewarded):
    assert "level" not in " ".join(train(settings(tiny("llama"), **rewarded)).warnings)


def test_a_run_without_any_gradient_ends_with_a_warning(tiny, settings, rewarded):
    for reward, expected in (("exact", True), (rewarded["reward"], False)):
        asked = settings(
            tiny("llama"), **{**rewarded, "reward": reward, "rollout_tokens": 16, "rollouts": 8}
        )
        asked = asked.model_copy(update={"out": asked.out.with_name(f"same-{expected}")})
        report = train(asked)
        warned = "the gradient was zero in every step" in " ".join(report.warnings)
        assert (warned, report.learned) == (expected, not expected)


@pytest.mark.parametrize(("temperature", "warned"), [(1.0, False), (0.5, True)])
def test_another_temperature_than_that_of_training_is_a_warning(
    tiny, settings, rewarded, temperature, warned
):
    made = plan_run(settings(tiny("llama"), **rewarded, rollout_temperature=temperature))
    assert ("--rollout-temperature 0.5" in " ".join(n.message for n in made.notices())) == warned


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
    assert plan["contract"]["rollouts"]["rewards"][0].startswith("judge.py:length ")
