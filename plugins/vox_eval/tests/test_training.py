"""Runs that are evaluated while they train, on both backends, killed, stopped and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plugins.vox_eval.tests.conftest import write_in, write_suite

from vox_core.api.runs import read_run
from vox_core.api.settings import TrainSettings
from vox_core.errors import PluginError, VoxError
from vox_core.host import discover, load
from vox_core.run.session import StoppedAtOnce
from vox_core.run.train import train
from vox_eval import evaluation
from vox_eval.evaluation import evaluate_and_compare
from vox_eval.scorers import Exact
from vox_eval.settings import EvalSettings

ADAPTER = "adapter_model.safetensors"
EVALUATED = ("evaluation.json", "eval.jsonl")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "BLOCK", 4)


def settings_in(place: Path, llama: Path, suite: Path, **given: Any) -> TrainSettings:
    """Four steps with dropout, evaluated before, after two and after four."""
    rows = ({"prompt": f"Say {n}.", "completion": f"{n}"} for n in range(8))
    usual = {
        "model": str(llama),
        "data": (write_in(place, "train.jsonl", *rows),),
        "out": place / "run",
        "backend": "cpu",
        "dtype": "fp32",
        "max_steps": 4,
        "batch_size": 4,
        "lr": 1e-2,
        "rank": 4,
        "dropout": 0.2,
        "save_every": 2,
        "eval_every": 2,
        "eval_suite": (suite,),
    }
    return TrainSettings(**{**usual, **given})


@pytest.fixture
def settings(llama, suite, tmp_path) -> Callable[..., TrainSettings]:
    return partial(settings_in, tmp_path, llama, suite)


@pytest.fixture(scope="module")
def whole(llama, tmp_path_factory) -> Path:
    """A run that nothing interrupts."""
    place = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evaluation, "BLOCK", 4)
        return train(settings_in(place, llama, write_suite(partial(write_in, place)))).run


def resume(run: Path) -> None:
    train(TrainSettings(resume=run))


def losses(run: Path) -> list[str]:
    lines = map(json.loads, (run / "telemetry.jsonl").open())
    found = {line["step"]: line["loss"].hex() for line in lines if line["event"] == "step"}
    return [found[step] for step in sorted(found)]


def evaluated(run: Path) -> dict[str, bytes]:
    """What all evaluations of a run have found."""
    files = sorted(each for name in EVALUATED for each in run.glob(f"evaluations/*/{name}"))
    return {str(each.relative_to(run)): each.read_bytes() for each in files}


def at_score(monkeypatch, number: int, act: Callable[[], object]) -> None:
    """Act at this score of the scorer `exact`: 6 is the first after step 2."""
    scored, count = Exact.score, [0]

    def score(self: Exact, *args: Any) -> Any:
        count[0] += 1
        if count[0] == number:
            act()
        return scored(self, *args)

    monkeypatch.setattr(Exact, "score", score)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_run_with_evaluations_is_the_run_without(settings, backend, tmp_path, suite) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    run = train(settings(backend=backend)).run
    plain = train(settings(backend=backend, out=tmp_path / "plain", eval_suite=())).run
    assert losses(run) == losses(plain)
    assert (run / ADAPTER).read_bytes() == (plain / ADAPTER).read_bytes()
    assert not (plain / "evaluations").exists()

    cards = [
        json.loads((run / f"evaluations/step-{n}/scorecard.json").read_text()) for n in (0, 2, 4)
    ]
    assert len({card["digest"] for card in cards}) == 3, "each of another model"
    curves = read_run(run).metrics
    assert curves.keys() == {"eval/say", "eval/warm", "eval/pick", "eval/text"}
    assert curves["eval/text"] == [
        (step, card["tasks"]["text"]["score"]) for step, card in zip((0, 2, 4), cards, strict=True)
    ]
    # The last one is of the adapter in the run folder; the loaded model rounds otherwise.
    given = EvalSettings(suite=(suite,), backend=backend, dtype="fp32")
    after = evaluate_and_compare(str(run), given, observe=lambda _: None).own.folder
    ours, theirs = (
        [json.loads(line) for line in (folder / "eval.jsonl").open()]
        for folder in (run / "evaluations/step-4", after)
    )
    for one, other in zip(ours, theirs, strict=True):
        found, expected = (np.concatenate(each.pop("log_probs")) for each in (one, other))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert one.pop("score") == pytest.approx(other.pop("score"), rel=1e-6)
        del one["why"], other["why"]
        assert one == other


def test_without_eval_every_it_is_before_and_after(settings) -> None:
    run = train(settings(eval_every=0)).run
    assert sorted(each.name for each in (run / "evaluations").iterdir()) == ["step-0", "step-4"]


# --- interruptions --------------------------------------------------------------------------------


def assert_same(run: Path, whole: Path) -> None:
    assert losses(run) == losses(whole)
    assert (run / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    assert evaluated(run) == evaluated(whole)


KILLED = """
import json, os, sys
from vox_core.api.settings import TrainSettings
from vox_core.run.train import train
from vox_eval import evaluation
from vox_eval.scorers import Exact

evaluation.BLOCK = 4
left, scored = [int(sys.argv[2])], Exact.score

def score(*args):
    left[0] -= 1
    return scored(*args) if left[0] else os._exit(9)

Exact.score = score
train(TrainSettings.model_validate_json(sys.argv[1]))
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [8, 13])
def test_a_killed_run_completes_its_evaluations(settings, whole, number) -> None:
    """Killed after the second step, whose checkpoint is there, or after the last."""
    given = settings().model_dump_json(include=settings().model_fields_set)
    command = [sys.executable, "-c", KILLED, given, str(number)]
    assert subprocess.run(command, check=False).returncode == 9
    run = settings().out
    before = {path: path.stat().st_mtime_ns for path in run.glob("evaluations/step-0/eval.jsonl")}
    resume(run)
    assert_same(run, whole)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert [step for step, _ in read_run(run).metrics["eval/warm"]] == [0, 2, 4]


@pytest.mark.parametrize(("number", "step"), [(2, 0), (7, 2)])
def test_ctrl_c_stops_an_evaluation_and_keeps_the_run(
    settings, whole, monkeypatch, number, step
) -> None:
    with monkeypatch.context() as patched:
        at_score(patched, number, lambda: os.kill(os.getpid(), signal.SIGINT))
        report = train(settings())
    assert (report.stopped, report.steps) == (True, step)
    assert not (report.run / f"evaluations/step-{step}/scorecard.json").exists()
    resume(report.run)
    assert_same(report.run, whole)


def test_a_second_ctrl_c_keeps_the_run_too(settings, whole, monkeypatch) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        at_score(patched, 7, twice)
        with pytest.raises(StoppedAtOnce) as stopped:
            train(settings(save_every=0))
    assert stopped.value.step == 2
    resume(stopped.value.run)
    assert_same(stopped.value.run, whole)


def test_a_scorer_that_fails_ends_the_run_and_keeps_it(settings, whole, monkeypatch) -> None:
    def fail() -> None:
        raise RuntimeError("no such judge")

    with monkeypatch.context() as patched:
        at_score(patched, 7, fail)
        with pytest.raises(PluginError, match="exact"):
            train(settings(save_every=0))
    resume(settings().out)
    assert_same(settings().out, whole)


def test_an_evaluation_of_another_model_is_replaced(settings, whole, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        at_score(patched, 7, lambda: os.kill(os.getpid(), signal.SIGINT))
        run = train(settings()).run
    path = run / "evaluations/step-2/evaluation.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "digest": "other"}))
    resume(run)
    assert_same(run, whole)


# --- refusals -------------------------------------------------------------------------------------


def refused(settings: TrainSettings) -> str:
    with pytest.raises(VoxError) as caught:
        train(settings)
    assert settings.out is not None
    assert not settings.out.exists(), "something was written"
    return str(caught.value)


@pytest.mark.parametrize(
    ("suite", "said"),
    [
        (None, ("VOX-C010", "nothing.toml", "cannot be read")),
        ('task = [{ id = "a", rows = "say.jsonl", scorer = "no" }]', ("VOX-C010", "'no'")),
        ('task = [{ id = "a", rows = "none.jsonl", scorer = "exact" }]', ("VOX-D002", "no rows")),
        ("task = []", ("VOX-C010", "task")),
    ],
    ids=["unknown suite", "unknown scorer", "empty task", "no task"],
)
def test_a_suite_is_refused_before_training(settings, write, suite, said) -> None:
    write("none.jsonl")
    named = write("s.toml", f'name = "s"\n{suite}') if suite else Path("nothing.toml")
    text = refused(settings(eval_suite=(named,)))
    assert all(each in text for each in said), text


def test_an_example_that_is_too_long_is_refused(settings, write) -> None:
    write("say.jsonl", {"prompt": "long " * 4000, "ideal": "x"})
    assert "VOX-D007" in refused(settings())


def test_without_the_plugin_its_name_is_in_the_error(settings, monkeypatch) -> None:
    found = [each for each in discover.discover() if each.id != "eval"]
    monkeypatch.setattr(load, "discover", lambda: found)
    text = refused(settings())
    assert "VOX-B013" in text
    assert "vox plugin install eval" in text
    assert "--eval-suite" in text
