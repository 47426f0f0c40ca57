"""A data set: documents ready to be trained, and the account of what became of every row.

All tokens lie end to end in arrays, beside a few numbers for each document. The arrays may be
mapped from files (`dataset_cache.py`), so that a data set may be larger than memory: a `Document`
is made when one is asked for.

Rows are rendered and tokenised some hundreds at a time, so that the tokenizer's threads have work.
What is refused here is what would train silently and wrongly: nothing at all, or answers that never
end.

Shape legend: T tokens of all documents, D documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

from vox_core.data.encode import Document, Encoded, Encoder, EncodeStats, stats_of
from vox_core.data.records import listed
from vox_core.data.rows import WHOLE, Row
from vox_core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.data.batching import Ordering

ROWS_AT_A_TIME = 512
_DIGEST_FORMAT = b"vox-documents-1"
DOCUMENT = np.dtype(
    [
        ("tokens", "<i8"),
        ("file", "<i4"),
        ("line", "<i8"),
        ("ends", "<i4"),
        ("difficulty", "<f4"),
        ("side", "<i4"),
        ("label", "S16"),
    ]
)
"""A `Document` beside its arrays: how many tokens; the number of its file among those of the data
set; the line; how many end-of-turn tokens are trained; its difficulty, NaN where the row does not
say; its place in its group, from 0; its label there, such as chosen, in ASCII."""


@dataclass(eq=False)
class Dataset(Sequence[Document]):
    """Documents in the order of their rows.

    Args:
        tokens_T: int32.
        weights_T: float32.
        documents_D: `DOCUMENT`. A group is the documents from a side of 0 to the next: one document
            in supervised training; an objective may compare several.
        stats: of the rows, from tokenising them.
        notes: what somebody should be told of how it was made.
        ordering: of training; None for permutations of all documents.
        owner: kept as long as this is, such as the temporary folder of mapped files.
    """

    tokens_T: NDArray[np.int32]
    weights_T: NDArray[np.float32]
    documents_D: NDArray[np.void]
    files: Sequence[Path]
    stats: EncodeStats = field(default_factory=EncodeStats)
    notes: tuple[str, ...] = ()
    ordering: Ordering | None = None
    owner: object = None

    @classmethod
    def of(cls, documents: Sequence[Document], numbers: dict[Path, int] | None = None) -> Dataset:
        """Copy `documents`.

        Args:
            numbers: of files; one that is not in it yet is added.
        """
        numbers = {} if numbers is None else numbers
        files = [numbers.setdefault(d.source, len(numbers)) for d in documents]
        numbered = zip(documents, files, strict=True)
        rows = [(len(d), n, d.line, d.ends, d.difficulty, d.side, d.label) for d, n in numbered]
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(d.tokens_T for d in documents)]),
            np.concatenate([np.zeros(0, np.float32), *(d.weights_T for d in documents)]),
            np.array(rows, DOCUMENT),
            tuple(numbers),
        )

    def ordered(self, ordering: Ordering, notes: tuple[str, ...] = ()) -> Dataset:
        other = copy(self)
        other.ordering, other.notes = ordering, (*self.notes, *notes)
        return other

    def __len__(self) -> int:
        return len(self.documents_D)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | Sequence[Document]:
        at = range(len(self))[index]
        if isinstance(at, range):
            return tuple(self[i] for i in at)
        start, stop = self.starts_D1[at : at + 2].tolist()
        _, file, line, ends, difficulty, side, label = self.documents_D[at].item()
        tokens_T, weights_T = self.tokens_T[start:stop], self.weights_T[start:stop]
        place = self.files[file], line
        return Document(tokens_T, weights_T, *place, ends, difficulty, side, label.decode())

    @property
    def lengths_D(self) -> NDArray[np.int64]:
        """int64, tokens of each document."""
        return self.documents_D["tokens"]

    @cached_property
    def starts_G1(self) -> NDArray[np.int64]:
        """int64; group g has the documents [starts[g], starts[g + 1])."""
        return np.append(np.flatnonzero(self.documents_D["side"] == 0), len(self)).astype(np.int64)

    @property
    def groups(self) -> int:
        """Number of groups: what a step counts, and an epoch permutes."""
        return len(self.starts_G1) - 1

    def documents_of(self, groups_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of the documents of some groups, in their order."""
        if self.groups == len(self):
            return groups_N
        bounds = zip(self.starts_G1[groups_N], self.starts_G1[groups_N + 1], strict=True)
        return np.concatenate([np.arange(start, stop) for start, stop in bounds])

    @cached_property
    def starts_D1(self) -> NDArray[np.int64]:
        """int64; document d has the tokens [starts[d], starts[d + 1])."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths_D)])

    @property
    def tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def longest(self) -> int:
        """Tokens of the longest document; 0 without documents."""
        return int(self.lengths_D.max(initial=0))

    @cached_property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.weights_T))

    def trained_D(self) -> NDArray[np.int64]:
        """Of each document the tokens whose loss is computed; nothing precedes its first one."""
        bounds = pairwise(self.starts_D1.tolist())
        return np.array([(self.weights_T[a + 1 : b] > 0).sum() for a, b in bounds], np.int64)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of each document's length (int64), tokens (int64) and weights (float32),
        little-endian, in order, and what it is in its group, if an objective compares. Nothing else
        enters: not paths, not lines."""
        sha256 = hashlib.sha256(_DIGEST_FORMAT)
        for document in self:
            sha256.update(len(document).to_bytes(8, "little"))
            sha256.update(document.tokens_T.astype("<i8").data)
            sha256.update(document.weights_T.astype("<f4").data)
            if document.label:
                sha256.update(f"{document.side} {document.label}\n".encode())
        return sha256.hexdigest()


def encode_rows(encoder: Encoder, rows: Iterable[Row], numbers: dict[Path, int]) -> Dataset:
    """Encode rows, without judging them.

    Args:
        numbers: of the files that they are from; one that is not in it yet is added.
    """
    documents, stats, left = list[Document](), EncodeStats(), iter(rows)
    while some := list(islice(left, ROWS_AT_A_TIME)):
        for row in some:
            numbers.setdefault(row.source, len(numbers))
        every = iter(encoder.encode_many([side for row in some for side in row.sides.values()]))
        encoded = [_whole_or_none([next(every) for _ in row.sides]) for row in some]
        for row, sides in zip(some, encoded, strict=True):
            documents += _grouped(row, sides)
        stats.add(stats_of(encoder, encoded, numbers))
        stats.misfits += [(row.source, row.line, row.misfit) for row in some if row.misfit]
    dataset = Dataset.of(documents, numbers)
    dataset.stats = stats
    return dataset


def _whole_or_none(sides: list[Encoded]) -> list[Encoded]:
    """The sides of a row; all of them dropped where one is."""
    reason = next((side.dropped for side in sides if side.dropped), None)
    return [replace(side, documents=(), dropped=reason) for side in sides] if reason else sides


def _grouped(row: Row, sides: Sequence[Encoded]) -> Iterable[Document]:
    if WHOLE in row.sides:
        return [document for side in sides for document in side.documents]
    return [
        replace(document, side=number, label=label)
        for number, (label, side) in enumerate(zip(row.sides, sides, strict=True))
        for document in side.documents
    ]


def assumed_dataset(documents: int, length: int) -> Dataset:
    """So many documents of `length` tokens, all of them trained, in place of data still to come."""
    weights_T = np.ones(length, np.float32)
    weights_T[0] = 0  # nothing precedes it
    document = Document(np.zeros(length, np.int32), weights_T, Path(), 0, 1)
    dataset = Dataset.of((document,) * documents)
    dataset.stats.rows = documents
    return dataset


# --- refusals -------------------------------------------------------------------------------------


def require_trained(
    stats: EncodeStats, encoder: Callable[[], Encoder], objective: str = ""
) -> None:
    """Refuse rows that the chat template refuses, and what would train nothing, or answers that
    never end.

    Raises:
        DataError: D005; D006, every row was dropped; D004, nothing would be trained, or no answer's
            end.
    """
    if stats.misfits:
        raise _misfits(stats.misfits, objective)
    if stats.faults:
        raise _refused(stats)
    if sum(stats.dropped.values()) == stats.rows:
        if set(stats.dropped) == {"nothing to train"}:
            raise _untrained("no token would be trained", "rows with something the assistant says")
        raise _all_dropped(stats, encoder().seq_len)
    if stats.answers and not stats.ended:
        names = encoder().renderer.end_of_turn_names()
        expected = (
            f"{' or '.join(names)} after what the assistant says, within seq_len"
            if names
            else "an eos_token, or a chat template that ends turns with a special token"
        )
        raise _untrained("no end-of-turn token would be trained", expected)


def _misfits(faults: Sequence[tuple[Path, int, str]], objective: str) -> DataError:
    return DataError(
        "D033",
        "rows do not fit the objective",
        where=f"--objective {objective}".strip(),
        found=f"{len(faults)} row{'s' if len(faults) > 1 else ''} that it cannot use",
        faults=listed(faults),
        remedy="correct these rows or leave them out, or train with another --objective",
    )


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


def _all_dropped(stats: EncodeStats, seq_len: int) -> DataError:
    dropped, longest = stats.dropped, max(stats.lengths, default=0)
    found = ", ".join(f"{rows} with {reason}" for reason, rows in dropped.items())
    found += f"; the longest row has {longest:,} tokens" if longest else ""
    expected = f"a prompt of fewer than {seq_len:,} tokens (--seq-len)"
    remedy = "raise --seq-len, or shorten the prompts"
    if set(dropped) == {"preference pair"}:
        found = f"{dropped['preference pair']} preference pairs and nothing else"
        expected = "conversations, prompts with completions, or texts"
        remedy = "train on the comparison: --objective dpo"
    return DataError(
        "D006",
        "every row was dropped",
        where="the data",
        found=found or "no rows",
        expected=expected,
        remedy=remedy,
    )


def _refused(stats: EncodeStats) -> DataError:
    what = "the model has no chat template"
    remedy = (
        "name one with --template chatml, use an -instruct model, or rows of prompt and "
        "completion, or of text"
    )
    if stats.template:
        what = "the chat template refuses rows of the data"
        remedy = "change these rows to what the template takes, or choose another model"
    rows = len(stats.faults)
    return DataError(
        "D005",
        what,
        where="the data, as the model's chat template renders it",
        found=f"{rows} row{'s' if rows > 1 else ''} that cannot be rendered",
        expected="a chat template that renders every row",
        faults=listed(stats.faults),
        remedy=remedy,
    )
