"""Training through the SDK against `vox.open_trainer` with the same documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from plugins.vox_tinker.tests.data import ADAM, DATA, sampled
from tinker import types

import vox_core as vox
from vox_core.api.training import load_newest
from vox_core.contract import Floats
from vox_core.run.own_documents import documents_of, objective_named
from vox_tinker.checkpoints import STATE, Store

SETTINGS = {
    "backend": "cpu", "dtype": "fp32", "rank": 4, "alpha": 32, "dropout": 0.0, "seed": 1,
    "targets": ["all-linear", "lm_head"],
}  # fmt: skip
STEP = {"lr": 1e-2, "weight_decay": 0.0, "clip": 0.0, "total_weight": 1.0}


def adapter_of(client: tinker.TrainingClient, runs: Path) -> dict[str, Floats]:
    path = client.save_state("compared").result().path
    state, _ = load_newest(Store(runs).find(path)[2] / STATE)
    return dict(state.adapter.tensors())


def test_twenty_steps_are_those_of_vox_bit_for_bit(
    client: tinker.TrainingClient, base: Path, runs: Path
) -> None:
    random = np.random.default_rng(0)
    with vox.open_trainer(base, **SETTINGS) as trainer:
        for _ in range(20):
            documents, data = [], []
            for count in (5, 40, 17):
                tokens = random.integers(0, 250, count)
                weights = (random.random(count) < 0.7).astype(np.float32)
                weights[:2] = 0, 1
                documents.append(vox.Document(tokens, weights))
                given = {"target_tokens": tokens[1:], "weights": weights[1:]}
                data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1].tolist()), given))
            expected = trainer.forward_backward(documents)
            norm = trainer.optim_step(**STEP)
            passed, stepped = (
                client.forward_backward(data, "cross_entropy"),
                client.optim_step(ADAM),
            )
            found = passed.result().loss_fn_outputs
            for each, given, document in zip(found, expected.log_probs, documents, strict=True):
                trained = np.asarray(document.weights)[1:] != 0
                assert np.array_equal(each["logprobs"].to_numpy()[trained], given)
            assert stepped.result().metrics == {"grad_norm": norm}
        ours, vox_own = adapter_of(client, runs), trainer.state.adapter.tensors()
    assert ours.keys() == vox_own.keys()
    assert all(np.array_equal(ours[name], vox_own[name]) for name in ours)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_step_of_a_loss_is_that_of_its_weights(
    loss: types.LossFnType, client: tinker.TrainingClient, base: Path, runs: Path
) -> None:
    """The gradient of the loss, as torch has it from the log-probabilities, gives the same step."""
    data = [sampled(seed, 12 + seed, masked=loss == "gspo") for seed in range(3)]
    passed = client.forward_backward(data, loss).result()
    client.optim_step(ADAM).result()
    service = tinker.ServiceClient(base_url=client.holder._base_url)
    other = service.create_lora_training_client("tiny", rank=4, seed=1).result()

    def custom(
        data: list[types.Datum], log_probs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        total = torch.zeros((), dtype=torch.float64)
        for each, logs in zip(data, log_probs, strict=True):
            given = each.loss_fn_inputs
            advantages = given["advantages"].to_torch().double()
            ratio = torch.exp(logs.double() - given["logprobs"].to_torch().double())
            if loss == "gspo":
                away = torch.log(ratio.detach())[given["sequence_ratio_mask"].to_torch() != 0]
                ratio = torch.exp(away.mean() + logs.double() - logs.detach().double())
            clipped = torch.clamp(ratio, 0.8, 1.2)
            if loss == "importance_sampling":
                total = total - (ratio * advantages).sum()
            elif loss in ("ppo", "gspo"):
                total = total - torch.min(ratio * advantages, clipped * advantages).sum()
            else:
                total = total - (clipped.detach() * logs.double() * advantages).sum()
        return total, {}

    found = other.forward_backward_custom(data, custom).result()
    other.optim_step(ADAM).result()
    assert passed.metrics["loss:sum"] == pytest.approx(found.metrics["loss:sum"], rel=1e-5)
    ours, expected = adapter_of(client, runs), adapter_of(other, runs)
    for name, value in ours.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)
    service.close("success").result()


def test_dpo_of_the_client_is_the_dpo_of_vox(
    client: tinker.TrainingClient, base: Path, runs: Path
) -> None:
    rows = [
        {"prompt": f"{n} and {n}?", "chosen": f"It is {2 * n}.", "rejected": "Who knows"}
        for n in range(3, 6)
    ]
    beta = 0.1
    with vox.open_trainer(base, **SETTINGS) as trainer:
        objective = objective_named("dpo", None, {"beta": beta})
        made = documents_of(rows, objective, trainer._shared.encoder)
        data = [
            types.Datum(
                types.ModelInput.from_ints(each.tokens_T[:-1].tolist()),
                {"target_tokens": each.tokens_T[1:].astype(np.int64),
                 "weights": each.weights_T[1:].copy()},
            )
            for each in made
        ]  # fmt: skip
        reference = [
            each["logprobs"].to_torch()
            for each in client.forward(data, "cross_entropy").result().loss_fn_outputs
        ]

        def custom(
            data: list[types.Datum], log_probs: list[torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, float]]:
            gains = [
                ((logs - base_logs) * each.loss_fn_inputs["weights"].to_torch()).sum()
                for each, logs, base_logs in zip(data, log_probs, reference, strict=True)
            ]
            margins = torch.stack(gains[::2]) - torch.stack(gains[1::2])
            return -torch.nn.functional.logsigmoid(beta * margins).mean(), {}

        for _ in range(5):
            expected = trainer.forward_backward(rows, "dpo", options={"beta": beta})
            trainer.optim_step(**STEP)
            found = client.forward_backward_custom(data, custom).result()
            client.optim_step(ADAM).result()
            assert found.metrics["loss:sum"] == pytest.approx(expected.loss, rel=1e-5)
        vox_own, ours = trainer.state.adapter.tensors(), adapter_of(client, runs)
    difference = sum(float(((ours[n] - vox_own[n]) ** 2).sum()) for n in ours)
    assert difference**0.5 < 1e-5 * sum(float((v**2).sum()) for v in vox_own.values()) ** 0.5


def test_four_clients_get_the_numbers_that_each_gets_alone(
    service: tinker.ServiceClient, runs: Path
) -> None:
    """Losses, log-probabilities and adapters, bit for bit on this model."""
    work: list[tuple[int, list[types.Datum], types.LossFnType]] = [
        (2, DATA, "cross_entropy"),
        (8, [sampled(1, 9)], "ppo"),
        (4, [sampled(2, 30), sampled(3, 5)], "importance_sampling"),
        (4, DATA[:1], "cross_entropy"),
    ]

    def made() -> list[tinker.TrainingClient]:
        shapes = ((rank, seed) for seed, (rank, _, _) in enumerate(work))
        making = [service.create_lora_training_client("tiny", r, seed=s) for r, s in shapes]
        return [each.result() for each in making]

    def trained(clients: Sequence[tinker.TrainingClient], wait: bool) -> list[object]:
        waiting = []
        for client, (_, data, loss) in zip(clients, work, strict=True):
            for _ in range(4):
                passed, stepped = client.forward_backward(data, loss), client.optim_step(ADAM)
                waiting.append((passed, stepped))
                if wait:
                    stepped.result()
        found = [(passed.result(), stepped.result().metrics) for passed, stepped in waiting]
        return [
            (p.metrics, metrics, [each["logprobs"].tolist() for each in p.loss_fn_outputs])
            for p, metrics in found
        ]

    together, alone = made(), made()
    assert trained(together, wait=False) == trained(alone, wait=True)
    for client, other in zip(together, alone, strict=True):
        ours, expected = adapter_of(client, runs), adapter_of(other, runs)
        assert all(np.array_equal(ours[name], expected[name]) for name in expected)
