"""SmolLM2-135M on real conversations, by both backends and from one to the other, in float32.

Through the services that the commands call: the runs' own telemetry, checkpoints and adapters.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import vox_core
from tests.parity import held, tolerances
from vox_core import models
from vox_core.adapter.peft import read_adapter
from vox_core.config import SamplingSettings, TrainSettings, validate
from vox_core.run import telemetry
from vox_core.run.load import open_model
from vox_core.run.train import train

STEPS, MOVED = 20, 15
OTHER = {"cpu": "mlx", "mlx": "cpu"}

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smollm2")
    shipped = Path(vox_core.__file__).parent / "quickstart" / "data" / "train.jsonl"
    (made / "train.jsonl").write_text("\n".join(shipped.read_text().splitlines()[::6][:32]))
    return made


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Path]:
    """Backend -> its run of twenty steps."""
    model = models.resolve("smollm2-135m").path
    given = {"model": str(model), "data": [folder / "train.jsonl"], "dtype": "fp32", "rank": 8}
    numbers = {"max_steps": STEPS, "batch_size": 2, "lr": 1e-3, "warmup": 0.1, "save_every": MOVED}
    return {
        backend: train(
            validate(
                TrainSettings, {**given, **numbers, "backend": backend, "out": folder / backend}
            )
        ).run
        for backend in OTHER
    }


def lines(run: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in telemetry.read(run / "telemetry.jsonl") if line["event"] == event]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run, "step")]


def cut(run: Path, to: Path) -> Path:
    """A copy of the run as it was after most of its steps."""
    shutil.copytree(run, to)
    shutil.rmtree(to / "checkpoints" / f"step-{STEPS}")
    (to / "vox_adapter.json").unlink()
    # A checkpoint is announced at one of the steps after its own.
    told = telemetry.read(run / "telemetry.jsonl")
    kept = [json.dumps(line) + "\n" for line in told if line.get("step", 0) <= MOVED]
    (to / "telemetry.jsonl").write_text("".join(kept))
    return to


def test_the_loss_at_each_of_twenty_steps(runs):
    assert len(losses(runs["mlx"])) == STEPS
    assert losses(runs["mlx"]) == pytest.approx(losses(runs["cpu"]), rel=tolerances.LOSS)
    assert losses(runs["mlx"])[-1] < losses(runs["mlx"])[0]


def test_the_adapter_after_twenty_steps(runs):
    mine, other = (read_adapter(runs[backend]).tensors() for backend in ("mlx", "cpu"))
    assert held.distance(mine, other) < tolerances.ADAPTER


@pytest.mark.parametrize("begun", sorted(OTHER))
def test_a_run_goes_on_elsewhere(runs, folder, begun):
    run = cut(runs[begun], folder / f"{begun}-moved")
    train(validate(TrainSettings, {"resume": run, "backend": OTHER[begun]}))
    assert losses(run) == pytest.approx(losses(runs[begun]), rel=tolerances.LOSS)
    mine, other = (read_adapter(each).tensors() for each in (run, runs[begun]))
    assert held.distance(mine, other) < tolerances.ADAPTER
    worked = json.loads((run / "vox_adapter.json").read_text())["backends"]
    assert [(each["backend"], each["first_step"]) for each in worked] == [
        (begun, 1),
        (OTHER[begun], MOVED + 1),
    ]
    assert any(f"going on with {OTHER[begun]}" in n["message"] for n in lines(run, "notice"))


def test_logits_and_greedy_answers_with_one_adapter(runs):
    base, state = models.resolve("smollm2-135m").path, read_adapter(runs["cpu"])
    mine, other = (held.logits(backend, base, state) for backend in ("mlx", "cpu"))
    assert held.apart(mine, other) < tolerances.LOGITS
    answers = {}
    for backend in OTHER:
        asked = {"backend": backend, "dtype": "fp32", "max_tokens": 16}
        with open_model(str(runs["cpu"]), validate(SamplingSettings, asked)) as model:
            answers[backend] = "".join(
                model.reply([{"role": "user", "content": "How do I train?"}])
            )
    assert answers["mlx"] == answers["cpu"] != ""
