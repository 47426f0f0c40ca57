"""A program that answers as vLLM or llama.cpp's server do, for tests of `--engine`.

It is installed as `vllm` or `llama-server` by `conftest.py`, and reads `state.json` beside itself:

    tokens     model -> token ids of every conversation
    shift      nats that are added to every log-probability of an adapter
    say, die   a line that it prints, and then ends
    stall      seconds between two events of a stream
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

HERE = Path(__file__).resolve().parent
ARGUMENTS = sys.argv[1:]
KEY = os.environ.get("VLLM_API_KEY") or os.environ.get("LLAMA_API_KEY")


def state() -> dict[str, Any]:
    return json.loads((HERE / "state.json").read_text())


def after(flag: str) -> str:
    return ARGUMENTS[ARGUMENTS.index(flag) + 1]


def log_probs(document: list[int], adapter: str | None) -> list[float]:
    """Those in the `probe.json` of the adapters that were converted or named."""
    for probe in state()["probes"]:
        for each in probe["documents"]:
            if each["tokens"][: len(document)] == document:
                shift = state().get("shift", 0.0) if adapter else 0.0
                found = each["adapter" if adapter else "base"]
                return [value + shift for value in found[: len(document) - 1]]
    return [-(token % 7) - (0.5 if adapter else 0.0) for token in document[1:]]


def token(text: str) -> dict[str, Any]:
    """A token's log-probabilities, as llama.cpp has them."""
    top = [{"token": each, "logprob": -float(n)} for n, each in enumerate((text, "other"))]
    return {**top[0], "top_logprobs": top}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with (HERE / "requests.jsonl").open("a") as file:
            file.write(json.dumps([self.path, body]) + "\n")
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self.answer({"error": {"message": "no key"}}, 401)
        elif self.path == "/tokenize":
            self.answer({"tokens": state()["tokens"]})
        elif self.path == "/apply-template":
            self.answer({"prompt": "rendered"})
        elif self.path == "/completion":
            self.answer(self.forced(body))
        elif body.get("stop") == ["refuse"]:
            self.answer({"error": {"message": "no such stop", "param": "stop"}}, 400)
        elif body.get("stop") == ["break"]:
            self.answer({"detail": str(HERE)}, 500)
        elif body.get("stream"):
            self.stream(body)
        else:
            self.answer(self.completion(body))

    def forced(self, body: dict[str, Any]) -> dict[str, Any]:
        ((token, _),) = body["logit_bias"]
        partial = state().get("partial", [])
        if token in partial:  # of a character: it has no text
            return {"content": ""}
        adapter = next((str(each["id"]) for each in body["lora"] if each["scale"]), None)

        def found(token: int) -> dict[str, Any]:
            return {"id": token, "logprob": log_probs([*body["prompt"], token], adapter)[-1]}

        likely = [found(each) for each in partial if body["n_probs"] > len(partial)]
        return {"completion_probabilities": [{**found(token), "top_logprobs": likely}]}

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if body.get("top_logprobs", body.get("logprobs")):
            choice["logprobs"] = {"content": [token("te"), token("xt")]}
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": f"from {os.getpid()}"}
        else:
            choice["text"] = "text"
        if "prompt_logprobs" in body:
            adapter = None if body["model"] == after("--served-model-name") else body["model"]
            found = zip(body["prompt"][1:], log_probs(body["prompt"], adapter), strict=True)
            choice["prompt_logprobs"] = [None, *({str(t): {"logprob": p}} for t, p in found)]
        return {"id": "1", "object": "completion", "model": "alias", "choices": [choice]}

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index in range(3):
            delta = {"index": 0, "delta": {"content": str(index)}}
            self.event(json.dumps({"model": "alias", "choices": [delta]}))
            time.sleep(state().get("stall", 0))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

    def answer(self, body: dict[str, Any], status: int = 200) -> None:
        sent = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


def main() -> None:
    if "--version" in ARGUMENTS:
        sys.stdout.write(f"version: {state().get('build', 9000)} (abc)")
        return
    with (HERE / "started.jsonl").open("a") as file:
        file.write(json.dumps([os.getpid(), ARGUMENTS]) + "\n")
    (HERE / "environment.json").write_text(json.dumps(dict(os.environ)))
    if said := state().get("die"):
        sys.exit(said)
    Server(after("--uds" if "--uds" in ARGUMENTS else "--host"), Handler).serve_forever()


main()
