"""Choosing by measuring: what is tried, what is thrown out, what is kept, and when it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vox_core.cache import cache_root
from vox_core.cli import main
from vox_core.config import TrainSettings, validate
from vox_core.contract import (
    Batch,
    Event,
    ExecutionPlan,
    FastPaths,
    Notice,
    Step,
    StepDone,
    Update,
)
from vox_core.errors import BackendError, ConfigError, TrainingError
from vox_core.host.manifest import parse_manifest
from vox_core.run.learner import Learner
from vox_core.run.run_plan import RunPlan, plan_run, with_advice
from vox_core.run.session import StoppedAtOnce, StopSignal
from vox_core.run.train import train
from vox_plan import stopwatch, tuning, tuning_cache
from vox_plan.planner import plan
from vox_plan.stopwatch import ALONE, Stopwatch, Timing
from vox_plan.tuning_cache import Tuned, cached
from vox_torch import profile as knobs
from vox_torch.forward import Together
from vox_torch.layout import Scores
from vox_torch.train import TorchTrainer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    return cache_root()


@pytest.fixture
def prepared(tiny, settings) -> Callable[..., RunPlan]:
    return lambda **given: plan_run(settings(tiny("llama"), tune_budget="full", **given))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ExecutionPlan]]:
    """`scripted(seconds)`: steps take what `seconds(tokens at once, tuning)` says, and their loss
    and norm are 1; or it says what was taken, or what is raised. Gives the plans that were tried,
    one for each job."""

    def script(says: Callable[[int, Mapping[str, str]], object]) -> list[ExecutionPlan]:
        tried = []

        def measure(_: Stopwatch, plan: ExecutionPlan, budgets: Sequence[int], rounds: int):
            tried.append(plan)
            said = {budget: says(budget, plan.tuning) for budget in budgets}
            for each in said.values():
                if isinstance(each, Exception):
                    raise each
            return {
                budget: each if isinstance(each, Timing) else Timing((9.0, each), 1.0, 1.0)
                for budget, each in said.items()
            }

        monkeypatch.setattr(Stopwatch, "measure", measure)
        return tried

    return script


def found(prepared: RunPlan) -> tuple[Tuned, list[str]]:
    told: list[str] = []
    return tuning.search(prepared, told.append), told


def test_the_fastest_wins_and_knobs_are_tried_with_it(prepared, scripted):
    tried = scripted(lambda tokens, tuning: 4000 / tokens + (0 if tuning.get("threads") else 1))
    answer, told = found(prepared())
    assert (answer.micro_batch_tokens, answer.tuning) == (8192, {"threads": "half"})
    assert [plan.tuning for plan in tried[5:]] == [
        {"threads": "half"},
        {"threads": "half", "layout": "padded"},
    ]
    tokens = [plan.micro_batch_tokens for plan in tried]
    assert tokens == [2048, 512, 1024, 4096, 8192, 8192, 8192]
    assert answer.gain == pytest.approx((4000 / 2048 + 1) / (4000 / 8192))
    assert len(told) == 1 + 5 + 2


@pytest.mark.parametrize("wins", ["a knob", "tokens"])
def test_what_wins_by_less_than_the_scatter_stays(wins, prepared, scripted):
    def other(tokens: int, tuning: Mapping[str, str]) -> bool:
        return bool(tuning) if wins == "a knob" else tokens == 4096

    scripted(lambda tokens, tuning: 0.97 if other(tokens, tuning) else 1.0)
    answer, _ = found(prepared())
    assert (answer.micro_batch_tokens, answer.tuning) == (2048, {})


@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        (Timing((0.1,), 1.001, 1.0), "loss 1.001, expected 1"),
        (Timing((0.1,), 1.0, 7.0), "gradient norm 7, expected 1"),
        (Timing((0.1,), 1.0, 1.001), "gradient norm 1.001, expected 1"),
        (Timing((0.1,), 1.0, 1.0, "out of memory"), "out of memory"),
        (TrainingError("T002", "no memory", remedy=""), "no memory"),
    ],
)
def test_other_numbers_and_what_is_short_of_memory_are_thrown_out(
    taken, reason, prepared, scripted
):
    scripted(lambda tokens, tuning: taken if tokens == 4096 or tuning else 1.0)
    answer, told = found(prepared())
    assert answer.micro_batch_tokens == 2048 and answer.tuning == {}
    assert answer.refused == dict.fromkeys(
        ("4096 tokens at once", "threads half", "layout padded"), reason
    )
    assert sum("thrown out" in line for line in told) == 3


def test_what_was_asked_for_is_not_tried_otherwise(prepared, scripted):
    seen: list[int] = []
    scripted(lambda tokens, tuning: seen.append(tokens) or 4000 / tokens)
    answer, _ = found(prepared(micro_batch_tokens=512))
    assert set(seen) == {ALONE, 512} and answer.micro_batch_tokens == 512
    scripted(lambda tokens, tuning: tokens)
    answer, _ = found(prepared(micro_batch_tokens=512))
    assert answer.micro_batch_tokens == 512


def test_with_dropout_no_other_tokens_at_once_are_tried(prepared, scripted):
    seen: list[int] = []
    tried = scripted(lambda tokens, tuning: seen.append(tokens) or (0.5 if tuning else tokens))
    answer, _ = found(prepared(dropout=0.1))
    assert set(seen) == {ALONE, 2048}
    assert (answer.micro_batch_tokens, answer.tuning) == (2048, {"threads": "half"})
    assert [p.contract.adapter.dropout for p in tried] == [0.0, 0.1, 0.1, 0.1]


def test_an_answer_changes_no_tokens_at_once_of_a_plan_with_dropout(tiny, settings, cache):
    asked = settings(tiny("llama"), dropout=0.1)
    ready = plan_run(asked, tell=print)
    tuning_cache.store(
        tuning_cache.cache_key(ready),
        Tuned(64, {"threads": "half"}, tokens_per_second=2, untuned=1),
    )
    used = with_advice(ready, print).execution
    assert (used.micro_batch_tokens, used.tuning) == (2048, {"threads": "half"})
    assert cached(ready).micro_batch_tokens == 2048


def test_a_backend_whose_numbers_are_others_with_more_documents_is_named(prepared, scripted):
    scripted(lambda tokens, _: 1.0 if tokens == ALONE else Timing((0.5,), 1.0, 2.0))
    answer, told = found(prepared(micro_batch_tokens=512))
    assert answer.refused["512 tokens at once"] == "gradient norm 2, expected 1"
    assert any("512 tokens at once: thrown out" in line for line in told)


def test_what_would_not_fit_into_memory_is_not_tried(prepared, scripted, monkeypatch):
    seen: list[int] = []
    scripted(lambda tokens, tuning: seen.append(tokens) or 1.0)
    real = tuning.forecast

    def forecast(prepared: RunPlan):
        limit = real(
            replace(prepared, execution=replace(prepared.execution, micro_batch_tokens=2048))
        )
        little = prepared.execution.micro_batch_tokens < 4096
        return replace(real(prepared), free=limit.prediction.peak * 2 if little else 1)

    monkeypatch.setattr(tuning, "forecast", forecast)
    found(prepared())
    assert set(seen) == {ALONE, 512, 1024, 2048}


def test_real_steps_are_measured_used_and_gone_on_with(tiny, settings, cache):
    quick = {"tune_budget": "balanced", "tune": "refresh", "dropout": 0.1}
    events: list[Event] = []
    first = train(settings(tiny("llama"), **quick, max_steps=2), observe=events.append)
    (file,) = (cache / "tuned").iterdir()
    kept = json.loads(file.read_bytes())
    assert kept["own"] == {"adapters with dropout": 14}
    # In rows the same documents draw other numbers for dropout: other gradients, the same loss.
    (refused,) = kept["refused"].items()
    assert refused[0] == "layout padded" and refused[1].startswith("gradient norm")
    measured = [e.message for e in events if isinstance(e, Notice) and "tokens/s" in e.message]
    assert len(measured) == 3  # alone, the plan's own, threads
    recorded = json.loads((first.run / "plan.json").read_text())
    assert recorded["micro_batch_tokens"] == kept["micro_batch_tokens"]
    assert recorded["tuning"] == kept["tuning"]


@pytest.fixture
def answered(prepared, settings, cache) -> Callable[..., None]:
    """`answered(model, ...)`: the cache says 1024 tokens and padded rows."""

    def answer(base: Path, **given: object) -> None:
        asked = settings(base, **given)
        kept = Tuned(1024, {"layout": "padded"}, 100.0, 50.0)
        tuning_cache.store(tuning_cache.cache_key(plan_run(asked)), kept)

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
    real = RunPlan.notices

    def notices(self: RunPlan):
        plans.append(self.execution)
        return real(self)

    monkeypatch.setattr(RunPlan, "notices", notices)
    train(settings(base, out=None, resume=stopped.run))
    assert [(p.micro_batch_tokens, p.tuning) for p in plans] == [(1024, {"layout": "padded"})]


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[Event], None]:
    seen: list[int] = []
    monkeypatch.setattr(StopSignal, "__call__", lambda self: bool(seen) and seen[-1] == step)
    return lambda event: seen.append(event.step) if event.name == "step" else None


def test_the_question_is_the_shape_and_not_the_data(tiny, settings, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "Something else."}\n')

    def question(family: str = "llama", **given: object) -> str:
        asked = settings(tiny(family), **given)
        return tuning_cache.cache_key(plan_run(asked))

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
    }
    assert seen.speed.own == {} and seen.speed.tokens_per_second > 0
    assert seen.speed.seconds == seen.steps.work.tokens / seen.speed.tokens_per_second
    assert plan(settings(base)).speed == seen.speed


def test_measuring_stops_when_its_time_is_over(prepared, monkeypatch):
    monkeypatch.setattr(stopwatch, "TOKENS", 200)
    made = prepared()
    over = Stopwatch(made, until=0.0)
    assert set(over.measure(made.execution, [ALONE, 2048, 1024], 3)) == {ALONE, 2048}
    assert over.tokens <= 200


def test_no_candidate_is_begun_when_the_time_is_over(prepared, scripted, monkeypatch):
    tried = scripted(lambda tokens, tuning: 1.0)
    monkeypatch.setattr(Stopwatch, "over", True)
    found(prepared())
    assert len(tried) == 1


def test_steps_at_a_rate_of_zero_have_one_loss_however_they_are_cut(prepared):
    made = prepared()
    track = Stopwatch(made)
    taken = [
        each
        for tuning in ({}, {"layout": "padded"}, {"threads": "half"})
        for each in track.measure(
            replace(made.execution, tuning=tuning), [ALONE, 64, 2048], 2
        ).values()
    ]
    for numbers in ([each.loss for each in taken], [each.norm for each in taken]):
        # Roundoff of sums of some 100 numbers.
        np.testing.assert_allclose(numbers, numbers[0], rtol=1e-6)
    assert track.paths == FastPaths({"adapters": 14, "norms": 5, "feed-forwards": 2}, {})


@pytest.fixture
def in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`in_step(outcome, when)`: where `when(plan, number)` is true, torch's update raises `outcome`
    or returns it as the gradient norm."""

    def script(outcome: BaseException | float, when: Callable[[ExecutionPlan, int], bool]) -> None:
        real = TorchTrainer.update

        def update(self: TorchTrainer, update: Update, learner: str) -> float:
            if not when(self._plan, update.number):
                return real(self, update, learner)
            if isinstance(outcome, BaseException):
                raise outcome
            self.discard(learner)
            return outcome

        monkeypatch.setattr(TorchTrainer, "update", update)

    return script


@pytest.mark.parametrize("tuning", [{}, {"threads": "half"}])
@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_ends_it_and_nothing_was_written(tiny, settings, in_step, tuning, number):
    in_step(KeyboardInterrupt(), lambda plan, step: plan.tuning == tuning and step == number)
    asked = settings(tiny("llama"), tune="refresh", micro_batch_tokens=512)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(asked)
    assert not isinstance(caught.value, StoppedAtOnce) and not asked.out.exists()


def test_an_interrupt_is_an_exit_with_130(tiny, settings, in_step):
    in_step(KeyboardInterrupt(), lambda plan, step: step == 2)
    asked = settings(tiny("llama"))
    command = [
        "plan",
        "--model",
        str(asked.model),
        "--data",
        str(asked.data[0]),
        "--tune",
        "refresh",
    ]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 130


def test_a_step_that_is_not_finite_is_no_measurement(prepared, settings, in_step):
    in_step(math.nan, lambda plan, step: step == 2 and bool(plan.tuning))
    answer, _ = found(prepared(micro_batch_tokens=512))
    why = "the loss or the gradient of a measured step is not finite"
    assert answer.refused == {"threads half": why, "layout padded": why}


@pytest.mark.parametrize("number", [1, 2])
def test_a_reference_that_is_not_finite_is_an_error(prepared, settings, in_step, number):
    in_step(math.nan, lambda plan, step: step == number)
    with pytest.raises(TrainingError) as caught:
        found(prepared(micro_batch_tokens=512))
    assert caught.value.code == "VOX-T001"


def test_each_budget_has_the_times_of_its_own_steps(prepared, monkeypatch):
    def take(_: Learner, step: Step) -> StepDone:
        return StepDone(step.number, len(step.batches), 0.0, 1.0, 1, 1, seconds=step.number)

    made = prepared()
    monkeypatch.setattr(Learner, "take", take)
    taken = Stopwatch(made).measure(made.execution, [ALONE, 2048], 2)
    assert taken[ALONE].seconds == (1, 3) and taken[2048].seconds == (2, 4)
    assert taken[ALONE].loss > taken[2048].loss  # numbers of micro-batches


@pytest.mark.parametrize("always", [False, True])
def test_tokens_that_run_out_of_memory_are_refused_and_the_rest_goes_on(
    tiny, settings, monkeypatch, always
):
    """Only once, so that half of it fits; or always, which is T002."""
    met: list[int] = []
    real = TorchTrainer._gradient

    def gradient(self: TorchTrainer, optimizer: object, batch: Batch, *given: object) -> Scores:
        if self._plan.micro_batch_tokens == 4096 and (always or not met):
            met.append(len(batch.tokens_T))
            raise MemoryError("out of memory")
        return real(self, optimizer, batch, *given)

    monkeypatch.setattr(TorchTrainer, "_gradient", gradient)
    told: list[str] = []
    seen = plan(settings(tiny("llama"), tune="refresh"), tell=told.append)
    assert len(met) == (2 if always else 1)
    (refused,) = seen.speed.refused.items()
    said = "out of memory" if always else "micro-batches are half as large"
    assert refused[0] == "4096 tokens at once" and said in refused[1]
    assert sum("tokens/s" in line for line in told) == 5  # alone, own, 1024, two knobs


def test_other_gradients_under_the_same_loss_are_thrown_out(tiny, settings, monkeypatch):
    real = TorchTrainer.update

    def wrong(self: TorchTrainer, update: Update, learner: str) -> float:
        if self._plan.tuning.get("layout") == "padded":
            update = replace(update, total_weight=update.total_weight / 7)
        return real(self, update, learner)

    monkeypatch.setattr(TorchTrainer, "update", wrong)
    seen = plan(settings(tiny("llama"), tune="refresh"))
    assert seen.speed.refused["layout padded"].startswith("gradient norm")


def test_assumed_documents_are_not_measured(tiny, settings):
    with pytest.raises(ConfigError) as caught:
        plan(settings(tiny("llama"), data=[], tune="refresh"))
    error = caught.value
    assert (error.code, error.where) == ("VOX-C004", "--tune refresh")
    assert "--data" in f"{error.remedy}"


def test_a_run_that_goes_on_is_not_measured(tiny, settings, cache, monkeypatch):
    made = settings(tiny("llama"), save_every=1, tune="refresh", micro_batch_tokens=512)
    run = train(made, observe=stop_after(2, monkeypatch)).run
    asked = validate(TrainSettings, {"resume": run, "tune": "refresh"})
    with pytest.raises(ConfigError, match="cut as it began") as caught:
        train(asked)
    assert (caught.value.code, caught.value.where) == ("VOX-C004", "--tune refresh")
    told: list[Event] = []
    again = made.model_dump(include=made.model_fields_set)
    same = validate(TrainSettings, {**again, "resume": "auto"})
    monkeypatch.setattr(StopSignal, "__call__", lambda self: False)
    assert not train(same, observe=told.append).stopped
    notices = [event.message for event in told if isinstance(event, Notice)]
    assert any("nothing is measured for --tune refresh" in each for each in notices)


def test_padded_rows_are_what_was_asked_for(prepared, monkeypatch):
    made = prepared()
    monkeypatch.setattr(Together, "hidden", None)
    monkeypatch.setattr(Together, "__call__", None)
    rows = replace(made.execution, tuning={"layout": "padded"})
    assert set(Stopwatch(made).measure(rows, [2048], 1)) == {2048}


def test_threads_are_as_torch_had_them_unless_half_are_wanted():
    had = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for value, expected in (("half", 1), ("default", 2)):
            with knobs.threads({"threads": value}):
                assert torch.get_num_threads() == expected
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(had)


@pytest.mark.parametrize("values", ['["one"]', '["one", "one"]', '"one"', '["one", 2]'])
def test_a_knob_has_several_values(values):
    text = (Path(knobs.__file__).parents[3] / "plugins/vox_cpu/vox_cpu/vox_plugin.toml").read_text()
    with pytest.raises(BackendError, match="manifest is invalid") as caught:
        parse_manifest(text.replace('["default", "half"]', values), "here")
    assert caught.value.code == "VOX-B006" and "threads" in str(caught.value.faults)
