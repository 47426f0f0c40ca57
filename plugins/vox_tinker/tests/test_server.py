"""Keys, addresses, names of models; weights that are replaced; and a server that is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import tinker
from plugins.vox_tinker.tests.conftest import KEY, running
from plugins.vox_tinker.tests.data import ADAM, DATA
from plugins.vox_tinker.tests.raw import Raw
from starlette.requests import Request
from tinker import types

from vox_core.api.serving import require_key
from vox_core.api.settings import TrainSettings
from vox_core.cli import root
from vox_core.errors import ConfigError
from vox_tinker.app import _body
from vox_tinker.futures import Refused
from vox_tinker.server import PREFIX, named_models, opened

PROMPT = types.ModelInput.from_ints([10, 20, 30])
GREEDY = types.SamplingParams(max_tokens=8, temperature=0, stop=[])


@pytest.mark.parametrize(
    ("host", "key", "words"),
    [
        ("0.0.0.0", None, "other machines"),
        ("127.0.0.1", "tml-short", "9 characters"),
        ("127.0.0.1", "a-long-key-without-it", "no 'tml-' in front"),
    ],
)
def test_keys_that_are_refused(host: str, key: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        require_key(host, key, PREFIX)
    assert words in str(error.value)


def test_names_of_models() -> None:
    assert named_models(["a/b", "Qwen/Qwen3-8B=/x"]) == {"a/b": "a/b", "Qwen/Qwen3-8B": "/x"}
    for wrong in ([], ["a", "a=b"], ["a="]):
        with pytest.raises(ConfigError):
            named_models(wrong)


def test_a_key_is_required_if_there_is_one(base: Path, tmp_path: Path) -> None:
    settings = TrainSettings(backend="cpu", dtype="fp32")
    with (
        opened("tiny", str(base), settings, lambda _: None) as served,
        running({"tiny": served}, tmp_path, KEY) as url,
    ):
        right, wrong = {"X-API-Key": KEY}, {"X-API-Key": KEY + "x"}
        asked = url + "/api/v1/get_server_capabilities"
        assert httpx.get(asked, headers={**right, "Host": "any.example"}).status_code == 200
        assert httpx.get(asked).status_code == 401
        assert httpx.get(asked, headers=wrong).status_code == 401
        with pytest.raises(tinker.AuthenticationError, match="TINKER_API_KEY"):
            tinker.ServiceClient(base_url=url, api_key="tml-another-key").holder  # noqa: B018


def said(sampler: tinker.SamplingClient) -> list[int]:
    return sampler.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens


def test_replaced_weights_are_those_that_are_sampled(
    client: tinker.TrainingClient, service: tinker.ServiceClient
) -> None:
    path = client.save_state("again").result().path
    before = said(service.create_sampling_client(model_path=path).result())
    for _ in range(5):
        client.forward_backward(DATA, "cross_entropy").result()
        client.optim_step(ADAM).result()
    client.save_state("again", overwrite=True).result()
    after = said(service.create_sampling_client(model_path=path).result())
    live = said(client.save_weights_and_get_sampling_client().result())
    assert before != after == live


def test_weights_of_another_base_are_refused(base: Path, tmp_path: Path) -> None:
    settings = TrainSettings(backend="cpu", dtype="fp32")
    with (
        opened("tiny", str(base), settings, lambda _: None) as one,
        running({"tiny": one, "other": replace(one, name="other")}, tmp_path, KEY) as url,
    ):
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        clients = [
            service.create_lora_training_client(name, rank=4).result() for name in ("tiny", "other")
        ]
        path = clients[0].save_state("saved").result().path
        with (
            pytest.warns(FutureWarning),
            pytest.raises(tinker.RequestFailedError, match="belong to 'tiny'"),
        ):
            clients[1].load_state(path).result()
        service.close("success").result()


def test_a_run_of_vox_train_that_has_not_ended_is_refused(url: str, runs: Path) -> None:
    """The SDK sends an internal error again and again. Paths are the server's own affair."""
    (run := runs / "unfinished").mkdir()
    (run / "plan.json").write_text("{}")
    with Raw(url, "") as raw:
        found = raw.post("weights_info", {"tinker_path": "tinker://unfinished/weights/final"})
    assert found.status_code == 400
    assert found.json()["error"] == "this is not a run folder of vox (VOX-A001)"


def test_a_client_that_goes_away_while_it_sends_is_no_fault_of_the_server() -> None:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with pytest.raises(Refused) as caught:
        asyncio.run(_body(Request({"type": "http", "method": "POST", "headers": []}, receive)))
    assert caught.value.status == 499


@contextmanager
def process(base: Path, runs: Path, port: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a server in a process of its own, and its URL."""
    command = [
        sys.executable, "-m", "vox_core.cli", "tinker", "serve", "--model", f"tiny={base}",
        "--backend", "cpu", "--dtype", "fp32", "--port", port, "--out", str(runs),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield started, started.stdout.readline().split()[-1]
        finally:
            started.kill()


@pytest.mark.long
def test_a_killed_server_goes_on(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """benchmarks/tinker_killed.py kills it at 30 random moments."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with process(base, tmp_path / "runs", "0") as (server, url):
        service = tinker.ServiceClient(base_url=url)
        client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        path = client.save_state("saved").result().path
        sampler = service.create_sampling_client(model_path=path).result()
        sampled = said(sampler)
        waiting = [client.forward_backward(DATA, "cross_entropy") for _ in range(3)]
        stepped = client.optim_step(ADAM)
        waiting[0].result()
        server.send_signal(signal.SIGKILL)
        server.wait()
    with process(base, tmp_path / "runs", url.rpartition(":")[2]):
        assert said(sampler) == sampled
        found = [each.result().metrics for each in waiting], stepped.result().metrics
        other = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        again = [other.forward_backward(DATA, "cross_entropy").result().metrics for _ in range(3)]
        assert found == (again, other.optim_step(ADAM).result().metrics)
        service.close("success").result()


def test_the_command_reads_its_own_section(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "vox.toml").write_text(
        '[serve]\nport = 1\n[tinker]\nport = 2\nout = "here"\n[train]\ndtype = "fp32"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOX_TINKER_HOST", "::1")
    given = []
    monkeypatch.setattr("vox_tinker.server.serve", lambda *args, **_: given.append(args))
    line = ["tinker", "serve", "--model", "m", "--micro-batch-tokens", "64"]
    root.main(line, standalone_mode=False)
    settings = TrainSettings(dtype="fp32", micro_batch_tokens=64)
    assert given == [(("m",), settings, "::1", 2, Path("here"), None)]
