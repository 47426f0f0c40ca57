"""A data set's account, its digest, and what it refuses to train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.data_samples import build_dataset, chat, completion, text
from tests.core.tiny_tokenizer import FAMILIES, make_tokenizer, tiny_tokenizer
from vox_core.data.dataset import Dataset
from vox_core.data.rows import Record
from vox_core.errors import DataError

DIGEST = "d0eb6a337af839e1c46a62674197ca19aeb967ff4fc271d65b2c41862fdca824"
RECORDS = [chat("how are you?", "well"), chat("and now?", "thank you", "so?", "yes")]


def build(family: str, *records: Record, seq_len: int = 2048) -> Dataset:
    return build_dataset(records, tiny_tokenizer(family), seq_len)


def refuse(family: str, *records: Record, seq_len: int = 2048) -> DataError:
    with pytest.raises(DataError) as caught:
        build(family, *records, seq_len=seq_len)
    return caught.value


def test_what_became_of_every_row() -> None:
    """At 40 tokens: the first fits; of the second the first turn; the third's question is longer;
    the fourth's answer is."""
    records = [*RECORDS, chat("a question " * 30, "yes"), chat("so?", "a number " * 40)]
    whole = build("chatml", *records)
    assert (whole.stats.rows, dict(whole.stats.dropped), dict(whole.stats.truncated)) == (4, {}, {})
    first, second = (len(document) for document in whole[:2])
    dataset = build("chatml", *records, seq_len=max(first, second - 2))
    assert dict(dataset.stats.dropped) == {"no room for an answer": 1}
    assert dict(dataset.stats.truncated) == {"whole turns": 1, "mid-turn": 1}
    assert dataset.stats.rows == 4
    assert [document.line for document in dataset] == [1, 1, 1]
    assert dataset.tokens == sum(len(document) for document in dataset)
    assert dataset.trained_tokens == sum(int(d.weights_T.sum()) for d in dataset)


def test_a_text_that_is_split_is_one_row_of_several_documents() -> None:
    dataset = build("base", text("the answer is a number " * 20), seq_len=16)
    assert (dataset.stats.rows, dict(dataset.stats.truncated)) == (1, {"split": 1})
    assert len(dataset) > 1


def test_the_digest_is_of_what_is_trained_and_of_nothing_else() -> None:
    here = build("chatml", *RECORDS)
    moved = [replace(record, source=Path("elsewhere.jsonl"), line=9) for record in RECORDS]
    assert build("chatml", *moved).digest == here.digest
    assert len({
        here.digest,
        build("chatml", *reversed(RECORDS)).digest,
        build("chatml", RECORDS[0]).digest,
        build("chatml", chat("how are you?", "well!"), RECORDS[1]).digest,
        build("base", text("a b"), text("c")).digest,
        build("base", text("a"), text(" bc")).digest,
    }) == 6  # fmt: skip


def test_the_digest_sees_weights() -> None:
    dataset = build("chatml", *RECORDS)
    document = dataset[0]
    muted = replace(document, weights_T=document.weights_T * 0)
    changed = Dataset.of((muted, *dataset[1:]))
    assert changed.digest != dataset.digest


def test_the_digest_is_the_same_everywhere() -> None:
    """Of two documents whose tokens and weights are written out in the digest's docstring's terms:
    python -c "import hashlib, struct; p = struct.pack; print(hashlib.sha256(b'vox-documents-1' +
    p('<q3q3f', 3, 5, 6, 0, 0, 1, 1) + p('<q2q2f', 2, 7, 0, 0, 1)).hexdigest())" """
    dataset = build("chatml", *RECORDS)
    one, two = (replace(document) for document in dataset)
    one = replace(one, tokens_T=one.tokens_T[:3] * 0 + [5, 6, 0], weights_T=one.weights_T[:3] * 0)
    one.weights_T[1:] = 1
    two = replace(two, tokens_T=two.tokens_T[:2] * 0 + [7, 0], weights_T=two.weights_T[:2] * 0)
    two.weights_T[1:] = 1
    assert Dataset.of((one, two)).digest == DIGEST


# --- refusals -------------------------------------------------------------------------------------


def test_conversations_need_a_chat_template() -> None:
    error = refuse("base", text("a b"), *RECORDS, completion("a", "b"))
    assert (error.code, error.what) == ("VOX-D005", "the model has no chat template")
    assert error.found == "2 rows that cannot be rendered"
    assert "-instruct" in error.remedy


def test_rows_that_the_template_refuses_for_one_reason_are_one_fault() -> None:
    bad = replace(chat("a", "b", system="s"), line=7)
    others = [replace(bad, line=line) for line in range(9, 609)]
    error = refuse("gemma_without_system", chat("a", "b"), bad, *others)
    assert (error.code, error.found) == ("VOX-D005", "601 rows that cannot be rendered")
    assert error.faults == (
        "train.jsonl, line 7, 9, 10, 11, 12 and 596 more: the chat template refuses the row: "
        "System role not supported",
    )


def test_answers_that_never_end_are_refused() -> None:
    error = refuse("never_closed", *RECORDS)
    assert (error.code, error.what) == ("VOX-D004", "no end-of-turn token would be trained")
    assert error.expected == "</s> after what the assistant says, within seq_len"


def test_answers_whose_end_never_fits_are_refused() -> None:
    assert refuse("chatml", chat("a", "b" * 100), seq_len=40).code == "VOX-D004"


def test_texts_need_no_end() -> None:
    assert build("never_closed", text("the answer")).trained_tokens > 0
    without_eos = make_tokenizer(replace(FAMILIES["base"], eos="<s>", bos="<s>"))
    without_eos.eos_token = None
    assert build_dataset([text("the answer")], without_eos, 64).trained_tokens > 0
    with pytest.raises(DataError, match="no end-of-turn") as caught:
        build_dataset([completion("a", "b c")], without_eos, 64)
    assert caught.value.expected == (
        "an eos_token, or a chat template that ends turns with a special token"
    )


def test_nothing_to_train_is_refused() -> None:
    error = refuse("never_closed", chat("how?", ""))
    assert (error.code, error.what) == ("VOX-D004", "no token would be trained")


def test_dropping_every_row_is_refused() -> None:
    error = refuse("chatml", chat("a question " * 30, "yes"), seq_len=16)
    found = "1 with no room for an answer; the longest row has 104 tokens"
    assert (error.code, error.found) == ("VOX-D006", found)
    assert error.expected == "a prompt of fewer than 16 tokens (--seq-len)"
