"""A data file as a stream of bytes, whatever it is compressed with, within limits.

Data that are torn or damaged, or that expand to more than anything that people write does, end with
a `RowError`. A compressed file of a few kilobytes can hold a terabyte: nothing here is kept in
memory beyond a window, and `MAX_RATIO` keeps it from the disk.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from vox_core.data.faults import RowError, RowFault
from vox_core.data.jsonl import MAX_LINE_BYTES, too_long
from vox_core.data.readers.formats import Compression, format_of
from vox_core.data.readers.needed import needed

MAX_RATIO = 1000
FREE_BYTES = 100_000_000
"""What may come out of a file whatever its size."""
_WINDOW = 1 << 27
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)


class Stream:
    """What is in a file, read forwards."""

    def __init__(self, file: IO[bytes], size: int, compression: Compression) -> None:
        self._file, self._compression = file, compression
        self._limit = most_bytes(size) if compression else None
        self._count = 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end.

        Raises:
            RowError: what is compressed is damaged, or expands too far.
        """
        with damage(self._compression):
            return self._counted(self._file.read(size))

    def lines(self) -> Iterator[bytes | RowError]:
        """Each line with its end; a fault for one that is too long.

        Raises:
            RowError: as `read`.
        """
        with damage(self._compression):
            while line := self._counted(self._file.readline(MAX_LINE_BYTES + 1)):
                if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
                    yield line
                    continue
                while part := self._counted(self._file.readline(MAX_LINE_BYTES)):
                    if part.endswith(b"\n"):
                        break
                yield too_long("line")

    def _counted(self, data: bytes) -> bytes:
        self._count += len(data)
        if self._limit and self._count > self._limit:
            raise too_much(self._limit)
        return data


def most_bytes(size: int) -> int:
    """What may come out of a file of `size` bytes."""
    return max(FREE_BYTES, MAX_RATIO * size)


def too_much(limit: int) -> RowError:
    """What is said of a file that holds more."""
    found = f"data that expand to more than {limit:,} bytes"
    return RowError(RowFault("damaged file", (), found, "less"))


@contextmanager
def opened(path: Path) -> Iterator[Stream]:
    """A data file, expanded as its name says.

    Raises:
        DataError: D010, zstandard is not installed.
        OSError: it cannot be read.
    """
    compression = format_of(path).compression
    with path.open("rb") as raw:
        size = path.stat().st_size
        if compression == "gzip":
            with gzip.GzipFile(fileobj=raw) as file:
                yield Stream(io.BufferedReader(file), size, compression)
        elif compression == "zstd":
            zstandard = needed("zstandard", path)
            reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(
                _WholeFrames(raw, zstandard), read_across_frames=True
            )
            with io.BufferedReader(reader) as file:
                yield Stream(file, size, compression)
        else:
            yield Stream(raw, size, compression)


@contextmanager
def damage(compression: Compression) -> Iterator[None]:
    """What the libraries say of compressed data that are no such data, as faults."""
    if not compression:
        yield
        return
    try:
        yield
    except EOFError:
        found = f"{compression} data that end before they are complete"
        raise RowError(RowFault("damaged file", (), found, "all of them")) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        found = f"damaged {compression} data ({error})"
        raise RowError(RowFault("damaged file", (), found, "whole ones")) from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        found = f"damaged {compression} data ({error})"
        raise RowError(RowFault("damaged file", (), found, "whole ones")) from None


class _WholeFrames:
    """A file of zstd frames; reading to its end raises EOFError where a frame is cut off, which the
    library passes over."""

    def __init__(self, file: IO[bytes], zstandard: Any) -> None:
        self._file, self._zstandard = file, zstandard

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if not data and not self._whole():
            raise EOFError
        return data

    def _whole(self) -> bool:
        """Whether the last frame is complete: the lengths of all blocks, added up."""
        end = self._file.seek(0, io.SEEK_END)
        at = 0
        try:
            while at < end:
                at = self._after_frame(at)
        except (IndexError, self._zstandard.ZstdError):
            return False
        finally:
            self._file.seek(0, io.SEEK_END)
        return at == end

    def _after_frame(self, at: int) -> int:
        head = self._at(at, 18)
        if int.from_bytes(head[:4], "little") in _SKIPPABLE:
            return at + 8 + int.from_bytes(head[4:8], "little")
        parameters = self._zstandard.get_frame_parameters(head)
        at += self._zstandard.frame_header_size(head)
        last = False
        while not last:
            header = self._at(at, 3)
            number = header[0] | header[1] << 8 | header[2] << 16
            last, kind, size = bool(number & 1), number >> 1 & 3, number >> 3
            at += 3 + (1 if kind == 1 else size)
        return at + (4 if parameters.has_checksum else 0)

    def _at(self, at: int, size: int) -> bytes:
        self._file.seek(at)
        return self._file.read(size)
