"""The page of `vox serve` in a real browser: over a real server with tiny models, and over one
whose models say what a test wants them to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.browser import chromium
from vox_core.adapter.peft import write_adapter
from vox_serve import page
from vox_serve.server import listening
from vox_testing import jobs
from vox_testing.tiny import make_model

if TYPE_CHECKING:
    from starlette.requests import Request

PROGRAM = chromium.find()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is on the path"),
]
KEY = "correct horse battery"
TAKE = "document.title='taken'"
EVIL = f'<img src=x onerror="{TAKE}"><script>{TAKE}</script>[x](javascript:{TAKE})'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    assert PROGRAM
    with chromium.Page(PROGRAM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


class Talk:
    """What a reader does on the page and sees there."""

    def __init__(self, browser: chromium.Page, url: str) -> None:
        self.browser, self.url = browser, url
        browser.evaluate("globalThis.sessionStorage?.clear()") if browser.requests else None
        browser.requests.clear()
        browser.complaints.clear()
        browser.dark(False)
        browser.open(url)

    def texts(self, selector: str) -> list[str]:
        return self.browser.evaluate(
            f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)"
        )

    def write(self, selector: str, text: str) -> None:
        """Replace a field's text as a reader would."""
        self.browser.evaluate(f"document.querySelector({selector!r}).focus()")
        self.browser.evaluate("document.activeElement.select()")
        self.browser.type(text) if text else self.browser.press("Backspace")

    def choose(self, selector: str, value: str) -> None:
        self.browser.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.value = {value!r};"
            "e.dispatchEvent(new Event('input', { bubbles: true })); })()"
        )

    def begin(self, question: str) -> None:
        """Send a question with Enter."""
        self.write("#text", question)
        self.browser.press("Enter")

    def ask(self, question: str) -> list[str]:
        """Send a question, wait until it is answered, and return the newest answers."""
        self.begin(question)
        self.finish()
        return self.texts(".turn:last-of-type .reply")

    def finish(self) -> None:
        self.browser.wait(
            "document.querySelector('.turn') && !document.querySelector('.running') &&"
            "document.getElementById('send').textContent === 'Send'"
        )

    @property
    def clean(self) -> bool:
        """No request went elsewhere, and the browser did not complain."""
        local = all(url.startswith((self.url, "data:")) for url in self.browser.requests)
        return local and self.browser.complaints == []


# --- a real server --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    make_model("llama", place / "base")
    for scale, name in enumerate(("one", "two"), start=1):
        start = jobs.start(place / "base", jobs.plan(place / "base"))
        (place / name).mkdir()
        adapter = jobs.stirred(start, 0.2 * scale).adapter
        write_adapter(place / name, adapter, base=str(place / "base"), modules={})
    return place


@pytest.fixture(scope="module")
def serve(folders: Path) -> Iterator[Callable[..., tuple[str, subprocess.Popen[str]]]]:
    """`serve(**environment)` -> the URL of a page, and the process of `vox serve`."""
    started: list[subprocess.Popen[str]] = []

    def start(**environment: str) -> tuple[str, subprocess.Popen[str]]:
        arguments = (folders / "one", folders / "two", "--backend", "cpu", "--port", "0")
        process = subprocess.Popen(
            [sys.executable, "-m", "vox_core.cli", "serve", *map(str, arguments)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout
        (address,) = (word for word in process.stdout.readline().split() if word.endswith("/v1"))
        return address.removesuffix("v1"), process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(serve) -> str:
    return serve()[0]


def test_chat_with_a_model_beside_its_base(browser, server) -> None:
    talk = Talk(browser, server)
    assert talk.texts("#model option") == ["one", "two", "base"]
    assert browser.evaluate("document.getElementById('beside').value") == "base"
    assert talk.texts("#hint") == ["Ask one and base."]
    talk.write("#temperature", "0")
    talk.write("#max_tokens", "12")
    first = talk.ask("Hi")
    assert len(first) == 2 and first[0] != first[1]
    assert talk.texts("article h2") == ["one", "base"]
    for facts in talk.texts(".facts"):
        assert "ended at the token limit" in facts
        assert "12 tokens" in facts and "first token" in facts
    talk.ask("And now?")
    browser.click("#new")
    assert talk.texts(".turn") == []
    assert talk.ask("Hi") == first
    talk.choose("#beside", "")
    assert len(talk.ask("Alone")) == 1
    assert talk.clean


def test_switch_model(browser, server) -> None:
    talk = Talk(browser, server)
    talk.write("#temperature", "0")
    talk.write("#max_tokens", "12")
    one = talk.ask("Hi")[0]
    browser.click("#new")
    talk.choose("#model", "two")
    assert talk.texts("#hint") == ["Ask two and base."]
    assert talk.ask("Hi")[0] != one
    assert talk.texts("article h2") == ["two", "base"]


def test_a_seed_gives_the_same_answer_again(browser, server) -> None:
    talk = Talk(browser, server)
    talk.write("#max_tokens", "12")
    talk.choose("#beside", "")
    free = talk.ask("Hi")
    (facts,) = talk.texts(".facts")
    browser.click("#new")
    talk.write("#seed", facts.partition("seed ")[2].partition("prompt")[0])
    assert talk.ask("Hi") == free


def test_the_rendered_prompt_is_that_of_the_template(browser, server) -> None:
    talk = Talk(browser, server)
    talk.write("#max_tokens", "1")
    talk.write("#system", "Be brief.")
    talk.ask("Hi")
    browser.click(".mine .facts button")
    browser.wait("document.querySelector('#rendered pre').textContent !== ''")
    assert talk.texts("#rendered pre") == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    ]
    assert talk.texts("#title")[0].startswith("Prompt of one, ")
    browser.click("#close")
    assert browser.evaluate("document.getElementById('rendered').open") is False


def test_a_wrong_key_is_an_error_and_the_right_one_is_kept_for_the_tab(browser, serve) -> None:
    url, _ = serve(VOX_API_KEY=KEY)
    talk = Talk(browser, url)
    assert talk.texts("#keyfault") == ["The server needs its API key."]
    talk.write("#key", "wrong horse battery")
    browser.press("Enter")
    browser.wait("document.getElementById('keyfault').textContent.includes('refused')")
    assert talk.texts("#keyfault") == ["The server refused this API key."]
    assert talk.texts("#model option") == []
    talk.write("#key", KEY)
    browser.press("Enter")
    browser.wait("document.getElementById('model').options.length === 3")
    assert browser.evaluate("document.getElementById('keys').checkVisibility()") is False
    browser.open(url)
    assert talk.texts("#model option") == ["one", "two", "base"]
    assert browser.evaluate("[localStorage.length, document.cookie]") == [0, ""]


def test_a_server_that_is_gone_is_said_and_the_question_is_kept(browser, serve) -> None:
    url, process = serve()
    talk = Talk(browser, url)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with contextlib.suppress(OSError):  # its worker ends a moment later
        while True:
            urllib.request.urlopen(url).close()
    talk.begin("Are you there?")
    browser.wait("document.getElementById('text').value === 'Are you there?'")
    assert talk.texts(".fault") == [
        "The server does not answer. Check that vox serve still runs, then send again."
    ] * 2  # fmt: skip


# --- a server whose models say what a test wants --------------------------------------------------


class Scripted:
    """The endpoints that the page uses.

    Attributes:
        pieces: (model, text, the most likely tokens with their probabilities), of each answer.
        endless: go on until the client leaves.
        asked: bodies of chats.
        left: set when a client has gone away from an endless answer.
    """

    def __init__(self) -> None:
        self.pieces: dict[str, list[tuple[str, dict[str, float]]]] = {}
        self.endless = self.cut = False
        self.fault: dict[str, Any] | None = None
        self.names = ["tuned", "base"]
        self.asked: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.app = Starlette(
            routes=[
                Route("/", page.show),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        parents = [self.names[-1]] * (len(self.names) - 1) + [None]
        listed = zip(self.names, parents, strict=True)
        return JSONResponse({"data": [{"id": name, "parent": parent} for name, parent in listed]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if self.fault:
            return JSONResponse({"error": self.fault}, 400)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        pieces = self.pieces.get(body["model"], [])
        try:
            for text, top in pieces:
                yield self._event(text, top if body.get("logprobs") else None)
            while self.endless:
                yield self._event("and ", None)
                await asyncio.sleep(0)
        finally:
            if self.endless:
                self.left.set()
        if self.cut:
            return
        choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 7, "completion_tokens": len(pieces)}
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

    def _event(self, text: str, top: dict[str, float] | None) -> str:
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        if top:
            entries = [{"token": t, "logprob": math.log(p), "bytes": None} for t, p in top.items()]
            first = {**entries[0], "top_logprobs": entries}
            choice["logprobs"] = {"content": [first], "refusal": None}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    script = Scripted()
    with listening("127.0.0.1", 0) as listener:
        config = uvicorn.Config(script.app, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield script, f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.force_exit = server.should_exit = True
        thread.join()


@pytest.mark.parametrize("how", ["button", "Escape", "new"])
def test_stop_mid_stream(browser, scripted, how) -> None:
    script, url = scripted
    script.endless = True
    talk = Talk(browser, url)
    talk.begin("Go on")
    browser.wait("[...document.querySelectorAll('.reply')].every(e => e.textContent.length > 20)")
    assert talk.texts("#send") == ["Stop"]
    browser.press("Escape") if how == "Escape" else browser.click(
        {"button": "#send", "new": "#new"}[how]
    )
    assert script.left.wait(30), "the server's answer is cancelled"
    script.endless = False
    if how == "new":
        assert talk.texts(".turn") == []
    else:
        talk.finish()
        facts = talk.texts(".facts")
        assert all(each.startswith("stopped") and "tokens/s" in each for each in facts)
        assert talk.texts(".fault") == ["", ""]
        said = talk.texts(".mine .reply")[0]
        talk.ask("Now?")
        messages = next(each for each in script.asked[2:] if each["model"] == "tuned")["messages"]
        assert messages[1] == {"role": "assistant", "content": said}
    assert talk.texts("#send") == ["Send"]


def test_hostile_text_is_inert(browser, scripted) -> None:
    script, url = scripted
    script.names = [EVIL, "base"]
    steering = "\u202ereversed\u2066 \x1b[31m\x00"
    script.pieces = {EVIL: [(EVIL, {EVIL: 0.5, steering: 0.2})], "base": [(steering, {"x": 0.1})]}
    talk = Talk(browser, url)
    for probabilities in (False, True):
        if probabilities:
            browser.click("#logprobs")
        assert talk.ask(EVIL) == [EVIL, "\\u202ereversed\\u2066 \\u001b[31m\\u0000"]
    assert talk.texts(".question") == [EVIL, EVIL]
    assert talk.texts("article h2")[0] == EVIL
    browser.point(".mine .t")
    browser.wait("!document.getElementById('token').hidden")
    assert EVIL.replace(" ", "␣") in talk.texts("#token .piece")[0]
    assert browser.evaluate("document.title") == "vox"
    assert browser.evaluate("document.images.length + document.scripts.length") == 1
    box = "document.querySelector('{}').getBoundingClientRect().{}"
    assert browser.evaluate(f"{box.format('article', 'right')} <= innerWidth")
    assert talk.clean


def test_its_policy_lets_nothing_else_run_or_be_fetched(browser, scripted) -> None:
    talk = Talk(browser, scripted[1])
    browser.evaluate(
        "(() => { const s = document.createElement('style'); s.textContent = 'body{opacity:0}';"
        "document.head.append(s); const i = new Image(); i.src = 'https://example.org/x.png';"
        "document.body.append(i); fetch('https://example.org/').catch(() => {}); })()"
    )
    assert browser.evaluate("getComputedStyle(document.body).opacity") == "1"
    browser.wait("document.images[0].complete")
    blocked = [text for text in browser.complaints if "Content Security Policy" in text]
    assert len(blocked) >= 3
    assert not [url for url in browser.requests if "example" in url and "png" not in url]
    markup = "try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.message; }"
    assert "TrustedHTML" in browser.evaluate(f"(() => {{ {markup} }})()")
    assert talk.url


def test_errors_of_the_server_and_broken_streams_are_said(browser, scripted) -> None:
    script, url = scripted
    script.pieces = {"tuned": [("half", {})], "base": [("half", {})]}
    talk = Talk(browser, url)
    script.fault = {"message": "max_tokens is 9, and the server allows 4"}
    talk.ask("Too much")
    said = "max_tokens is 9, and the server allows 4 (status 400)"
    assert talk.texts(".fault") == [said, said]
    script.fault, script.cut = None, True
    assert talk.ask("Again") == ["half", "half"]
    assert "ended before the answer did" in talk.texts(".turn:last-of-type .fault")[0]
    script.cut = False
    talk.ask("Once more")
    told = [each["content"] for each in script.asked[-1]["messages"]]
    assert told == ["Again", "half", "Once more"]


def test_probabilities_show_where_and_how_two_answers_part(browser, scripted) -> None:
    script, url = scripted
    script.pieces = {
        "tuned": [("To", {"To": 0.9}), (" vox", {" vox": 0.75, " me": 0.2}), ("!", {"!": 1})],
        "base": [("To", {"To": 0.6}), (" me", {" me": 0.5, " vox": 0.25}), ("!", {"!": 1})],
    }  # fmt: skip
    talk = Talk(browser, url)
    browser.click("#logprobs")
    talk.ask("Hi")
    assert talk.texts(".mine .t") == ["To", " vox", "!"]
    assert talk.texts(".parts") == [" vox", " me"]
    browser.evaluate("document.querySelector('.mine .reply').focus()")
    found = []
    for _ in range(3):
        browser.press("ArrowRight")
        found.append(talk.texts("#token p"))
    assert found == [
        ["To by tuned90.0 %", "by base60.0 %"],
        ["␣vox by tuned75.0 %", "by base25.0 %"],
        ["! by tuned100.0 %"],
    ]
    browser.press("ArrowLeft")
    assert talk.texts("#token li") == ["␣vox75.0 %", "␣me20.0 %"]
    browser.press("Escape")
    assert browser.evaluate("document.getElementById('token').hidden") is True


def test_parameters_are_sent_and_checked(browser, scripted) -> None:
    script, url = scripted
    talk = Talk(browser, url)
    talk.write("#temperature", "9")
    talk.begin("Hi")
    assert browser.evaluate("document.activeElement.id") == "temperature"
    assert script.asked == []
    for field, value in {"temperature": 1.5, "top_p": 0.5, "max_tokens": 3, "seed": 4}.items():
        talk.write(f"#{field}", str(value))
    talk.write("#system", "Be brief.")
    talk.ask("Hi")
    assert {each["model"] for each in script.asked} == {"tuned", "base"}
    for body in script.asked:
        del body["model"]
        assert body == {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
            ],
            "temperature": 1.5,
            "top_p": 0.5,
            "max_tokens": 3,
            "seed": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def test_light_dark_and_a_phone(browser, scripted) -> None:
    talk = Talk(browser, scripted[1])
    colour = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(colour)
    browser.dark(True)
    assert browser.evaluate(colour) != light
    phone = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    browser.send("Emulation.setDeviceMetricsOverride", **phone)
    try:
        browser.open(talk.url)
        talk.ask("Hi " * 100 + "x" * 500)
        assert browser.evaluate("document.documentElement.scrollWidth") == 360
        assert browser.evaluate("document.getElementById('settings').hidden") is True
        size = "parseFloat(getComputedStyle(document.getElementById('text')).fontSize)"
        assert browser.evaluate(size) >= 16, "or a phone zooms in on the field"
    finally:
        browser.send("Emulation.clearDeviceMetricsOverride")
