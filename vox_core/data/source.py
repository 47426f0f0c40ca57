"""A data file of any format as JSONL, made once and kept in the cache.

    plain JSONL           itself
    anything else         read once, streaming, into a JSONL file in the cache, line N for row N

What comes after (checks, blocks, processes, masks of rows) reads JSONL alone. A compressed file is
expanded first, within `MAX_RATIO`: a few kilobytes can hold a terabyte. Plugins read the formats
that they declare in `row-sources`. A row that cannot be read is a line with its faults
(`json_rows.unread`), so that it is reported where it stands, together with the others. No more of a
file is in memory than a row at a time.

An entry is named after the file's bytes, its format, `[data.fields]` and `CACHE_VERSION`. A torn or
altered one is made anew.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeAlias

from vox_core import files
from vox_core.cache import CACHE_VERSION, cached, file_sha256
from vox_core.contract import RowStream
from vox_core.data.faults import FileError, RowError, RowFault, changed
from vox_core.data.fields import NO_FIELDS, FieldMap, mapped
from vox_core.data.formats import POINT, Format, format_of, is_remote
from vox_core.data.json_rows import (
    BOM,
    MAX_LINE_BYTES,
    bounded_lines,
    json_rows,
    no_text,
    parse_object,
    too_long,
    unread,
)
from vox_core.data.tables import table_rows, text_rows, with_values
from vox_core.errors import BackendError, DataError, StorageError
from vox_core.host.load import call_hook, foreign_errors, provider, providers

KIND = "lines"
_ROWS, _SHA256 = "rows.jsonl", "rows.sha256"
MAX_RATIO = 1000
FREE_BYTES = 100_000_000
"""What may come out of a file whatever its size."""
_ZSTD_WINDOW = 1 << 27
_ZSTD_BYTES = 1 << 12
"""Compressed bytes at a time: a block of 128 KiB may take four of them."""

Row: TypeAlias = "bytes | dict[str, object] | RowError"
"""A line as it is, a row, or what is wrong with one."""


@dataclass(frozen=True, slots=True)
class RowSource:
    """A data file, and its rows as lines.

    Args:
        lines: a JSONL file; `path` itself, if it is one and no field is elsewhere.
        key: SHA-256 of all that decides the rows; for plain JSONL, of the file's bytes.
        owner: of a temporary folder that holds `lines`.
    """

    path: Path
    lines: Path
    key: str
    owner: object = None


def open_source(path: Path, fields: FieldMap = NO_FIELDS) -> RowSource:
    """A data file as JSONL.

    Raises:
        DataError: D010, a plugin or library is missing; what the plugin says of a remote data set.
        StorageError: the file cannot be read, or not even a temporary folder written.
    """
    format_ = format_of(path)
    if format_ == Format("jsonl", "") and not fields:
        return RowSource(path, path, file_sha256(path))
    stream = _opened_by_plugin(str(path), path, format_) if is_remote(path) else None
    content = stream.fingerprint if stream else file_sha256(path)
    readers = providers(POINT, format_.name) if stream or format_.kind == "plugin" else []
    versions = [f"{each.id} {each.shown_version}" for each in readers]
    decides = [content, *format_, versions, sorted(fields.items()), CACHE_VERSION]
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def make(folder: Path) -> None:
        lines = _lines(path, format_, stream, fields, folder)
        with files.storage_errors(path), closing(lines), (folder / _ROWS).open("wb") as file:
            file.writelines(lines)
        (folder / _SHA256).write_text(file_sha256(folder / _ROWS))
        if not stream and file_sha256(path) != content:
            raise changed(path)  # else these would be kept as the rows of other bytes

    def read(folder: Path, owner: object) -> RowSource | None:
        lines = folder / _ROWS
        try:
            same = file_sha256(lines) == (folder / _SHA256).read_text()
        except (OSError, StorageError):
            return None
        return RowSource(path, lines, key, owner) if same else None

    return cached(KIND, key, make, read).value


def _lines(
    path: Path, format_: Format, stream: RowStream | None, fields: FieldMap, folder: Path
) -> Generator[bytes, None, None]:
    """A line for each row; a fault for all that cannot be read."""
    size, limit = 0, None if stream else most_bytes(path.stat().st_size)
    try:
        for row in _rows(path, format_, stream, fields, folder):
            line = _line(row, fields, format_.kind) + b"\n"
            size += len(line)
            if limit and size > limit:
                raise too_much(limit)
            yield line
    except RowError as fault:
        yield unread(fault) + b"\n"


def _rows(
    path: Path, format_: Format, stream: RowStream | None, fields: FieldMap, folder: Path
) -> Iterator[Row]:
    """Yield each row of a file; after a `RowError` nothing more can be read."""
    if stream:
        yield from map(dict, stream.rows)
        return
    with _expanded(path, format_, folder) as file:
        if format_.kind == "plugin":
            yield from map(dict, _opened_by_plugin(str(file), path, format_).rows)
            return
        with file.open("rb") as start:
            if fault := no_text(start.read(8)):
                raise FileError(fault)
        match format_.kind:
            case "json":
                yield from json_rows(file)
            case "csv" | "tsv":
                yield from table_rows(file, "," if format_.kind == "csv" else "\t", fields)
            case "text":
                yield from text_rows(file)
            case _:
                yield from _jsonl_rows(file)


def _jsonl_rows(path: Path) -> Iterator[bytes | RowError]:
    """Each line, blank ones too: they count."""
    with path.open("rb") as file:
        for number, line in enumerate(bounded_lines(file)):
            if line is None:
                yield too_long("line")
            else:
                yield line.rstrip(b"\r\n") if number else line.rstrip(b"\r\n").removeprefix(BOM)


def _line(row: Row, fields: FieldMap, kind: str) -> bytes:
    """A row as JSON, or its faults."""
    try:
        if isinstance(row, RowError):
            raise row
        if isinstance(row, bytes):
            if not fields or not row.strip():
                return row
            row = parse_object(row)
        values = mapped(row, fields) if kind != "text" else row  # which has no columns
        if kind in ("csv", "tsv"):
            values = with_values(values)
        if len(line := _json(values)) > MAX_LINE_BYTES:
            raise too_long("row")
        return line
    except RowError as fault:
        return unread(fault)


def _json(values: dict[str, object]) -> bytes:
    try:
        return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which is a fault of the row
        return json.dumps(values, separators=(",", ":")).encode()
    except TypeError as error:  # of a plugin's row
        fault = RowFault("unsupported", (), str(error), "values that JSON has")
        raise RowError(fault) from error


# --- plugins --------------------------------------------------------------------------------------


def _opened_by_plugin(reference: str, path: Path, format_: Format) -> RowStream:
    """The rows that a plugin reads (D010 without one), or what the plugin raises."""
    try:
        plugin = provider(POINT, format_.name)
    except BackendError as error:
        raise DataError(
            "D010",
            "this data needs a plugin",
            where=path,
            found=f"{error.what}; {error.found}" if error.found else error.what,
            expected=f"a plugin that reads {format_.name}",
            remedy=error.remedy,
        ) from error
    stream: RowStream = call_hook(plugin, "vox_open_rows", RowStream, reference=reference)
    return RowStream(_guarded(plugin.id, stream.rows), stream.fingerprint)


def _guarded(plugin: str, rows: Iterable[object]) -> Iterator[Mapping[str, object]]:
    """A plugin's rows; what it raises that is no fault of the data is a `PluginError`."""
    fault = None
    with foreign_errors(plugin, "vox_open_rows", "plugin"):
        try:
            for row in rows:
                if not isinstance(row, Mapping):
                    raise TypeError(f"a row is a {type(row).__name__}, expected a mapping")
                yield row
        except RowError as error:
            fault = error
    if fault:
        raise fault


# --- compressed files -----------------------------------------------------------------------------


def most_bytes(size: int) -> int:
    """Return the most bytes that a compressed file of `size` bytes may expand to."""
    return max(FREE_BYTES, MAX_RATIO * size)


def too_much(limit: int) -> RowError:
    return _damaged(f"data that expand to more than {limit:,} bytes", "less")


def _damaged(found: str, expected: str) -> FileError:
    return FileError(RowFault("damaged file", (), found, expected))


@contextmanager
def _expanded(path: Path, format_: Format, folder: Path) -> Iterator[Path]:
    """A file, or a temporary one in `folder` with what it holds compressed."""
    if not format_.compression:
        yield path
        return
    limit = most_bytes(path.stat().st_size)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        expanded = Path(temporary) / path.stem
        with path.open("rb") as raw, expanded.open("wb") as file:
            for data in _pieces(raw, path, format_.compression):
                file.write(data)
                if file.tell() > limit:
                    raise too_much(limit)
        yield expanded


def _pieces(raw: IO[bytes], path: Path, compression: str) -> Iterator[bytes]:
    """Yield the decompressed content of a file.

    Raises:
        DataError: D010, zstandard is not installed.
        FileError: it is damaged.
    """
    try:
        if compression == "gzip":
            yield from iter(partial(gzip.GzipFile(fileobj=raw).read, 1 << 20), b"")
        else:
            yield from _zstd(raw, path)
    except EOFError:
        found = f"{compression} data that end before they are complete"
        raise _damaged(found, "all of them") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(f"damaged {compression} data ({error})", "whole ones") from None


def _zstd(raw: IO[bytes], path: Path) -> Iterator[bytes]:
    """Decompress zstandard; EOFError and zlib.error as of gzip."""
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            "D010",
            "this data needs zstandard, which is not installed",
            where=path,
            found=error,
            remedy="pip install zstandard",
        ) from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame, data = None, b""
    try:
        while data := data or raw.read(_ZSTD_BYTES):
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data
            if frame.eof:
                frame = None
    except zstandard.ZstdError as error:
        said = str(error).rpartition(": ")[2]  # the library names its own function before
        raise zlib.error(said) from None
    if frame:
        raise EOFError
