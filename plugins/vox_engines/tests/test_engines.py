"""`--engine`: a program that generates in place of vox, played by `fake_program.py`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from select import select as select_ready
from threading import Event, Thread
from typing import Any

import httpx2
import pytest
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

from vox_engines import keeper, programs, proxy, xllama
from vox_serve.served import select, served_models

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfd_open is Linux's")

KEY = "correct horse battery"
CONVERSATION = [{"role": role, "content": content} for role, content in proxy._CONVERSATION]


class Fake:
    """The fake program, and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, **changes: Any) -> None:
        path = self.folder / "state.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        path.with_suffix(".new").write_text(json.dumps({**found, **changes}))
        path.with_suffix(".new").replace(path)

    def _lines(self, name: str) -> list[Any]:
        path = self.folder / name
        return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []

    @property
    def started(self) -> list[tuple[int, list[str]]]:
        """Pid and arguments of each start."""
        return [tuple(each) for each in self._lines("started.jsonl")]

    @property
    def requests(self) -> list[tuple[str, dict[str, Any]]]:
        return [tuple(each) for each in self._lines("requests.jsonl")]


@pytest.fixture
def fake(tmp_path, monkeypatch, trained) -> Fake:
    """On the PATH as `vllm` and as `llama-server`."""
    source = Path(__file__).with_name("fake_program.py").read_text()
    (place := tmp_path / "bin").mkdir()
    (place / "fake_program.py").write_text(source)
    for name in ("vllm", "llama-server"):
        (place / name).write_text(f"#!{sys.executable} -I\n{source}")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    served = served_models(select([str(trained)], []))
    tokens = served["run"].render(CONVERSATION)
    fake = Fake(place)
    fake.set(tokens=tokens, probes=[json.loads((trained / "probe.json").read_text())])
    return fake


def gone(pid: int) -> bool:
    """Wait until a process has ended; fail after a minute."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select_ready([process], [], [], 60)[0])
    finally:
        os.close(process)


@pytest.fixture
def serving(vox, monkeypatch, trained, fake) -> Callable[..., Any]:
    """`serving(use, *flags)` calls `use(client)` while the command serves; returns how it ended."""

    def serve(use: Callable[[TestClient], None], *flags: Any) -> Any:
        def run(app, listener, drain, connections) -> None:
            with TestClient(app, "http://127.0.0.1", raise_server_exceptions=False) as client:
                use(client)

        monkeypatch.setattr("vox_serve.server.run", run)
        return vox("serve", trained, "--port", 0, "--engine", "vllm", *flags)

    return serve


def chat(client: TestClient, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "7 + 7?"}]
    return client.post(
        "/v1/chat/completions", json={"model": "run", "messages": messages, **fields}
    )


def test_a_verified_program_answers_under_the_names_of_the_models(serving, fake, trained) -> None:
    def use(client: TestClient) -> None:
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert names == ["run", "base"]
        assert chat(client).json()["model"] == "run"
        assert client.get("/health").json() == {"status": "ok"}
        assert chat(client, model="other").status_code == 404
        done = client.post("/v1/completions", json={"model": "base", "prompt": "1 + 1"})
        assert done.json()["choices"][0]["text"] == "text"

    done = serving(use, "--max-batch", 3, "--engine-args", "--enforce-eager --seed '1'")
    assert done.code == 0, done.err
    assert "matches training: " in done.out
    ((pid, arguments),) = fake.started
    assert arguments[:2] == ["serve", str(trained.parent / "base")]
    assert arguments[arguments.index("--max-num-seqs") + 1] == "3"
    assert f"run={trained}" in arguments
    assert arguments[-5:-2] == ["--enforce-eager", "--seed", "1"]
    assert gone(pid)


def test_the_connections_to_the_program_end_with_the_server(serving, monkeypatch) -> None:
    made: list[httpx2.AsyncClient] = []

    class Client(httpx2.AsyncClient):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            made.append(self)

    monkeypatch.setattr(httpx2, "AsyncClient", Client)
    assert serving(lambda client: [chat(client), chat(client)]).code == 0
    assert [client.is_closed for client in made] == [True]


def test_requests_reach_the_program_with_every_sampling_field_and_tokens(serving, fake) -> None:
    def use(client: TestClient) -> None:
        chat(client, seed=-1, top_k=5, max_tokens=7, logprobs=True, top_logprobs=2)
        client.post("/v1/completions", json={"model": "base", "prompt": "1 + 1", "stop": "x"})

    assert serving(use).code == 0
    (_, asked), (path, plain) = fake.requests[-2:]
    assert (asked["model"], asked["max_tokens"], asked["seed"]) == ("run", 7, 2**31 - 1)
    assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (1.0, 1.0, 5)
    assert (asked["logprobs"], asked["top_logprobs"]) == (True, 2)
    assert asked["messages"] == [{"role": "user", "content": "7 + 7?"}]
    assert asked["chat_template"]
    assert asked["stop_token_ids"]
    assert (path, plain["model"], plain["stop"]) == ("/v1/completions", "base", ["x"])
    assert all(isinstance(token, int) for token in plain["prompt"])


def test_an_adapter_that_the_program_does_not_compute_is_refused(serving, fake) -> None:
    fake.set(shift=0.5)
    done = serving(lambda client: pytest.fail("it served"))
    assert (done.code, "VOX-V004" in done.err) == (1, True)
    assert "the model run" in done.err
    assert "0.5 nats (root mean square) from those at the end of training" in done.err
    assert all(gone(pid) for pid, _ in fake.started)


def test_a_program_that_renders_otherwise_is_refused(serving, fake) -> None:
    fake.set(tokens=[1, 2, 3])
    done = serving(lambda client: pytest.fail("it served"))
    assert done.code == 2
    assert "renders or tokenises conversations otherwise" in done.err
    assert "3 tokens, from token " in done.err


def test_a_program_that_ends_at_its_start_is_quoted(serving, fake) -> None:
    fake.set(die="ValueError: no kernel for this model")
    done = serving(lambda client: pytest.fail("it served"))
    assert (done.code, "VOX-B004" in done.err) == (2, True)
    assert "ValueError: no kernel for this model" in done.err
    assert "exit status 1" in done.err


def test_a_program_that_is_killed_is_started_and_verified_again(serving, fake) -> None:
    def use(client: TestClient) -> None:
        fake.set(stall=60)
        (pid, _), seen = fake.started[0], Event()
        found: list[str] = []

        def read() -> None:
            with client.stream("POST", "/v1/chat/completions", json=STREAMED) as response:
                for line in response.iter_lines():
                    found.append(line)
                    seen.set()

        reader = Thread(target=read)
        reader.start()
        assert seen.wait(60)
        os.kill(pid, signal.SIGKILL)
        reader.join(60)  # the event ends it; 60 s is the program's own pause
        assert '"type":"server_error"' in found[-2]
        fake.set(stall=0)
        while (answer := chat(client)).status_code == 503:
            assert answer.headers["retry-after"] == "1"
        assert answer.json()["choices"][0]["message"]["content"] != f"from {pid}"

    done = serving(use)
    assert done.code == 0, done.err
    assert len(fake.started) == 2
    assert [path for path, _ in fake.requests].count("/tokenize") == 2 * 2
    assert all(gone(pid) for pid, _ in fake.started)


STREAMED = {
    "model": "run",
    "messages": [{"role": "user", "content": "7 + 7?"}],
    "stream": True,
}


def test_a_program_that_does_not_start_again_is_tried_until_it_does(
    serving, fake, monkeypatch
) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE", 0.01)

    def use(client: TestClient) -> None:
        fake.set(die="out of memory")
        os.kill(fake.started[0][0], signal.SIGKILL)
        while len(fake.started) < 3:
            assert chat(client).status_code == 503
        health = client.get("/health")
        assert (health.status_code, "is starting again" in health.text) == (503, True)
        fake.set(die="")
        while chat(client).status_code == 503:
            pass
        assert client.get("/health").status_code == 200

    assert serving(use).code == 0
    assert all(gone(pid) for pid, _ in fake.started)


def test_a_start_that_fails_in_any_way_is_tried_again(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE", 0.01)
    starts, again = [], Event()

    def start() -> keeper.Process:
        starts.append(1)
        if len(starts) == 2:
            raise OSError("too many open files")
        if len(starts) == 3:
            again.set()
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        return keeper.Process("fake", command, {}, tmp_path / "engine.sock", "key")

    monkeypatch.setattr(keeper.Process, "wait_until_healthy", lambda self: None)
    kept = keeper.Keeper(start, lambda running: None)
    try:
        os.kill(kept.running._process.pid, signal.SIGKILL)
        assert again.wait(60)
    finally:
        kept.close()


def test_events_are_passed_on_as_they_come(serving, fake) -> None:
    def use(client: TestClient) -> None:
        with client.stream("POST", "/v1/chat/completions", json=STREAMED) as response:
            events = [line for line in response.iter_lines() if line]
        documents = [json.loads(each.removeprefix("data: ")) for each in events[:-1]]
        assert [each["choices"][0]["delta"]["content"] for each in documents] == ["0", "1", "2"]
        assert {each["model"] for each in documents} == {"run"}
        assert events[-1] == "data: [DONE]"

    assert serving(use).code == 0


def test_a_client_that_leaves_before_the_first_event_keeps_no_connection(
    serving, fake, monkeypatch
) -> None:
    responses, forward = list[httpx2.Response](), httpx2.AsyncClient.send
    messages = [{"type": "http.request", "body": json.dumps(STREAMED).encode()}]

    async def kept(*args: Any, **given: Any) -> httpx2.Response:
        responses.append(await forward(*args, **given))
        return responses[-1]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        raise OSError("the client is gone")

    def use(client: TestClient) -> None:
        monkeypatch.setattr(httpx2.AsyncClient, "send", kept)
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers,
            "query_string": b"", "asgi": {"version": "3.0", "spec_version": "2.4"},
        }  # fmt: skip
        with suppress(OSError, ClientDisconnect):
            client.portal.call(client.app, scope, receive, send)
        assert [each.is_closed for each in responses] == [True]

    assert serving(use).code == 0


def test_errors_of_the_program_have_openais_body_and_no_path(serving, fake) -> None:
    def use(client: TestClient) -> None:
        refused = chat(client, stop="refuse")
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "vllm: no such stop"
        assert refused.json()["error"]["param"] == "stop"
        broken = chat(client, stop="break")
        assert (broken.status_code, str(fake.folder) in broken.text) == (503, False)
        assert chat(client, temperature="hot").status_code == 400
        assert client.post("/v1/responses", json={"model": "run", "input": "x"}).status_code == 404
        refused = chat(client, response_format={"type": "json_object"})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "unsupported_parameter", refused.text
        assert "--engine vllm" in refused.text
        assert chat(client, tools=[], response_format={"type": "text"}).status_code == 200
        assert chat(client, max_tokens=99999).status_code == 400

    assert serving(use).code == 0


def test_a_full_queue_answers_429_and_leaves_no_place_taken(serving, fake) -> None:
    def use(client: TestClient) -> None:
        for _ in range(3):
            assert chat(client, stop="refuse").status_code == 400
            assert chat(client).status_code == 200
            assert chat(client, n=2).status_code == 400
        fake.set(stall=60)
        seen, found = Event(), []

        def read() -> None:
            with client.stream("POST", "/v1/chat/completions", json=STREAMED) as response:
                for line in response.iter_lines():
                    found.append(line)
                    seen.set()

        reader = Thread(target=read)
        reader.start()
        assert seen.wait(60)
        assert chat(client).status_code == 429
        os.kill(fake.started[0][0], signal.SIGKILL)
        reader.join(60)

    assert serving(use, "--max-batch", 1, "--queue", 0).code == 0


def test_the_key_is_required_and_is_not_the_programs(serving, fake, monkeypatch) -> None:
    monkeypatch.setenv("VOX_API_KEY", KEY)

    def use(client: TestClient) -> None:
        assert chat(client).status_code == 401
        client.headers["authorization"] = f"Bearer {KEY}"
        assert chat(client).status_code == 200

    assert serving(use).code == 0
    environment = json.loads((fake.folder / "environment.json").read_text())
    assert "PATH" in environment
    assert KEY not in json.dumps([fake.started, fake.requests, environment])


def test_the_program_listens_on_a_socket_that_no_other_user_reaches(serving, fake) -> None:
    place = Path()

    def use(client: TestClient) -> None:
        nonlocal place
        ((_, arguments),) = fake.started
        place = Path(arguments[arguments.index("--uds") + 1])
        assert place.is_socket()
        assert place.parent.stat().st_mode & 0o777 == 0o700
        assert not {"--host", "--port"} & {*arguments}

    assert serving(use).code == 0
    assert place.name
    assert not place.parent.exists()


def test_a_folder_with_too_long_a_path_for_a_socket_is_refused(
    serving, fake, monkeypatch, tmp_path
) -> None:
    (folder := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    done = serving(lambda client: pytest.fail("it served"))
    assert (done.code, "TMPDIR" in done.err, "at most 103 bytes" in done.err) == (2, True, True)
    assert fake.started == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--backend", "cpu"), "leave out --backend"),
        (("--quant", "nf4"), "--quant none"),
        (("--engine-python", "/nowhere/python"), "pip install vllm"),
    ],
)
def test_settings_that_are_not_for_an_engine_are_refused(serving, fake, flags, said) -> None:
    done = serving(lambda client: pytest.fail("it served"), *flags)
    assert (done.code, said in done.err) == (2, True), done.err
    assert fake.started == []


def test_a_missing_program_is_named_with_what_to_install(vox, trained, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("vox_engines.programs._version", lambda *_: "")
    done = vox("serve", trained, "--port", 0, "--engine", "vllm")
    assert (done.code, "VOX-C009" in done.err, "pip install vllm" in done.err) == (2, True, True)
    done = vox("serve", trained, "--port", 0, "--engine", "llama.cpp")
    assert (done.code, "llama-server is on the PATH" in done.err) == (2, True)


def test_a_program_that_is_too_old_is_refused(vox, trained, fake) -> None:
    fake.set(build=4000)
    done = vox("serve", trained, "--port", 0, "--engine", "llama.cpp")
    assert (done.code, "llama.cpp is too old" in done.err, "4000" in done.err) == (2, True, True)


def test_llama_cpp_gets_gguf_files_and_switches_adapters_on(serving, fake, monkeypatch) -> None:
    jobs = []

    def write_model(job) -> None:
        jobs.append(job)
        if job.out:
            (job.out / "made.gguf").write_bytes(b"GGUF")

    monkeypatch.setattr("vox_engines.programs.write_model", write_model)

    def use(client: TestClient) -> None:
        assert chat(client, repetition_penalty=1.5).json()["model"] == "run"
        assert chat(client, model="base").status_code == 200

    done = serving(use, "--engine", "llama.cpp", "--dtype", "fp32")
    assert done.code == 0, done.err
    assert "matches training: " in done.out
    assert [(job.format, bool(job.out), bool(job.adapter)) for job in jobs] == [
        ("gguf", False, False),
        ("gguf-lora", False, True),
        ("gguf", True, False),
        ("gguf-lora", True, True),
    ]
    ((_, arguments),) = fake.started
    assert arguments[arguments.index("-m") + 1].endswith("made.gguf")
    assert arguments[arguments.index("--lora") + 1].endswith("made.gguf")
    assert {"-ctk", "--lora-init-without-apply", "--chat-template-file"} <= {*arguments}
    assert xllama.options(arguments).parallel == 4, "xllamacpp takes the same options"
    (_, adapted), (_, base) = fake.requests[-2:]
    assert adapted["lora"] == [{"id": 0, "scale": 1.0}]
    assert (adapted["repeat_penalty"], "repetition_penalty" in adapted) == (1.5, False)
    assert adapted["repeat_last_n"] > adapted["max_tokens"], "the prompt and the answer"
    assert adapted["samplers"][:2] == ["penalties", "temperature"]
    assert base["lora"] == [{"id": 0, "scale": 0.0}]


def test_llama_cpps_answers_have_openais_log_probabilities(serving, monkeypatch) -> None:
    def write_model(job) -> None:
        if job.out:
            (job.out / "made.gguf").touch()

    monkeypatch.setattr("vox_engines.programs.write_model", write_model)

    def use(client: TestClient) -> None:
        for top in (0, 1):
            answer = chat(client, logprobs=True, top_logprobs=top).json()
            found = answer["choices"][0]["logprobs"]["content"]
            assert [each["logprob"] for each in found] == [0.0, 0.0]
            assert [len(each["top_logprobs"]) for each in found] == [top, top]
        assert "logprobs" not in chat(client).json()["choices"][0]
        body = {"model": "base", "prompt": "1 + 1", "logprobs": 0}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["logprobs"] == {
            "tokens": ["te", "xt"],
            "token_logprobs": [0.0, 0.0],
            "top_logprobs": [{"te": 0.0}, {"xt": 0.0}],
            "text_offset": [0, 2],
        }
        for field in ("frequency_penalty", "presence_penalty"):
            refused = chat(client, **{field: 0.5})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == field
            assert "counts the tokens of the prompt too" in refused.text
            assert chat(client, **{field: 0}).status_code == 200

    assert serving(use, "--engine", "llama.cpp").code == 0


def write_empty(job) -> None:
    if job.out:
        (job.out / "made.gguf").touch()


def test_llama_cpp_is_verified_with_tokens_that_are_parts_of_characters(
    serving, fake, trained, monkeypatch
) -> None:
    monkeypatch.setattr("vox_engines.programs.write_model", write_empty)
    probe = json.loads((trained / "probe.json").read_text())
    plain = json.loads((fake.folder / "state.json").read_text())["tokens"][-1]
    tokens = {token for each in probe["documents"] for token in each["tokens"]}
    fake.set(partial=sorted(tokens - {plain})[::2])
    done = serving(lambda client: None, "--engine", "llama.cpp", "--dtype", "fp32")
    assert (done.code, "matches training: " in done.out) == (0, True), done.err


def test_llama_cpp_with_an_adapter_that_it_does_not_compute_is_refused(
    serving, fake, monkeypatch
) -> None:
    monkeypatch.setattr("vox_engines.programs.write_model", write_empty)
    fake.set(shift=-0.5)
    done = serving(lambda client: pytest.fail("it served"), "--engine", "llama.cpp")
    assert (done.code, "VOX-V004" in done.err) == (1, True)


HELD = """
import sys
from pathlib import Path
from vox_engines.keeper import Process
socket = Path(sys.argv[2])
running = Process("fake", [sys.argv[1], "--uds", sys.argv[2]], {"VLLM_API_KEY": "k"}, socket, "k")
running.wait_until_healthy()
print("healthy", flush=True)
sys.stdin.read()
"""


def test_kill_9_of_vox_ends_the_program(fake, tmp_path) -> None:
    command = [sys.executable, "-c", HELD, str(fake.folder / "vllm"), str(tmp_path / "e.sock")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as vox_itself:
        assert vox_itself.stdout.readline() == b"healthy\n"
        vox_itself.kill()
    assert gone(fake.started[0][0])


def test_sigterm_ends_the_command_and_the_program(fake, trained) -> None:
    command = [sys.executable, "-m", "vox_core.cli", "serve", trained, "--port", "0"]
    with subprocess.Popen([*command, "--engine", "vllm"], stdout=subprocess.PIPE) as running:
        name, url = running.stdout.readline().decode().split()
        assert name == "serving"
        assert httpx2.get(f"{url}/models").is_success
        running.terminate()
        assert running.wait(60) == 0
    assert gone(fake.started[0][0])


def test_adapters_that_vllm_cannot_serve_are_refused(trained, fake) -> None:
    from dataclasses import replace

    from vox_core.errors import AdapterError
    from vox_engines.programs import Vllm

    chosen = select([str(trained)], [])
    run = chosen.models["run"]
    assert run.adapter is not None
    first = next(iter(run.adapter.modules))
    one = {**run.adapter.modules, first: replace(run.adapter.modules[first], alpha=99.0)}
    for adapter, why in (
        (replace(run.adapter, method="dora"), "DoRA"),
        (replace(run.adapter, saved={"lm_head.weight": None}), "whole tensors, such as lm_head"),
        (replace(run.adapter, modules=one), "different ranks or alphas"),
    ):
        models = {**chosen.models, "run": replace(run, adapter=adapter)}
        with pytest.raises(AdapterError, match=why):
            Vllm(["vllm"], "").require(replace(chosen, models=models))


def test_finding_a_version_imports_nothing_from_the_working_directory(
    tmp_path, monkeypatch
) -> None:
    """It may be a repository of somebody else's."""
    (tmp_path / "csv.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    assert programs._version(Path(sys.executable), "pytest") == pytest.__version__
    assert not (tmp_path / "ran").exists()
