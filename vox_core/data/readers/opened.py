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
from vox_core.data.formats import Compression, format_of
from vox_core.data.jsonl import MAX_LINE_BYTES, too_long
from vox_core.errors import DataError

MAX_RATIO = 1000
FREE_BYTES = 100_000_000
"""What may come out of a file whatever its size."""
_WINDOW = 1 << 27
_ZSTD_BYTES = 1 << 12
"""Compressed bytes at a time: a block of 128 KiB may take four of them."""


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
            with io.BufferedReader(_ZstdFrames(raw, path)) as file:
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
        said = str(error).rpartition(": ")[2]  # the library names its own function before
        found = f"damaged {compression} data ({said})"
        raise RowError(RowFault("damaged file", (), found, "whole ones")) from None


class _ZstdFrames(io.RawIOBase):
    """What is in the zstd frames of a file; EOFError where the last one is cut off.

    Raises:
        DataError: D010, zstandard is not installed.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError(
                "D010",
                "this data needs zstandard, which is not installed",
                where=path,
                found=error,
                expected="the package zstandard",
                remedy="pip install zstandard",
            ) from error
        self._file, self._data, self._rest = file, memoryview(b""), b""
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._data:
            if not (data := self._rest or self._file.read(_ZSTD_BYTES)):
                if self._frame:
                    raise EOFError
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._data = memoryview(self._frame.decompress(data))
            self._rest = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._data))
        buffer[:size] = self._data[:size]
        self._data = self._data[size:]
        return size
