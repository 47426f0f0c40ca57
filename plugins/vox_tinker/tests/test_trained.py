"""Runs of `vox train` and training clients: the same numbers, and each opens the other's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from plugins.vox_tinker.tests.data import ADAM, DATA, sampled
from tinker import RequestFailedError, types

import vox_core as vox
from vox_core.api.runs import read_run
from vox_core.api.training import load_newest
from vox_core.data.batching import documents_of_step
from vox_core.run.own_documents import documents_of
from vox_tinker.checkpoints import STATE, Store

if TYPE_CHECKING:
    import tinker

STEPS, BATCH, SEED = 20, 4, 42
ROWS = [
    {"prompt": f"Say {'it ' * (n % 5)}{n}:", "completion": f" {n:02d} now"[:7]} for n in range(16)
]


@pytest.fixture(scope="module")
def run(base: Path, runs: Path) -> Path:
    data = runs.parent / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    vox.train(
        model=str(base), data=str(data), out=str(runs / "sums"), backend="cpu", dtype="fp32",
        rank=4, max_steps=STEPS, batch_size=BATCH, lr=1e-3, seed=SEED,
    )  # fmt: skip
    return runs / "sums"


def test_twenty_steps_are_those_of_vox_train_bit_for_bit(
    run: Path, base: Path, runs: Path, service: tinker.ServiceClient
) -> None:
    """Same documents, order, schedule and clipping; `vox train` divides by the trained tokens.

    These are a power of two here, so that dividing the weights instead changes no bit.
    """
    with vox.open_trainer(base, backend="cpu", dtype="fp32", rank=4) as trainer:
        documents = documents_of(ROWS, None, trainer._shared.encoder)
    lines = map(json.loads, (run / "telemetry.jsonl").read_text().splitlines())
    taken = [line for line in lines if line["event"] == "step"]
    assert len(taken) == STEPS
    client = service.create_lora_training_client(
        "tiny", rank=4, seed=SEED, train_unembed=False
    ).result()
    for line in taken:
        chosen = [documents[n] for n in documents_of_step(16, BATCH, SEED, line["step"])]
        total = sum(float(each.weights_T.sum()) for each in chosen)
        assert total == line["trained_tokens"] == 32
        data = [
            types.Datum(
                types.ModelInput.from_ints(each.tokens_T[:-1].tolist()),
                {
                    "target_tokens": each.tokens_T[1:].astype(np.int64),
                    "weights": each.weights_T[1:] / np.float32(total),
                },
            )
            for each in chosen
        ]
        passed = client.forward_backward(data, "cross_entropy")
        adam = ADAM.model_copy(update={"learning_rate": line["lr"], "grad_clip_norm": 1.0})
        assert client.optim_step(adam).result().metrics == {"grad_norm": line["grad_norm"]}
        assert passed.result().metrics["loss:sum"] == pytest.approx(line["loss"], rel=1e-6)
    found, _ = load_newest(Store(runs).find(client.save_state("end").result().path)[2] / STATE)
    expected, _ = load_newest(run / "checkpoints")
    ours = dict(found.adapter.tensors())
    for name, value in expected.adapter.tensors().items():
        assert np.array_equal(ours.pop(name), value)
    assert not ours


def test_a_run_of_vox_train_is_opened(
    run: Path, base: Path, runs: Path, service: tinker.ServiceClient
) -> None:
    path = f"tinker://{run.name}/weights/final"
    client = service.create_training_client_from_state_with_optimizer(path).result()
    saved = client.save_state("same").result().path
    (found, _), (expected, _) = (
        load_newest(Store(runs).find(saved)[2] / STATE), load_newest(run / "checkpoints"),
    )  # fmt: skip
    assert found.step == expected.step == STEPS
    for name, value in expected.adapter.tensors().items():
        assert np.array_equal(dict(found.adapter.tensors())[name], value)
    client.forward_backward(DATA, "cross_entropy").result()
    client.optim_step(ADAM).result()
    prompt = types.ModelInput.from_ints([10, 20, 30])
    one = types.SamplingParams(max_tokens=1)
    scores = [
        made.sample(prompt, 1, one, include_prompt_logprobs=True).result().prompt_logprobs
        for made in (
            service.create_sampling_client(model_path=path).result(),
            service.create_sampling_client(model_path=saved).result(),
            service.create_sampling_client(base_model="tiny").result(),
        )
    ]
    assert scores[0] == scores[1] != scores[2]


def test_weights_of_another_alpha_are_refused(
    base: Path, run: Path, runs: Path, service: tinker.ServiceClient
) -> None:
    vox.train(
        model=str(base), data=str(runs.parent / "rows.jsonl"), out=str(runs / "alpha"),
        backend="cpu", dtype="fp32", rank=4, alpha=16, max_steps=1,
    )  # fmt: skip
    client = service.create_lora_training_client("tiny", rank=4, train_unembed=False).result()
    with pytest.warns(FutureWarning):
        client.load_state(f"tinker://{run.name}/weights/final").result()
    with pytest.warns(FutureWarning), pytest.raises(RequestFailedError, match="alpha"):
        client.load_state("tinker://alpha/weights/final").result()


def test_the_loss_of_a_run_is_per_token(client: tinker.TrainingClient, runs: Path) -> None:
    summed = client.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"]
    client.optim_step(ADAM).result()
    sums = client.forward_backward([sampled(1, 12)], "importance_sampling").result().metrics
    client.optim_step(ADAM).result()
    losses = [loss for _, loss in read_run(Store(runs).folder(client.model_id)).losses]
    assert losses == pytest.approx([summed / 6.5, sums["loss:sum"] / 6])
