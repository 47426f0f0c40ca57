"""Saved weights: training goes on from them, samplers are made of them, vox merges them."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
import tinker
from plugins.vox_tinker.tests.data import ADAM, DATA
from tinker import types

import vox_core as vox
from vox_core.api.runs import read_run
from vox_tinker.checkpoints import Store
from vox_tinker.futures import Refused

PROMPT = types.ModelInput.from_ints([10, 20, 30])


def learn(client: tinker.TrainingClient, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(client.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])
        client.optim_step(ADAM).result()
    return losses


def test_training_goes_on_bit_for_bit(
    client: tinker.TrainingClient, service: tinker.ServiceClient
) -> None:
    learn(client, 2)
    path = client.save_state("two").result().path
    expected = learn(client, 3)
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert learn(again, 3) == expected
    weights = service.create_training_client_from_state(path).result()
    found = learn(weights, 3)
    assert found[0] == expected[0]
    assert found[2] != expected[2], "AdamW began anew"
    with pytest.warns(FutureWarning):
        client.load_state_with_optimizer(path).result()
    assert learn(client, 3) == expected


def test_checkpoints_are_listed_deleted_and_downloaded(
    client: tinker.TrainingClient, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest, run = tinker.RestClient(base_url=url), client.model_id
    state = client.save_state("a", user_metadata={"note": "first"}).result().path
    sampler = client.save_weights_for_sampler("b").result().path
    external = client.save_weights_external("c").result().path
    assert (state, sampler, external) == (
        f"tinker://{run}/weights/a", f"tinker://{run}/sampler_weights/b",
        f"tinker://{run}/external_weights/c",
    )  # fmt: skip
    listed = rest.list_checkpoints(run).result().checkpoints
    assert [each.checkpoint_id for each in listed] == [
        "external_weights/c", "sampler_weights/b", "weights/a",
    ]  # fmt: skip
    assert listed[2].user_metadata == {"note": "first"}
    assert rest.get_training_run(run).result().last_checkpoint == listed[2]
    assert run in {r.training_run_id for r in rest.list_training_runs().result().training_runs}
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == ("tiny", 4, True)
    with pytest.raises(tinker.RequestFailedError, match="overwrite=True"):
        client.save_state("a").result()
    client.save_state("a", overwrite=True).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    assert rest.list_checkpoints(run).result().checkpoints[0].expires_at is not None
    for seconds in (0, -1, 10**12):
        with pytest.raises(tinker.BadRequestError, match="ttl_seconds"):
            rest.set_checkpoint_ttl_from_tinker_path(state, seconds).result()
    links = rest.get_external_weights_urls(external).result().urls
    for name, link in links.items():
        with urllib.request.urlopen(link) as content:
            (tmp_path / name).write_bytes(content.read())
    link = links["adapter_model.safetensors"]
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(link[:-1] + ("0" if link[-1] != "0" else "1"))
    monkeypatch.setattr("vox_tinker.app.LINK_SECONDS", -1)
    expired = rest.get_external_weights_urls(external).result().urls
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(expired["adapter_model.safetensors"])
    with vox.load(tmp_path, backend="cpu", dtype="fp32") as model:
        assert model.title.endswith("+ adapter")
    rest.delete_checkpoint_from_tinker_path(state).result()
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(state).result()


def test_a_path_of_another_form_names_no_checkpoint(
    client: tinker.TrainingClient, runs: Path
) -> None:
    path = client.save_weights_for_sampler("one").result().path
    assert Store(runs).find(path)[2].is_dir()
    trained = f"tinker://{'r' * 300}/weights/final"  # longer than the name of any file
    for wrong in (
        f"{path}/more", path.removeprefix("tinker://"), path.replace("sampler_", "x_"), trained,
    ):  # fmt: skip
        with pytest.raises(Refused, match="no checkpoint"):
            Store(runs).find(wrong)


def test_saved_weights_are_sampled_and_merged(
    client: tinker.TrainingClient, service: tinker.ServiceClient, runs: Path, tmp_path: Path
) -> None:
    learn(client, 3)
    path = client.save_weights_for_sampler("final").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    greedy = types.SamplingParams(max_tokens=8, temperature=0, stop=[])
    said = sampler.sample(PROMPT, 1, greedy).result().sequences[0].tokens
    base = service.create_sampling_client(base_model="tiny").result()
    assert base.sample(PROMPT, 1, greedy).result().sequences[0].tokens != said
    folder = Store(runs).find(path)[2]
    vox.merge(folder, out=tmp_path / "merged", backend="cpu", dtype="fp32")
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    import torch

    tokens = torch.tensor([PROMPT.to_ints()])
    for token in said:
        assert int(merged(tokens).logits[0, -1].argmax()) == token
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
    run = read_run(Store(runs).folder(client.model_id))
    assert (run.status, run.step) == ("running", 3)
