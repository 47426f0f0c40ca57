"""Sixty calls of the SDK: each endpoint, its errors, async, repetition and order."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable
from typing import Any

import tinker
from plugins.vox_tinker.tests.data import ADAM, DATA, datum, sampled
from plugins.vox_tinker.tests.raw import Raw
from tinker import types

PROMPT = types.ModelInput.from_ints([10, 20, 30])
FOUR = types.SamplingParams(max_tokens=4, seed=1)
Check = Callable[[Any], bool]


class Calls:
    """Counts calls, and those that went wrong."""

    def __init__(self) -> None:
        self.made, self.wrong = 0, list[str]()

    def __call__(self, name: str, call: Callable[[], Any], check: Check = lambda _: True) -> Any:
        """Call, and check the result; futures are awaited."""
        self.made += 1
        try:
            found = call()
            found = found.result() if hasattr(found, "result") else found
            if check(found):
                return found
            self.wrong.append(f"{name}: {found!r}")
        except Exception as error:  # noqa: BLE001 - each is reported
            self.wrong.append(f"{name}: {type(error).__name__}: {error}")
        return None

    def refused(self, name: str, call: Callable[[], Any], kind: type[Exception], text: str) -> None:
        """Call what must fail with this error."""
        self.made += 1
        try:
            found = call()
            found = found.result() if hasattr(found, "result") else found
            self.wrong.append(f"{name}: not refused, but {found!r}")
        except Exception as error:  # noqa: BLE001 - each is reported
            if not isinstance(error, kind) or text not in str(error):
                self.wrong.append(f"{name}: {type(error).__name__}: {error}")


def trained(call: Calls, client: tinker.TrainingClient) -> None:
    """Passes with each loss, steps, and what is refused."""
    failed = tinker.RequestFailedError
    call("get_info", client.get_info, lambda i: i.model_data.model_name == "tiny")
    call("get_tokenizer", client.get_tokenizer, lambda t: len(t) > 0)
    call("forward", lambda: client.forward(DATA, "cross_entropy"))
    rewarded = [sampled(1, 8), sampled(2, 12)]
    call("cross_entropy", lambda: client.forward_backward(DATA, "cross_entropy"))
    call("optim_step", lambda: client.optim_step(ADAM), lambda f: f.metrics["grad_norm"] > 0)
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        call(loss, lambda loss=loss: client.forward_backward(rewarded, loss))
    masked = [sampled(1, 8, masked=True)]
    call("gspo", lambda: client.forward_backward(masked, "gspo"))
    call("optim_step of five", lambda: client.optim_step(ADAM))
    clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    call("loss_fn_config", lambda: client.forward_backward(rewarded, "ppo", clip))
    own: Any = lambda data, logs: (-sum(each.sum() for each in logs), {})  # noqa: E731
    call("custom", lambda: client.forward_backward_custom(DATA, own))
    call("optim_step after custom", lambda: client.optim_step(ADAM))
    futures = [client.forward_backward(DATA, "cross_entropy") for _ in range(3)]
    order = client.optim_step(ADAM)
    for number, future in enumerate(reversed(futures)):
        call(f"result {number}, out of order", lambda future=future: future)
    call("the step behind them", lambda: order)
    call("a result again", lambda: order, lambda f: f.metrics["grad_norm"] > 0)
    for name, data, loss, text in (
        ("token", [datum([1, 2, 999])], "cross_entropy", "outside of the vocabulary"),
        ("NaN", [datum([1, 2, 3], [1, float("nan")])], "cross_entropy", "'weights'"),
        ("lengths", [datum([1, 2, 3], [1.0])], "cross_entropy", "has the shape"),
        ("context", [datum([1] * 600)], "cross_entropy", "can read"),
        ("loss", DATA, "stable_reinforce", "loss_fn"),
        ("inputs", DATA, "ppo", "missing"),
        ("mask", rewarded, "gspo", "'sequence_ratio_mask' is missing"),
    ):
        call.refused(name, lambda d=data, e=loss: client.forward_backward(d, e), failed, text)
    call.refused("no gradients", lambda: client.optim_step(ADAM), failed, "send all passes")
    call("it goes on", lambda: client.forward_backward(DATA, "cross_entropy"))
    call("with a step", lambda: client.optim_step(ADAM))


def saved(
    call: Calls, url: str, service: tinker.ServiceClient, client: tinker.TrainingClient
) -> tuple[str, tinker.SamplingClient]:
    """Checkpoints: saved, listed, opened, downloaded, deleted."""
    rest, run = tinker.RestClient(base_url=url), client.model_id
    state = call("save_state", lambda: client.save_state("a")).path
    sampler = call("save_weights_for_sampler", lambda: client.save_weights_for_sampler("b")).path
    external = call("save_weights_external", lambda: client.save_weights_external("c")).path
    live = call("a sampler at once", client.save_weights_and_get_sampling_client)
    failed = tinker.RequestFailedError
    call.refused("a name twice", lambda: client.save_state("a"), failed, "exists")
    call("overwrite", lambda: client.save_state("a", overwrite=True))
    call("from state", lambda: service.create_training_client_from_state(state))
    call("with optimizer", lambda: service.create_training_client_from_state_with_optimizer(state))
    call("list_checkpoints", lambda: rest.list_checkpoints(run), lambda f: len(f.checkpoints) == 4)
    call("list_user_checkpoints", rest.list_user_checkpoints, lambda f: len(f.checkpoints) >= 4)
    call("list_training_runs", rest.list_training_runs, lambda f: len(f.training_runs) >= 3)
    call("get_training_run", lambda: rest.get_training_run(run), lambda f: f.lora_rank == 4)
    call("run of a path", lambda: rest.get_training_run_by_tinker_path(state))
    call("weights_info", lambda: rest.get_weights_info_by_tinker_path(state))
    call("ttl", lambda: rest.set_checkpoint_ttl_from_tinker_path(state, 3600))
    links = call("urls", lambda: rest.get_external_weights_urls(external)).urls
    link = links["adapter_model.safetensors"]
    call("download", lambda: urllib.request.urlopen(link).read(), lambda f: len(f) > 1000)
    call("delete", lambda: rest.delete_checkpoint_from_tinker_path(state))
    lost = tinker.NotFoundError
    call.refused("deleted", lambda: rest.delete_checkpoint_from_tinker_path(state), lost, "no")
    call.refused(
        "copy",
        lambda: rest.copy_weights(state, destination_project_id="p"),
        tinker.APIStatusError,
        "not supported",
    )
    session = run.partition(":")[0]
    call("get_session", lambda: rest.get_session(session), lambda f: run in f.training_run_ids)
    call("list_sessions", rest.list_sessions, lambda f: session in f.sessions)
    return sampler, live


def sampled_from(
    call: Calls, service: tinker.ServiceClient, path: str, live: tinker.SamplingClient
) -> None:
    """Samples, scores, and several at once."""
    client = call("sampler of a path", lambda: service.create_sampling_client(model_path=path))
    base = call("sampler of the base", lambda: service.create_sampling_client(base_model="tiny"))
    one = call("sample", lambda: client.sample(PROMPT, 2, FOUR), lambda f: len(f.sequences) == 2)
    tokens = [each.tokens for each in one.sequences]
    call("the same weights", lambda: live.sample(PROMPT, 2, FOUR),
         lambda f: [each.tokens for each in f.sequences] == tokens)  # fmt: skip
    call("compute_logprobs", lambda: base.compute_logprobs(PROMPT), lambda f: f[0] is None)
    call("top-k", lambda: base.sample(PROMPT, 1, FOUR, topk_sample_logprobs=3),
         lambda f: len(f.sequences[0].topk_logprobs[0]) == 3)  # fmt: skip
    zero = types.SamplingParams(max_tokens=0)
    failed = tinker.RequestFailedError
    call.refused("max_tokens", lambda: base.sample(PROMPT, 1, zero), failed, "max_tokens")

    async def several() -> list[types.SampleResponse]:
        asked = [base.sample(PROMPT, 1, FOUR) for _ in range(8)]
        return list(await asyncio.gather(*asked))

    call("eight at once", lambda: asyncio.run(several()),
         lambda f: len({tuple(each.sequences[0].tokens) for each in f}) == 1)  # fmt: skip


def raw(call: Calls, url: str, client: tinker.TrainingClient) -> None:
    """Below the SDK: order and repetition."""
    with Raw(url, client.model_id) as made:
        second, first = made.stepped(2), made.passed(1, DATA)
        call("2 before 1", lambda: made.result(second).json(), lambda f: "metrics" in f)
        call("1 again", lambda: made.passed(1, DATA).json(), lambda f: f == first.json())
        call("2 changed", lambda: made.stepped(2, lr=1.0), lambda f: f.status_code == 400)
        call("a wrong body", lambda: made.post("optim_step", {}), lambda f: f.status_code == 422)
        call("no endpoint", lambda: made.post("nothing", {}), lambda f: f.status_code == 404)
        unknown = {"request_id": "x"}
        lost = made.post("retrieve_future", unknown)
        call("no request", lambda: lost, lambda f: f.status_code == 410)


def test_sixty_calls(url: str) -> None:
    call, service = Calls(), tinker.ServiceClient(base_url=url)
    served = call(
        "capabilities", tinker.RestClient(base_url=url).get_server_capabilities
    ).supported_models
    assert [each.model_name for each in served] == ["tiny"]
    lost = tinker.NotFoundError
    call.refused("model", lambda: service.create_lora_training_client("x"), lost, "use tiny")
    made = [
        call("create", lambda: service.create_lora_training_client("tiny", rank=4, seed=1))
        for _ in range(2)
    ]
    trained(call, made[0])
    path, live = saved(call, url, service, made[0])
    sampled_from(call, service, path, live)
    raw(call, url, made[1])
    call("finish", lambda: service.close("success"))
    assert not call.wrong
    assert call.made >= 60
