"""What a row says, as a digest: who says what, in which order, and nothing of how it is written.

Two rows have the same digest if the same is said, be it as messages or as a prompt with its
completion, with whatever attributes. `whole` counts in what is trained of it as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from vox_core.data.messages import Message
from vox_core.data.records import Record

SIZE = 16
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=dict).encode


def digests(record: Record) -> tuple[bytes, bytes]:
    """Of what is said; and of that with the weights of the messages."""
    said: list[Any] = [record.text, _said(record.messages or ())]
    if record.rejected or record.tools:
        said += [_said(record.rejected), list(record.tools)]
    digest = _digest(said)
    weights = [message.weight for message in record.messages or ()]
    if not any(weight is not None for weight in weights):
        return digest, digest
    return digest, _digest([digest.hex(), weights])


def chars(record: Record) -> int:
    """Characters of all that is said: of the text, or of the messages together."""
    if record.text is not None:
        return len(record.text)
    return sum([len(message.content) for message in record.messages or ()])


def text_of(record: Record) -> str:
    """All that is said, in order, without who says it."""
    if record.text is not None:
        return record.text
    return "\n".join([message.content for message in record.messages or ()])


def _said(messages: Sequence[Message]) -> list[Any]:
    return [
        (m.role, m.content) if m.extra is None else (m.role, m.content, m.extra) for m in messages
    ]


def _digest(value: list[Any]) -> bytes:
    return blake2b(_encode(value).encode(), digest_size=SIZE).digest()
