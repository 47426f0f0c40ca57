"""Choosing by measuring: what is tried, what is thrown out, what is kept, and when it is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vox_core.cache import cache_root
from vox_core.contract import Event, ExecutionPlan, FastPaths, Notice
from vox_core.errors import BackendError, TrainingError
from vox_core.host.manifest import parse_manifest
from vox_core.run.planning import plan
from vox_core.run.prepare import Prepared, prepare
from vox_core.run.train import train
from vox_core.run.tuning import answers, measure, search
from vox_core.run.tuning.answers import Answer
from vox_core.run.tuning.measure import ALONE, Taken, Track
from vox_torch import tuning as knobs
from vox_torch.forward import Together


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    return cache_root()


@pytest.fixture
def prepared(tiny, settings) -> Callable[..., Prepared]:
    return lambda **given: prepare(settings(tiny("llama"), **given), None, None, None)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ExecutionPlan]]:
    """`scripted(seconds)`: steps take what `seconds(tokens at once, tuning)` says, and their loss
    is 1, or the second of two numbers, or what they raise. Gives the plans that were tried."""

    def script(says: Callable[[int, Mapping[str, str]], object]) -> list[ExecutionPlan]:
        tried = []

        def take(_: Track, plan: ExecutionPlan, budgets: Sequence[int], rounds: int):
            tried.append(plan)
            said = {budget: says(budget, plan.tuning) for budget in budgets}
            for each in said.values():
                if isinstance(each, Exception):
                    raise each
            pairs = {
                b: each if isinstance(each, tuple) else (each, 1.0) for b, each in said.items()
            }
            return {b: Taken((9.0, seconds), loss) for b, (seconds, loss) in pairs.items()}

        monkeypatch.setattr(Track, "take", take)
        return tried

    return script


def found(prepared: Prepared, settings, **given: object) -> tuple[Answer, list[str]]:
    told: list[str] = []
    asked = settings(Path("any"), tune_budget="full", **given)
    return search.search(prepared, asked, told.append), told


def test_the_fastest_wins_and_knobs_are_tried_with_it(prepared, settings, scripted):
    tried = scripted(lambda tokens, tuning: 4000 / tokens + (0 if tuning.get("threads") else 1))
    answer, told = found(prepared(), settings)
    assert (answer.micro_batch_tokens, answer.tuning) == (8192, {"threads": "half"})
    assert [plan.tuning for plan in tried] == [
        {},
        {"threads": "half"},
        {"threads": "half", "layout": "padded"},
    ]
    assert [plan.micro_batch_tokens for plan in tried] == [2048, 8192, 8192]
    assert answer.gain == pytest.approx((4000 / 2048 + 1) / (4000 / 8192))
    assert len(told) == 1 + 5 + 2


def test_a_knob_that_wins_by_less_than_the_scatter_stays(prepared, settings, scripted):
    scripted(lambda tokens, tuning: 1.0 if not tuning else 0.97)
    assert found(prepared(), settings)[0].tuning == {}


def test_another_loss_is_thrown_out_and_named(prepared, settings, scripted):
    scripted(lambda tokens, tuning: (0.1, 1.001) if tokens == 4096 or tuning else 1.0)
    answer, told = found(prepared(), settings)
    assert answer.micro_batch_tokens in (2048, ALONE) and answer.tuning == {}
    assert answer.refused == dict.fromkeys(
        ("4096 tokens at once", "threads half", "layout padded"), "loss 1.001, expected 1"
    )
    assert sum("thrown out" in line for line in told) == 3


def test_what_cannot_be_carried_out_is_named(prepared, settings, scripted):
    scripted(
        lambda tokens, tuning: TrainingError("T002", "no memory", remedy="") if tuning else 1.0
    )
    answer, _ = found(prepared(), settings)
    assert answer.refused == {"threads half": "no memory", "layout padded": "no memory"}


def test_what_was_asked_for_is_not_tried_otherwise(prepared, settings, scripted):
    seen: list[int] = []
    scripted(lambda tokens, tuning: seen.append(tokens) or 4000 / tokens)
    answer, _ = found(prepared(micro_batch_tokens=512), settings, micro_batch_tokens=512)
    assert set(seen) == {ALONE, 512} and answer.micro_batch_tokens == 512


def test_what_would_not_fit_into_memory_is_not_tried(prepared, settings, scripted, monkeypatch):
    seen: list[int] = []
    scripted(lambda tokens, tuning: seen.append(tokens) or 1.0)
    real = search.foresee

    def foresee(prepared: Prepared):
        limit = real(replace(prepared, plan=replace(prepared.plan, micro_batch_tokens=2048)))
        little = prepared.plan.micro_batch_tokens < 4096
        return replace(real(prepared), free=limit.prediction.peak * 2 if little else 1)

    monkeypatch.setattr(search, "foresee", foresee)
    found(prepared(), settings)
    assert set(seen) == {ALONE, 512, 1024, 2048}


def test_real_steps_are_measured_used_and_gone_on_with(tiny, settings, cache):
    quick = {"tune_budget": "balanced", "tune": "refresh", "dropout": 0.1}
    events: list[Event] = []
    first = train(settings(tiny("llama"), **quick, max_steps=2), observe=events.append)
    (file,) = (cache / "tuned").iterdir()
    kept = json.loads(file.read_bytes())
    assert kept["refused"] == {} and kept["own"] == {"adapters with dropout": 14}
    measured = [e.message for e in events if isinstance(e, Notice) and "tokens/s" in e.message]
    assert len(measured) == 6  # alone, three budgets, two knobs
    recorded = json.loads((first.run / "plan.json").read_text())
    assert recorded["micro_batch_tokens"] == kept["micro_batch_tokens"]
    assert recorded["tuning"] == kept["tuning"]


@pytest.fixture
def answered(prepared, settings, cache) -> Callable[..., None]:
    """`answered(model, ...)`: the cache says 1024 tokens and padded rows."""

    def answer(base: Path, **given: object) -> None:
        asked = settings(base, **given)
        kept = Answer(1024, {"layout": "padded"}, 100.0, 50.0)
        answers.keep(answers.question(prepare(asked, None, None, None), asked), kept)

    return answer


def test_an_answer_is_used_ignored_and_kept_by_a_resume(tiny, settings, tmp_path, answered, cache):
    base = tiny("llama")
    answered(base)
    used = train(settings(base, max_steps=2)).run
    ignored = train(settings(base, tune="ignore", out=tmp_path / "ignored", max_steps=2)).run
    plans = [json.loads((run / "plan.json").read_text()) for run in (used, ignored)]
    assert [p["micro_batch_tokens"] for p in plans] == [1024, 2048]
    assert [p["tuning"] for p in plans] == [{"layout": "padded"}, {}]
    told = (used / "telemetry.jsonl").read_text()
    assert "1024 tokens at once, layout padded, which was measured to be the fastest here" in told


def test_a_resumed_run_is_cut_as_it_began(tiny, settings, tmp_path, answered, cache, monkeypatch):
    base = tiny("llama")
    answered(base)
    made = settings(base, save_every=1)
    plans: list[ExecutionPlan] = []
    stopped = train(made, observe=stop_after(2, monkeypatch))
    assert stopped.stopped
    for file in (cache / "tuned").iterdir():
        file.unlink()
    real = Prepared.notices

    def notices(self: Prepared):
        plans.append(self.plan)
        return real(self)

    monkeypatch.setattr(Prepared, "notices", notices)
    train(settings(base, out=None, resume=stopped.run))
    assert [(p.micro_batch_tokens, p.tuning) for p in plans] == [(1024, {"layout": "padded"})]


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[Event], None]:
    from vox_core.run.stop import StopSignal

    seen: list[int] = []
    monkeypatch.setattr(StopSignal, "__call__", lambda self: bool(seen) and seen[-1] == step)
    return lambda event: seen.append(event.step) if event.name == "step" else None


def test_the_question_is_the_shape_and_not_the_data(tiny, settings, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "Something else."}\n')

    def question(family: str = "llama", **given: object) -> str:
        asked = settings(tiny(family), **given)
        return answers.question(prepare(asked, None, None, None), asked)

    same = {question(), question(data=[other]), question(lr=1.0), question(max_steps=9)}
    others = [
        question("qwen2"),
        question(rank=8),
        question(dtype="bf16"),
        question(dropout=0.1),
        question(micro_batch_tokens=2048),
        question(gradient_checkpointing=True),
    ]
    assert len(same) == 1 and len({*same, *others}) == 7


def test_a_broken_answer_is_none(tiny, settings, cache, answered):
    base = tiny("llama")
    answered(base)
    (file,) = (cache / "tuned").iterdir()
    file.write_text('{"micro_batch_tokens": 1')
    assert plan(settings(base)).speed is None


def test_the_plan_says_what_was_measured(tiny, settings, cache):
    base = tiny("llama")
    assert plan(settings(base)).speed is None
    seen = plan(settings(base, tune="refresh", tune_budget="minimal"))
    assert seen.speed.fast == {
        "adapters": 14,
        "norms": 5,
        "feed-forwards": 2,
        "rotary positions": 2,
    }
    assert seen.speed.own == {} and seen.speed.tokens_per_second > 0
    tokens = seen.steps.total * seen.steps.tokens
    assert seen.speed.seconds == tokens / seen.speed.tokens_per_second
    assert plan(settings(base)).speed == seen.speed


def test_measuring_stops_when_its_time_is_over(prepared, monkeypatch):
    monkeypatch.setattr(measure, "TOKENS", 200)
    made = prepared()
    over = Track(made, until=0.0)
    assert set(over.take(made.plan, [ALONE, 2048, 1024], 3)) == {ALONE, 2048}
    assert over.tokens <= 200


def test_steps_at_a_rate_of_zero_have_one_loss_however_they_are_cut(prepared):
    made = prepared()
    track = Track(made)
    losses = [
        each.loss
        for tuning in ({}, {"layout": "padded"}, {"threads": "half"})
        for each in track.take(replace(made.plan, tuning=tuning), [ALONE, 64, 2048], 2).values()
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)  # roundoff of sums of some 100 numbers
    assert track.paths == FastPaths(
        {"adapters": 14, "norms": 5, "feed-forwards": 2, "rotary positions": 2}, {}
    )


def test_padded_rows_are_what_was_asked_for(prepared, monkeypatch):
    made = prepared()
    monkeypatch.setattr(Together, "hidden", None)
    monkeypatch.setattr(Together, "__call__", None)
    rows = replace(made.plan, tuning={"layout": "padded"})
    assert set(Track(made).take(rows, [2048], 1)) == {2048}


def test_threads_are_as_torch_had_them_unless_half_are_wanted(monkeypatch):
    had = torch.get_num_threads()
    monkeypatch.setattr(knobs, "_own_threads", lambda: 2)
    try:
        for value, expected in (("half", 1), ("default", 2)):
            knobs.set_threads({"threads": value})
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(had)


@pytest.mark.parametrize("values", ['["one"]', '["one", "one"]', '"one"', '["one", 2]'])
def test_a_knob_has_several_values(values):
    text = (Path(knobs.__file__).parents[3] / "plugins/vox_cpu/vox_cpu/vox_plugin.toml").read_text()
    with pytest.raises(BackendError, match="manifest is invalid") as caught:
        parse_manifest(text.replace('["default", "half"]', values), "here")
    assert caught.value.code == "VOX-B006" and "threads" in str(caught.value.faults)
