"""The page of `vox data preview --html` in a real browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import chromium
from vox_core.data.audit import Finding
from vox_data.page import page
from vox_data.token_view import TokenView

PROGRAM = chromium.find()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is on the path"),
]
TAKE = "document.title='taken'"
EVIL = f'<img src=x onerror="{TAKE}"></script><script>{TAKE}</script>'
STEERING = "\u202ered\x1b[31m"


def row(line: int, answer: str, **rest: object) -> TokenView:
    """A question and its answer, which is trained with the token that ends it."""
    texts = ("<s>", "question", f" {line}", "?\n", *answer.split("|"), "</s>")
    weights = (0.0, 0.0, 0.0, 0.0, *[1.0] * (len(texts) - 4))
    special = (0, len(texts) - 1)
    told = {"ids": tuple(range(100, 100 + len(texts))), "weights": weights, "special": special}
    return TokenView(
        **{
            "file": Path("a.jsonl"),
            "line": line,
            "form": "messages",
            "tokens": texts,
            "kept": len(texts),
            **told,
            **rest,
        }
    )


ROWS = [
    row(1, "the| answer"),
    row(2, f"{EVIL}|{STEERING}"),
    row(3, "weighted", weights=(0.0, 0.0, 0.0, 0.0, 0.25, 1.0)),
    row(4, "a|b|c", kept=6, cut="mid-turn", findings=("cut-in-answer",)),
    row(5, "elsewhere", file=Path("b.jsonl")),
    TokenView(Path("b.jsonl"), 6, "messages", fault="the chat template refuses the row"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    assert PROGRAM
    with chromium.Page(PROGRAM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(browser: chromium.Page, tmp_path: Path) -> chromium.Page:
    path = tmp_path / "page.html"
    findings = [Finding("cut-in-answer", rows=1, places=("a.jsonl:4",))]
    path.write_text(page("a preview", {"model": EVIL}, findings, ROWS))
    browser.requests.clear()
    browser.complaints.clear()
    browser.dark(False)
    browser.open(path.as_uri())
    browser.wait("document.querySelectorAll('article pre > *').length > 0")
    return browser


def shown(opened: chromium.Page) -> list[int]:
    """Lines of the rows that are to be seen."""
    return opened.evaluate(
        "[...document.querySelectorAll('article')].filter(a => a.checkVisibility())"
        ".map(a => Number(a.querySelector('b').textContent.split(':')[1]))"
    )


def texts(opened: chromium.Page, selector: str) -> list[str]:
    return opened.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")


def test_what_is_trained_is_marked(opened) -> None:
    assert texts(opened, "article:nth-of-type(1) .t") == [
        "<s>", "question", " 1", "?↵\n", "the", " answer", "</s>",
    ]  # fmt: skip
    assert texts(opened, "article:nth-of-type(1) .on") == ["the", " answer", "</s>"]
    assert texts(opened, "article:nth-of-type(1) .special") == ["<s>", "</s>"]
    assert texts(opened, "article:nth-of-type(3) .part") == ["weighted"]
    assert texts(opened, "article:nth-of-type(4) .cut") == ["c", "</s>"]
    assert "refuses the row" in texts(opened, "article:nth-of-type(6) pre")[0]
    heads = texts(opened, "article header")
    assert heads[0] == "a.jsonl:1 messages, 7 tokens, 3 trained"
    assert heads[3].endswith("cut: mid-turn cut-in-answer")
    colours = "getComputedStyle(document.querySelector('.on')).backgroundColor"
    assert opened.evaluate(colours) != opened.evaluate(colours.replace(".on", ".t"))


def test_data_are_text_and_nothing_is_asked_for(opened, browser) -> None:
    assert EVIL in texts(opened, "article:nth-of-type(2) .t")
    assert texts(opened, "article:nth-of-type(2) .control") == ["\\u202e", "\\u001b"]
    assert opened.evaluate("document.title") == "a preview"
    assert opened.evaluate("document.images.length") == 0
    assert [url.partition(":")[0] for url in browser.requests] == ["file"]
    assert browser.complaints == []


def test_its_policy_lets_nothing_else_run(opened, browser) -> None:
    opened.evaluate(
        "(() => { const s = document.createElement('style'); s.textContent = 'body{opacity:0}';"
        "document.head.append(s); const i = new Image(); i.src = 'https://example.org/x.png';"
        "document.body.append(i); })()"
    )
    assert opened.evaluate("getComputedStyle(document.body).opacity") == "1"
    opened.wait("document.images[0].complete")
    assert any("Content Security Policy" in text for text in browser.complaints)


def test_search_finds_and_marks(opened) -> None:
    opened.press("/")
    opened.type("THE ANSWER")
    assert shown(opened) == [1]
    assert texts(opened, ".hit") == ["the", " answer"]
    assert texts(opened, "#count") == ["1 of 6 rows"]
    opened.evaluate("document.getElementById('search').select()")
    opened.type("nowhere")
    assert (shown(opened), texts(opened, "#count")) == ([], ["0 of 6 rows"])


def test_filters(opened) -> None:
    assert shown(opened) == [1, 2, 3, 4, 5, 6]
    for box, found in (("#truncated", [4]), ("#with-findings", [4, 6])):
        opened.click(box)
        assert shown(opened) == found
        opened.click(box)
    choose = (
        "(() => {{ const s = document.querySelector('{}'); s.value = '{}'; "
        "s.dispatchEvent(new Event('input')); }})()"
    )
    opened.evaluate(choose.format("#file", "1"))
    assert shown(opened) == [5, 6]
    opened.evaluate(choose.format("#file", ""))
    opened.evaluate(choose.format("#finding", "cut-in-answer"))
    assert shown(opened) == [4]
    opened.evaluate(choose.format("#finding", ""))
    opened.click("#trained-only")
    visible = (
        "[...document.querySelectorAll('article:nth-of-type(1) .t')]"
        ".filter(t => t.checkVisibility()).map(t => t.textContent)"
    )
    assert opened.evaluate(visible) == ["the", " answer", "</s>"]


def test_weight_and_id_on_hover(opened) -> None:
    opened.point("article:nth-of-type(3) .part")
    opened.wait("document.querySelector('article:nth-of-type(3) .part').title !== ''")
    told = "token 4: id 104, weight 0.25"
    assert opened.evaluate("document.querySelector('.part[title]').title") == told
    assert texts(opened, "#says") == [told]


def test_keys_are_enough(opened) -> None:
    for key in ("j", "j", "k"):
        opened.press(key)
    focused = "document.activeElement.getAttribute('aria-label')"
    assert opened.evaluate(focused).startswith("a.jsonl:1 ")
    for _ in range(2):
        opened.press("ArrowRight")
    assert texts(opened, ".at") == ["question"]
    assert texts(opened, "#says") == ["question token 1: id 101, weight 0"]
    opened.press("ArrowLeft")
    assert texts(opened, ".at") == ["<s>"]


def test_light_and_dark(opened) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    assert opened.evaluate(colour) == "rgb(255, 255, 255)"
    opened.dark(True)
    assert opened.evaluate(colour) == "rgb(21, 24, 28)"


def test_a_thousand_rows_with_half_a_million_tokens(browser, tmp_path: Path) -> None:
    path = tmp_path / "large.html"
    words = "|".join(f" word{n}" for n in range(500))
    path.write_text(page("large", {}, [], [row(n, words) for n in range(1000)]))
    began = time.perf_counter()
    browser.open(path.as_uri())
    assert time.perf_counter() - began < 20
    filled = browser.evaluate("document.querySelectorAll('.t').length")
    assert filled < 100_000  # those in sight
    browser.evaluate("document.querySelector('article:last-of-type').scrollIntoView()")
    browser.wait("document.querySelector('article:last-of-type .on') !== null")
    browser.evaluate("document.getElementById('search').focus()")
    browser.type("question 77?")
    assert browser.evaluate("document.getElementById('count').textContent") == "1 of 1,000 rows"


def test_a_screenshot_shows_something(opened) -> None:
    assert opened.screenshot()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.dumps(opened.evaluate("document.body.scrollHeight > 500")) == "true"
