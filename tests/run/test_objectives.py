"""Runs with an objective of a plugin: pairs, references, rollouts, rewards; what is refused."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.run.interrupted import assert_same_run, cut_after, killed, resumed
from vox_core.config import TrainSettings, validate
from vox_core.contract import (
    Notice,
    Objective,
    ObjectiveMetrics,
    StepDone,
    Validation,
    Weighed,
)
from vox_core.data.batching import cut_groups, to_batch
from vox_core.data.encode import Document
from vox_core.errors import (
    BackendError,
    ConfigError,
    DataError,
    ModelError,
    PlanError,
    PluginError,
    TrainingError,
)
from vox_core.run import inputs, rollouts, weighing
from vox_core.run.telemetry import read_run
from vox_core.run.train import train
from vox_core.run.weighing import (
    StepWeights,
    by_batch,
    mean_metrics,
    most_likely,
    totals_of,
    weigh,
)

PAIRS = [
    {"prompt": f"Say {n}.", "chosen": f"{n} it is.", "rejected": f"Why {n * 3}? No, never."}
    for n in range(6)
]


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)))
    return path


@pytest.fixture
def compared(tiny, settings, pairs):
    """Settings of a run on the pairs."""

    def make(objective="dpo", **given):
        return settings(
            tiny("llama"), **{"data": [pairs], "valid": pairs, "objective": objective, **given}
        )

    return make


def losses(events):
    return [event.loss for event in events if isinstance(event, StepDone)]


# --- pairs ----------------------------------------------------------------------------------------


def test_dpo_begins_at_ln_2_and_learns(compared):
    told = []
    report = train(compared(lr=1e-3, max_steps=4), observe=told.append)
    assert losses(told)[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses(told)[-1] < 0.6
    before, after = [event.loss for event in told if isinstance(event, Validation)]
    assert before == pytest.approx(math.log(2), rel=1e-6) and after < 0.6
    measured = [event for event in told if isinstance(event, ObjectiveMetrics)]
    assert [event.step for event in measured] == [1, 2, 3, 4]
    assert json.loads((report.run / "plan.json").read_text())["contract"]["objective"] == {
        "name": "dpo",
        "options": {},
    }


def test_the_cut_and_the_passes_change_nothing(compared, monkeypatch, tmp_path):
    from vox_core.host.load import Backend

    manifest = Backend.manifest.fget

    def without_one_pass(backend):
        found = manifest(backend)
        return replace(found, capabilities=replace(found.capabilities, one_pass=False))

    together, apart, two = [], [], []
    train(compared(max_steps=3), observe=together.append)
    train(
        compared(max_steps=3, micro_batch_tokens=64, out=tmp_path / "apart"),
        observe=apart.append,
    )
    monkeypatch.setattr(Backend, "manifest", property(without_one_pass))
    train(compared(max_steps=3, out=tmp_path / "two"), observe=two.append)
    # Roundoff of float32 in sums over at most some hundred tokens.
    assert losses(apart) == pytest.approx(losses(together), rel=1e-5)
    assert losses(two) == pytest.approx(losses(together), rel=1e-5)


def test_an_interrupted_run_is_the_undisturbed_one(compared, tmp_path):
    given = {"max_steps": 4, "save_every": 1, "keep": 9, "eval_every": 2}
    whole = train(compared(**given, out=tmp_path / "whole")).run
    killed(compared(**given), cut_after(3))
    assert_same_run(resumed(tmp_path / "run").run, whole)


def test_rows_that_do_not_fit_are_all_named(compared, pairs):
    odd = [PAIRS[0], {"prompt": "a", "completion": "b"}, PAIRS[1], {"text": "a b c"}]
    pairs.write_text("\n".join(map(json.dumps, odd)))
    with pytest.raises(DataError) as caught:
        train(compared())
    error = caught.value
    assert error.code == "VOX-D033"
    assert [fault.partition(": ")[0] for fault in error.faults] == [f"{pairs}, line 2, 4"]
    assert not (pairs.parent / "run").exists()


def test_a_pair_of_which_one_side_is_cut_away_is_dropped(compared, pairs):
    long = {"prompt": "p" * 90, "chosen": "c", "rejected": "r" + " r" * 200}
    cut = {"prompt": "p" * 500, "chosen": "c", "rejected": "r"}
    pairs.write_text("\n".join(map(json.dumps, [*PAIRS, long, cut])))
    report = train(compared(seq_len=200, max_steps=1))
    plan = json.loads((report.run / "plan.json").read_text())
    assert plan["contract"]["data"]["rows"] == len(PAIRS) + 1


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"objective": "dpa"}, BackendError, "dpo"),
        ({"objective": "nonsense"}, BackendError, "ppo, sft, simpo"),
        ({"objective_options": {"betta": "1"}}, ConfigError, "did you mean beta"),
        ({"objective_options": {"beta": "0"}}, ConfigError, "beta"),
        ({"objective": "sft", "objective_options": {"beta": "1"}}, ConfigError, "no options"),
        ({"reward": "exact"}, ConfigError, "dpo takes none; --reward is for grpo and ppo"),
        (
            {"objective": "sft", "teacher": "x"},
            ConfigError,
            "sft takes none; --teacher is for distill",
        ),
        ({"objective": "grpo"}, ConfigError, "next: name one, such as --reward exact"),
        ({"objective": "grpo", "reward": "exact", "rollouts": 1}, ConfigError, "--rollouts"),
        ({"objective": "grpo", "reward": "exact", "dropout": 0.1}, ConfigError, "--dropout"),
        ({"objective": "grpo", "reward": "no.py:f"}, ConfigError, "no such file"),
        ({"objective": "distill"}, ConfigError, "next: name one, such as --teacher RUN"),
        (
            {"objective": "distill", "objective_options": {"top_k": "4"}},
            ConfigError,
            "no --teacher",
        ),
        (
            {
                "objective": "distill",
                "objective_options": {"top_k": "4"},
                "teacher": "a run",
                "rollout_tokens": 8,
            },
            ConfigError,
            "--rollout-tokens, and nothing is sampled",
        ),
        (
            {"objective": "grpo", "reward": "exact", "updates": 3, "max_steps": 4},
            ConfigError,
            "multiple of --updates",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(compared, tmp_path, given, kind, said):
    with pytest.raises(kind) as caught:
        train(compared(**given))
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


# --- groups ---------------------------------------------------------------------------------------


class Sum(Objective):
    """Its loss is the sum of all log-probabilities of `a`, less those of `b`, twice."""

    def weigh(self, groups, totals):
        sign = {"a": 1.0, "b": -2.0}
        loss = sum(sign[s.label] * float(s.log_probs_K.sum()) for g in groups for s in g)
        weights = [[np.full(len(s.log_probs_K), -sign[s.label], "f4") for s in g] for g in groups]
        return Weighed(loss / totals.groups, weights, {"groups": float(len(groups))})


def documents(pairs):
    """Pairs of lengths -> documents, whose first token is a prompt."""
    made = []
    for lengths in pairs:
        for side, (label, length) in enumerate(zip("ab", lengths, strict=True)):
            tokens, weights = np.arange(length, dtype=np.int32), np.ones(length, np.float32)
            weights[:2] = 0
            made.append(Document(tokens, weights, None, 0, 1, side=side, label=label))
    return made


@pytest.mark.parametrize("packing", ["rows", "end-to-end"])
@pytest.mark.parametrize("tokens", [1, 16, 40, 1000])
def test_a_group_stays_in_one_batch(packing, tokens):
    made = documents([(5, 9), (3, 4), (12, 12), (7, 3), (30, 4)])
    batches, groups = cut_groups(made, tokens, packing)
    assert len(groups) == 5
    for number, group in enumerate(groups):
        assert len({place.batch for place in group}) == 1
        for place, document in zip(group, made[2 * number :], strict=False):
            batch = batches[place.batch]
            assert place.label == document.label
            assert batch.tokens_T[place.extent].tolist() == document.tokens_T.tolist()
    assert sum(len(batch.tokens_T) for batch in batches) == sum(map(len, made))


def test_weights_land_where_the_documents_are():
    made = documents([(5, 9), (3, 4), (12, 12)])
    batches, groups = cut_groups(made, 20, "end-to-end")
    random = np.random.default_rng(0)
    log_probs = [random.normal(size=len(batch.tokens_T)).astype("f4") for batch in batches]
    totals = totals_of(batches, groups)
    assert (totals.groups, dict(totals.documents)) == (3, {"a": 3, "b": 3})
    assert dict(totals.tokens) == {"a": 5 + 3 + 12 - 6, "b": 9 + 4 + 12 - 6}
    whole = weigh(Sum(), batches, groups, log_probs, totals)
    places = by_batch(groups, len(batches))
    parts = [
        weigh(Sum(), [batch], some, [scores], totals)
        for batch, some, scores in zip(batches, places, log_probs, strict=True)
    ]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss)
    for index, (batch, weights_T) in enumerate(zip(batches, whole.weights, strict=True)):
        assert np.array_equal(weights_T, parts[index].weights[0])
        assert np.array_equal(weights_T != 0, batch.weights_T != 0)
        for place in (place for group in groups for place in group if place.batch == index):
            values = set(weights_T[place.extent].tolist()) - {0.0}
            assert values == {-1.0 if place.label == "a" else 2.0}


def test_metrics_of_parts_count_as_often_as_they_have_values():
    def part(counts, **metrics):
        return StepWeights(0.0, metrics, dict.fromkeys(metrics, counts), [])

    parts = [part(3, a=1.0, b=5.0), part(1, a=5.0)]
    assert mean_metrics(parts) == {"a": 2.0, "b": 5.0}


def test_weights_of_a_wrong_shape_are_the_objectives_fault():
    class Short(Sum):
        def weigh(self, groups, totals):
            good = super().weigh(groups, totals)
            return Weighed(good.loss, [[w[:-1] for w in g] for g in good.weights])

    batches, groups = cut_groups(documents([(5, 9)]), 100)
    scores = [np.zeros(len(batch.tokens_T), "f4") for batch in batches]
    with pytest.raises(TrainingError, match="wrong shape"):
        weigh(Short(), batches, groups, scores, totals_of(batches, groups))


def test_an_objective_that_raises_is_named_with_its_line():
    class Odd(Sum):
        def weigh(self, groups, totals):
            raise ValueError("odd")

    batches, groups = cut_groups(documents([(5, 9)]), 100)
    scores = [np.zeros(len(batch.tokens_T), "f4") for batch in batches]
    line = Odd.weigh.__code__.co_firstlineno + 1
    with pytest.raises(PluginError) as caught:
        weigh(Odd(), batches, groups, scores, totals_of(batches, groups))
    assert caught.value.found == f"ValueError: odd ({__file__}, line {line})"


def test_a_result_of_another_type_is_the_objectives_fault():
    class Odd(Sum):
        def weigh(self, groups, totals):
            return 0.0, []

    batches, groups = cut_groups(documents([(5, 9)]), 100)
    scores = [np.zeros(len(batch.tokens_T), "f4") for batch in batches]
    with pytest.raises(PluginError, match="objective 'Odd' failed in weigh") as caught:
        weigh(Odd(), batches, groups, scores, totals_of(batches, groups))
    assert caught.value.found == "TypeError: it returned a tuple, expected Weighed"


# --- rollouts -------------------------------------------------------------------------------------


@pytest.fixture
def learning(tiny, settings, tmp_path):
    """Settings of a run that learns to answer at length, by a function of a file."""
    file = tmp_path / "reward.py"
    file.write_text("def longer(row, answer):\n    print('said')\n    return len(answer) / 10\n")

    def make(**given):
        return settings(
            tiny("llama"),
            **{
                "objective": "grpo",
                "reward": f"{file}:longer",
                "rollouts": 3,
                "rollout_tokens": 6,
                "max_steps": 4,
                "save_every": 2,
                "keep": 9,
                **given,
            },
        )

    return make


def test_a_model_learns_from_its_answers(learning):
    told = []
    report = train(learning(lr=1e-3), observe=told.append)
    rows = [json.loads(line) for line in (report.run / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 2 * 3
    assert all(row["reward"] == pytest.approx(len(row["answer"]) / 10) for row in rows)
    metrics = [event.metrics for event in told if isinstance(event, ObjectiveMetrics)]
    assert len(metrics) == 4
    named = {"reward", "rewards/longer/mean", "reward_std", "completions/mean_length"}
    assert all(named <= found.keys() for found in metrics)
    assert all(row["ended"] or row["tokens"] == 6 for row in rows)
    assert len({row["answer"] for row in rows}) > 6  # sampled, each with random numbers of its own


def test_rounding_between_sampling_and_training_is_not_clipped(learning):
    told = []
    train(learning(updates=2, objective_options={"epsilon": "1e-9"}), observe=told.append)
    clipped = [each.metrics["clip_ratio"] for each in told if isinstance(each, ObjectiveMetrics)]
    assert clipped[::2] == [0.0, 0.0] and any(clipped[1::2])


@pytest.mark.parametrize("updates", [1, 2])
def test_a_run_cut_between_rollouts_is_the_undisturbed_one(learning, tmp_path, updates):
    whole = train(learning(updates=updates, out=tmp_path / "whole")).run
    killed(learning(updates=updates), cut_after(3))
    assert_same_run(resumed(tmp_path / "run").run, whole)


def test_answers_of_another_model_are_noticed(learning, monkeypatch):
    """The adapter that learns is not the one that answers."""
    monkeypatch.setattr(rollouts, "NAME", None)  # the base answers
    with pytest.raises(TrainingError) as caught:
        train(learning(lr=1e-2))
    assert caught.value.code == "VOX-T005"
    assert "step 1" not in str(caught.value)  # there they are the same


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 'much'", "no number"),
        ("return float('nan')", "nan"),
        ("raise KeyError('gone')", "raised KeyError: 'gone' ("),
        ("raise KeyError('gone')", "reward.py, line 2)"),
        ("import os; os._exit(3)", "ended its process"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_row(learning, tmp_path, data, body, said):
    (tmp_path / "reward.py").write_text(f"def longer(row, answer):\n    {body}\n")
    with pytest.raises(TrainingError) as caught:
        train(learning())
    assert caught.value.code == "VOX-T004"
    assert said in str(caught.value.found)
    assert str(caught.value.where) == f"{data / 'valid.jsonl'}, line 1"
    found = read_run(tmp_path / "run")
    assert (found.status, found.error) == ("failed", str(caught.value))


def test_rollouts_are_laid_out_behind_their_prompts():
    prompts = [
        Document(np.array(t, "i4"), np.ones(len(t), "f4"), Path(), 1, 0)
        for t in ([7, 8, 9], [5, 6])
    ]
    batch = to_batch([*map(rollouts.behind, prompts, ([1, 2], [3]))])
    assert batch.tokens_T.tolist() == [7, 8, 9, 1, 2, 5, 6, 3]
    assert batch.targets_T.tolist() == [8, 9, 1, 2, 0, 6, 3, 0]
    assert batch.weights_T.tolist() == [0, 0, 1, 1, 0, 0, 1, 0]
    assert batch.starts_D.tolist() == [0, 5]


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory):
    """A run that has learnt what the base does not say."""
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "Say 1.", "completion": "1 it is."}))
    numbers = {"max_steps": 20, "lr": 1e-2, "dtype": "fp32", "out": folder / "run"}
    given = {"model": str(tiny("llama")), "data": [folder / "train.jsonl"], **numbers}
    return str(train(validate(TrainSettings, given)).run)


@pytest.fixture
def distilled(tiny, settings, teacher):
    """Settings of a run that learns a teacher's four most likely tokens from rows."""

    def make(**given):
        options = {"objective": "distill", "objective_options": {"top_k": "4"}, "lr": 1e-2}
        return settings(tiny("llama"), **{**options, "teacher": teacher, **given})

    return make


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_teachers_likely_tokens_are_learned_from_rows(distilled, backend, tmp_path, monkeypatch):
    """Its adapter takes part; its tokens are computed once."""
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    told, base = {}, {"teacher": distilled().model}
    for name, other in (("one", {}), ("again", {}), ("two", base)):
        told[name] = []
        given = {"backend": backend, "max_steps": 8, "dtype": "fp32", "out": tmp_path / name}
        train(distilled(**given, **other), observe=told[name].append)
    assert losses(told["again"]) == losses(told["one"])
    said = [[e.message for e in events if isinstance(e, Notice)] for events in told.values()]
    computed = ["the teacher's log-probabilities" in " ".join(each) for each in said]
    assert computed == [1, 0, 1]
    assert any("examples, " in each and "of them trained" in each for each in said[0])
    first, last = losses(told["one"])[0], losses(told["one"])[-1]
    assert last < first
    assert losses(told["two"])[0] != pytest.approx(first, rel=1e-3)  # the base's own teacher
    metrics = [each.metrics for each in told["one"] if isinstance(each, ObjectiveMetrics)]
    assert all(0 < each["teacher_mass"] <= 1 for each in metrics)
    assert [each["kl"] for each in metrics] == pytest.approx(losses(told["one"]), rel=0.5)


def test_distillation_from_rows_is_the_same_on_cpu_and_mlx_and_goes_on(distilled, tmp_path):
    curves = {}
    for backend in ("cpu", "mlx"):
        told, given = [], {"backend": backend, "dtype": "fp32", "out": tmp_path / backend}
        train(distilled(**given), observe=told.append)
        curves[backend] = losses(told)
    assert curves["cpu"] == pytest.approx(curves["mlx"], rel=1e-5)
    given = {"save_every": 1, "keep": 9}
    whole = train(distilled(**given, out=tmp_path / "whole")).run
    killed(distilled(**given), cut_after(2))
    assert_same_run(resumed(tmp_path / "run").run, whole)


def test_a_teachers_tokens_are_those_of_the_students_vocabulary(distilled, tmp_path, monkeypatch):
    """And are computed anew for another one."""
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    seen: set[Path] = set()
    for vocabulary in (None, 100):
        monkeypatch.setattr(weighing, "vocabulary_of", lambda _: vocabulary)  # noqa: B023
        train(distilled(max_steps=1, out=tmp_path / str(vocabulary)))
        made = {*(tmp_path / "cache").glob("reference/*/targets.npy")} - seen
        assert made
        assert (max(np.load(path).max() for path in made) < 100) == (vocabulary == 100)
        seen |= made


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"objective_options": {"top_k": "256"}}, ConfigError, "the model's vocabulary"),
        ({"backend": "mlx"}, BackendError, "quantisation nf4 (has:"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_before_any_work(
    distilled, tiny, settings, tmp_path, monkeypatch, given, kind, said
):
    if kind is ConfigError:
        monkeypatch.setattr(inputs, "vocabulary_of", lambda _: 98)
    else:
        numbers = {"quant": "nf4", "max_steps": 1, "out": tmp_path / "nf4"}
        given = {**given, "teacher": str(train(settings(tiny("llama"), **numbers)).run)}
    with pytest.raises(kind) as caught:
        train(distilled(**given))
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_teachers_most_likely_tokens():
    """Sorted, of equals the lower id first, also at the end, and only where something is
    trained."""
    logits_TV = np.array([[9, 9, 9, 9], [1, 3, 2, 0], [2, 1, 2, 2], [0, 0, 0, 0]], np.float32)
    model = Mock(logits=lambda _tokens, _adapter: logits_TV)
    document = Document(np.arange(4), np.array([0, 0, 1, 1], "f4"), "rows", 1, 0)
    ((best_KM, log_probs_KM),) = most_likely(model, None, [document], 2, 4)
    assert best_KM.tolist() == [[1, 2], [0, 2]]
    expected_TV = logits_TV - np.log(np.exp(logits_TV).sum(1, keepdims=True))
    assert log_probs_KM == pytest.approx(np.take_along_axis(expected_TV[1:3], best_KM, 1))
    ((within_KM, _),) = most_likely(model, None, [document], 2, 2)
    assert within_KM.tolist() == [[1, 0], [0, 1]]


def test_a_teacher_is_learned_from(tiny, settings, tmp_path, data):
    first = train(settings(tiny("llama"), out=tmp_path / "teacher", lr=1e-2)).run
    told = []
    train(
        settings(
            tiny("llama"),
            objective="distill",
            teacher=str(first),
            rollouts=2,
            rollout_tokens=6,
            max_steps=2,
        ),
        observe=told.append,
    )
    assert len(losses(told)) == 2
    assert any(loss != 0 for loss in losses(told))
    metrics = [event.metrics for event in told if isinstance(event, ObjectiveMetrics)]
    assert [next(iter(found)) for found in metrics] == ["kl", "kl"]
    assert not any("reward" in name for found in metrics for name in found)
    assert any(each.loss for each in told if isinstance(each, Validation))
    assert f"| teacher | {first} |" in (tmp_path / "run" / "README.md").read_text()


ON_POLICY = {"objective": "distill", "rollouts": 2, "rollout_tokens": 4, "max_steps": 1}
PROMPTS = [{"prompt": f"Say {n}."} for n in range(3)]


@pytest.fixture
def rows(tmp_path):
    """`rows(list)` -> a data file."""

    def make(objects):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, objects)))
        return path

    return make


@pytest.mark.parametrize("objective", ["distill", "grpo"])
def test_where_the_model_answers_rows_need_no_answer(
    tiny, settings, rows, teacher, learning, tmp_path, objective
):
    """The same prompts are answered, alone or with an answer that nothing reads."""
    code = "def longer(row, answer):\n    return len(row) + len(answer)\n"
    (tmp_path / "reward.py").write_text(code)
    user = [{"role": "user", "content": row["prompt"]} for row in PROMPTS]
    forms = [
        PROMPTS,
        [{"prompt": [turn]} for turn in user],
        [{"messages": [turn]} for turn in user],
        [{**row, "completion": "any"} for row in PROMPTS],
    ]
    found = []
    for number, objects in enumerate(forms):
        out = tmp_path / f"run-{number}"
        given = {**ON_POLICY, "objective": objective, "data": [rows(objects)], "out": out}
        if objective == "distill":
            report = train(settings(tiny("llama"), **given, valid=None, teacher=teacher))
        else:
            report = train(learning(**given, valid=None))
        lines = map(json.loads, (report.run / "rollouts.jsonl").read_text().splitlines())
        found.append([(line["answer"], line["reward"] - len(line["answer"])) for line in lines])
    assert len(found[0]) == 2 * 2
    assert [[answer for answer, _ in each] for each in found] == [[a for a, _ in found[0]]] * 4
    if objective == "grpo":  # a reward is given the row as it is written
        assert [{fields for _, fields in each} for each in found] == [{1}, {1}, {1}, {2}]


def test_where_rows_are_learned_from_each_has_an_answer(tiny, settings, rows, teacher, learning):
    data, top_k = [rows(PROMPTS)], {"objective_options": {"top_k": "4"}}
    for given in (
        settings(tiny("llama"), data=data, max_steps=1),
        settings(tiny("llama"), data=data, max_steps=1, objective="kto"),
        settings(tiny("llama"), data=data, objective="distill", teacher=teacher, **top_k),
        learning(data=data, valid=None, reward="exact"),
    ):
        with pytest.raises(DataError, match="malformed") as caught:
            train(given)
        assert caught.value.code == "VOX-D003"
        assert "found in every row none of completion, response" in caught.value.faults[0]
        assert "prompts alone: --objective grpo" in caught.value.remedy
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    with pytest.raises(DataError, match="malformed") as caught:
        train(learning(data=[rows([{"messages": turns}])], valid=None, reward="exact"))
    assert '"messages" that end with the user' in caught.value.faults[0]


@pytest.mark.parametrize("objects", [[{"text": f"Some {n}."} for n in range(9)], PAIRS[:2]])
def test_rows_without_one_prompt_and_answer_are_refused(
    tiny, settings, rows, teacher, objects, tmp_path
):
    """Equal faults are one line; documents that supervised training has cached are not used."""
    data, text = [rows(objects)], "text" in objects[0]
    if text:
        train(settings(tiny("llama"), data=data, max_steps=1, out=tmp_path / "sft"))
    with pytest.raises(DataError) as caught:
        train(settings(tiny("llama"), **ON_POLICY, teacher=teacher, data=data))
    assert caught.value.code == "VOX-D033"
    (fault,) = caught.value.faults
    assert f"line 1, 2{', 3, 4, 5 and 4 more' if text else ''}: found a " in fault


def test_pairs_have_no_answer_to_learn_a_teachers_distribution_of(distilled, pairs):
    with pytest.raises(DataError, match="do not fit the objective") as caught:
        train(distilled(data=[pairs]))
    assert "found a preference pair" in caught.value.faults[0]
    assert caught.value.where == "--objective distill"


def test_a_teacher_that_is_wrong_is_named(tiny, settings, distilled, tmp_path):
    with pytest.raises(ModelError) as caught:
        train(distilled(teacher="no-such-teacher"))
    assert caught.value.where == "--teacher no-such-teacher"
    other = shutil.copytree(tiny("llama"), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = sorted(vocabulary, key=vocabulary.get)[5:7]
    vocabulary[one], vocabulary[two] = 6, 5
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="another tokenizer") as caught:
        train(distilled(teacher=str(other)))
    assert caught.value.found.endswith(f"{one!r} has id 6")
    assert caught.value.expected.endswith(f"{one!r} has id 5")


def test_a_resume_names_what_has_changed(distilled, tmp_path):
    killed(distilled(save_every=1), cut_after(1))
    settings = {"resume": tmp_path / "run", "backend": "cpu"}
    with pytest.raises(PlanError) as caught:
        train(validate(TrainSettings, {**settings, "objective_options": {"top_k": "3"}}))
    assert "-O top_k: '4' when it began, '3' now" in caught.value.faults
    with pytest.raises(ModelError, match="names nothing") as caught:
        train(validate(TrainSettings, {**settings, "teacher": "no-such-teacher"}))
    assert caught.value.remedy.endswith("if it has moved, name its new place with --teacher")
