"""Adapters that are added and removed while the server answers, and rows that share a beginning."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from plugins.vox_serve.tests.alphabet import SECONDS, Alphabet, wait_until
from safetensors.numpy import load_file, save_file

from vox_core.api.generating import Generator, Sampling
from vox_core.api.tokenizers import load_tokenizer
from vox_core.config import GenerateSettings, validate
from vox_core.run.folder import PROBE
from vox_core.run.load import OpenModel
from vox_serve.engine import Answer, Engine, EngineFailed
from vox_serve.server import KEPT

TOLD = "You answer questions about parcels, in one sentence and politely. "


def asked(model: str, text: str, **fields) -> dict:
    messages = [{"role": "system", "content": TOLD}, {"role": "user", "content": text}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12, **fields}


def said(client, model: str, text: str, **fields) -> str:
    found = client.post("/v1/chat/completions", json=asked(model, text, **fields))
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_32_requests_over_3_adapters_are_those_of_vox_generate(opened_on, folders, backend) -> None:
    """Alone, 8 at once, in any order, and with a beginning out of another row's cache."""
    opened = opened_on(backend, ("one", "two", "three"))
    generator, tokenizer = opened.base.generator, load_tokenizer(folders / "base")
    settings = validate(GenerateSettings, {"max_tokens": 12, "system": TOLD})
    questions = [(("one", "two", "three")[n % 3], f"{n} + {n * n}? Why?") for n in range(32)]
    expected = []
    for name, text in questions:
        model = OpenModel(name, generator, tokenizer, settings, adapter=name)
        expected.append("".join(model.reply([{"role": "user", "content": text}])))
    reused: list[int] = []
    own = opened.base.model.reuse
    opened.base.model.reuse = lambda row, source, count: (
        reused.append(count),
        own(row, source, count),
    )
    client = opened.client()
    for keep in (0, KEPT):
        generator.keep = keep
        ask = lambda each: said(client, *each)  # noqa: E731
        assert [ask(each) for each in questions] == expected
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, questions)) == expected
            assert list(pool.map(ask, questions[::-1])) == expected[::-1]
    assert min(reused) >= len(TOLD)


@pytest.fixture
def server(opened_on, folders, trained, tmp_path):
    """A client, the folder that it may add adapters from, and the models."""
    for name in ("two", "zero"):
        shutil.copytree(folders / name, tmp_path / "runs" / name)
    shutil.copytree(trained, tmp_path / "runs" / "mine")
    opened = opened_on("cpu", ("one",))
    opened.base.generator.keep = KEPT
    return opened.client(allowed=tmp_path / "runs"), tmp_path / "runs", opened


def test_an_adapter_is_added_proven_and_removed_while_answers_run(server) -> None:
    client, _, _ = server
    alone = said(client, "one", "Why?", max_tokens=60)
    base = said(client, "base", "Why?")
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(said, client, "one", "Why?", max_tokens=60) for _ in range(3)]
        wait_until(lambda: client.engine.running > 0)
        added = client.post("/v1/adapters", json={"name": "new", "path": "mine"})
        assert added.status_code == 200, added.text
        assert added.json()["verification"].startswith("matches training: ")
        assert added.json()["parent"] == "base"
        found = said(client, "new", "Why?")
        assert [each.result() for each in running] == [alone] * 3
    assert "new" in [each["id"] for each in client.get("/v1/models").json()["data"]]
    again = client.post("/v1/adapters", json={"name": "new", "path": "mine"})
    assert (again.status_code, "already" in again.text) == (400, True)
    for request in (
        lambda: client.delete("/v1/adapters/new"),
        lambda: client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}),
    ):
        assert request().json() == {"id": "new", "object": "model", "deleted": True}
        assert client.post("/v1/chat/completions", json=asked("new", "Why?")).status_code == 404
        assert request().status_code == 404
        # another adapter of this name does not get the first one's cache
        body = {"lora_name": "new", "lora_path": "two"}
        other = client.post("/v1/load_lora_adapter", json=body).json()
        assert other["verification"].endswith("no probe.json")
        assert said(client, "new", "Why?") not in (found, base)
    assert client.delete("/v1/adapters/base").status_code == 404
    assert client.delete("/v1/adapters/new").status_code == 200


def test_an_adapter_removed_while_a_prompt_is_rendered_gets_no_answer(server, monkeypatch) -> None:
    """Otherwise the row would enter without its adapter, or with another one of its name."""
    client, _, opened = server
    for path, status in ((None, 404), ("two", 503)):
        assert client.post("/v1/adapters", json={"name": "new", "path": "mine"}).status_code == 200
        served = opened.models["new"]
        rendering, free, own = Event(), Event(), served.encode

        def slow(*given, rendering=rendering, free=free, own=own, **fields):
            rendering.set()
            assert free.wait(SECONDS)
            return own(*given, **fields)

        monkeypatch.setattr(served, "encode", slow)
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(client.post, "/v1/chat/completions", json=asked("new", "Why?"))
            assert rendering.wait(SECONDS)
            assert client.delete("/v1/adapters/new").status_code == 200
            if path:
                body = {"name": "new", "path": path}
                assert client.post("/v1/adapters", json=body).status_code == 200
            free.set()
            assert late.result().status_code == status
    assert client.delete("/v1/adapters/new").status_code == 200


def test_an_adapter_that_fails_is_refused_with_numbers_and_without_paths(server) -> None:
    client, runs, opened = server
    (runs / "link").symlink_to(runs.parent)
    tensors = load_file(runs / "mine" / "adapter_model.safetensors")
    shutil.copytree(runs / "mine", runs / "other")
    save_file({n: -v for n, v in tensors.items()}, runs / "other" / "adapter_model.safetensors")
    refused = {
        "zero": "VOX-V002",
        "other": "VOX-V004",
        "nobody": "no such folder",
        "..": "no such folder",
        "link": "no such folder",
        "/etc": "no such folder",
        "a\0b": "no such folder",
        ".": "VOX-A001",
    }
    for path, why in refused.items():
        found = client.post("/v1/adapters", json={"name": "bad", "path": path})
        assert found.status_code in (400, 404), found.text
        assert why in found.json()["error"]["message"], (path, found.text)
        assert str(runs.parent) not in found.text
    for body in ({}, {"name": "a b", "path": "two"}, {"name": "x", "path": 3}, {"name": "base"}):
        assert client.post("/v1/adapters", json=body).status_code == 400
    assert set(opened.models) == {"one", "base"}
    with pytest.raises(Exception, match="bad"):  # nothing of it stayed
        opened.base.model.remove_adapter("bad")


def test_a_hostile_probe_is_refused_and_answers_go_on(server) -> None:
    """Its tokens would index the embedding outside of its rows, or fill the memory."""
    client, runs, opened = server
    probe = json.loads((runs / "mine" / PROBE).read_text())
    before = said(client, "one", "Why?")
    for tokens in ([1, 10**6], [1, -1], [1, 2**70], [1] * 10_000):
        scores = [-1.0] * (len(tokens) - 1)
        document = {"tokens": tokens, "base": scores, "adapter": scores}
        (runs / "mine" / PROBE).write_text(json.dumps({**probe, "documents": [document]}))
        found = client.post("/v1/adapters", json={"name": "bad", "path": "mine"})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "path")
        assert "the run's probe cannot be used (VOX-A001)" in found.text
    assert set(opened.models) == {"one", "base"}
    assert said(client, "one", "Why?") == before


def test_adapters_cannot_be_added_unless_that_is_allowed(client) -> None:
    assert client.post("/v1/adapters", json={"name": "x", "path": "two"}).status_code == 404


def test_the_folder_must_be_there_and_the_engine_voxs(vox, folders, tmp_path) -> None:
    for flags in (("--allow-adapters", tmp_path / "gone"), ("--allow-adapters", tmp_path,
                  "--engine", "vllm")):  # fmt: skip
        done = vox("serve", folders / "one", *flags)
        assert (done.code, "--allow-adapters" in done.err) == (2, True)


def test_a_call_waits_until_no_answer_uses_the_adapter() -> None:
    model, pieces, done = Alphabet(3, 40), [], Event()
    model.free.clear()
    engine = Engine(Generator(model, rows=2), queue=2)

    def emit(piece) -> None:
        pieces.append(piece)
        if piece.finish:
            done.set()

    class Text:
        tokens = 0
        add = staticmethod(lambda token: False)
        take = staticmethod(lambda everything: "x")

    engine.submit([Answer([3], Sampling(max_tokens=5), "a", Text(), emit)])
    with ThreadPoolExecutor(1) as pool:
        removed = pool.submit(engine.call, lambda: len(pieces), "a")
        model.free.set()
        assert removed.result(SECONDS) == 5
        assert engine.call(lambda: "at once") == "at once"
        with pytest.raises(ZeroDivisionError):
            engine.call(lambda: 1 / 0)
    assert done.wait(SECONDS)
    engine.close()
    with pytest.raises(EngineFailed):
        engine.call(lambda: None)
