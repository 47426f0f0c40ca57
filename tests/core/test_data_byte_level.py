"""The same tokens from fastokens as from tokenizers: ids, characters and texts."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from vox_core.data import byte_level
from vox_core.data.byte_level import ByteLevel, Disagreement
from vox_core.data.tokenizer import load_tokenizer
from vox_core.data.tokens import Tokens, tokenise
from vox_core.models import resolve

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "\n",
        "\r\n",
        "\t",
        " ",
        "  ",
        "   ",
        "\u00a0",
        "\u3000",
    ),
    *(
        "'s",
        "'LL",
        "don't",
        "1",
        "123",
        "½",
        "٣",
        "²",
        "e\u0301",
        "é",
        "ß",
        "\u0131",
        "日本",
        "한국어",
    ),
    *("👩‍👩‍👧", "क्ष", "ﬁ", "a", "B", "ǅ", "_", "--", "...", "def f(x):\n    return", "\\n", "{}"),
)
_ENTRIES = 12_000
WITHOUT_A_TOKEN = "\x04"
"""A byte that SmolLM2's vocabulary lacks."""

pytestmark = pytest.mark.real_model


@cache
def smollm2() -> dict[str, Any]:
    """SmolLM2's tokenizer with a quarter of its vocabulary, which is read in less time."""
    folder = resolve("smollm2-135m").path
    made_of: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    model = made_of["model"]
    vocab = {token: id for token, id in model["vocab"].items() if id < _ENTRIES}
    merges = [pair for pair in model["merges"] if "".join(pair) in vocab]
    return {**made_of, "model": {**model, "vocab": vocab, "merges": merges}}


def split(pattern: str) -> dict[str, Any]:
    regex = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [regex, mapping(use_regex=False)]}


def mapping(**changed: bool) -> dict[str, Any]:
    usual = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"type": "ByteLevel", **usual, **changed}


WHOLE = {"type": "Sequence", "processors": [mapping(trim_offsets=False, add_prefix_space=True)]}
KINDS: dict[str, dict[str, Any]] = {
    "smollm2": {},
    "llama3": {"pre_tokenizer": split(LLAMA3), "post_processor": WHOLE},
    "qwen2": {
        "pre_tokenizer": split(QWEN2),
        "post_processor": WHOLE,
        "normalizer": {"type": "NFC"},
    },
    "o200k": {"pre_tokenizer": split(O200K), "post_processor": WHOLE},
    "gpt2": {"pre_tokenizer": mapping(), "post_processor": WHOLE},
}


def tokenizer_of(changed: dict[str, Any]) -> PreTrainedTokenizerFast:
    made_of = json.dumps({**smollm2(), **changed})
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(made_of))


def quick(tokenizer: PreTrainedTokenizerFast) -> ByteLevel:
    found = ByteLevel.of(tokenizer)
    assert found
    return found


def same(ours: Tokens | None, theirs: Tokens) -> bool:
    return ours is not None and all(
        np.array_equal(getattr(ours, name), getattr(theirs, name))
        for name in ("ids_T", "begins_T", "stops_T", "bounds_R1")
    )


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return tokenizer_of(KINDS[request.param])


@pytest.fixture(scope="module")
def ours(tokenizer: PreTrainedTokenizerFast) -> ByteLevel:
    return quick(tokenizer)


def pieces() -> st.SearchStrategy[list[str]]:
    text = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
    return st.lists(text, min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(texts=pieces())
def test_texts_of_hard_pieces_are_cut_alike(
    tokenizer: PreTrainedTokenizerFast, ours: ByteLevel, texts: list[str]
) -> None:
    """What NFC would change is left to tokenizers; nothing else is."""
    texts = [unicodedata.normalize("NFC", text) for text in texts]
    assert same(ours._tokens(texts), tokenise(tokenizer, texts))


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_any_texts_are_cut_alike_or_left(
    tokenizer: PreTrainedTokenizerFast, ours: ByteLevel, texts: list[str]
) -> None:
    found = ours._tokens(texts)
    assert found is None or same(found, tokenise(tokenizer, texts))


@pytest.mark.long
@settings(max_examples=5_000, deadline=None)
@given(texts=st.one_of(pieces(), st.lists(st.text(max_size=30), min_size=1, max_size=3)))
def test_many_texts_are_cut_alike_or_left(
    tokenizer: PreTrainedTokenizerFast, ours: ByteLevel, texts: list[str]
) -> None:
    found = ours._tokens(texts)
    assert found is None or same(found, tokenise(tokenizer, texts))


@pytest.mark.parametrize("text", [WITHOUT_A_TOKEN, "a\u0301", "", "\U00040000", "日 " * 9000])
def test_what_it_cannot_cut_the_tokenizer_does(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, unless it is of a byte beyond ASCII that has no token."""
    tokenizer = tokenizer_of({"normalizer": {"type": "NFC"}})
    texts = ["before", text, "äfter", text, text + "!"]
    expected = tokenise(tokenizer, texts)
    by_tokenizer: list[Sequence[str]] = []
    monkeypatch.setattr(
        byte_level, "tokenise", lambda *given: (by_tokenizer.append(given[1]), tokenise(*given))[1]
    )
    assert same(quick(tokenizer)(texts), expected)
    alone = {"": [["before"]], "\U00040000": [texts]}
    assert by_tokenizer == alone.get(text, [["before"], [text, text, text + "!"]])


@pytest.mark.parametrize("piece", ["日本語", "=", " ", "\n", "a", "<|im_start|>x ", "word, 12 "])
def test_texts_up_to_the_longest_are_cut_alike(
    tokenizer: PreTrainedTokenizerFast, ours: ByteLevel, piece: str
) -> None:
    text = (piece * byte_level._LONG)[: byte_level._LONG]
    assert same(ours._tokens([text, "b", text]), tokenise(tokenizer, [text, "b", text]))


def test_what_panics_is_left_to_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As Rust's are."""

    class Panics:
        def encode_batch_flat(self, *_: object, **__: object) -> None:
            raise PanicException

    tokenizer = tokenizer_of({})
    ours = quick(tokenizer)
    ours._quick = Panics()
    assert same(ours(["text"]), tokenise(tokenizer, ["text"]))


def test_some_texts_of_a_batch_are_cut_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    by_both: list[Sequence[str]] = []
    monkeypatch.setattr(
        byte_level, "tokenise", lambda *given: (by_both.append(given[1]), tokenise(*given))[1]
    )
    quick(tokenizer_of({}))([f"text {n}" for n in range(200)])
    assert by_both == [["text 0", "text 64", "text 128", "text 192"]]


def test_a_text_that_is_cut_otherwise_is_noticed() -> None:
    """Both stand for the text; one has fewer merges."""
    model = smollm2()["model"]
    theirs = tokenizer_of({"model": {**model, "merges": model["merges"][:50]}})
    ours = quick(tokenizer_of({}))
    ours._tokenizer = theirs
    with pytest.raises(Disagreement):
        ours(["the answer is a number"])


@pytest.mark.parametrize(
    "changed",
    [
        {"pre_tokenizer": mapping(add_prefix_space=True)},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"normalizer": {"type": "Lowercase"}},
        {"post_processor": mapping(trim_offsets=True)},
        {"model": {**smollm2()["model"], "dropout": 0.1}},
        {"added_tokens": [{**smollm2()["added_tokens"][0], "rstrip": True}]},
        {"added_tokens": [{**smollm2()["added_tokens"][0], "single_word": True}]},
    ],
)
def test_other_tokenizers_are_left_alone(changed: dict[str, Any]) -> None:
    assert ByteLevel.of(tokenizer_of(changed)) is None


def test_the_default_models_tokenizer_is_one() -> None:
    assert ByteLevel.of(load_tokenizer(resolve("smollm2-135m").path))
