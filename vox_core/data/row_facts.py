"""Columns that filters, deduplication and the split read, and their decisions.

Facts are taken in one pass over the rows and depend on no policy, so the cache keeps them by the
file's SHA-256, and another policy reads no row. A row takes 64 bytes.

Rows are compared by content digests, blake2b-128 of roles, texts and tools: two rows are duplicates
if they say the same, be it as messages or as a prompt with its completion, whatever their
attributes. Prompts without an answer are, if attributes and other fields are the same, too.

Shape legend: R well-formed rows of a file, N rows of several, V rows for validation, P pairs; 2
halves of a digest.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vox_core.cache import CACHE_VERSION, cached
from vox_core.contract import DataPolicy
from vox_core.data.faults import RowError, RowFault
from vox_core.data.messages import Message
from vox_core.data.records import Progress, read_lines
from vox_core.data.rows import Answers, Record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.data.checked import CheckedFile

    Digests: TypeAlias = NDArray[np.uint64]
    Codes: TypeAlias = NDArray[np.uint8]
    Pairs: TypeAlias = NDArray[np.int64]
    Bools: TypeAlias = NDArray[np.bool_]

KEPT, HELD_OUT = 0, 1
MALFORMED = "malformed"
REASONS: dict[str, str] = {
    "unrated": "no rating, with --unrated drop",
    "rating": "its rating is below --min-rating",
    "category": "its category is not in --category",
    "lane": "its lane is not in --lane",
    "tag": "none of its tags is in --tag",
    "too short": "fewer characters than --min-chars",
    "too long": "more characters than --max-chars",
    "duplicate": "same content as an earlier row (--dedup exact, near)",
    "near duplicate": "nearly the same content as an earlier row (--dedup near)",
}
"""Why a row is left out; the first that applies counts. The guide prints this table."""
NAMES = ("kept", "held out", *REASONS)
"""What becomes of a row, by its code."""
CODES = {name: code for code, name in enumerate(NAMES)}

NO_VALUE = -1
"""Code of a row without the attribute."""
FILTERS = {"category": "category", "lane": "lane", "tag": "tags"}
"""Filter -> column that has a code for each of its values."""
ROW = np.dtype(
    [
        ("line", "<i8"),
        ("said", "<u8", 2),
        ("whole", "<u8", 2),
        ("chars", "<i8"),
        ("rating", "<f8"),
        *((name, "<i4") for name in FILTERS.values()),
    ]
)
"""Facts about a row: its line, from 1; content digests, the second also of weights and other
fields; the characters that it says; its rating, NaN for none; and of its category, lane and tags
the index in `RowFacts.names`, `NO_VALUE` for none."""
_PACKED = struct.Struct("<q16s16sqdiii")
"""`ROW`, from Python values."""
_FILE = "facts.npz"


@dataclass(frozen=True, slots=True, eq=False)
class RowFacts:
    """Facts about the rows of a file.

    Args:
        rows_R: `ROW`.
        names: "category" and "lane" -> values; "tags" -> the tags of a row, several together.
        faults: (line, fault) of malformed rows; a line may have several.
        unused: field that means nothing to vox -> rows that have it.
    """

    rows_R: NDArray[np.void]
    names: Mapping[str, list[Any]]
    faults: list[tuple[int, RowFault]]
    unused: Mapping[str, int]

    @property
    def rows(self) -> int:
        return len(self.rows_R)

    @property
    def malformed(self) -> int:
        """Lines with a fault."""
        return len({line for line, _ in self.faults})


def collect(found: Iterable[tuple[int, Record | RowError]]) -> RowFacts:
    """Collect the facts of rows, each with its line, or with its faults."""
    packed, unused = bytearray(), Counter[str]()
    known: dict[str, dict[Any, int]] = {name: {} for name in FILTERS.values()}
    faults: list[tuple[int, RowFault]] = []
    for line, row in found:
        if isinstance(row, RowError):
            faults += ((line, fault) for fault in row.faults)
            continue
        says = row.attributes
        rating = float("nan") if says.rating is None else says.rating
        named = says.category, says.lane, tuple(sorted({*says.tags})) or None
        codes = [
            NO_VALUE if value is None else numbers.setdefault(value, len(numbers))
            for numbers, value in zip(known.values(), named, strict=True)
        ]
        packed += _PACKED.pack(row.line, *digests(row), characters(row), rating, *codes)
        unused.update(row.unused)
    names = {name: list(numbers) for name, numbers in known.items()}
    return RowFacts(np.frombuffer(packed, ROW), names, faults, unused)


def facts_of(file: CheckedFile, answers: Answers, progress: Progress | None = None) -> RowFacts:
    """The facts of a file, from the cache or taken now.

    Args:
        answers: as for `parse_row`.
    """

    def make(folder: Path) -> None:
        facts = collect(read_lines(file.path, file.lines, progress, answers))
        file.require_unchanged()
        _write(folder, facts)

    return cached("facts", f"{file.source.key}-{CACHE_VERSION}-{answers}", make, _read).value


TORN = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile)
"""Errors of a `.npz` file that is not whole or not what is expected; zip has checksums."""


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of a `.npz` file; `TORN` if it is."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
        return dict(found)


def _write(folder: Path, facts: RowFacts) -> None:
    faults = [(line, fault.to_json()) for line, fault in facts.faults]
    about = {"names": facts.names, "faults": faults, "unused": facts.unused}
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez(folder / _FILE, allow_pickle=False, rows_R=facts.rows_R, about=text)


def _read(folder: Path, _owner: object) -> RowFacts | None:
    try:
        arrays = read_arrays(folder / _FILE)
        about = json.loads(arrays["about"].tobytes())
        faults = [(line, RowFault.from_json(fault)) for line, fault in about["faults"]]
        return RowFacts(arrays["rows_R"], about["names"], faults, about["unused"])
    except TORN:
        return None


# --- content --------------------------------------------------------------------------------------


def digests(record: Record) -> tuple[bytes, bytes]:
    """Content digest, and one of weights and a prompt's other fields, too; 16 bytes each.

    Hashed is, before each content, its role and length, so that no two conversations are written
    alike; what else a message or a row has follows as JSON with sorted keys.
    """
    messages = record.messages or ()
    said = _said(messages) if record.text is None else f"text {len(record.text)} {record.text}"
    if record.rejected or record.tools:
        said = f"{said}rejected {_said(record.rejected)}tools {_json(record.tools)}"
    digest = _digest(said)
    if not record.others and all(message.weight is None for message in messages):
        return digest, digest
    return digest, _digest(f"{digest.hex()} {[m.weight for m in messages]} {_json(record.others)}")


def characters(record: Record) -> int:
    """Characters of the text, or of all messages together."""
    if record.text is not None:
        return len(record.text)
    return sum([len(message.content) for message in record.messages or ()])


def row_text(record: Record) -> str:
    """All that is said, in order, without roles; tools, calls and other fields as JSON."""
    if record.text is not None:
        return record.text
    parts = [_json(each) for each in (record.tools, record.others) if each]
    for message in (*(record.messages or ()), *record.rejected):
        parts += [message.content, *([_json(message.extra)] if message.extra else [])]
    return "\n".join(parts).encode(errors="replace").decode()  # others may have half a surrogate


def _said(messages: Sequence[Message]) -> str:
    return "".join(
        [
            f"{m.role} {len(m.content)} {m.content}{_json(m.extra) if m.extra else ''}"
            for m in messages
        ]
    )


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=dict, ensure_ascii=False)


def _digest(said: str) -> bytes:
    return blake2b(said.encode("utf-8", "surrogatepass"), digest_size=16).digest()


# --- filters, dedup, split ------------------------------------------------------------------------


def filtered(facts: RowFacts, policy: DataPolicy) -> Codes:
    """uint8 (R,): `KEPT`, or the code of the first filter that a row does not pass."""
    code_R = np.zeros(facts.rows, np.uint8)
    unrated_R = np.isnan(facts.rows_R["rating"])
    refused: dict[str, Bools] = {}
    if policy.unrated == "drop":
        refused["unrated"] = unrated_R
    if policy.min_rating is not None:
        refused["rating"] = ~unrated_R & (facts.rows_R["rating"] < policy.min_rating)
    for name, column in FILTERS.items():
        if wanted := getattr(policy, name):
            each = ({*tags} if name == "tag" else {tags} for tags in facts.names[column])
            fits = [*(not values.isdisjoint(wanted) for values in each), False]  # of `NO_VALUE`
            refused[name] = ~np.array(fits)[facts.rows_R[column]]
    refused["too short"] = facts.rows_R["chars"] < policy.min_chars
    if policy.max_chars:
        refused["too long"] = facts.rows_R["chars"] > policy.max_chars
    for reason, refused_R in refused.items():
        code_R[(code_R == KEPT) & refused_R] = CODES[reason]
    return code_R


def value_counts(
    facts: Sequence[RowFacts], name: str, rows: NDArray[np.int64] | slice = slice(None)
) -> Counter[str]:
    """Values of "category", "lane" or "tags" -> rows that have them.

    Args:
        rows: which rows of each file to count.
    """
    counts: Counter[str] = Counter()
    for each in facts:
        code_R = each.rows_R[name][rows]
        found = np.bincount(code_R[code_R >= 0], minlength=len(each.names[name])).tolist()
        for value, number in zip(each.names[name], found, strict=True):
            for single in value if name == "tags" else (value,):
                counts[single] += number
    return +counts


def duplicates(digest_N2: Digests) -> Pairs:
    """Rows whose digest an earlier row has: int64 (P, 2), row and the first such row, in order."""
    order_N = np.lexsort((digest_N2[:, 1], digest_N2[:, 0]))  # stable
    sorted_N2 = digest_N2[order_N]
    new_N = np.ones(len(order_N), np.bool_)
    new_N[1:] = (sorted_N2[1:] != sorted_N2[:-1]).any(axis=1)
    first_N = order_N[new_N][np.cumsum(new_N) - 1]
    pairs_P2 = np.stack([order_N[~new_N], first_N[~new_N]], axis=1)
    return pairs_P2[np.argsort(pairs_P2[:, 0])]


def held_out(said_N2: Digests, share: float) -> Bools:
    """Which rows are held out: those in a fixed part of all digests. A row keeps its side when the
    set grows, and a larger `share` holds out the same rows and others."""
    return said_N2[:, 0] < np.uint64(min(int(share * 2**64), 2**64 - 1))
