"""Fifteen chat templates of real models on a dozen conversations: what vox renders is what
transformers renders, what is trained is what the assistant says, and both are in golden files.

`python -m tests.golden.make` writes the files.
"""

from __future__ import annotations

from datetime import datetime
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from tests.core.data_samples import encode_one
from tests.golden import make
from tests.golden.cases import CASES, given, record
from tests.golden.families import FAMILIES, REAL, RENDERED, TEMPLATES, tokenizer
from vox_core.data.encode import Document, serving_difference
from vox_core.data.messages import Message
from vox_core.data.render import Rendered, RenderError, weight_of

every_template = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.real_model if n == REAL else ()) for n in FAMILIES],
)
every_case = pytest.mark.parametrize("case", CASES)

STRIPPED = ("reasoning", "reasoning in the content")
"""Cases of which templates leave parts out by design."""
LOST = {("mistral-nemo", "a system prompt")}
"""The template writes a system prompt only where a user has the last word: a difference from what a
server sends, of which `serving_difference` tells."""
OPEN = {("deepseek-r1", "a call without tools")}
"""The template does not close a single call."""


@pytest.fixture(autouse=True)
def _a_fixed_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers gives a template today's."""

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2024, 7, 26, tzinfo=tz)

    monkeypatch.setattr(chat_template_utils, "datetime", Stopped)


@every_template
def test_the_golden_files(name: str) -> None:
    assert make.readable(name) == (RENDERED / f"{name}.txt").read_text(encoding="utf-8")
    assert make.tokens(name) == (RENDERED / f"{name}.json").read_text(encoding="utf-8")


@every_template
@every_case
def test_it_is_what_transformers_gives_and_what_a_server_sends(name: str, case: str) -> None:
    try:
        document, rendered = encoded(name, case)
    except RenderError as refused:
        assert_something_would_be_lost(name, case, str(refused))
        return
    assert rendered.text == theirs(name, case)
    assert document.tokens_T.tolist() == their_tokens(name, case)
    assert case in STRIPPED or (name, case) in LOST or not missing(name, case)
    assert_prompts_are_prefixes(name, case, rendered)


@every_template
@every_case
def test_trained_is_what_the_assistant_says_and_its_end(name: str, case: str) -> None:
    try:
        document, _ = encoded(name, case)
    except RenderError:
        return
    trained = [one for one in record(case).messages or () if weight_of(one)]
    found = stretches(name, document)
    assert [weight for weight, _ in found] == [weight_of(message) for message in trained]
    for message, (_, text) in zip(trained, found, strict=True):
        if message.role == "assistant" and (name, case) not in OPEN:
            assert text.endswith(FAMILIES[name].end)
        said = text.removesuffix(FAMILIES[name].end)
        if message.extra and "tool_calls" in message.extra:
            assert said.count("get_weather") == len(message.extra["tool_calls"])
        elif case not in STRIPPED:
            assert said in {around + message.content for around in ("", *FAMILIES[name].around)}


def test_every_template_is_used_and_has_its_origin() -> None:
    names = {path.stem for path in TEMPLATES.glob("*.jinja")}
    assert names == set(FAMILIES)
    sources = (TEMPLATES / "SOURCES.md").read_text(encoding="utf-8")
    assert all(f"`{name}.jinja`" in sources for name in names)


# --- helpers


@cache
def encoded(name: str, case: str) -> tuple[Document, Rendered]:
    encoder = make.encoder_of(name)
    (document,) = encode_one(encoder, record(case)).documents
    return document, encoder.renderer.render(record(case))


def theirs(name: str, case: str, until: int | None = None) -> str:
    """What transformers renders: the case, or the messages before one with the prompt for it."""
    messages, tools = given(case, name)
    prompt = until is not None
    if FAMILIES[name].text_arguments:  # see there
        names: Any = tokenizer(name).special_tokens_map
        (text,), _ = chat_template_utils.render_jinja_template(
            [messages[:until]],
            tools,
            chat_template=tokenizer(name).chat_template,
            add_generation_prompt=prompt,
            **names,
        )
        return str(text)
    return str(
        tokenizer(name).apply_chat_template(
            messages[:until], tools=tools, tokenize=False, add_generation_prompt=prompt
        )
    )


def their_tokens(name: str, case: str) -> list[int]:
    if FAMILIES[name].text_arguments:
        return list(tokenizer(name)(theirs(name, case), add_special_tokens=False)["input_ids"])
    messages, tools = given(case, name)
    return list(tokenizer(name).apply_chat_template(messages, tools=tools, return_dict=False))


def assert_prompts_are_prefixes(name: str, case: str, rendered: Rendered) -> None:
    """Or vox says that they are not."""
    starts = {span.start for span in rendered.spans}
    same = True
    for turn, message in enumerate(record(case).messages or ()):
        if message.role == "assistant" and weight_of(message):
            prompt = theirs(name, case, turn)
            prefix = rendered.text.startswith(prompt)
            assert not prefix or len(prompt) in starts
            same &= prefix
    difference = serving_difference(make.encoder_of(name).renderer, record(case))
    assert (difference is None) == same


def stretches(name: str, document: Document) -> list[tuple[float, str]]:
    """Weight and text of each run of trained tokens."""
    pairs = zip(document.weights_T.tolist(), document.tokens_T.tolist(), strict=True)
    runs = groupby(pairs, key=lambda pair: pair[0])
    return [(w, tokenizer(name).decode([id for _, id in run])) for w, run in runs if w > 0]


def missing(name: str, case: str) -> list[str]:
    """What is said in a case and not in what transformers renders of it."""
    row = record(case)
    said = [tool["function"]["description"] for tool in row.tools]
    for message in row.messages or ():
        said += [message.content, *_of_calls(message)]
    text = theirs(name, case).replace('\\"', '"')
    return [part for part in said if part not in text]


def _of_calls(message: Message) -> list[str]:
    calls = (message.extra or {}).get("tool_calls", ())
    reasoning = (message.extra or {}).get("reasoning_content", "")
    return [reasoning, *(str(call["function"]["arguments"]["at"]) for call in calls)]


def assert_something_would_be_lost(name: str, case: str, refused: str) -> None:
    """Either transformers cannot render the row, or something that is said is missing there."""
    try:
        lost = missing(name, case)
    except Exception:  # noqa: BLE001  (a template raises whatever it likes)
        return
    assert lost
    assert "does not write" in refused
