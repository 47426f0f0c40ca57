"""The JSONL that a data file is read as, made once and kept in the cache.

An entry is named after the file's bytes, its format, `[data.fields]` and `CACHE_VERSION`.
One that is torn or altered is made anew; it appears whole. Where the cache cannot be written, it
lies in a temporary folder as long as somebody has the `Source`. Entries that nobody has used for a
month go when another is made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from vox_core import files
from vox_core.cache import CACHE_VERSION, cache_folder, cache_root
from vox_core.data.faults import RowError
from vox_core.data.jsonl import BOM, MAX_LINE_BYTES, parse_object, too_long, unread
from vox_core.data.readers import hub
from vox_core.data.readers.arrow import parquet_rows
from vox_core.data.readers.formats import format_of, is_plain
from vox_core.data.readers.json_rows import json_rows
from vox_core.data.readers.mapping import NO_FIELDS, FieldMap, mapped
from vox_core.data.readers.opened import most_bytes, opened, too_much
from vox_core.data.readers.tables import table_rows, with_values
from vox_core.data.readers.text import text_rows
from vox_core.data.rows import refuse_columns
from vox_core.errors import OutputError, StorageError
from vox_core.hashes import file_sha256

FOLDER = "lines"
_ROWS, _ENTRY = "rows.jsonl", "entry.json"
_UNUSED_FOR = 30 * 24 * 3600.0
_LEFT_FOR = 24 * 3600.0

Item: TypeAlias = "bytes | dict[str, object] | RowError"
"""A line as it is, a row, or what is wrong with one."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data file, and its rows as lines.

    Args:
        path: what was named.
        lines: a JSONL file; `path` itself, if it is one and no field is elsewhere.
        key: SHA-256 of all that decides the rows; for plain JSONL, of the file's bytes.
        owner: kept as long as `lines` is needed.
    """

    path: Path
    lines: Path
    key: str
    owner: object = None


def open_source(path: Path, fields: FieldMap = NO_FIELDS) -> Source:
    """A data file as JSONL.

    Raises:
        DataError: D010, a library is missing; D011 and D012, of a data set of the hub.
        StorageError: the file cannot be read, or not even a temporary folder written.
    """
    if is_plain(path) and not fields:
        return Source(path, path, file_sha256(path))
    kind, compression = format_of(path)
    if kind == "text":
        fields = NO_FIELDS  # a text file has no columns
    fetched = hub.fetch(path) if kind == "hub" else None
    content = fetched.fingerprint if fetched else file_sha256(path)
    decides = [content, kind, compression, sorted(fields.items()), CACHE_VERSION]
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
    if lines := _recall(cache_root() / FOLDER / key):
        return Source(path, lines, key)

    def make(folder: Path) -> None:
        items = _items(path, fetched, fields)
        with files.storage_errors(path), closing(items):
            limit = None if kind == "hub" else most_bytes(path.stat().st_size)
            _write(folder, items, fields, limit, is_text=kind in ("csv", "tsv"))
        if not fetched and file_sha256(path) != content:
            from vox_core.data.records import changed

            raise changed(path)  # else these would be kept as the rows of other bytes

    return _kept(path, key, make)


def _kept(path: Path, key: str, make: Callable[[Path], None]) -> Source:
    try:
        folder = cache_folder(FOLDER) / key
        _clear(folder)
        try:
            with files.atomic_folder(folder) as temporary:
                make(temporary)
        except OutputError:  # another process was quicker
            if not _recall(folder):
                raise
        return Source(path, folder / _ROWS, key)
    except (OutputError, StorageError):
        pass  # then not in the cache
    with files.storage_errors(Path(tempfile.gettempdir())):
        owner = tempfile.TemporaryDirectory(prefix="vox-lines-", ignore_cleanup_errors=True)
        make(Path(owner.name))
    return Source(path, Path(owner.name) / _ROWS, key, owner)


def _items(
    path: Path, fetched: hub.HubData | None, fields: FieldMap
) -> Generator[Item, None, None]:
    """Each row of a file; a `RowError` is raised where nothing more can be read."""
    kind, compression = format_of(path)
    if fetched is not None:
        yield from fetched
        return
    if kind == "parquet":
        with _expanded(path) if compression else _as_it_is(path) as file:
            yield from parquet_rows(file)
        return
    with opened(path) as stream:
        if kind == "jsonl":
            yield from stream.lines()
        elif kind == "json":
            with opened(path) as again:
                opens = iter([stream.read, again.read])
                yield from json_rows(lambda: next(opens))
        elif kind == "text":
            yield from text_rows(stream)
        else:

            def refuse(names: Sequence[str]) -> None:
                refuse_columns([*mapped(dict.fromkeys(names, ""), fields)])

            yield from table_rows(stream, "," if kind == "csv" else "\t", refuse)


@contextmanager
def _as_it_is(path: Path) -> Iterator[Path]:
    yield path


@contextmanager
def _expanded(path: Path) -> Iterator[Path]:
    """A file that is read here and there, expanded on the disk."""
    with tempfile.TemporaryDirectory(prefix="vox-parquet-") as folder, opened(path) as stream:
        expanded = Path(folder) / path.stem
        with expanded.open("wb") as file:
            while data := stream.read(1 << 20):
                file.write(data)
        yield expanded


def _write(
    folder: Path, items: Iterator[Item], fields: FieldMap, limit: int | None, *, is_text: bool
) -> None:
    """A line for each row, and what the lines are."""
    sha256 = hashlib.sha256()
    with (folder / _ROWS).open("wb") as file:
        for line in _limited(_lines(items, fields, is_text=is_text), limit):
            file.write(line)
            sha256.update(line)
        size = file.tell()
    entry = {"bytes": size, "sha256": sha256.hexdigest()}
    (folder / _ENTRY).write_text(json.dumps(entry) + "\n", encoding="utf-8")


def _limited(lines: Iterator[bytes], limit: int | None) -> Iterator[bytes]:
    """As many lines as may come out of a file, and, where there are more, what is said of them."""
    size = 0
    for line in lines:
        size += len(line)
        if limit and size > limit:
            yield unread(too_much(limit)) + b"\n"
            return
        yield line


def _lines(items: Iterator[Item], fields: FieldMap, *, is_text: bool) -> Iterator[bytes]:
    first = True
    try:
        for item in items:
            try:
                yield _line(item, fields, first=first, is_text=is_text)
            except RowError as fault:
                yield unread(fault) + b"\n"
            first = False
    except RowError as fault:  # of the file from here on
        yield unread(fault) + b"\n"


def _line(item: Item, fields: FieldMap, *, first: bool, is_text: bool) -> bytes:
    if isinstance(item, RowError):
        raise item
    if isinstance(item, bytes):
        if not fields or not item.strip():
            return item if item.endswith(b"\n") else item + b"\n"
        item = parse_object(item.removeprefix(BOM) if first else item)
    values = mapped(item, fields)
    if is_text:
        values = with_values(values)
    line = _json(values)
    if len(line) > MAX_LINE_BYTES:
        raise too_long("row")
    return line + b"\n"


def _json(values: dict[str, object]) -> bytes:
    try:
        return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which is told where the row is looked at
        return json.dumps(values, separators=(",", ":")).encode()


def _recall(folder: Path) -> Path | None:
    """The lines that are kept, if they are whole."""
    try:
        entry = json.loads((folder / _ENTRY).read_bytes())
        lines = folder / _ROWS
        same = lines.stat().st_size == entry["bytes"] and file_sha256(lines) == entry["sha256"]
        with suppress(OSError):
            os.utime(folder / _ENTRY)
    except (OSError, StorageError, ValueError, KeyError, TypeError):
        return None
    return lines if same else None


def _clear(folder: Path) -> None:
    """Away with an entry that cannot be used, with old ones, and with what was left half made."""
    shutil.rmtree(folder, ignore_errors=True)
    for other in folder.parent.iterdir():
        left = other.name.startswith(files.TEMPORARY_PREFIX)
        used = other / _ENTRY if (other / _ENTRY).exists() else other
        with suppress(OSError):  # another process was quicker
            if used.stat().st_mtime < time.time() - (_LEFT_FOR if left else _UNUSED_FOR):
                shutil.rmtree(other, ignore_errors=True)
