"""The queue, cancellation, a failing model, and draining, over a model that steps when told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any
from unittest.mock import Mock

import httpx2 as httpx
import pytest
import uvicorn
from plugins.vox_serve.tests.alphabet import SECONDS, Alphabet, wait_until
from starlette.testclient import TestClient

from vox_core.api.generating import Generator, Sampling
from vox_core.api.serving import listening
from vox_core.api.tokenizers import load_tokenizer
from vox_serve.app import Api, Limits
from vox_serve.engine import Answer, Engine, EngineFailed
from vox_serve.served import Served
from vox_serve.server import run
from vox_testing.tiny import write_tokenizer

BODY = {"model": "base", "prompt": "z", "temperature": 0, "max_tokens": 30}
ENDLESS = {**BODY, "max_tokens": 10**6}
SAID = "abcdefghijklmnopqrstuvwxyzabcd"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A tokenizer is enough: the model is an `Alphabet`."""
    folder = tmp_path_factory.mktemp("base")
    write_tokenizer(folder)
    return Served("base", load_tokenizer(folder))


@pytest.fixture
def model(base) -> Alphabet:
    return Alphabet(base.encode("a")[0], base.vocabulary)


@pytest.fixture
def engine(model) -> Iterator[Engine]:
    with closing(Engine(Generator(model, rows=2), queue=1)) as engine:
        yield engine
        model.free.set()


@pytest.fixture
def api(engine, base) -> Api:
    return Api(engine, {"base": base}, Limits(10**6, None))


@pytest.fixture
def client(api) -> TestClient:
    return TestClient(api.app, "http://127.0.0.1", raise_server_exceptions=False)


@contextmanager
def served(app: Any, stalled: int = 60) -> Iterator[httpx.Client]:
    """A client of uvicorn on a free port, in a thread."""
    listener = listening("127.0.0.1", 0, stalled)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=SECONDS) as client:
            client.open = lambda: len(server.server_state.connections)
            yield client
    finally:
        server.should_exit = True
        thread.join()


def text(response: Any) -> str:
    return response.json()["choices"][0]["text"]


def test_a_full_queue_is_refused_at_once_and_the_others_are_answered(client, engine, model) -> None:
    model.free.clear()
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(client.post, "/v1/completions", json=BODY) for _ in range(3)]
        wait_until(lambda: engine.running + engine.waiting == 3)
        refused = client.post("/v1/completions", json=BODY)
        assert "vox_answers_waiting" in client.get("/metrics").text
        model.free.set()
        assert [text(each.result()) for each in asked] == [SAID] * 3
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "queue_full"
    assert text(client.post("/v1/completions", json=BODY)) == SAID


def test_a_stop_text_that_is_split_over_tokens(client) -> None:
    found = client.post("/v1/completions", json={**BODY, "stop": ["efg", "zz"]})
    assert text(found) == "abcd"
    assert found.json()["usage"]["completion_tokens"] == 7
    streamed = client.post("/v1/completions", json={**BODY, "stop": "efg", "stream": True})
    assert "e" not in "".join(_texts(streamed.text))


def test_a_request_that_is_dropped_frees_its_row(api, engine, model) -> None:
    """Streamed and not, and one that still waits in the queue; another one goes on."""
    stream = ("POST", "/v1/completions")
    with served(api.app) as client:
        with client.stream(*stream, json={**ENDLESS, "stream": True}) as kept:
            lines = kept.iter_lines()
            with client.stream(*stream, json={**ENDLESS, "stream": True}) as dropped:
                heard = dropped.iter_lines()  # without a name it would be closed here
                assert next(heard).startswith("data: {")
                wait_until(lambda: engine.running == 2)
            wait_until(lambda: engine.running == len(model.inside) == 1)
            assert not [line for line in islice(lines, 100) if "error" in line]
        wait_until(lambda: not engine.running and not model.inside)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={**ENDLESS, "n": 2}, timeout=0.3)
        wait_until(lambda: not engine.running and not model.inside)
        model.free.clear()
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(client.post, "/v1/completions", json={**BODY, "n": 2})
            wait_until(lambda: engine.running == 2)
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=BODY, timeout=0.3)
            wait_until(lambda: not engine.waiting)
            model.free.set()
            assert text(others.result()) == SAID


def test_an_answer_that_cannot_be_decoded_ends_alone(client, engine) -> None:
    """The other row of the batch goes on."""
    ended: list[object] = []
    broken = Answer([1], Sampling(max_tokens=9), None, Mock(), ended.append)
    broken.text.add.side_effect = Exception("Invalid bytes")
    engine.submit([broken])
    assert text(client.post("/v1/completions", json=BODY)) == SAID
    wait_until(lambda: bool(ended))
    assert isinstance(ended[0], EngineFailed)


def test_an_adapter_that_computes_no_numbers_ends_its_answers_alone(
    client, engine, model, base
) -> None:
    """The other row of the batch goes on."""
    model.free.clear()
    ended: list[object] = []
    bad = Answer([1], Sampling(max_tokens=9), "bad", base.text(()), ended.append)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.post, "/v1/completions", json=BODY)
        wait_until(lambda: engine.running == 1)
        engine.submit([bad])
        model.free.set()
        assert text(other.result()) == SAID
    (failed,) = ended
    assert isinstance(failed, EngineFailed)
    assert str(failed) == "the model's logits are not numbers"


def test_a_client_that_never_reads_holds_nobody_up(api, engine) -> None:
    """And loses its connection."""
    body = json.dumps({**BODY, "max_tokens": 50_000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with served(api.app, stalled=1) as client:
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address) as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            wait_until(lambda: engine.running == 1)
            assert text(client.post("/v1/completions", json=BODY)) == SAID
            wait_until(lambda: not engine.running and client.open() == 1)


def test_many_requests_over_one_connection(api) -> None:
    with served(api.app) as client:
        assert [text(client.post("/v1/completions", json=BODY)) for _ in range(50)] == [SAID] * 50


def test_a_failing_model_ends_its_answers_and_goes_on(client, engine, model) -> None:
    model.faults = 1
    failed = client.post("/v1/completions", json=BODY)
    assert failed.status_code == 503
    assert failed.json()["error"]["type"] == "server_error"
    assert "out of memory" not in failed.text
    model.faults = 1
    streamed = client.post("/v1/completions", json={**BODY, "stream": True})
    assert "error" in json.loads(streamed.text.removeprefix("data: "))
    assert text(client.post("/v1/completions", json=BODY)) == SAID
    assert client.get("/health").status_code == 200


def test_a_model_that_cannot_be_used_any_more_is_unhealthy(client, engine, model) -> None:
    model.faults, model.stuck = 1, True
    assert client.post("/v1/completions", json=BODY).status_code == 503
    assert engine.failed
    health = client.get("/health")
    assert (health.status_code, "restart the server" in health.text) == (503, True)
    assert client.post("/v1/completions", json=BODY).status_code == 503


def test_closing_ends_waiting_answers_with_an_error(engine, model, base) -> None:
    model.free.clear()
    ended: list[object] = []
    answers = [
        Answer([1], Sampling(max_tokens=5), None, base.text(()), ended.append) for _ in range(3)
    ]
    engine.submit(answers)
    closing_thread = threading.Thread(target=engine.close)
    closing_thread.start()
    model.free.set()
    closing_thread.join()
    assert len([each for each in ended if isinstance(each, EngineFailed)]) >= 1
    with pytest.raises(EngineFailed):
        engine.submit(answers)


# --- the end of the server ------------------------------------------------------------------------


def _texts(stream: str) -> list[str]:
    events = [each.removeprefix("data: ") for each in stream.split("\n\n") if each]
    return [json.loads(each)["choices"][0]["text"] for each in events if each != "[DONE]"]


def _ended_by(number: int, api: Api, drain: float, then: Callable[[str], None]) -> str:
    """Run the server in this thread, send it a signal during a stream, and return the stream."""
    listener, said = listening("127.0.0.1", 0), []
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def ask() -> None:
        try:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=SECONDS
            ) as response:
                os.kill(os.getpid(), number)
                then(url)
                said.append("".join(response.iter_text()))
        except httpx.HTTPError as error:
            said.append(repr(error))

    thread = threading.Thread(target=ask)
    thread.start()
    run(api.app, listener, drain, 99)
    thread.join()
    return said[0]


def _refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=1)
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:
        return False
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_answers_finish_and_takes_no_new_ones(
    api, model, number, monkeypatch
) -> None:
    model.free.clear()
    looked: list[float] = []  # how often uvicorn has looked whether a connection is left
    own = asyncio.sleep
    monkeypatch.setattr(
        "uvicorn.server.asyncio.sleep", lambda seconds: (looked.append(seconds), own(seconds))[1]
    )

    def then(url: str) -> None:
        wait_until(lambda: _refuses(url))
        before = len(looked)
        wait_until(lambda: len(looked) > before + 2)
        model.free.set()

    before = signal.getsignal(number)
    stream = _ended_by(number, api, SECONDS, then)
    assert "".join(_texts(stream)) == SAID
    assert stream.endswith("data: [DONE]\n\n")
    assert signal.getsignal(number) is before


def test_what_does_not_finish_in_time_is_cut(api, model, engine) -> None:
    model.free.clear()
    stream = _ended_by(signal.SIGTERM, api, 0, lambda url: None)
    assert "[DONE]" not in stream
    model.free.set()
    wait_until(lambda: not engine.running)
