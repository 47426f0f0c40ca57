"""The scorer `judge`, against a server of the test's own."""

from __future__ import annotations

import json
import threading
import urllib.request
import urllib.response
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from vox_core.errors import TrainingError
from vox_eval import Example, Output, Scorer, ScorerSpec, UnusableScorer
from vox_eval.scorer import find_scorer, options_of
from vox_scorers import judge

EXAMPLE = Example("row", {}, ({"role": "user", "content": "Which?"},), ("ideal",))


class Server:
    """Gives `reply(prompt)`; a number is a status without a completion."""

    def __init__(self) -> None:
        self.reply: Callable[[str], str | int | bytes] = lambda _: ""
        self.finish: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.keys.append(self.headers["Authorization"])
                said = outer.reply(body["messages"][0]["content"])
                self.send_response(said if isinstance(said, int) else 200)
                self.end_headers()
                choice = {"message": {"content": said}, "finish_reason": outer.finish}
                message = {"choices": [choice]}
                self.wfile.write(said if isinstance(said, bytes) else json.dumps(message).encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.http.serve_forever, args=(0.01,), daemon=True).start()
    slept: list[float] = []
    monkeypatch.setattr(judge.chat_completion, "__kwdefaults__", {
        **judge.chat_completion.__kwdefaults__, "sleep": slept.append,
    })  # fmt: skip
    yield made
    made.http.shutdown()
    made.http.server_close()


def scorer(server: Server, **given: Any) -> Scorer:
    options = {"url": server.url, "model": "m", **given}
    return find_scorer(ScorerSpec("judge", options, Path()))[0]


def value(found: Scorer, answer: str = "own") -> float:
    found.check(EXAMPLE)
    return found.score(EXAMPLE, Output(answer, [])).value


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        (["Fine. [[A]]", "[[B]]"], 1),
        (["[[b]]", "[[A]]"], 0),
        (["[[tie]]", "[[TIE]]"], 0.5),
        (["[[A]]", "[[A]]"], 0.5),  # whichever stands first
        (["[[A]]", "[[tie]]"], 0.75),
        (["Not [[B]], but [[A]]", "[[B]]"], 1),
    ],
)
def test_both_orders_decide(server, replies, expected) -> None:
    coming = iter(replies)
    server.reply = lambda _: next(coming)
    assert value(scorer(server)) == expected
    first, second = (body["messages"][0]["content"] for body in server.bodies)
    assert "[Answer A]\nown\n\n[Answer B]\nideal\n" in first
    assert "[Answer A]\nideal\n\n[Answer B]\nown\n" in second
    assert "[Request]\nuser: Which?\n" in first
    body = {key: each for key, each in server.bodies[0].items() if key != "messages"}
    assert body == {"model": "m", "max_tokens": 512, "temperature": 0, "seed": 0}


@pytest.mark.parametrize(
    ("reply", "expected"), [("[[1]]", 0), ("[[10]]", 1), ("3/10: [[4]]", 1 / 3)]
)
def test_a_rubric_gives_a_grade(server, reply, expected) -> None:
    server.reply = lambda _: reply
    assert value(scorer(server, rubric="Is it polite?")) == pytest.approx(expected)
    (body,) = server.bodies
    assert "[Rubric]\nIs it polite?\n" in body["messages"][0]["content"]


def test_the_other_answer_may_be_that_of_an_earlier_evaluation(server, tmp_path) -> None:
    line = '{"task": "t", "row": "row", "answer": "earlier"}\n'
    (tmp_path / "eval.jsonl").write_text(line)
    server.reply = lambda _: "[[A]]"
    found = scorer(server, against=str(tmp_path))
    assert value(found) == 0.5
    assert "[Answer B]\nearlier\n" in server.bodies[0]["messages"][0]["content"]
    with pytest.raises(ValueError, match="no answer of it"):
        found.check(Example("other", {}))
    before = options_of(found)["answers"]
    (tmp_path / "eval.jsonl").write_text(line.replace("earlier", "changed"))
    assert options_of(scorer(server, against=str(tmp_path)))["answers"] != before
    line = '{"task": "t", "row": "row", "answer": "one\u2028two"}\n'
    (tmp_path / "eval.jsonl").write_text(line, encoding="utf-8")
    assert scorer(server, against=str(tmp_path)).answers == {"row": "one\u2028two"}


def test_a_row_may_have_other_answers_in_other_tasks(server, tmp_path) -> None:
    lines = [f'{{"task": "{task}", "row": "row", "answer": "of {task}"}}\n' for task in "ab"]
    (tmp_path / "eval.jsonl").write_text("".join(lines))
    with pytest.raises(UnusableScorer, match="name a task in against-task"):
        scorer(server, against=str(tmp_path))
    found = scorer(server, against=str(tmp_path), against_task="b")
    assert found.answers == {"row": "of b"}


def test_a_verdict_in_a_reply_that_is_cut_off_is_none(server) -> None:
    """It may be one that the judge was about to revoke."""
    server.finish = "length"
    server.reply = lambda _: "If A were right, [[A]], but"
    with pytest.raises(TrainingError, match="no verdict in 4 replies") as caught:
        value(scorer(server))
    assert "cut off by max-tokens = 512" in str(caught.value.found)


def test_a_key_is_sent_and_is_not_an_option(server, monkeypatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server.reply = lambda _: "[[A]]"
    found = scorer(server, api_key="MY_KEY")
    value(found)
    assert server.keys == ["Bearer secret"] * 2
    assert "secret" not in json.dumps(options_of(found))


def test_a_key_does_not_follow_a_redirection() -> None:
    sent: list[urllib.request.Request] = []

    class Redirecting(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> Any:
            sent.append(request)
            headers = Message()
            headers["Location"] = "http://other.test/v1/chat/completions"
            found = urllib.response.addinfourl(BytesIO(), headers, request.full_url, 302)
            found.msg = "Found"
            return found

    opener, urllib.request._opener = urllib.request._opener, None
    urllib.request.install_opener(urllib.request.build_opener(Redirecting()))
    try:
        with pytest.raises(judge.Unreachable):
            judge.chat_completion("http://own.test/v1", {}, key="secret", sleep=lambda _: None)
    finally:
        urllib.request._opener = opener
    for request in sent:
        own = request.host == "own.test"
        assert request.get_header("Authorization") == ("Bearer secret" if own else None)
    assert {request.host for request in sent} == {"own.test", "other.test"}


def test_half_a_surrogate_pair_in_a_reply_is_replaced(server) -> None:
    server.reply = lambda _: b'{"choices": [{"message": {"content": "a\\ud800"}}]}'
    assert judge.chat_completion(server.url, {"messages": [{"content": ""}]})[0] == "a?"


def test_a_passing_failure_is_tried_again(server) -> None:
    coming = iter([500, 429, "[[A]]", b"", "[[B]]"])
    server.reply = lambda _: next(coming)
    with pytest.raises(TrainingError, match="does not reply") as caught:
        value(scorer(server))
    assert caught.value.found == "no chat completion: ''"


def test_an_answer_of_a_megabyte_is_cut(server) -> None:
    server.reply = lambda _: "[[A]]"
    value(scorer(server), "a" * 1_000_000)
    prompt = server.bodies[0]["messages"][0]["content"]
    assert len(prompt) < 50_000
    assert "[1,000,000 characters in all]" in prompt


@pytest.mark.parametrize(
    ("reply", "given", "said", "found"),
    [
        ("I cannot say.", {}, "gave no verdict in 4 replies", "'I cannot say.'"),
        ("[[11]]", {"rubric": "r"}, "gave no verdict in 4 replies", "'[[11]]'"),
        (None, {}, "gave no verdict in 4 replies", "''"),
        (503, {}, "does not reply", "status 503"),
        (404, {}, "does not reply", "status 404"),
        (b"<html>", {}, "does not reply", "no chat completion: '<html>'"),
        (b"[" * 100_000, {}, "does not reply", "no chat completion"),
        (b"x" * (5 << 20), {}, "does not reply", "a reply of more than 4,194,304"),
    ],
)
def test_a_judge_without_a_verdict_is_an_error(server, reply, given, said, found) -> None:
    server.reply = lambda _: reply
    with pytest.raises(TrainingError, match=said) as caught:
        value(scorer(server, **given))
    assert caught.value.code == "VOX-T004"
    assert str(caught.value.found).startswith(found)


def test_a_judge_that_is_down_or_slow_is_an_error(server) -> None:
    release = threading.Event()
    server.reply = lambda _: str(release.wait(20))
    slow = scorer(server, timeout=0.05)
    with pytest.raises(TrainingError, match="does not reply") as caught:
        value(slow)
    release.set()
    assert "timed out" in str(caught.value.found)
    server.http.server_close()
    down = find_scorer(ScorerSpec("judge", {"url": "http://127.0.0.1:1/v1", "model": "m"}, Path()))
    with pytest.raises(TrainingError, match="does not reply") as caught:
        value(down[0])
    assert str(caught.value.found).endswith("(4 times)")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "localhost:8000"}, "url: "),
        ({"model": ""}, "model: "),
        ({"against": "nowhere"}, "against: nowhere: "),
        ({"answers": {"row": "x"}}, "answers: unknown option"),
        ({"timeout": 0}, "timeout: "),
    ],
)
def test_wrong_options(server, given, said) -> None:
    with pytest.raises(UnusableScorer, match=said):
        scorer(server, **given)


def test_a_row_needs_something_to_compare_with(server) -> None:
    with pytest.raises(ValueError, match='no "ideal"'):
        scorer(server).check(Example("row", {}))
    scorer(server, rubric="r").check(Example("row", {}))
