"""A data file of any format as JSONL, made once and kept in the cache.

An entry is named after the file's bytes, its format, `[data.fields]` and `CACHE_VERSION`. A torn or
altered one is made anew.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from vox_core import files
from vox_core.cache import CACHE_VERSION, cached
from vox_core.contract import RowStream
from vox_core.data.faults import RowError, changed
from vox_core.data.fields import NO_FIELDS, FieldMap, mapped
from vox_core.data.formats import POINT, Format, format_of, is_plain, is_remote
from vox_core.data.jsonl import BOM, MAX_LINE_BYTES, parse_object, too_long, unread
from vox_core.data.readers.json_rows import json_rows
from vox_core.data.readers.opened import most_bytes, opened, too_much
from vox_core.data.readers.tables import table_rows, text_rows, with_values
from vox_core.data.rows import refuse_columns
from vox_core.errors import BackendError, DataError, StorageError
from vox_core.hashes import file_sha256
from vox_core.host.load import call_hook, foreign_errors
from vox_core.host.provide import provider

KIND = "lines"
_ROWS, _ENTRY = "rows.jsonl", "entry.json"

Item: TypeAlias = "bytes | dict[str, object] | RowError"
"""A line as it is, a row, or what is wrong with one."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data file, and its rows as lines.

    Args:
        path: what was named.
        lines: a JSONL file; `path` itself, if it is one and no field is elsewhere.
        key: SHA-256 of all that decides the rows; for plain JSONL, of the file's bytes.
        owner: of a temporary folder that holds `lines`.
    """

    path: Path
    lines: Path
    key: str
    owner: object = None


def open_source(path: Path, fields: FieldMap = NO_FIELDS) -> Source:
    """A data file as JSONL.

    Raises:
        DataError: D010, a plugin or library is missing; what the plugin says of a remote data set.
        StorageError: the file cannot be read, or not even a temporary folder written.
    """
    if is_plain(path) and not fields:
        return Source(path, path, file_sha256(path))
    format_ = format_of(path)
    if format_.kind == "text":
        fields = NO_FIELDS  # a text file has no columns
    stream = _opened_by_plugin(str(path), path, format_) if is_remote(path) else None
    content = stream.fingerprint if stream else file_sha256(path)
    decides = [content, *format_, sorted(fields.items()), CACHE_VERSION]
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def make(folder: Path) -> None:
        items = _items(path, format_, stream, fields)
        with files.storage_errors(path), closing(items):
            limit = None if stream else most_bytes(path.stat().st_size)
            _write(folder, items, fields, limit, is_text=format_.kind in ("csv", "tsv"))
        if not stream and file_sha256(path) != content:
            raise changed(path)  # else these would be kept as the rows of other bytes

    def read(folder: Path, owner: object) -> Source | None:
        lines = folder / _ROWS
        try:
            entry = json.loads((folder / _ENTRY).read_bytes())
            same = lines.stat().st_size == entry["bytes"] and file_sha256(lines) == entry["sha256"]
        except (OSError, StorageError, ValueError, KeyError, TypeError):
            return None
        return Source(path, lines, key, owner) if same else None

    return cached(KIND, key, make, read).value


def _opened_by_plugin(reference: str, path: Path, format_: Format) -> RowStream:
    """The rows that a plugin reads.

    Raises:
        DataError: D010, no usable plugin reads this; or what the plugin raises.
    """
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
    stream: RowStream = call_hook(plugin, "vox_open_rows", reference=reference)
    return RowStream(_guarded(plugin.id, iter(stream.rows)), stream.fingerprint)


def _guarded(plugin: str, rows: Iterator[Mapping[str, object]]) -> Iterator[Mapping[str, object]]:
    """A plugin's rows; what it raises that is no fault of the data is a `PluginError`."""
    while True:
        fault = None
        with foreign_errors(plugin, "vox_open_rows", "plugin"):
            try:
                row = next(rows, None)
            except RowError as error:
                fault = error
        if fault:
            raise fault
        if row is None:
            return
        yield row


def _items(
    path: Path, format_: Format, stream: RowStream | None, fields: FieldMap
) -> Generator[Item, None, None]:
    """Each row of a file; a `RowError` is raised where nothing more can be read."""
    if stream:
        yield from map(dict, stream.rows)
        return
    kind = format_.kind
    if kind == "plugin":
        with _expanded(path) if format_.compression else nullcontext(path) as file:
            yield from map(dict, _opened_by_plugin(str(file), path, format_).rows)
        return
    with opened(path) as data:
        if kind == "jsonl":
            yield from data.lines()
        elif kind == "json":
            with opened(path) as again:
                opens = iter([data.read, again.read])
                yield from json_rows(lambda: next(opens))
        elif kind == "text":
            yield from text_rows(data)
        else:

            def refuse(names: Sequence[str]) -> None:
                refuse_columns([*mapped(dict.fromkeys(names, ""), fields)])

            yield from table_rows(data, "," if kind == "csv" else "\t", refuse)


@contextmanager
def _expanded(path: Path) -> Iterator[Path]:
    """A compressed file that is read here and there, expanded on the disk."""
    with tempfile.TemporaryDirectory(prefix="vox-expanded-") as folder, opened(path) as stream:
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
    values = mapped(item, fields) if fields else item
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
