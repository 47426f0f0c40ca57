"""What a row says, as a digest: who says what, in which order, and nothing of how it is written.

Two rows have the same digest if the same is said, be it as messages or as a prompt with its
completion, with whatever attributes. The second digest counts in what is trained of it as well.

What is hashed is the role and the length before each content, so that no two conversations are
written alike; what else a message or a row has follows as JSON with sorted keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b

from vox_core.data.messages import Message
from vox_core.data.records import Record

SIZE = 16
"""Bytes of a digest."""


def digests(record: Record) -> tuple[bytes, bytes]:
    """Of what is said; and of that with the weights of the messages."""
    messages = record.messages or ()
    said = _said(messages) if record.text is None else f"text {len(record.text)} {record.text}"
    if record.rejected or record.tools:
        said = f"{said}rejected {_said(record.rejected)}tools {_json(record.tools)}"
    digest = _digest(said)
    if all(message.weight is None for message in messages):
        return digest, digest
    return digest, _digest(f"{digest.hex()} {[message.weight for message in messages]}")


def chars(record: Record) -> int:
    """Characters of all that is said: of the text, or of the messages together."""
    if record.text is not None:
        return len(record.text)
    return sum([len(message.content) for message in record.messages or ()])


def text_of(record: Record) -> str:
    """All that is said, in order, without who says it; tools and calls of them as JSON."""
    if record.text is not None:
        return record.text
    parts = [_json(record.tools)] if record.tools else []
    for message in (*(record.messages or ()), *record.rejected):
        parts += [message.content, *([_json(message.extra)] if message.extra else [])]
    return "\n".join(parts)


def _said(messages: Sequence[Message]) -> str:
    return "".join(
        [
            f"{m.role} {len(m.content)} {m.content}{_json(m.extra) if m.extra else ''}"
            for m in messages
        ]
    )


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=dict)


def _digest(said: str) -> bytes:
    return blake2b(said.encode("utf-8", "surrogatepass"), digest_size=SIZE).digest()
