"""The command: what is checked before the model is loaded, and each adapter once it is."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
from contextlib import asynccontextmanager
from itertools import starmap
from pathlib import Path
from threading import Thread

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from vox_core.adapter.peft import CONFIG, read_adapter
from vox_core.api.serving import listening
from vox_core.digests import folder_digest
from vox_core.run.folder import MANIFEST, PROBE
from vox_core.run.reference import adapter_digest
from vox_serve import server
from vox_serve.served import select
from vox_testing.tiny import make_model

KEY = "correct horse battery"


@pytest.fixture
def not_loaded(monkeypatch) -> None:
    """Loading the model fails the test."""

    def fail(*_, **__):
        pytest.fail("the model was loaded")

    monkeypatch.setattr("vox_serve.server.open_base", fail)


@pytest.fixture
def ran(monkeypatch) -> list[TestClient]:
    """Clients of what the command would serve, which it does not."""
    found: list[TestClient] = []

    def run(app, listener, drain, connections) -> None:
        assert connections >= 8
        client = TestClient(app, f"http://127.0.0.1:{listener.getsockname()[1]}")
        found.append(client)
        for model in client.get("/v1/models").json()["data"]:
            body = {"model": model["id"], "prompt": "x", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200

    monkeypatch.setattr("vox_serve.server.run", run)
    return found


def test_runs_are_served_under_their_names_beside_their_base(vox, folders, ran) -> None:
    flags = ("--dtype", "fp32", "--backend", "cpu", "--port", 0)
    done = vox("serve", folders / "one", "--name", f"b/2={folders / 'two'}", *flags)
    assert done.code == 0, done.err
    assert done.err.index("loading the tokenizer") < done.err.index("loading the model")
    lines = [line.split(None, 1) for line in done.out.splitlines()]
    assert [name for name, _ in lines] == ["serving", "page", "one", "b/2", "base"]
    assert lines[0][1].startswith("http://127.0.0.1:")
    assert lines[2][1].startswith("adapter; changes log-probabilities by ")
    assert lines[2][1].endswith(" nats; no probe.json")
    assert lines[4][1] == "base"
    assert len(ran) == 1


def test_a_model_alone_is_served(vox, folders, ran) -> None:
    done = vox("serve", folders / "base", "--dtype", "fp32", "--backend", "cpu", "--port", 0)
    assert done.code == 0, done.err
    assert done.out.splitlines()[2].split() == ["base", "model"]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_an_adapter_that_does_nothing_is_refused_with_the_numbers(
    vox, folders, ran, backend
) -> None:
    flags = ("--dtype", "fp32", "--backend", backend, "--port", 0)
    done = vox("serve", folders / "one", folders / "zero", *flags)
    assert done.code == 1
    assert "VOX-V002" in done.err
    assert "the model zero" in done.err
    assert "up to 0.0e+00 from the base's" in done.err
    assert ran == []


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_run_matches_its_training(vox, trained, ran, backend) -> None:
    done = vox("serve", trained, "--dtype", "fp32", "--backend", backend, "--port", 0)
    assert done.code == 0, done.err
    said = r"within (\S+) nats of those at the end of training; the adapter changes them by (\S+)\n"
    found = re.search(f"adapter; matches training: log-probabilities {said}", done.out)
    assert float(found[1]) < 1e-4 < float(found[2]), done.out
    assert len(ran) == 1


def _renamed(name, value):
    first, second = "layers.0.self_attn.q", "layers.1.self_attn.q"
    swapped = {first: second, second: first}
    return next((name.replace(old, swapped[old]) for old in swapped if old in name), name), value


FAULTS = {
    "flipped": lambda name, value: (name, -value if "1.self_attn.v_proj.lora_B" in name else value),
    "zeroed": lambda name, value: (name, value * np.float32("lora_A" in name)),
    "renamed": _renamed,
    "scale": None,
    "base": None,
}


@pytest.mark.parametrize("whole_digest", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_with_a_fault_is_refused_with_the_numbers(
    vox, trained, ran, tmp_path, fault, whole_digest
) -> None:
    """Also when the digests agree, as they would if the fault were the backend's."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    if change := FAULTS[fault]:
        tensors = load_file(run / "adapter_model.safetensors")
        save_file(dict(starmap(change, tensors.items())), run / "adapter_model.safetensors")
    elif fault == "scale":
        _edit(run / CONFIG, lambda config: {**config, "lora_alpha": config["lora_alpha"] * 1.1})
    else:
        other = make_model("llama", tmp_path / "other", seed=1)
        at = {"path": str(other)}
        if whole_digest:
            at["weights_digest"] = folder_digest(other)
        _edit(run / MANIFEST, lambda found: {**found, "base": {**found["base"], **at}})
    if whole_digest:
        digest = adapter_digest("", read_adapter(run))
        _edit(run / PROBE, lambda probe: {**probe, "digest": digest})
    done = vox("serve", run, "--dtype", "fp32", "--backend", "cpu", "--port", 0)
    code = "VOX-A002" if fault == "base" and not whole_digest else "VOX-V004"
    assert code in done.err, done.err
    assert ("nats" in done.err) == whole_digest
    assert ran == []


def _edit(path: Path, change) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.usefixtures("not_loaded")
class TestBeforeLoading:
    def test_there_must_be_a_model(self, vox) -> None:
        done = vox("serve")
        assert (done.code, "VOX-C004" in done.err) == (2, True)
        assert "vox serve runs/mine" in done.err

    def test_a_name_stands_for_one_model(self, vox, folders, tmp_path) -> None:
        (tmp_path / "one").symlink_to(folders / "two")
        for arguments in (
            (folders / "one", "--name", f"one={folders / 'two'}"),
            ("--name", f"a={folders / 'one'}", "--name", f"a={folders / 'two'}"),
            ("--name", f"a={folders / 'one'}", "--name", f"b={folders / 'one'}"),
        ):
            done = vox("serve", "--port", 0, *arguments)
            assert done.code == 2, arguments
            assert "each model has one name" in done.err

    def test_the_base_gives_way_to_a_run_of_its_name(self, folders) -> None:
        models = select([], [f"base={folders / 'one'}"]).models
        assert [(name, bool(each.adapter)) for name, each in models.items()] == [
            ("base", True),
            ("base-base", False),
        ]

    @pytest.mark.parametrize("given", ["one", "=x", "a b=x", "a=", "../x=y", "\ud800=x"])
    def test_a_name_must_be_usable(self, vox, given) -> None:
        done = vox("serve", "--port", 0, "--name", given)
        assert (done.code, "NAME=RUN" in done.err) == (2, True)

    def test_models_must_share_their_base(self, vox, folders, tmp_path) -> None:
        other = make_model("llama", tmp_path / "other", seed=1)
        done = vox("serve", "--port", 0, folders / "one", other)
        assert done.code == 2
        assert "different bases" in done.err
        assert "one: base, weights " in done.err
        assert "other: other, weights " in done.err

    def test_a_base_that_is_gone_is_named(self, vox, folders, tmp_path) -> None:
        lost = tmp_path / "lost"
        lost.mkdir()
        for file in (folders / "one").iterdir():
            (lost / file.name).write_bytes(file.read_bytes())
        config = json.loads((lost / CONFIG).read_text())
        config["base_model_name_or_path"] = str(tmp_path / "gone")
        (lost / CONFIG).write_text(json.dumps(config))
        done = vox("serve", "--port", 0, lost)
        assert done.code == 2
        assert str(tmp_path / "gone") in done.err

    def test_a_port_in_use_is_found(self, vox, folders) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            done = vox("serve", folders / "one", "--port", port)
        assert done.code == 2
        assert f"127.0.0.1:{port}" in done.err

    def test_another_address_needs_a_key(self, vox, folders, monkeypatch) -> None:
        for host in ("0.0.0.0", "::", "example.org", "127.0.0.2"):
            done = vox("serve", folders / "one", "--host", host)
            assert (done.code, "VOX_API_KEY" in done.err) == (2, True), host
        monkeypatch.setenv("VOX_API_KEY", "short")
        done = vox("serve", folders / "one")
        assert (done.code, "5 characters" in done.err) == (2, True)
        assert "short" not in done.err


def test_a_key_from_the_environment_is_required(vox, folders, ran, monkeypatch) -> None:
    monkeypatch.setenv("VOX_API_KEY", KEY)
    clients: list[TestClient] = []
    monkeypatch.setattr(
        "vox_serve.server.run", lambda app, *_: clients.append(TestClient(app, "http://x"))
    )
    done = vox("serve", folders / "base", "--backend", "cpu", "--port", 0, "--host", "0.0.0.0")
    assert done.code == 0, done.err
    assert KEY not in done.out + done.err
    assert clients[0].get("/v1/models").status_code == 401
    assert clients[0].get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).is_success


def test_the_lifespan_of_the_app_is_that_of_the_server() -> None:
    seen = []

    @asynccontextmanager
    async def lifespan(app):
        seen.append("begun")
        yield
        seen.append("ended")

    async def stop(request):
        signal.raise_signal(signal.SIGTERM)
        return Response()

    app = Starlette(routes=[Route("/", stop)], lifespan=lifespan)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        (client := Thread(target=httpx2.get, args=(url,))).start()
        server.run(app, listener, 5, 4)
        client.join()
    assert seen == ["begun", "ended"]


def test_responses_are_sent_at_once() -> None:
    """asyncio sets TCP_NODELAY only on sockets that name their protocol."""
    with listening("localhost", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_run_folder_is_named_after_its_folder(folders) -> None:
    found = select([str(folders / "two" / ".." / "one") + "/"], [])
    assert list(found.models) == ["one", "base"]
    assert Path(found.source.base.path) == folders / "base"
