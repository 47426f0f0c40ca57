"""What the tracker writes, read back by TensorBoard itself."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.run.lines import read as read_lines

from vox_core.api.tracking import Tracker
from vox_core.config import TrainSettings, validate
from vox_core.contract import (
    CheckpointWritten,
    Evaluation,
    Event,
    Notice,
    ObjectiveMetrics,
    RunEnd,
    RunStart,
    StepDone,
    Validation,
)
from vox_core.host.observers import Observers
from vox_core.run.train import train
from vox_tensorboard import Curves
from vox_testing.tiny import make_model


def start(run: Path, first: int = 1) -> RunStart:
    return RunStart(str(run), "m", "cpu", "a CPU", "fp32", "0" * 64, first, 4, 8, 99, 40)


def step(number: int, loss: float) -> StepDone:
    return StepDone(number, loss, 1e-4, 0.5, 100, 40, 0.5, memory=2**33)


def tell(*events: Event) -> None:
    observer = Tracker(Curves)
    for event in events:
        observer.vox_event(event)


def read(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), as TensorBoard understands the folder."""
    told = EventAccumulator(str(run / "tensorboard"))
    told.Reload()
    return {
        tag: [(each.step, each.value) for each in told.Scalars(tag)]
        for tag in told.Tags()["scalars"]
    }


def test_each_number_is_a_scalar(tmp_path: Path) -> None:
    events = [Notice("ready"), start(tmp_path), Validation(0, 5.0), step(1, 4.0), step(2, 3.5)]
    events.append(Evaluation(2, {"eval/sums": 0.75}, "p"))
    tell(*events, CheckpointWritten(2, "p", 0.25), RunEnd(2, "stopped", 1.0))
    assert read(tmp_path) == {
        "validation/loss": [(0, 5.0)],
        "train/loss": [(1, 4.0), (2, 3.5)],
        "train/learning_rate": [(n, pytest.approx(1e-4)) for n in (1, 2)],
        "train/gradient_norm": [(1, 0.5), (2, 0.5)],
        "train/trained_tokens": [(1, 40.0), (2, 40.0)],
        "train/tokens_per_second": [(1, 200.0), (2, 200.0)],
        "train/memory_bytes": [(1, 2.0**33), (2, 2.0**33)],
        "eval/sums": [(2, 0.75)],
        "checkpoint/seconds": [(2, 0.25)],
    }


def test_a_run_with_rewards_has_their_curves_and_no_validation_loss(tmp_path: Path) -> None:
    metrics = {"reward": 0.5, "rewards/numeric/mean": 0.25, "kl": 0.125}
    tell(start(tmp_path), Validation(0, -0.5, 0.5), ObjectiveMetrics(1, metrics))
    assert read(tmp_path) == {
        "validation/reward": [(0, 0.5)],
        "train/reward": [(1, 0.5)],
        "train/rewards/numeric/mean": [(1, 0.25)],
        "train/kl": [(1, 0.125)],
    }


def test_what_was_told_is_there_before_the_end(tmp_path: Path) -> None:
    """As after a crash: nothing was closed."""
    tell(start(tmp_path), step(1, 4.0), step(2, float("nan")))
    (_, first), (_, second) = read(tmp_path)["train/loss"]
    assert first == 4.0 and math.isnan(second)


def test_steps_taken_again_after_a_resume_count_once(tmp_path: Path) -> None:
    tell(start(tmp_path), *(step(n, 9.0) for n in range(1, 5)))
    for file in (tmp_path / "tensorboard").iterdir():  # their order is that of their names
        file.rename(file.with_name("events.out.tfevents.0000000001.a"))
    tell(start(tmp_path, first=3), step(3, 2.0), step(4, 1.0), RunEnd(4, "done", 1.0))
    assert read(tmp_path)["train/loss"] == [(1, 9.0), (2, 9.0), (3, 2.0), (4, 1.0)]


def test_a_run_without_numbers_leaves_no_folder(tmp_path: Path) -> None:
    tell(start(tmp_path), Notice("x"), RunEnd(0, "failed", 1.0))
    assert list(tmp_path.iterdir()) == []


def test_neither_tensorflow_nor_torch_is_imported(tmp_path: Path) -> None:
    """Though TensorFlow is there: one that cannot be imported."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('imported')")
    script = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from vox_tensorboard import observer
assert not any(name.startswith('tensorboard') for name in sys.modules)
from vox_core.contract import RunStart, Validation
observer.vox_event(RunStart({str(tmp_path)!r}, "m", "b", "d", "fp32", "0", 1, 1, 1, 1, 1))
observer.vox_event(Validation(0, 1.0))
assert 'tensorboard' in sys.modules and 'torch' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_through_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its entry point, told in its own process, and equal to the telemetry."""
    monkeypatch.setenv("VOX_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "wandb")
    assert "tensorboard" in [each.id for each in Observers()._listening], "is it installed?"
    rows = '{"prompt": "Which?", "completion": "That one."}\n'
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "valid.jsonl").write_text(rows.replace("Which", "Which one"))
    settings = {
        "model": str(make_model("llama", tmp_path / "model")),
        "data": [tmp_path / "train.jsonl"],
        "valid": tmp_path / "valid.jsonl",
        "out": tmp_path / "run",
        "backend": "cpu",
        "dtype": "fp32",
        "max_steps": 3,
    }
    run = train(validate(TrainSettings, settings)).run
    told = list(read_lines(run / "telemetry.jsonl"))
    warned = [line["message"] for line in told if line["event"] == "warning"]
    assert not any("tracker" in message for message in warned)
    drawn = read(run)
    for tag, event in (("train/loss", "step"), ("validation/loss", "validation")):
        expected = [(e["step"], pytest.approx(e["loss"])) for e in told if e["event"] == event]
        assert drawn[tag] == expected


def test_the_guides_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Mock()
    monkeypatch.setitem(sys.modules, "mlflow", told)
    guide = Path(__file__).resolve().parents[3] / "docs/guide/observers.md"
    defined: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", guide.read_text("utf-8"), re.S)[:2]:
        exec(code, defined)
    for event in (start(Path("runs/a")), Validation(2, -0.25, 0.25, 0.1), RunEnd(2, "done", 1.0)):
        defined["tracker"].vox_event(event)
    assert told.mock_calls == [
        call.start_run(run_name="a"),
        call.log_params({"model": "m", "contract": "0" * 64}),
        call.log_metrics({"validation/reward": 0.25}, step=2),
        call.end_run("FINISHED"),
    ]
