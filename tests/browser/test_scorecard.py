"""`scorecard.html` of `vox eval` in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium
from vox_eval.page import write_page

PROGRAM = chromium.find()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is on the path"),
]
EVIL = (
    "<img src=x onerror=\"document.title='taken'\"></script><script>document.title='taken'</script>"
)
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "walks",
    "home",
    "again",
]


def evaluation(folder: Path, model: str, answers: list[tuple[str, float]]) -> Path:
    """A folder of `vox eval` with two tasks, as far as the page reads it."""
    folder.mkdir(parents=True)
    lines, half = list[dict[str, Any]](), len(answers) // 2
    for at, (answer, score) in enumerate(answers):
        prompt: object = [{"role": "user", "content": f"What is number {at}?"}]
        task = "sums" if at < half else "texts"
        lines.append(
            {"task": task, "prompt": prompt, "answer": answer, "score": score, "why": f"why {at}"}
        )
    task = {"score": 0.5, "interval": [0.4, 0.6], "higher_is_better": True}
    card = {"model": model, "suite": "s", "tasks": {"sums": task, "texts": task}}
    (folder / "scorecard.json").write_text(json.dumps(card))
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    assert PROGRAM
    with chromium.Page(PROGRAM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


OWN = [("It is one thing", 1.0), (EVIL, 0.0), ("same", 1.0), ("x\u202ey", 0.0)]
OTHER = [("It is another thing", 0.0), ("good", 1.0), ("same", 1.0), ("z", 0.0)]


@pytest.fixture
def opened(browser: chromium.Page, tmp_path: Path) -> chromium.Page:
    own = evaluation(tmp_path / "own", EVIL, OWN)
    write_page(own, evaluation(tmp_path / "other", "base", OTHER))
    browser.requests.clear()
    browser.complaints.clear()
    browser.open((own / "scorecard.html").as_uri())
    return browser


def texts(opened: chromium.Page, selector: str) -> list[str]:
    found = opened.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")
    assert isinstance(found, list)
    return found


def choose(opened: chromium.Page, box: str, value: str) -> None:
    opened.evaluate(
        f"(() => {{ const b = document.getElementById('{box}'); b.value = '{value}';"
        " b.dispatchEvent(new Event('input')); })()"
    )


def test_answers_stand_side_by_side_with_their_differences(opened) -> None:
    assert texts(opened, "#answers h2") == [f"{EVIL}: 1", "base: 0"]
    assert texts(opened, "#answers pre") == ["It is one thing", "It is another thing"]
    assert (texts(opened, "ins"), texts(opened, "del")) == (["one"], ["another"])
    assert texts(opened, "#detail p") == ["why 0", "why 0"]


def test_data_are_text_and_nothing_is_asked_for(opened, browser) -> None:
    opened.press("j")
    assert texts(opened, "#answers pre")[0] == EVIL
    for _ in range(2):
        opened.press("ArrowDown")
    assert texts(opened, "#answers pre")[0] == "x\\u202ey"
    assert "taken" not in opened.evaluate("document.title").split("'")[0]
    assert opened.evaluate("document.images.length") == 0
    assert [url.partition(":")[0] for url in browser.requests] == ["file"]
    assert browser.complaints == []


def test_its_policy_lets_nothing_else_run(opened, browser) -> None:
    opened.evaluate(
        "(() => { const s = document.createElement('style'); s.textContent = 'body{opacity:0}';"
        "document.head.append(s); })()"
    )
    assert opened.evaluate("getComputedStyle(document.body).opacity") == "1"
    assert any("Content Security Policy" in text for text in browser.complaints)


@pytest.mark.parametrize(
    ("box", "value", "shown"),
    [
        ("kind", "right", 2),
        ("kind", "wrong", 2),
        ("kind", "better", 1),
        ("kind", "worse", 1),
        ("kind", "other", 3),
        ("task", "1", 2),
        ("search", "ANOTHER", 1),
        ("search", "nowhere", 0),
    ],
)
def test_filters(opened, box, value, shown) -> None:
    choose(opened, box, value)
    assert len(texts(opened, ".row")) == shown
    assert texts(opened, "#count") == [f"{shown} of 4 samples"]
    assert len(texts(opened, "#answers pre")) == (2 if shown else 0)


def test_one_model_alone(browser, tmp_path) -> None:
    own = evaluation(tmp_path / "own", "mine", OWN)
    write_page(own)
    browser.open((own / "scorecard.html").as_uri())
    assert texts(browser, "#answers pre") == ["It is one thing"]
    assert texts(browser, "#kind option") == ["all", "score 1", "score 0"]


def large(folder: Path, count: int) -> Path:
    """Two evaluations of `count` samples with answers of about 300 characters."""

    def answers(step: int) -> list[tuple[str, float]]:
        return [
            (
                " ".join(WORDS[(at * step + n) % len(WORDS)] for n in range(60)),
                float(at % step == 0),
            )
            for at in range(count)
        ]

    own = evaluation(folder / "own", "mine", answers(2))
    write_page(own, evaluation(folder / "other", "base", answers(3)))
    return own / "scorecard.html"


TIMED = """(() => {{ const b = document.getElementById('{}'); b.value = '{}';
const began = performance.now(); b.dispatchEvent(new Event('input'));
document.getElementById('list').getBoundingClientRect(); return performance.now() - began; }})()"""


def test_ten_thousand_samples_are_elements_only_in_sight(browser, tmp_path) -> None:
    browser.open(large(tmp_path, 10_000).as_uri())
    assert browser.evaluate("document.querySelectorAll('.row').length") < 100
    browser.evaluate("document.getElementById('list').scrollTop = 1e9")
    browser.wait("document.querySelector('#row-9999') !== null")
    browser.evaluate(TIMED.format("search", "number 77?"))
    assert texts(browser, "#count") == ["1 of 10,000 samples"]


def timings(browser: chromium.Page, path: Path) -> dict[str, float]:
    """Milliseconds to the first paint, and of each filter."""
    browser.open(path.as_uri())
    browser.wait("performance.getEntriesByName('first-contentful-paint').length > 0")
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    filters = {"search": "fox jumps", "kind": "better", "task": "1"}
    took = {box: browser.evaluate(TIMED.format(box, value)) for box, value in filters.items()}
    return {"first paint": browser.evaluate(paint), **took}
