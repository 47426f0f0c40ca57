"""Texts without a template, lengths, and what is dropped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.data_samples import chat, completion, encode_one, text
from tests.core.tiny_tokenizer import tiny_tokenizer
from vox_core.data.encode import Document, Encoded, Encoder
from vox_core.data.rows import Record

QUESTIONS = chat("how are you?", "well", "and now?", "thank you", "again?", "no")


def encode(family: str, record: Record, seq_len: int = 10_000) -> Encoded:
    return encode_one(Encoder(tiny_tokenizer(family), seq_len), record)


def only(encoded: Encoded) -> Document:
    (document,) = encoded.documents
    return document


def decoded(family: str, document: Document, *, trained: bool) -> str:
    on = document.weights_T > 0 if trained else slice(None)
    return str(tiny_tokenizer(family).decode(document.tokens_T[on]))


# --- without a template ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "bos", "eos"), [("base", "", "<|endoftext|>"), ("base_with_bos", "<s>", "</s>")]
)
def test_a_completion_and_its_end_are_trained(family: str, bos: str, eos: str) -> None:
    document = only(encode(family, completion("Q: how?\nA:", " so")))
    assert decoded(family, document, trained=False) == f"{bos}Q: how?\nA: so{eos}"
    assert decoded(family, document, trained=True) == f" so{eos}"
    assert document.ends == 1


def test_a_text_is_trained_whole_except_bos() -> None:
    document = only(encode("base_with_bos", text("the answer")))
    assert decoded("base_with_bos", document, trained=False) == "<s>the answer</s>"
    assert decoded("base_with_bos", document, trained=True) == "the answer</s>"
    assert document.ends == 1


def test_what_nothing_precedes_cannot_be_trained() -> None:
    document = only(encode("base", text("the answer")))
    assert document.weights_T.tolist() == [0.0] + [1.0] * (len(document) - 1)


def test_an_end_that_the_text_has_is_not_repeated() -> None:
    document = only(encode("base", text("the answer<|endoftext|>")))
    assert decoded("base", document, trained=False) == "the answer<|endoftext|>"
    assert document.ends == 1


def test_a_text_of_an_instruct_model_is_not_rendered() -> None:
    document = only(encode("llama3", text("the answer")))
    assert decoded("llama3", document, trained=False) == (
        "<|begin_of_text|>the answer<|end_of_text|>"
    )


def test_dtypes() -> None:
    document = only(encode("chatml", QUESTIONS))
    assert (document.tokens_T.dtype, document.weights_T.dtype) == (np.int32, np.float32)


# --- length ---------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(seq_len=st.integers(2, 120))
def test_a_long_conversation_keeps_whole_turns(seq_len: int) -> None:
    whole = only(encode("chatml", QUESTIONS))
    ends = [i + 1 for i in range(len(whole)) if whole.weights_T[i] and not whole.tokens_T[i]]
    assert len(ends) == 3  # <|im_end|> is token 0 of this tokenizer
    encoded = encode("chatml", QUESTIONS, seq_len)
    fitting = [end for end in ends if end <= seq_len]
    if len(whole) <= seq_len:
        length, cut = len(whole), "none"
    elif fitting:
        length, cut = max(fitting), "whole turns"
    else:
        length, cut = seq_len, "mid-turn"
    assert encoded.cut == cut
    if encoded.documents:
        document = only(encoded)
        assert document.tokens_T.tolist() == whole.tokens_T[:length].tolist()
        assert document.weights_T.tolist() == whole.weights_T[:length].tolist()
        assert document.ends == len(fitting)
        assert document.weights_T.any()
    else:
        assert not whole.weights_T[:length].any()
        assert encoded.dropped == "no room for an answer"


def test_a_question_without_an_answer_that_does_not_fit_costs_nothing() -> None:
    whole = only(encode("chatml", chat("how?", "so")))
    encoded = encode("chatml", chat("how?", "so", "the question " * 20), len(whole))
    assert encoded.cut == "whole turns"
    assert only(encoded).weights_T.sum() == whole.weights_T.sum()


def test_an_answer_that_says_nothing_and_never_ends_is_dropped() -> None:
    assert encode("never_closed", chat("how?", "")).dropped == "nothing to train"


@pytest.mark.parametrize("family", ["base", "base_with_bos"])
@settings(max_examples=60)
@given(length=st.integers(1, 60), seq_len=st.integers(2, 30))
def test_a_long_text_loses_no_token_and_trains_none_twice(
    family: str, length: int, seq_len: int
) -> None:
    record = text("a b\n" * length)
    whole = only(encode(family, record))
    encoded = encode(family, record, seq_len)
    pieces = encoded.documents
    assert encoded.cut == ("split" if len(whole) > seq_len else "none")
    assert all(len(piece) <= seq_len for piece in pieces)
    tokens = [piece.tokens_T[1 if i else 0 :] for i, piece in enumerate(pieces)]
    assert np.concatenate(tokens).tolist() == whole.tokens_T.tolist()
    assert sum(piece.weights_T.sum() for piece in pieces) == whole.weights_T.sum()
    assert all(piece.weights_T[0] == 0 for piece in pieces)
    assert sum(piece.ends for piece in pieces) == 1
