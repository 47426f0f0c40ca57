"""SmolLM2-135M on real conversations, in float32: by both backends, from one to the other, and held
against a plain transformers + PEFT + torch loop, step by step.

Through the services that the commands call: the runs' own telemetry, checkpoints and adapters. 64
real conversations, of their first words, 6 steps; warm-up, cosine and clipping in force. The loop
pads one batch a step and computes all logits; vox cuts the step into micro-batches of one
conversation and computes the trained ones.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

import vox_core
from tests.core.data_samples import build_dataset, load_records
from tests.parity import held, tolerances
from tests.run.lines import read
from vox_core import models
from vox_core.adapter.initial import initial_adapter
from vox_core.adapter.peft import read_adapter, write_adapter
from vox_core.adapter.targets import linear_modules, select_targets
from vox_core.config import SamplingSettings, TrainSettings, validate
from vox_core.contract import AdapterSpec
from vox_core.data.batching import documents_of_step
from vox_core.data.tokenizer import load_tokenizer
from vox_core.run.load import open_model
from vox_core.run.train import train
from vox_core.weights import WeightFolder
from vox_testing.jobs import batch
from vox_torch.base import load_base
from vox_torch.forward import Padded
from vox_torch.fused_modules import fuse_modules
from vox_torch.inject import attach
from vox_torch.lora import fuse
from vox_torch.trial import loss_of

STEPS, MOVED, BATCH, SEED = 6, 4, 2, 42
RATE = {"lr": 1e-3, "warmup": 0.15, "clip": 1.0, "rank": 8, "alpha": 16}
OTHER = {"cpu": "mlx", "mlx": "cpu"}
# DESIGN.md: two right float32 implementations agree to 1e-5 on losses and 1e-3 on the adapter
# (Adam turns noise in a near-zero gradient into a step of the learning rate). Measured here against
# the loop: 4e-6 and 4e-5; a mean of micro-batch means differs by 2e-2.
LOSS, ADAPTER = 1e-5, 1e-3
WORDS = 8

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(900)]


def first_words(line: str) -> str:
    """A conversation with a system prompt of one word for the model's own, and short turns."""
    turns = json.loads(line)["messages"]
    short = [{**turn, "content": " ".join(turn["content"].split()[:WORDS])} for turn in turns]
    return json.dumps({"messages": [{"role": "system", "content": "vox"}, *short]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smollm2")
    shipped = Path(vox_core.__file__).parent / "quickstart" / "data" / "train.jsonl"
    rows = shipped.read_text().splitlines()[::3][:64]
    (made / "train.jsonl").write_text("\n".join(map(first_words, rows)))
    return made


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Path]:
    """Backend -> its run, with each conversation a micro-batch of its own."""
    return {backend: run_of(folder, backend, "fp32") for backend in OTHER}


def run_of(folder: Path, backend: str, dtype: str) -> Path:
    given = {"model": str(models.resolve("smollm2-135m").path), "data": [folder / "train.jsonl"]}
    numbers = {"max_steps": STEPS, "batch_size": BATCH, "seed": SEED, "save_every": MOVED, **RATE}
    cut = {"micro_batch_tokens": 32, "tune": "ignore"}
    to = {"backend": backend, "dtype": dtype, "out": folder / f"{backend}-{dtype}"}
    return train(validate(TrainSettings, {**given, **numbers, **cut, **to})).run


def lines(run: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in read(run / "telemetry.jsonl") if line["event"] == event]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run, "step")]


def cut(run: Path, to: Path) -> Path:
    """A copy of the run as it was after most of its steps."""
    shutil.copytree(run, to)
    shutil.rmtree(to / "checkpoints" / f"step-{STEPS}")
    (to / "vox_adapter.json").unlink()
    # A checkpoint is announced at one of the steps after its own.
    told = read(run / "telemetry.jsonl")
    kept = [json.dumps(line) + "\n" for line in told if line.get("step", 0) <= MOVED]
    (to / "telemetry.jsonl").write_text("".join(kept))
    return to


def test_the_loss_at_each_step(runs):
    assert len(losses(runs["mlx"])) == STEPS
    assert losses(runs["mlx"]) == pytest.approx(losses(runs["cpu"]), rel=tolerances.LOSS)
    assert losses(runs["mlx"])[-1] < losses(runs["mlx"])[0]


def test_the_adapter_after_the_last_step(runs):
    mine, other = (read_adapter(runs[backend]).tensors() for backend in ("mlx", "cpu"))
    assert held.distance(mine, other) < tolerances.ADAPTER


@pytest.mark.parametrize("begun", ["cpu", pytest.param("mlx", marks=pytest.mark.long)])
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


# --- against the loop -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[list[float], Path]:
    """The loop's losses and its adapter."""
    model = models.resolve("smollm2-135m").path
    spec = {"model": str(model), "adapter": str(start(folder, model)), **RATE}
    spec["steps"] = documents(model, folder)
    (folder / "spec.json").write_text(json.dumps(spec))
    script = Path(__file__).with_name("reference_loop.py")
    out = folder / "out.json"
    subprocess.run([sys.executable, script, folder / "spec.json", out], check=True)
    return json.loads(out.read_text()), out.with_suffix(".adapter")


def start(folder: Path, model: Path) -> Path:
    """The seeded start as a folder for PEFT."""
    weights = WeightFolder(model)
    modules = linear_modules(weights.tensors, "llama")
    spec = AdapterSpec("lora", 8, 16.0, 0.0, ("all-linear",))
    state = initial_adapter(select_targets(modules, spec.targets), spec, SEED, weights.read)
    (folder / "start").mkdir()
    write_adapter(folder / "start", state, base=str(model), modules=modules)
    return folder / "start"


def documents(model: Path, folder: Path) -> list:
    """The documents of each step: the order is vox's, what is done with them is the loop's own."""
    dataset = build_dataset(load_records([folder / "train.jsonl"]), load_tokenizer(model), 2048)
    count = len(dataset)
    return [
        [
            (dataset[i].tokens_T.tolist(), dataset[i].weights_T.tolist())
            for i in documents_of_step(count, BATCH, SEED, step)
        ]
        for step in range(1, STEPS + 1)
    ]


def test_every_loss_is_the_reference_loops(runs, reference):
    expected, _ = reference
    found = losses(runs["cpu"])
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=LOSS)
    assert found[-1] < 0.8 * found[0]  # 7.2 to 5.6


@pytest.mark.long  # test_real_weights.py holds both against transformers and PEFT
def test_bfloat16_stays_with_float32(runs, folder):
    """A step trains some 25 tokens here, and in bfloat16 one of them is up to 2 % away, above or
    below: 0.15 % in the mean. Where the adapter's part is added to numbers that are rounded
    already, it is 1.2 %, and half of the steps are 1 % above (docs/adr/0014)."""
    half, full = np.array(losses(run_of(folder, "cpu", "bf16"))), np.array(losses(runs["cpu"]))
    apart = half / full - 1
    assert abs(apart.mean()) < 0.005
    assert np.median(np.abs(apart)) < 0.005


def test_the_final_adapter_is_the_reference_loops(runs, reference):
    _, adapter = reference
    mine, other = read_adapter(runs["cpu"]).tensors(), read_adapter(adapter).tensors()
    assert mine.keys() == other.keys()
    squares = [(np.sum((mine[n] - other[n]) ** 2.0), np.sum(other[n] ** 2.0)) for n in other]
    difference, size = np.sum(squares, axis=0)
    assert np.sqrt(difference / size) < ADAPTER


def test_clipping_was_in_force(runs):
    assert max(line["grad_norm"] for line in lines(runs["cpu"], "step")) > RATE["clip"]


def test_each_gradient_points_where_transformers_and_pefts_does(runs, folder):
    """Of A and B of every module, in float32, from the adapter that the run ended with."""
    model = models.resolve("smollm2-135m").path
    some = documents(model, folder)[0]
    made = []
    for fast in (True, False):
        adapted = attach(load_base(model, "fp32", "cpu"), read_adapter(runs["cpu"]))
        if fast:
            fuse(adapted.model)
            fuse_modules(adapted.model)
            way, fault = loss_of(adapted.model, "cpu")
            assert fault is None
        else:
            way = Padded(adapted.model, "cpu")
        loss, _ = way(batch([(np.array(tokens), shifted(weights)) for tokens, weights in some]))
        made.append(torch.autograd.grad(loss, list(adapted.parameters.values())))
    cosines = [
        cosine_similarity(*map(torch.flatten, pair), dim=0) for pair in zip(*made, strict=True)
    ]
    assert min(cosines) > 0.9999


def shifted(weights: list[float]) -> np.ndarray:
    """A document's weights are those of tokens, a batch's those of the places before them."""
    return np.array([*weights[1:], 0], np.float32)
