"""Stopped and resumed is the run that would have been: bit for bit, on the CPU with one thread.

Six documents, two a step: an epoch is three steps. 96 tokens hold one or two of them, so that a
step has several micro-batches.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.run.interrupted import (
    Killed,
    assert_same_run,
    cut_after,
    killed,
    resumed,
    stop_after,
)
from tests.run.lines import read
from vox_core.adapter.peft import read_adapter
from vox_core.config import TrainSettings, validate
from vox_core.contract import CheckpointWritten, Notice, RunEnd, StepDone, Validation
from vox_core.data.batching import cut, documents_in_step
from vox_core.errors import InputError, TrainingError, WorkError
from vox_core.run import checkpoint
from vox_core.run.learner import Learner
from vox_core.run.run_plan import plan_run
from vox_core.run.session import STOPPING, StoppedAtOnce, StopSignal
from vox_core.run.telemetry import Telemetry
from vox_core.run.train import train
from vox_torch.train import TorchTrainer

STEPS = 9
SMALL = {"max_steps": STEPS, "dropout": 0.1, "micro_batch_tokens": 96, "eval_every": 2}
# A rate that is far too high. Held-out losses: 5.63, 5.20, 5.00, 5.22, 5.06, 5.02, 6.02, 5.45.
WORSE = {**SMALL, "max_steps": 40, "lr": 0.1, "schedule": "constant", "eval_every": 1}
WORSE_AND_SHORT = {**WORSE, "max_steps": 7}


@pytest.fixture(scope="module")
def wholes():
    """What was given -> the folder of the run that nothing interrupts."""
    return {}


@pytest.fixture
def whole(tiny, settings, tmp_path_factory, wholes):
    """`whole(**given)` -> the folder of the run that nothing interrupts, made once: the rows of
    every test are the same."""

    def make(**given):
        if (key := json.dumps(given, sort_keys=True)) not in wholes:
            out = tmp_path_factory.mktemp("whole") / "run"
            wholes[key] = train(settings(tiny("llama"), out=out, **given)).run
        return wholes[key]

    return make


@pytest.fixture
def made(tiny, settings):
    return lambda **given: settings(tiny("llama"), **given)


@pytest.mark.parametrize("step", [4, 3], ids=["mid-epoch", "between epochs"])
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_in_an_epoch_and_between_two(made, whole, step, how):
    asked = made(**SMALL, save_every=step)
    if how == "stopped":
        report = train(asked, observe=stop_after(step))
        assert (report.stopped, report.steps) == (True, step)
    else:
        killed(asked, cut_after(step, CheckpointWritten))
    assert resumed(asked.out).steps == STEPS
    assert_same_run(asked.out, whole(**SMALL))


def test_inside_accumulation(made, whole, monkeypatch):
    """Killed between two micro-batches: what was collected of the step is not in the next run."""
    asked = made(**SMALL, save_every=2)
    with monkeypatch.context() as patched:
        patched.setattr(TorchTrainer, "accumulate", _at_a_second_batch(patched, _raise_killed))
        killed(asked, lambda _: None)
    assert resumed(asked.out).steps == STEPS
    assert_same_run(asked.out, whole(**SMALL))


def test_steps_have_several_micro_batches(made):
    dataset = plan_run(made(**SMALL)).data.train
    chosen = [dataset[index] for index in documents_in_step(dataset, 2, 42, 6)]
    assert len(cut(chosen, 96)[0]) > 1


@pytest.mark.parametrize("event", [StepDone, CheckpointWritten])
def test_after_the_last_step(made, whole, event):
    """Before its checkpoint, and after it, when only the adapter was still to be written."""
    asked = made(**SMALL, save_every=4)
    killed(asked, cut_after(STEPS, event))
    assert not (asked.out / "vox_adapter.json").exists()
    assert resumed(asked.out).steps == STEPS
    assert_same_run(asked.out, whole(**SMALL))
    with pytest.raises(InputError, match="finished already"):
        resumed(asked.out)


def test_twice(made, whole):
    asked = made(**SMALL, save_every=2)
    killed(asked, cut_after(3))
    with pytest.raises(Killed):
        resumed(asked.out, cut_after(7))
    assert resumed(asked.out).steps == STEPS
    assert_same_run(asked.out, whole(**SMALL))


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_with_early_stopping(made, whole, best, how):
    """The count of validations without a better one goes on where it was, and so does the best."""
    given = {**WORSE, "patience": 4, "load_best_at_end": best}
    through = whole(**given)
    manifest = json.loads((through / "vox_adapter.json").read_text())
    last = manifest["last_step"]
    assert 5 < last < 40
    assert manifest["step"] == (last - 4 if best else last)
    asked = made(**given, save_every=2)
    if how == "stopped":  # two validations without a better one before, two after it
        train(asked, observe=stop_after(last - 2))
    else:
        killed(asked, cut_after(last - 1))
    report = resumed(asked.out)
    assert (report.stopped, report.steps, report.best_step) == (False, last, last - 4)
    assert_same_run(asked.out, through)
    with pytest.raises(InputError, match="finished already"):
        resumed(asked.out)


def test_early_stopping_goes_on_without_telemetry(made, whole):
    """It is a log, which may be lost: the checkpoint holds what was measured."""
    given = {**WORSE, "patience": 4}
    last = json.loads((whole(**given) / "vox_adapter.json").read_text())["last_step"]
    asked = made(**given, save_every=1)
    killed(asked, cut_after(last - 1))
    telemetry = asked.out / "telemetry.jsonl"
    telemetry.unlink()
    report = resumed(asked.out)
    assert (report.steps, report.best_step) == (last, last - 4)


def test_killed_when_early_stopping_has_decided(made, whole):
    given = {**WORSE, "patience": 3}
    through = whole(**given)
    last = json.loads((through / "vox_adapter.json").read_text())["last_step"]
    asked = made(**given, save_every=1)
    killed(asked, cut_after(last, CheckpointWritten))
    told = []
    assert resumed(asked.out, told.append).steps == last
    assert_same_run(asked.out, through)
    assert any("early stopping" in each.message for each in told if isinstance(each, Notice))


def test_patience_may_be_raised_afterwards(made, whole):
    given = {**WORSE, "max_steps": 14, "lr": 1e-20}  # moves no number: equal is not better
    asked = made(**given, patience=2)
    assert train(asked).steps == 3
    report = train(validate(TrainSettings, {"resume": asked.out, "patience": 0}))
    assert report.steps == 14
    assert_same_run(asked.out, whole(**given))


def test_the_best_checkpoint_is_kept_and_is_the_adapter(made):
    given = {**WORSE, "max_steps": 8, "warmup": 0.125}
    asked = made(**given, load_best_at_end=True, save_every=1)
    told = []
    report = train(asked, observe=told.append)
    losses = {e.step: e.loss for e in told if isinstance(e, Validation) and e.step}
    best = min(losses, key=losses.get)
    assert (report.best_step, report.best_loss) == (best, losses[best])
    assert report.adapter_step == best < 7
    there = {path.name for path in (report.run / "checkpoints").iterdir()}
    assert there == {f"step-{best}", "step-7", "step-8"}
    assert f"-> {losses[best]:.4f} (" in (report.run / "README.md").read_text()
    best_adapter = read_adapter(report.run).tensors()
    state = checkpoint.load_step(report.run / "checkpoints", best)
    for name, value in state.adapter.tensors().items():
        assert np.array_equal(best_adapter[name], value), name


def test_a_best_checkpoint_that_is_damaged_is_told(made):
    asked = made(**{**WORSE, "patience": 2}, load_best_at_end=True)
    told = []

    def observe(event):
        told.append(event)
        if isinstance(event, CheckpointWritten) and event.step == 3:
            (asked.out / "checkpoints" / "step-3" / "adapter.safetensors").write_bytes(b"")

    report = train(asked, observe=observe)
    assert (report.best_step, report.adapter_step) == (3, report.steps)
    assert any("step, 3, is missing or damaged" in e.message for e in told if isinstance(e, Notice))


@pytest.mark.parametrize("given", [{"patience": 2}, {"load_best_at_end": True}])
def test_what_needs_validations_is_refused_without(made, data, given):
    with pytest.raises(InputError, match="needs validations") as caught:
        train(made(**given))
    assert "--eval-every" in caught.value.found
    (data / "valid.jsonl").unlink()
    with pytest.raises(InputError) as caught:
        train(made(**given, eval_every=2))
    assert "held-out" in caught.value.found


def test_a_second_signal_stops_at_once_and_loses_the_step_alone(made, whole, monkeypatch):
    """In the middle of step 6, with the last checkpoint after step 4."""
    asked, told = made(**SMALL, save_every=4), []
    with monkeypatch.context() as patched:
        patched.setattr(TorchTrainer, "accumulate", _at_a_second_batch(patched, _two_signals))
        with pytest.raises(StoppedAtOnce) as caught:
            train(asked, observe=told.append)
    assert (caught.value.run, caught.value.step) == (asked.out, 5)
    assert isinstance(told[-1], RunEnd)
    assert (told[-1].outcome, told[-1].step) == ("stopped", 5)
    assert resumed(asked.out).steps == STEPS
    assert_same_run(asked.out, whole(**SMALL))


def test_a_second_signal_in_the_update_keeps_the_checkpoint_before(made, whole, monkeypatch):
    """A state that is half of one step and half of the next is no state."""
    from vox_torch.optimizer import MasterAdamW

    asked = made(**SMALL, save_every=4)
    forget, count = MasterAdamW.forget, []

    def impatient(adamw):
        count.append(0)
        if len(count) == 6:  # once a step: moments and masters are the next step's already
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        forget(adamw)

    with monkeypatch.context() as patched:
        patched.setattr(MasterAdamW, "forget", impatient)
        with pytest.raises(StoppedAtOnce) as caught:
            train(asked)
    assert caught.value.step == 4
    assert resumed(asked.out).steps == STEPS
    assert_same_run(asked.out, whole(**SMALL))


def test_a_second_signal_in_a_validation_keeps_the_step(made, whole, monkeypatch, tmp_path):
    """The resumed run begins with the validation."""
    through = whole(**WORSE_AND_SHORT)
    for validation, newest in ((4, 3), (8, 7)):  # the last is of step 7
        asked = made(**WORSE_AND_SHORT, save_every=2, out=tmp_path / f"run-{validation}")
        with monkeypatch.context() as patched:
            _interrupt(patched, "evaluate", validation)
            with pytest.raises(StoppedAtOnce) as caught:
                train(asked)
        assert caught.value.step == newest
        report = resumed(asked.out)
        assert (report.stopped, report.steps) == (False, 7)
        assert_same_run(asked.out, through)
        best = json.loads((asked.out / "checkpoints/step-7/state.json").read_text())
        other = json.loads((through / "checkpoints/step-7/state.json").read_text())
        assert (best["losses"], best["validations"]) == (other["losses"], other["validations"])


def test_an_interrupted_validation_that_exhausts_patience_ends_the_run(made, whole, monkeypatch):
    given = {**WORSE, "patience": 2}
    through = whole(**given)
    (newest,) = sorted(through.glob("checkpoints/step-*"), key=checkpoint.step_of)[-1:]
    state = json.loads((newest / "state.json").read_text())
    asked = made(**given)
    with monkeypatch.context() as patched:
        _interrupt(patched, "evaluate", len(state["validations"]))
        with pytest.raises(StoppedAtOnce) as caught:
            train(asked)
    assert caught.value.step == checkpoint.step_of(newest) < 40
    assert resumed(asked.out).steps == checkpoint.step_of(newest)
    assert_same_run(asked.out, through)
    again = json.loads((asked.out / "checkpoints" / newest.name / "state.json").read_text())
    assert again["validations"] == state["validations"]


@pytest.mark.parametrize("event", [StepDone, Validation])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_second_signal_while_an_event_is_told(made, whole, monkeypatch, event, when):
    """Before its line of telemetry and after it: what is not told of a kept step is never told."""
    asked = made(**SMALL, save_every=4)
    tell = Telemetry.__call__

    def impatient(telemetry, told):
        now = isinstance(told, event) and told.step == 6
        if now and when == "before":
            raise KeyboardInterrupt
        faults = tell(telemetry, told)
        if now:
            raise KeyboardInterrupt
        return faults

    with monkeypatch.context() as patched:
        patched.setattr(Telemetry, "__call__", impatient)
        with pytest.raises(StoppedAtOnce) as caught:
            train(asked)
    assert caught.value.step == 4
    assert resumed(asked.out).steps == STEPS
    assert_same_run(asked.out, whole(**SMALL))


def _at_a_second_batch(patched, act):
    """`accumulate`, which acts at the second micro-batch of step 6."""
    accumulate, update = TorchTrainer.accumulate, TorchTrainer.update
    updated, begun = list[int](), list[int]()

    def counted(trainer, given, name):
        updated.append(given.number)
        return update(trainer, given, name)

    def acting(trainer, *given):
        begun.append(len(updated))
        if begun.count(5) == 2 and begun[-1] == 5:
            act()
        return accumulate(trainer, *given)

    patched.setattr(TorchTrainer, "update", counted)
    return acting


def _raise_killed():
    raise Killed


def _two_signals():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


def _interrupt(patched, name, call):
    """Two signals at the beginning of so manieth a call of the learner's method."""
    method, calls = getattr(Learner, name), []

    def impatient(learner, *given):
        calls.append(name)
        if len(calls) == call:
            _two_signals()
        return method(learner, *given)

    patched.setattr(Learner, name, impatient)


LOST = TrainingError("T006", "another process cannot be reached", remedy="resume")


@pytest.mark.parametrize(
    ("method", "error", "kept"),
    [
        ("accumulate", MemoryError(), True),
        ("accumulate", LOST, True),
        ("update", LOST, True),
        ("update", MemoryError(), False),  # it may have changed some of the weights
    ],
)
def test_a_step_that_fails_keeps_the_state_before_it(made, whole, monkeypatch, method, error, kept):
    """In step 6, with the last checkpoint after step 4."""
    asked, steps = made(**SMALL, save_every=4), []

    def failing(*given):
        steps.append(method)
        if len(steps) == 6:
            raise error
        return update(*given)

    def act():
        raise error

    update = TorchTrainer.update
    with monkeypatch.context() as patched:
        if method == "update":
            patched.setattr(TorchTrainer, "update", failing)
        else:
            patched.setattr(TorchTrainer, "accumulate", _at_a_second_batch(patched, act))
        with pytest.raises(WorkError) as caught:
            train(asked)
    assert error in (caught.value, caught.value.__cause__)
    newest = checkpoint.numbered(asked.out / "checkpoints")[0]
    assert newest.name == ("step-5" if kept else "step-4")
    assert resumed(asked.out).steps == STEPS
    assert_same_run(asked.out, whole(**SMALL))


def test_max_time(made, whole, monkeypatch):
    """By a clock that goes on by ten seconds between steps."""
    told = []

    def now() -> float:
        return 10.0 * sum(isinstance(event, StepDone) for event in told)

    monkeypatch.setattr("vox_core.run.session.time.perf_counter", now)
    asked = made(**SMALL, max_time="45s")
    report = train(asked, observe=told.append)
    assert (report.stopped, report.steps) == (True, 5)
    assert any("--max-time" in e.message for e in told if isinstance(e, Notice))
    monkeypatch.undo()
    resumed(asked.out)
    assert_same_run(asked.out, whole(**SMALL))


TERM, HUP = signal.SIGTERM, signal.SIGHUP


def test_the_second_signal_of_a_closed_terminal_interrupts_nothing():
    told = []
    stop = StopSignal(lambda: told.append("stopping"))
    for number in (HUP, HUP):
        stop.caught(number, None)
    assert stop() and told
    with pytest.raises(KeyboardInterrupt):
        stop.caught(TERM, None)


@pytest.mark.parametrize(
    "signals", [pytest.param([TERM], marks=pytest.mark.long), [TERM, TERM], [HUP, HUP]]
)
def test_a_signal_from_outside(made, whole, signals):
    """Through the command itself: exit 130, with the words that say how to go on."""
    given = {**SMALL, "max_steps": 40, "eval_every": 10}
    asked = made(**given, save_every=35)
    flags = asked.model_dump(mode="json", include=asked.model_fields_set)
    command = [sys.executable, "-m", "vox_core.cli", "train"]
    for key, value in flags.items():
        for one in value if isinstance(value, list) else [value]:
            command += [f"--{key.replace('_', '-')}", str(one)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    told = asked.out / "telemetry.jsonl"
    while not any(line["event"] == "step" for line in read(told)):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.001)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert f"resume with: vox train --resume {asked.out}" in errors
    (last,) = [line for line in read(told) if line["event"] == "run_end"]
    assert last["outcome"] == "stopped"
    assert resumed(asked.out).steps == 40
    assert_same_run(asked.out, whole(**given))


# --- what may not change -------------------------------------------------------------------------


def test_a_config_that_has_changed_is_another_model(tiny, settings, tmp_path):
    """Weights and tokenizer are as they were: `rms_norm_eps` alone makes another run of it."""
    base = shutil.copytree(tiny("llama"), tmp_path / "base")
    asked = settings(base, save_every=1)
    killed(asked, cut_after(3))
    config = base / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({**said, "transformers_version": "0"}, indent=4))
    again = validate(TrainSettings, {"resume": asked.out})
    assert not plan_run(again, only_planned=True).fresh
    config.write_text(json.dumps({**said, "rms_norm_eps": 0.1}))
    with pytest.raises(InputError, match="cannot be resumed") as caught:
        resumed(asked.out)
    assert str(config) in "\n".join(caught.value.faults)


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(made):
    asked = made(save_every=1)
    killed(asked, cut_after(3))
    before = (asked.out / "plan.json").read_bytes()
    shutil.rmtree(asked.out / "checkpoints")
    with pytest.raises(InputError, match="checkpoints are gone"):
        resumed(asked.out)
    assert (asked.out / "plan.json").read_bytes() == before


def test_a_run_is_not_cut_shorter_than_it_is(made):
    asked = made(save_every=1)
    killed(asked, cut_after(5))
    given = {"resume": asked.out, "max_steps": 3, "allow_change": ["max-steps"]}
    with pytest.raises(InputError, match="further than it is to go"):
        train(validate(TrainSettings, given))


def test_losses_of_other_rows_are_not_the_best(made, data):
    asked = made(**WORSE, save_every=1, patience=3)
    killed(asked, cut_after(4))
    other = data / "other.jsonl"
    other.write_text(json.dumps({"prompt": "Something else?", "completion": "Yes, it is."}))
    given = {"resume": asked.out, "valid": other, "allow_change": ["valid"]}
    report = train(validate(TrainSettings, given))
    assert report.best_step > 4
    assert report.steps == report.best_step + 3
    (change, *_) = json.loads((asked.out / "plan.json").read_text())["changes"]
    assert "…" in change["changes"][0]


def test_what_was_measured_of_steps_that_are_taken_again_counts_no_more(made):
    """The last checkpoint is damaged, and its held-out loss is of an adapter that is no more."""
    asked = made(**{**SMALL, "max_steps": 4}, save_every=2)
    assert train(asked).valid_after is not None
    damaged = asked.out / "checkpoints/step-4/adapter.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    given = {"resume": asked.out, "max_steps": 9, "allow_change": ["max-steps"]}
    report = train(validate(TrainSettings, given), observe=stop_after(3))
    losses = {
        line["step"]: line["loss"]
        for line in read(asked.out / "telemetry.jsonl")
        if line["event"] == "validation"
    }
    assert (report.steps, sorted(losses)) == (3, [0, 2, 4])
    assert (report.valid_before, report.valid_after) == (losses[0], losses[2])
    assert f"{losses[4]:.4f}" not in (asked.out / "README.md").read_text()


def test_other_settings_of_a_resume_are_those_of_the_next(made):
    asked, told = made(**WORSE, patience=1), []
    first = train(asked, observe=told.append)
    assert not first.stopped and first.steps < 40
    assert any("in 1 validation;" in event.message for event in told if isinstance(event, Notice))
    given = {"resume": asked.out, "patience": 0}
    train(validate(TrainSettings, given), observe=stop_after(first.steps + 1))
    report = resumed(asked.out, stop_after(first.steps + 3))
    assert report.steps == first.steps + 3


def test_epochs_of_a_resume_win_over_the_steps_of_the_run(made):
    asked = made(max_steps=2)
    train(asked)
    given = {"resume": asked.out, "epochs": 1, "allow_change": ["epochs"]}
    assert train(validate(TrainSettings, given)).steps == 3  # 6 documents, 2 a step


def test_the_first_signal_is_acknowledged(made):
    told = []

    def observe(event) -> None:
        told.append(event)
        stop_after(2)(event)

    train(made(**SMALL), observe=observe)
    words = [event.message for event in told if isinstance(event, Notice)]
    assert words.count(STOPPING) == 1


def test_a_run_that_is_there_is_named_as_one(made):
    asked = made(**SMALL)
    train(asked, observe=stop_after(2))
    with pytest.raises(InputError) as caught:
        train(asked)
    assert (caught.value.code, caught.value.found) == ("VOX-O001", "a run")
    assert f"vox train --resume {asked.out}" in caught.value.remedy
    resumed(asked.out)
    with pytest.raises(InputError) as caught:
        train(asked)
    assert caught.value.found == f"a run, finished: {STEPS} of {STEPS} steps"
    assert f"vox chat {asked.out}" in caught.value.remedy


def test_dropout_is_not_cut_another_way(made):
    asked = made(**SMALL, save_every=1)
    killed(asked, cut_after(3))
    given = {"resume": asked.out, "micro_batch_tokens": 48}
    with pytest.raises(InputError, match="cannot be resumed") as caught:
        train(validate(TrainSettings, given))
    assert [*caught.value.faults] == ["--micro-batch-tokens: 96 when it began, 48 now"]
