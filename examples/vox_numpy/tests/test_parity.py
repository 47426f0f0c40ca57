"""Twenty steps of the core's `Learner` on numpy and on torch, from the same adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vox_core.api.training import Learner
from vox_core.contract import Method, StepDone, TrainJob, TrainState
from vox_numpy import backend as numpy_backend
from vox_testing.jobs import curve, plan, start, stirred
from vox_testing.llama import write_llama
from vox_testing.subject import Recorder

cpu = pytest.importorskip("vox_cpu")

# DESIGN.md, "The seam": two right float32 implementations agree to these. Seen: 3e-7 and 5e-7.
LOSS, ADAPTER = 1e-5, 1e-3
STEPS = 20
SAVED = ("model.norm.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("method", "saved"), [("lora", ()), ("rslora", ()), ("dora", ()), ("lora", SAVED)]
)
def test_losses_and_adapters_are_torchs(
    method: Method, saved: tuple[str, ...], tmp_path: Path
) -> None:
    folder = write_llama(tmp_path / "model")
    made = plan(folder, method=method, weight_decay=0.1, clip=0.5)
    begin = stirred(start(folder, made))
    read = start_weights(folder)
    begin = replace(
        begin, adapter=replace(begin.adapter, saved={name: read(name) for name in saved})
    )
    contract = made.contract
    whole = replace(contract.adapter, modules_to_save=("norm", "lm_head") if saved else ())
    made = replace(made, contract=replace(contract, adapter=whole), saved={n: n for n in saved})
    runs = []
    for backend in (numpy_backend, cpu.backend):
        trainer = backend.vox_train(TrainJob(made, folder), Recorder())
        learner = Learner(trainer, begin, contract.optimizer, contract.seed)
        events = [learner.take(step) for step in curve(STEPS, groups=2)]
        runs.append((losses(events), learner.state()))
        trainer.close()
    (found, state), (expected, other) = runs
    assert found == pytest.approx(expected, rel=LOSS)
    assert found[-1] != pytest.approx(found[0], rel=1e-2)
    assert distance(state, other) < ADAPTER


def start_weights(folder: Path):  # type: ignore[no-untyped-def]
    from vox_core.weights import WeightFolder

    files = WeightFolder(folder)
    return lambda name: np.array(files.read(name), np.float32)


def losses(events: list[object]) -> list[float]:
    assert all(isinstance(event, StepDone) for event in events)
    return [event.loss for event in events if isinstance(event, StepDone)]


def distance(state: TrainState, other: TrainState) -> float:
    """Relative distance of all values, in the Frobenius norm."""
    found, expected = state.adapter.tensors(), other.adapter.tensors()
    assert found.keys() == expected.keys()
    square = sum(float(np.square(found[name] - expected[name]).sum()) for name in found)
    size = sum(float(np.square(value).sum()) for value in expected.values())
    return float(np.sqrt(square / size))
