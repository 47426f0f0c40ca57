"""A data set: documents ready to be trained, and the account of what became of every row.

Rows are rendered and tokenised some hundreds at a time, so that the tokenizer's threads have work.
What is refused here is what would train silently and wrongly: nothing at all, or answers that never
end.

`build_dataset` keeps everything in memory, and is for rows that are there already; `kept.py` makes
data sets from files, which may be larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vox_core.data.documents import Columns, Documents, starts_of
from vox_core.data.encode import Document, Encoded, Encoder, Look
from vox_core.data.encode_stats import EncodeStats, StatsCollector
from vox_core.data.rows import Record
from vox_core.data.sampler import Ordering
from vox_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_AT_A_TIME = 512


@dataclass
class Dataset:
    """Documents in the order of their rows.

    Args:
        documents: what is trained; `Documents`, whatever sequence was given.
        rows: rows of the data files.
        dropped: reason -> rows that gave no document.
        truncated: "whole turns", "mid-turn" or "split" -> rows longer than `seq_len` that were
            treated so (see encode.py); those dropped after it are among `dropped` only.
        notes: what somebody should be told of how it was made.
        stats: of the rows, from tokenising them.
        ordering: of training; None for permutations of all documents.
    """

    documents: Documents
    rows: int
    dropped: Mapping[str, int]
    truncated: Mapping[str, int]
    notes: tuple[str, ...] = ()
    stats: EncodeStats = field(default_factory=EncodeStats)
    ordering: Ordering | None = None

    def __post_init__(self) -> None:
        self.documents = Documents.of(self.documents)

    def ordered(self, ordering: Ordering, notes: tuple[str, ...] = ()) -> Dataset:
        """The same in another order."""
        return replace(self, ordering=ordering, notes=(*self.notes, *notes))

    @property
    def tokens(self) -> int:
        return self.documents.tokens

    @property
    def trained_tokens(self) -> int:
        return self.documents.trained_tokens

    @property
    def digest(self) -> str:
        """Of the documents and of nothing else (`Documents.digest`)."""
        return self.documents.digest

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return self.documents.longest


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
    done = 0
    collector = StatsCollector(encoder)
    for some, (rows, refused) in encode_rows(encoder, records, collector.rendered):
        collector.encoded(rows)
        encoded += rows
        faults += refused
        done += len(some)
        if progress:
            progress(done, len(records))
    require_rendered(faults, encoder)
    kept, dropped, truncated = account(encoded)
    columns = Columns.of(kept, collector.sources)
    collector.columns(columns)
    documents = Documents(columns, starts_of(columns.lengths_D), tuple(collector.sources))
    dataset = Dataset(documents, len(encoded), dropped, truncated, stats=collector.stats)
    require_trained(dataset, encoder, answers=any(r.kind != "text" for r in records))
    return dataset


def assumed_dataset(documents: int, length: int) -> Dataset:
    """So many documents of `length` tokens, all of them trained, in place of data still to come."""
    weights_T = np.ones(length, np.float32)
    weights_T[0] = 0  # nothing precedes it
    document = Document(np.zeros(length, np.int32), weights_T, Path(), 0, 1)
    return Dataset(Documents.of((document,) * documents), documents, {}, {})


def encode_rows(
    encoder: Encoder, records: Iterable[Record], look: Look | None = None
) -> Iterator[tuple[list[Record], tuple[list[Encoded], list[str]]]]:
    """Some hundred records at a time, with what `Encoder.encode_many` says of them."""
    rows = iter(records)
    while some := list(islice(rows, ROWS_AT_A_TIME)):
        yield some, encoder.encode_many(some, look)


def account(encoded: Iterable[Encoded]) -> tuple[list[Document], Counter[str], Counter[str]]:
    """The documents; reason -> rows dropped; way -> rows cut and kept."""
    documents: list[Document] = []
    dropped, truncated = Counter[str](), Counter[str]()
    for row in encoded:
        documents += row.documents
        if row.dropped:
            dropped[row.dropped] += 1
        elif row.cut != "none":
            truncated[row.cut] += 1
    return documents, dropped, truncated


def require_rendered(faults: Sequence[str], encoder: Encoder) -> None:
    """Refuse rows that the chat template refuses.

    Raises:
        DataError: D005.
    """
    if faults:
        raise _refused(faults, has_template=encoder.renderer.template is not None)


def require_trained(dataset: Dataset, encoder: Encoder, *, answers: bool) -> None:
    """Refuse what would train nothing, or answers that never end.

    Args:
        answers: there are rows that are not of the form text.

    Raises:
        DataError: D006, every row was dropped; D004, nothing would be trained, or no answer's end.
    """
    if not dataset.documents:
        if set(dataset.dropped) == {"nothing to train"}:
            raise _untrained("no token would be trained", "rows with something the assistant says")
        raise _all_dropped(dataset)
    if answers and not dataset.documents.ends:
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
    if set(dataset.dropped) == {"preference pair"}:
        return DataError(
            "D006",
            "every row was dropped",
            where="the data",
            found=f"{dataset.dropped['preference pair']} preference pairs and nothing else",
            expected="conversations, prompts with completions, or texts",
            remedy='train on the answers that were chosen: write them as rows of "messages"',
        )
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
        remedy = (
            "name one with --template chatml, use an -instruct model, or rows of prompt and "
            "completion, or of text"
        )
    return DataError(
        "D005",
        what,
        where="the data, as the model's chat template renders it",
        found=f"{len(faults)} row{'s' if len(faults) > 1 else ''} that cannot be rendered",
        expected="a chat template that renders every row",
        faults=faults,
        remedy=remedy,
    )
