"""A text file as rows of the form text: the whole file is one document.

Blank lines separate paragraphs, not documents. A file of more than `PIECE` bytes is several
documents, each cut at a line end, because a row has a bounded size. Lines end in a line feed,
whatever the file has.
"""

from __future__ import annotations

from collections.abc import Iterator

from vox_core.data.faults import FileError, RowError, RowFault
from vox_core.data.jsonl import BOM, no_text
from vox_core.data.readers.opened import Stream

PIECE = 4_000_000


def text_rows(stream: Stream) -> Iterator[dict[str, object]]:
    """Each document that says something.

    Raises:
        RowError: the file is no UTF-8; nothing more can be read.
    """
    data, offset = stream.read(PIECE), 0
    if meaning := no_text(data):
        raise FileError(meaning)
    data = data.removeprefix(BOM)
    while data:
        data += stream.read(PIECE - len(data))
        end = _end(data)
        text = _decode(data[:end], offset).replace("\r\n", "\n")
        if text.strip():
            yield {"text": text}
        data, offset = data[end:], offset + end
        data = data or stream.read(PIECE)


def _end(data: bytes) -> int:
    """Where a document ends: with the file, after the last line end, or between characters."""
    if len(data) < PIECE:
        return len(data)
    if end := data.rfind(b"\n") + 1:
        return end
    end = len(data)
    while end and data[end - 1] & 0xC0 == 0x80:  # the character's first byte stays with the rest
        end -= 1
    return max(1, end - 1)


def _decode(data: bytes, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"invalid UTF-8 (0x{data[error.start]:02x}, byte {offset + error.start})"
        raise RowError(RowFault("invalid UTF-8", (), found, "UTF-8")) from None
