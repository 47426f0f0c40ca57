"""Tools, calls, reasoning and weights on their way through a chat template into a mask.

Real templates have golden files (`tests/golden`); here are those that no known model has.
"""

from __future__ import annotations

from itertools import groupby

import pytest

from tests.core.data_samples import SOURCE, build_dataset, chat, completion, encode_one
from tests.core.tiny_tokenizer import CHATML, FAMILIES, Family, make_tokenizer, tiny_tokenizer
from vox_core.data.encode import Document, Encoder, serving_difference
from vox_core.data.messages import Message
from vox_core.data.render import NO_TEMPLATE, Renderer, RenderError
from vox_core.data.rows import Record
from vox_core.data.template import ChatTemplate, Takes, what_it_takes
from vox_core.errors import DataError

TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = Message("assistant", "", {"tool_calls": [CALL]})
ADDED = Record("chat", SOURCE, 1, (Message("user", "1+1?"), CALLING, Message("tool", "2")))

_TURN = "{{ '<|im_start|>' + m.role + '\\n' }}%s{{ '<|im_end|>\\n' }}"
_CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ ARGUMENTS }}{% endfor %}"
TOOLED = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}"
    + _TURN % ("{{ m.content or '' }}" + _CALLS)
    + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OBJECTS = TOOLED.replace("ARGUMENTS", "c.function.arguments | tojson")
TEXTS = TOOLED.replace("ARGUMENTS", "' ' + c.function.arguments")


def encoder(template: str | dict[str, str] | None) -> Encoder:
    chatml = FAMILIES["chatml"]
    tokenizer = make_tokenizer(Family(None, chatml.specials, chatml.eos))
    tokenizer.chat_template = template
    return Encoder(tokenizer, 10_000)


def trained(by: Encoder, record: Record) -> list[tuple[float, str]]:
    (document,) = encode_one(by, record).documents
    return runs(by, document)


def runs(by: Encoder, document: Document) -> list[tuple[float, str]]:
    pairs = zip(document.weights_T.tolist(), document.tokens_T.tolist(), strict=True)
    decode = by.tokenizer.decode
    found = [(w, decode([id for _, id in run])) for w, run in groupby(pairs, lambda pair: pair[0])]
    return [(weight, text) for weight, text in found if weight]


@pytest.mark.parametrize(
    ("template", "written"), [(OBJECTS, 'add{"a": 1}<|im_end|>'), (TEXTS, 'add {"a": 1}<|im_end|>')]
)
def test_a_call_is_trained_in_the_form_that_the_template_takes(template: str, written: str) -> None:
    assert trained(encoder(template), ADDED) == [(1.0, written)]


PROBED: dict[str, tuple[str, Takes]] = {
    "objects": (OBJECTS, Takes(reasoning=False)),
    "texts": (TEXTS, Takes(reasoning=False, text_arguments=True)),
    "Python's way": (
        TOOLED.replace("ARGUMENTS", "c.function.arguments"),
        Takes(reasoning=False, text_arguments=True),
    ),
    "null": (
        OBJECTS.replace("in m.tool_calls or []", "in (m.tool_calls if m.content is none else [])"),
        Takes(reasoning=False, words=True, content="null"),
    ),
    "no calls": (CHATML, Takes(False, False, True, True, False, content="empty")),
    "no answers": (
        OBJECTS.replace("in messages", "in messages if m.role != 'tool'"),
        Takes(answers=False, reasoning=False),
    ),
    "words or calls": (
        OBJECTS.replace("m.content or ''", "'' if m.tool_calls else m.content"),
        Takes(words=False, reasoning=False),
    ),
    "reasoning": (
        OBJECTS.replace("m.content or ''", "(m.thinking or '') + (m.content or '')"),
        Takes(),
    ),
    "nothing it likes": ("{{ raise_exception('no') }}", Takes()),
}


@pytest.mark.parametrize("case", PROBED)
def test_what_a_template_takes_is_found_by_looking(case: str) -> None:
    template, takes = PROBED[case]
    assert what_it_takes(ChatTemplate(template, {})) == takes


REFUSED: dict[str, tuple[str, Record, str]] = {
    "tools": (CHATML, Record("chat", SOURCE, 1, chat("a", "b").messages, tools=(TOOL,)), "tools"),
    "calls": (CHATML, ADDED, r"the calls of messages\[1\]"),
    "an answer": (PROBED["no answers"][0], ADDED, r"messages\[2\] of a tool"),
    "words": (
        PROBED["words or calls"][0],
        Record("chat", SOURCE, 1, (Message("assistant", "hm", CALLING.extra),)),
        r"what messages\[0\] says beside calls",
    ),
    "reasoning": (
        CHATML,
        Record("chat", SOURCE, 1, (Message("assistant", "a", {"reasoning_content": "b"}),)),
        r"the reasoning of messages\[0\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_template_leaves_out_without_a_word_is_refused(case: str) -> None:
    template, record, what = REFUSED[case]
    with pytest.raises(RenderError, match="does not write .*" + what):
        encode_one(encoder(template), record)


def test_tools_without_a_template_are_refused() -> None:
    record = Record("completion", SOURCE, 1, completion("a", "b").messages, tools=(TOOL,))
    with pytest.raises(RenderError, match=NO_TEMPLATE):
        encode_one(encoder(None), record)


def test_among_several_templates_the_one_for_tools_is_taken() -> None:
    by = encoder({"default": CHATML, "tool_use": OBJECTS.replace("im_end", "endoftext")})
    record = Record("chat", SOURCE, 1, ADDED.messages, tools=(TOOL,))
    assert trained(by, record) == [(1.0, 'add{"a": 1}<|endoftext|>')]
    assert trained(by, chat("a", "b")) == [(1.0, "b<|im_end|>")]


# --- weights --------------------------------------------------------------------------------------


def weighted(*said: tuple[str, str, float | None]) -> Record:
    return Record("chat", SOURCE, 1, tuple(Message(r, c, weight=w) for r, c, w in said))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["chatml", "generation"])
def test_weights_are_those_of_the_messages(family: str) -> None:
    by = Encoder(tiny_tokenizer(family), 10_000)
    record = weighted(
        ("user", "a", None), ("assistant", "b", 0.0), ("user", "c", 0.5),
        ("assistant", "d", 0.25), ("user", "e", 0.0), ("assistant", "f", None),
    )  # fmt: skip
    (document,) = encode_one(by, record).documents
    assert runs(by, document) == [(0.5, "c<|im_end|>"), (0.25, "d<|im_end|>"), (1.0, "f<|im_end|>")]
    assert document.ends == 3
    assert document.weights_T.dtype == "float32"


def test_a_completion_has_a_weight_too() -> None:
    by = encoder(None)
    (document,) = encode_one(
        by,
        Record(
            "completion", SOURCE, 1, (Message("user", "a "), Message("assistant", "b", None, 0.5))
        ),
    ).documents
    assert runs(by, document) == [(0.5, "b<|im_end|>")]


def test_a_row_of_weight_0_trains_nothing() -> None:
    record = weighted(("user", "a", None), ("assistant", "b", 0.0))
    assert encode_one(Encoder(tiny_tokenizer("chatml"), 99), record).dropped == "nothing to train"


def test_words_that_a_template_changes_are_unclear() -> None:
    by = encoder("{% for m in messages %}{{ m.content + '|' + m.content }}{% endfor %}")
    with pytest.raises(RenderError, match=r"unclear where the words of messages\[0\] are"):
        encode_one(by, weighted(("user", "a", 1.0), ("assistant", "b", 0.0)))


def test_a_preference_pair_gives_no_document() -> None:
    pair = Record(
        "preference", SOURCE, 2, chat("a", "b").messages, rejected=chat("a", "c").messages
    )
    by = Encoder(tiny_tokenizer("chatml"), 99)
    assert encode_one(by, pair).dropped == "preference pair"
    encoded = by.encode_many([pair, chat("a", "b"), pair])
    assert [one.dropped for one in encoded] == ["preference pair", None, "preference pair"]
    assert not any(one.fault for one in encoded)
    with pytest.raises(DataError) as caught:
        build_dataset([pair], tiny_tokenizer("chatml"), 99)
    assert caught.value.code == "VOX-D006"
    assert "1 preference pair" in str(caught.value)


# --- serving --------------------------------------------------------------------------------------


def test_what_a_server_sends_is_compared() -> None:
    same = Renderer(tiny_tokenizer("qwen3"))
    assert serving_difference(same, chat("a", "b", "c", "d")) is None
    opens = Renderer(tiny_tokenizer("qwen3_open"))
    assert serving_difference(opens, chat("c", "d")) is None
    assert serving_difference(opens, chat("a", "b", "c", "d")) == (
        "before messages[1] a server sends '<|im_start|>assistant\\n<think>\\n' where the model is "
        "trained on '<|im_start|>assistant\\nb<|im_end|>\\n<|im_s'"
    )
    moves = Renderer(tiny_tokenizer("mistral"))
    found = serving_difference(moves, chat("a", "b", "c", "d", system="be brief"))
    assert found is not None
    assert "sends 'be brief" in found


def test_turns_that_are_not_trained_are_not_compared() -> None:
    record = weighted(
        ("user", "a", None), ("assistant", "b", 0.0), ("user", "c", None), ("assistant", "d", None)
    )
    assert serving_difference(Renderer(tiny_tokenizer("qwen3_open")), record) is None


# --- limits ---------------------------------------------------------------------------------------


def test_long_tools_have_a_long_text() -> None:
    source = "{% for i in range(40) %}{{ tools[0].description }}{% endfor %}"
    tools = [{"description": "word " * 500_000}]
    assert len(ChatTemplate(source, {}).render([], tools)) == 100_000_000


def test_a_probe_that_takes_too_much_stops_the_rows() -> None:
    by = encoder("{% if tools %}{{ 'a' * 10**10 }}{% endif %}" + CHATML)
    with pytest.raises(DataError) as caught:
        encode_one(by, ADDED)
    assert caught.value.code == "VOX-D005"
