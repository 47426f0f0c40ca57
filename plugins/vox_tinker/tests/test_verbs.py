"""The verbs through the real SDK: learning, sampling, order, repeated requests, keys, refusals."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from plugins.vox_tinker.tests.data import ADAM, DATA, datum, sampled
from plugins.vox_tinker.tests.raw import Raw
from tinker import types

PROMPT = types.ModelInput.from_ints([10, 20, 30])


def test_it_learns_and_samples(client: tinker.TrainingClient) -> None:
    losses = []
    for _ in range(5):
        done, stepped = client.forward_backward(DATA, "cross_entropy"), client.optim_step(ADAM)
        found = done.result()
        metrics = stepped.result().metrics
        assert metrics is not None
        assert metrics["grad_norm"] > 0
        losses.append(found.metrics["loss:sum"])
        computed = -sum(
            np.dot(each["logprobs"].to_numpy(), given.loss_fn_inputs["weights"].to_numpy())
            for each, given in zip(found.loss_fn_outputs, DATA, strict=True)
        )
        assert losses[-1] == pytest.approx(computed, rel=1e-6)  # float32 against float64
    assert losses == sorted(losses, reverse=True)
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, seed=3)
    found = sampler.sample(PROMPT, 2, params, topk_sample_logprobs=3).result()
    assert found.sequences[0].tokens != found.sequences[1].tokens
    sequence = found.sequences[0]
    assert sequence.topk_logprobs is not None
    for token, log_prob, top in zip(
        sequence.tokens, sequence.logprobs or [], sequence.topk_logprobs, strict=True
    ):
        assert top is not None
        assert len(top) == 3
        assert log_prob == dict(top).get(token, log_prob) <= top[0][1]
    whole = types.ModelInput.from_ints([10, 20, 30, *sequence.tokens])
    again = sampler.sample(
        whole, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True,
        topk_prompt_logprobs=100,
    ).result()  # fmt: skip
    scores = again.prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    # With a KV cache and without: the same sums in another order, in float32.
    np.testing.assert_allclose(sequence.logprobs, scores[3:], atol=1e-4)
    assert again.topk_prompt_logprobs is not None
    for token, score, top in zip(whole.to_ints(), scores, again.topk_prompt_logprobs, strict=True):
        if top is not None:
            assert dict(top).get(token, score) == pytest.approx(score, abs=1e-4)
    repeated = sampler.sample(PROMPT, 2, params).result()
    assert [s.tokens for s in repeated.sequences] == [s.tokens for s in found.sequences]


def test_forward_changes_nothing(client: tinker.TrainingClient) -> None:
    first = client.forward(DATA, "cross_entropy").result()
    second = client.forward_backward(DATA, "cross_entropy").result()
    assert first.metrics == second.metrics
    for one, two in zip(first.loss_fn_outputs, second.loss_fn_outputs, strict=True):
        assert one["logprobs"].tolist() == two["logprobs"].tolist()


def test_several_targets_are_the_sum_of_their_losses(client: tinker.TrainingClient) -> None:
    targets, weights = np.array([[20, 1], [30, 2], [40, 3]]), np.array([[1, 0.5]] * 3, np.float32)
    both = types.Datum(
        model_input=types.ModelInput.from_ints([10, 20, 30]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    found = client.forward([both], "cross_entropy").result()
    assert found.loss_fn_outputs[0]["logprobs"].shape == [3, 2]
    alone = [
        types.Datum(
            model_input=both.model_input,
            loss_fn_inputs={"target_tokens": targets[:, k], "weights": weights[:, k].copy()},
        )
        for k in range(2)
    ]
    assert client.forward(alone, "cross_entropy").result().metrics["loss:sum"] == pytest.approx(
        found.metrics["loss:sum"], rel=1e-6
    )


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
def test_each_datum_has_its_own_dtypes_and_thresholds(
    loss: types.LossFnType, client: tinker.TrainingClient
) -> None:
    given: dict[str, Any] = {"target_tokens": [20, 30, 40]}
    if loss == "ppo":
        given |= {"logprobs": [-9.0] * 3, "advantages": [1.0] * 3}
        others: list[dict[str, Any]] = [{}, {"clip_high_threshold": np.full(3, 1.5, np.float32)}]
    else:
        others = [{"weights": np.ones(3, np.int64)}, {"weights": np.full(3, 0.5, np.float32)}]
    data = [types.Datum(types.ModelInput.from_ints([10, 20, 30]), {**given, **o}) for o in others]

    def total(data: list[types.Datum]) -> float:
        return client.forward(data, loss).result().metrics["loss:sum"]

    alone = [total([each]) for each in data]
    assert alone[0] != alone[1]
    assert total(data) == pytest.approx(sum(alone), rel=1e-6)
    assert total(data[::-1]) == pytest.approx(sum(alone), rel=1e-6)


def test_stops(client: tinker.TrainingClient) -> None:
    sampler = client.save_weights_and_get_sampling_client().result()
    free = types.SamplingParams(max_tokens=8, temperature=0, stop=[])
    found = sampler.sample(PROMPT, 1, free).result().sequences[0]
    assert (len(found.tokens), found.stop_reason) == (8, "length")
    third = found.tokens[2]
    until = found.tokens.index(third) + 1
    at_it = types.SamplingParams(max_tokens=8, temperature=0, stop=[third])
    stopped = sampler.sample(PROMPT, 1, at_it).result().sequences[0]
    assert (stopped.tokens, stopped.stop_reason) == (found.tokens[:until], "stop")


# --- what is refused ------------------------------------------------------------------------------


def changed(**inputs: Any) -> list[types.Datum]:
    tokens = types.ModelInput.from_ints([1, 2, 3])
    given = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0], **inputs}
    return [types.Datum(tokens, {name: each for name, each in given.items() if each is not None})]


REFUSED: dict[str, tuple[list[types.Datum], str, dict[str, float] | None, str]] = {
    "token": ([datum([1, 2, 999])], "cross_entropy", None, "999 is outside of the vocabulary"),
    "NaN": (changed(weights=[1.0, float("nan"), 1.0]), "cross_entropy", None, "'weights'"),
    "lengths": (changed(weights=[1.0]), "cross_entropy", None, "'weights'] has the shape [1]"),
    "long": ([datum([1] * 513)], "cross_entropy", None, "512 that the model can read"),
    "missing": (changed(weights=None), "cross_entropy", None, "'weights' is missing"),
    "unknown": (changed(advantages=[1.0] * 3), "cross_entropy", None, "'advantages'"),
    "loss": (changed(), "stable_reinforce", None, "loss_fn='stable_reinforce'"),
    "option": ([sampled(1, 4)], "ppo", {"beta": 1.0}, "loss_fn_config['beta']"),
    "image": (
        [
            types.Datum(
                types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]),
                {"target_tokens": [1]},
            )
        ],
        "cross_entropy",
        None,
        "image is not supported",
    ),
}


def test_a_faulty_step_does_not_hold_up_the_next(client: tinker.TrainingClient) -> None:
    """The SDK sends NaN as null, which is no number."""
    client.forward_backward(DATA, "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="learning_rate"):
        client.optim_step(types.AdamParams(learning_rate=float("nan"))).result()
    assert client.optim_step(ADAM).result(timeout=60).metrics


@pytest.mark.parametrize(
    ("name", "value"), [("eps", 0), ("beta1", 1), ("learning_rate", -1), ("grad_clip_norm", -1)]
)
def test_faulty_parameters_change_nothing(
    name: str, value: float, client: tinker.TrainingClient
) -> None:
    before = client.forward_backward(DATA, "cross_entropy").result().metrics
    with pytest.raises(tinker.RequestFailedError, match=f"adam_params.{name}="):
        client.optim_step(ADAM.model_copy(update={name: value})).result()
    assert client.forward(DATA, "cross_entropy").result().metrics == before


@pytest.mark.parametrize("name", REFUSED)
def test_faulty_data_is_refused_by_its_field(name: str, client: tinker.TrainingClient) -> None:
    data, loss, config, words = REFUSED[name]
    failing = client.forward_backward(data, loss, config)  # type: ignore[arg-type]
    stepped = client.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError) as error:
        failing.result()
    assert error.value.category is types.RequestErrorCategory.User
    assert words in str(error.value)
    with pytest.raises(tinker.RequestFailedError, match="send all passes of this step again"):
        stepped.result()
    assert client.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_failed_pass_takes_its_step_along(client: tinker.TrainingClient) -> None:
    client.forward_backward(DATA, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError):
        client.forward_backward(changed(weights=None), "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="failed in request 2"):
        client.optim_step(ADAM).result()


def test_a_failed_part_of_a_batch_takes_its_step_along(client: tinker.TrainingClient) -> None:
    """The SDK sends more than 1,024 data as several requests."""
    alone = client.forward_backward(DATA, "cross_entropy"), client.optim_step(ADAM)
    passed = client.forward_backward([datum([1, 2, 999]), *DATA * 600], "cross_entropy")
    stepped = client.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError, match="999"):
        passed.result()
    with pytest.raises(tinker.RequestFailedError, match="failed in request 3"):
        stepped.result()
    again = client.forward_backward(DATA, "cross_entropy"), client.optim_step(ADAM)
    norms = [each.result().metrics["grad_norm"] for _, each in (alone, again)]
    assert norms[1] < 2 * norms[0], "nothing is left of the part that did not fail"


def test_a_prompt_may_fill_the_context(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result()
    whole = types.ModelInput.from_ints([1 + at % 90 for at in range(512)])
    assert len(sampler.compute_logprobs(whole).result()) == 512
    longer = types.ModelInput.from_ints([*whole.to_ints(), 1])
    with pytest.raises(tinker.RequestFailedError, match="513 tokens; the model can read 512"):
        sampler.compute_logprobs(longer).result()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 600}, "max_tokens=600"),
        ({"max_tokens": 2, "top_p": 0.0}, "top_p"),
        ({"max_tokens": 2, "temperature": -1.0}, "temperature"),
        ({"max_tokens": 2, "top_k": 0}, "top_k"),
        ({"max_tokens": 2, "stop": ""}, "stop"),
        ({"max_tokens": 2, "stop": ["a", ""]}, "stop"),
    ],
)
def test_faulty_sampling_is_refused(
    change: dict[str, Any], words: str, service: tinker.ServiceClient
) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result()
    with pytest.raises(tinker.RequestFailedError, match=words):
        sampler.sample(PROMPT, 1, types.SamplingParams(**change)).result()
    with pytest.raises(tinker.RequestFailedError, match="prompt_alt_tokens_k"):
        sampler.sample(
            PROMPT, 1, types.SamplingParams(max_tokens=1), prompt_alt_tokens_k=1
        ).result()


MODELS: dict[str, tuple[Callable[[tinker.ServiceClient], Any], type[Exception], str]] = {
    "model": (lambda s: s.create_lora_training_client("other"), tinker.NotFoundError, "use tiny"),
    "rank": (
        lambda s: s.create_lora_training_client("tiny", rank=4096),
        tinker.RequestFailedError,
        "rank",
    ),
    "optimizer": (
        lambda s: s.create_lora_training_client("tiny", optimizer=types.DimuonOptimizerConfig()),
        tinker.BadRequestError,
        "optimizer_config",
    ),
    "path": (
        lambda s: s.create_training_client_from_state("tinker://x/weights/y"),
        tinker.NotFoundError,
        "tinker://x/weights/y",
    ),
    "sampler": (
        lambda s: s.create_sampling_client(model_path="tinker://x/weights/y"),
        tinker.NotFoundError,
        "tinker://x/weights/y",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_there_is_refused(name: str, service: tinker.ServiceClient) -> None:
    make, kind, words = MODELS[name]
    with pytest.raises(kind, match=words):
        make(service).result()


# --- below the SDK --------------------------------------------------------------------------------


@pytest.fixture
def raw(url: str, client: tinker.TrainingClient) -> Iterator[Raw]:
    with Raw(url, client.model_id) as made:
        yield made


def test_requests_are_carried_out_in_their_order_and_once(raw: Raw) -> None:
    second, first = raw.stepped(2), raw.passed(1, DATA)
    assert "metrics" in raw.result(second).json(), "the gradients were there"
    assert raw.passed(1, DATA).json() == first.json()
    assert raw.stepped(2).json() == second.json()
    assert "metrics" in raw.result(raw.stepped(2)).json()
    third = raw.result(raw.stepped(3)).json()
    assert "call forward_backward" in third["error"], "neither was done again"
    other = raw.stepped(2, lr=1.0)
    assert (other.status_code, "another content" in other.text) == (400, True)


def test_faulty_bodies_are_refused(raw: Raw, url: str) -> None:
    assert raw.post("optim_step", {"model_id": "x"}).status_code == 422
    extra = {"model_id": raw.model_id, "seq_id": 1, "adam_params": {"new_field": 1}}
    assert b"new_field" in raw.result(raw.post("optim_step", extra)).content
    assert raw.post("forward_backward", {}).status_code == 415
    assert raw.post("copy_weights", {}).status_code == 404
    for number in ("x", "x:²", f"x:{'9' * 30}", f"x:{'9' * 5000}"):
        assert raw.post("retrieve_future", {"request_id": number}).status_code == 410
        session = raw.model_id.partition(":")[0]
        sampler = f"{url}/api/v1/samplers/{session}:sample:{number[2:]}"
        assert httpx.get(sampler).status_code == 404
    unknown = {"session_id": str(uuid.uuid4())}
    assert raw.post("session_heartbeat", unknown).status_code == 404
    assert raw.post("telemetry", {"events": []}).json() == {"status": "accepted"}
    for kind in ("text/plain", ""):
        sent = httpx.post(
            url + "/api/v1/create_session", content=b"{}", headers={"Content-Type": kind}
        )
        assert (sent.status_code, "application/json" in sent.text) == (415, True)
    for seed in (2**63, -(2**63) - 1):
        params = {"max_tokens": 1, "seed": seed}
        chunks = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        body = {"base_model": "tiny", "prompt": chunks, "sampling_params": params}
        found = raw.post("asample", body)
        assert (found.status_code, f"sampling_params.seed={seed}" in found.text) == (400, True)
    body["sampling_params"] = {"max_tokens": 1, "seed": -1}
    many = raw.post("asample", {**body, "num_samples": 10**6})
    assert len(many.content) < 1 << 20
    assert b"num_samples=1000000: it must be 1 to 1024" in raw.result(many).content
    assert b"error" not in raw.result(raw.post("asample", body)).content
    rebound = httpx.get(url + "/api/v1/healthz", headers={"Host": "evil.example"})
    assert rebound.status_code == 403


def test_the_sdk_uses_httpx(service: tinker.ServiceClient) -> None:
    """With pyqwest, `close` may wait forever for a heartbeat whose cancellation was lost."""
    assert not service.holder.get_client_config().use_pyqwest_transport


def test_a_finished_session_frees_its_clients(url: str, base: Path) -> None:
    service = tinker.ServiceClient(base_url=url)
    client = service.create_lora_training_client(str(base), rank=2).result()
    service.close("success").result()
    with Raw(url, client.model_id) as raw:
        assert raw.stepped(1).status_code == 404
        session = client.model_id.partition(":")[0]
        assert raw.post("session_heartbeat", {"session_id": session}).status_code == 410
