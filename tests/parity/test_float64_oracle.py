"""The CPU backend in float32, held against `examples/vox_float64`, which computes in float64.

First the package as a third party's: installed, asked for by name, through `vox` in processes of
its own. Then its numbers, by family, in this process.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.core.author_env import Environment
from tests.parity.held import learning
from tests.parity.installed_example import Vox, installed, losses, runs_of, vox_in
from vox_core.contract import LoadJob, TrainState
from vox_cpu import backend as cpu
from vox_testing import jobs
from vox_testing.subject import Recorder
from vox_testing.tiny import make_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/vox_float64"
FAMILIES = ("llama", "gemma3", "qwen3_5")  # plain; scaled embeddings, windows; recurrent state
STEPS = 20

# DESIGN.md, "The seam": two right float32 implementations agree to these. Measured here, float32
# against float64: losses 2e-6, adapter 2e-5 (qwen3_5; the other two stay below 2e-7).
LOSS, ADAPTER = 1e-5, 1e-3
# Two float32 forwards of one formula differ by 2e-6 (libs/vox_torch/tests/test_merge_load.py), and
# by no more from float64: 2.4e-6 measured.
LOGITS = 2e-5


# --- as a third party's package -------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return installed(EXAMPLE, tmp_path_factory.mktemp("third"))


@pytest.fixture(scope="module")
def vox(environment: Environment) -> Vox:
    return vox_in(environment)


@pytest.fixture(scope="module")
def runs(vox: Vox, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return runs_of(vox, tmp_path_factory.mktemp("tiny"), ("cpu", "float64"), STEPS)


@pytest.mark.long  # as any backend may ask for: test_numpy_example.py
def test_it_is_never_chosen_unless_by_name(vox: Vox, runs: dict[str, Path]) -> None:
    (out,) = vox(("backend", "list", "--json"))
    told = {each["id"]: each for each in json.loads(out)}
    assert told["float64"]["status"] == "rejected"
    assert "--backend float64" in told["float64"]["reason"]
    plan = json.loads((runs["float64"] / "plan.json").read_text())
    assert (plan["backend"], plan["dtype"]) == ("float64", "fp32")


@pytest.mark.long  # below in this process
def test_its_curve_is_that_of_the_cpu(runs: dict[str, Path]) -> None:
    exact, cpus = (losses(runs[backend]) for backend in ("float64", "cpu"))
    assert len(exact) == STEPS
    assert cpus == pytest.approx(exact, rel=LOSS)
    assert cpus != exact
    assert exact[-1] < 0.7 * exact[0]


@pytest.mark.long  # as any backend does: test_families.py
def test_it_merges_and_answers(vox: Vox, runs: dict[str, Path]) -> None:
    run, named = str(runs["float64"]), ("--backend", "float64")
    merged = runs["float64"].with_name("merged")
    asked = ("What is 3?", "--max-tokens", "4", *named)
    _, answer, of_merged = vox(
        ("merge", run, *named, "--out", str(merged)),
        ("generate", run, *asked),
        ("generate", str(merged), *asked),
    )
    assert (merged / "model.safetensors").is_file()
    assert answer == of_merged


@pytest.mark.long  # as any package does: test_scaffold.py
@pytest.mark.timeout(900)
def test_it_passes_the_conformance_suite(environment: Environment) -> None:
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=str(EXAMPLE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


# --- by family ------------------------------------------------------------------------------------


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from vox_float64 import backend

    return backend


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


def train(backend: object, model: Path) -> tuple[list[float], TrainState]:
    plan, steps = jobs.plan(model, total_steps=STEPS), jobs.curve(STEPS, groups=2)
    start, context = jobs.start(model, plan), Recorder()
    with learning(backend, plan, model, start, steps, context) as learner:
        return [learner.take(step).loss for step in steps], learner.state()


def relative(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    squares = [(np.sum((x - y) ** 2.0), np.sum(y**2.0)) for x, y in zip(a, b, strict=True)]
    difference, size = np.sum(squares, axis=0)
    return float(np.sqrt(difference / size))


def test_float32_on_the_cpu_agrees_with_float64(model: Path, float64: object) -> None:
    found, state = train(cpu, model)
    expected, exact = train(float64, model)
    assert found == pytest.approx(expected, rel=LOSS)
    assert found != expected, "the oracle computes in float32"

    mine, other = state.adapter.tensors(), exact.adapter.tensors()
    assert mine.keys() == other.keys()
    assert relative([mine[name] for name in other], list(other.values())) < ADAPTER

    tokens = np.arange(40, 72, dtype=np.int64)
    loaded = [each.vox_load(LoadJob(model, "fp32"), None) for each in (cpu, float64)]
    for each in loaded:
        each.add_adapter("adapter", exact.adapter)
    logits, exact_logits = (each.logits(tokens, "adapter") for each in loaded)
    assert relative([logits], [exact_logits]) < LOGITS
