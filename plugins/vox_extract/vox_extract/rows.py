"""Extracted rows with their provenance, and the filter that keeps them.

A row is a conversation of two turns, with the names that vox's own filters know: `category` is the
kind of question, `task_family` the kind of source, `lane` is always "extracted". Where it is from
stands in one field, `provenance`.

Left out, and counted by reason: answers that are too short to teach anything or longer than asked
for, texts with placeholders that only the library itself fills in, and what was said before.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

LANE = "extracted"
MIN_CHARACTERS = 12
MIN_WORDS = 3
MAX_CHARACTERS = 2000

# `%(name)s`, `${name}`, `{{name}}`, and the surrogates and control characters that no text has.
_PLACEHOLDER = re.compile(r"%\(\w{1,60}\)s|\$\{\w{1,60}\}|\{\{\s*\w{1,60}\s*\}\}")
_NOT_TEXT = re.compile(r"[\ud800-\udfff\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Extracted:
    """A row.

    Args:
        kind: of question: describe, signature, parameter, …
        family: python-docs or markdown-docs.
        same: what makes it a repetition: two rows of one kind with equal `same` say one thing.
        short: the answer may be as short as it is, for it is exact: code, a signature.
    """

    kind: str
    family: str
    question: str
    answer: str
    provenance: Mapping[str, str | int]
    same: str
    short: bool = False

    def line(self) -> bytes:
        """As a line of JSON."""
        messages = [
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": self.answer},
        ]
        fields = {
            "messages": messages,
            "category": self.kind,
            "lane": LANE,
            "task_family": self.family,
            "provenance": dict(self.provenance),
        }
        return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


@dataclass
class Sieve:
    """Says of each row whether it is kept, and counts.

    Args:
        max_characters: of an answer.
        left_out: reason -> rows.
    """

    max_characters: int = MAX_CHARACTERS
    left_out: Counter[str] = field(default_factory=Counter)
    _said: set[bytes] = field(default_factory=set)

    def keep(self, rows: Iterable[Extracted]) -> Iterator[Extracted]:
        """Yield the rows to keep, in order."""
        for row in rows:
            if reason := self._against(row):
                self.left_out[reason] += 1
            else:
                yield row

    def _against(self, row: Extracted) -> str | None:
        text = f"{row.question}\n{row.answer}"
        if _NOT_TEXT.search(text):
            return "not text"
        if _PLACEHOLDER.search(text):
            return "placeholder"
        if not row.short and _is_short(row.answer):
            return "too short"
        if len(row.answer) > self.max_characters:
            return "too long"
        return None if self._is_new(row) else "duplicate"

    def _is_new(self, row: Extracted) -> bool:
        """Neither its question nor what it says was there before."""
        keys = [_digest(row.question), _digest(row.kind, row.same)]
        if any(key in self._said for key in keys):
            return False
        self._said.update(keys)
        return True


def _is_short(answer: str) -> bool:
    return len(answer) < MIN_CHARACTERS or len(_WORD.findall(answer)) < MIN_WORDS


def spread(rows: Sequence[Extracted], limit: int) -> list[Extracted]:
    """`limit` rows from all over, in order: those whose questions have the smallest hashes."""
    chosen = sorted(range(len(rows)), key=lambda index: _digest(rows[index].question))[:limit]
    return [rows[index] for index in sorted(chosen)]


def fitting(parts: Sequence[str], max_characters: int) -> int:
    """Return how many parts fit, with a blank line between them; at least one."""
    length = 0
    for count, part in enumerate(parts):
        length += len(part) + 2 * bool(count)
        if count and length > max_characters:
            return count
    return len(parts)


def choose(templates: Sequence[str], *key: str) -> str:
    """Choose a template by a hash of the key."""
    return templates[int.from_bytes(_digest(*key)[:4]) % len(templates)]


def _digest(*parts: str) -> bytes:
    # A lone surrogate is looked at before its row is kept, and still must not stop the work.
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).digest()[:16]
