"""A data set: documents ready to be trained, and the account of what became of every row.

Rows are rendered and tokenised some hundreds at a time, so that the tokenizer's threads have work.
What is refused here is what would train silently and wrongly: nothing at all, or answers that never
end.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from vox_core.data.encode import Document, Encoded, Encoder
from vox_core.data.records import Record
from vox_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_A_TIME = 512
_DIGEST_FORMAT = b"vox-documents-1"


@dataclass(frozen=True)
class Dataset:
    """Documents in the order of their rows.

    Args:
        documents: what is trained.
        rows: rows of the data files.
        dropped: reason -> rows that gave no document.
        truncated: "whole turns", "mid-turn" or "split" -> rows longer than `seq_len` that were
            treated so (see encode.py); those dropped after it are among `dropped` only.
    """

    documents: tuple[Document, ...]
    rows: int
    dropped: Mapping[str, int]
    truncated: Mapping[str, int]

    @cached_property
    def tokens(self) -> int:
        return sum(len(document) for document in self.documents)

    @cached_property
    def trained_tokens(self) -> int:
        return sum(int(np.count_nonzero(document.weights_T)) for document in self.documents)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of each document's length (int64), tokens (int64) and weights (float32),
        little-endian, in order. Nothing else enters: not paths, not lines, not dropped rows."""
        sha256 = hashlib.sha256(_DIGEST_FORMAT)
        for document in self.documents:
            sha256.update(len(document).to_bytes(8, "little"))
            sha256.update(document.tokens_T.astype("<i8").tobytes())
            sha256.update(document.weights_T.astype("<f4").tobytes())
        return sha256.hexdigest()


def build_dataset(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """Encode every record.

    Args:
        seq_len: greatest length of a document, in tokens; at least 2.
        progress: called with the rows done and all rows.

    Raises:
        DataError: D005, the chat template is missing or refuses rows (all of them are named); D006,
            every row was dropped; D004, nothing would be trained, or no answer's end.
    """
    encoder = Encoder(tokenizer, seq_len)
    encoded: list[Encoded] = []
    faults: list[str] = []
    for start in range(0, len(records), _ROWS_AT_A_TIME):
        some, refused = encoder.encode_many(records[start : start + _ROWS_AT_A_TIME])
        encoded += some
        faults += refused
        if progress:
            progress(min(start + _ROWS_AT_A_TIME, len(records)), len(records))
    if faults:
        raise _refused(faults, has_template=encoder.renderer.template is not None)
    dataset = _collect(encoded)
    answers = any(record.kind != "text" for record in records)
    _require_trained(dataset, encoder, answers=answers)
    return dataset


def _collect(encoded: Sequence[Encoded]) -> Dataset:
    kept = [row for row in encoded if not row.dropped]
    return Dataset(
        documents=tuple(document for row in kept for document in row.documents),
        rows=len(encoded),
        dropped=Counter(row.dropped for row in encoded if row.dropped),
        truncated=Counter(row.cut for row in kept if row.cut != "none"),
    )


def _require_trained(dataset: Dataset, encoder: Encoder, *, answers: bool) -> None:
    if not dataset.documents:
        if set(dataset.dropped) == {"nothing to train"}:
            raise _untrained("no token would be trained", "rows with something the assistant says")
        raise _all_dropped(dataset)
    if answers and not any(document.ends for document in dataset.documents):
        raise _untrained("no end-of-turn token would be trained", _expected_end(encoder))


def _expected_end(encoder: Encoder) -> str:
    names = encoder.renderer.end_of_turn_names()
    if not names:
        return "an eos_token, or a chat template that ends turns with a special token"
    return f"{' or '.join(names)} after what the assistant says, within seq_len"


def _untrained(what: str, expected: str) -> DataError:
    return DataError(
        "D004",
        what,
        where="the data, as the model's chat template renders it",
        found="none",
        expected=expected,
        remedy="look at the chat template and the rows; a model trained so would never stop, or "
        "learn nothing",
    )


def _all_dropped(dataset: Dataset) -> DataError:
    reasons = ", ".join(f"{count} with {reason}" for reason, count in dataset.dropped.items())
    return DataError(
        "D006",
        "every row was dropped",
        where="the data",
        found=reasons or "no rows",
        expected="at least one row with an answer that begins within seq_len",
        remedy="raise --seq-len, or shorten what comes before the answers",
    )


def _refused(faults: Sequence[str], *, has_template: bool) -> DataError:
    if has_template:
        what = "the chat template refuses rows of the data"
        remedy = "change these rows to what the template takes, or choose another model"
    else:
        what = "the model has no chat template"
        remedy = "use an -instruct model, or rows of prompt and completion, or of text"
    return DataError(
        "D005",
        what,
        where="the data, as the model's chat template renders it",
        found=f"{len(faults)} row{'s' if len(faults) > 1 else ''} that cannot be rendered",
        expected="a chat template that renders every row",
        faults=faults,
        remedy=remedy,
    )
