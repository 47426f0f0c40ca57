"""Rows of Parquet and Arrow files, through pyarrow, and of Hugging Face data sets.

    train.parquet
    data-00000-of-00001.arrow              what `save_to_disk` of the datasets library writes
    hf:owner/name                          split "train"
    hf:owner/name:config@validation

Arrow has no absent fields: a null in a row, or in an object within it, is left out. Values that
JSON lacks become a description, never text to be trained: a time its ISO form, bytes an object with
their number. A number that is not finite is null.

The datasets library fetches a data set and keeps it in its own cache; code that a data set brings
is never run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from vox_core.api.rows import RowError, RowFault, most_bytes, too_much
from vox_core.contract import RowStream
from vox_core.errors import DataError

ROWS_AT_A_TIME = 64
"""A row may have ten megabytes."""
_ID = re.compile(
    r"hf:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?"
)
_SPLIT = "train"


def open_rows(reference: str) -> RowStream:
    """The rows of a file or a data set.

    Raises:
        DataError: D010, the datasets library is not installed; D011, `reference` names no data set;
            D012, the data set cannot be loaded.
    """
    if reference.startswith("hf:"):
        return _hub(reference)
    path = Path(reference)
    if path.suffix.lower() == ".parquet":
        return RowStream(_rows(path, _parquet, "Parquet"))
    return RowStream(_rows(path, _arrow, "Arrow"))


def _rows(path: Path, batches: Any, name: str) -> Iterator[dict[str, object]]:
    """Each row.

    Raises:
        RowError: from here on nothing can be read.
    """
    from pyarrow import ArrowException

    try:
        for batch in batches(path):
            for row in batch.to_pylist():
                yield plain_row(row)
    except (ArrowException, OSError, ValueError) as error:
        said = str(error).strip().split("\n")[0]
        found = f"no {name} that can be read ({said})"
        raise RowError(RowFault("damaged file", (), found, name)) from None


def _parquet(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16) as file:
        _require_unique(file.schema_arrow.names)
        groups = (file.metadata.row_group(n) for n in range(file.num_row_groups))
        most = most_bytes(path.stat().st_size)
        if sum(group.total_byte_size for group in groups) > most:  # a page is read whole
            raise too_much(most)
        yield from file.iter_batches(ROWS_AT_A_TIME, use_threads=False)


def _arrow(path: Path) -> Iterator[Any]:
    """Of the stream format, which the datasets library writes, or the file format."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            file = pyarrow.ipc.open_stream(source)
            batches = iter(file)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(n) for n in range(file.num_record_batches))
        _require_unique(file.schema.names)
        for batch in batches:
            for at in range(0, batch.num_rows, ROWS_AT_A_TIME):
                yield batch.slice(at, ROWS_AT_A_TIME)


def _require_unique(names: list[str]) -> None:
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RowError(
            RowFault("repeated key", (), f'the column "{twice}" more than once', "it once")
        )


def plain_row(row: dict[str, Any]) -> dict[str, object]:
    """A row with values that JSON has."""
    return {str(name): _plain(value) for name, value in row.items() if value is not None}


def _plain(value: Any) -> object:
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return plain_row(value)
        case list() | tuple():
            return [_plain(each) for each in value]
        case bytes() | bytearray():
            return {"bytes": len(value)}
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal():
            return _plain(float(value))
        case _:
            return {"type": type(value).__name__}


def _hub(reference: str) -> RowStream:
    found = _ID.fullmatch(reference)
    if found is None:
        raise DataError(
            "D011",
            "this names no data set of the hub",
            where=reference,
            expected="hf:owner/name, hf:owner/name:config or hf:owner/name@split",
            remedy="correct the id; it is the one in the address of the data set's page",
        )
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "D010",
            "this data needs datasets, which is not installed",
            where=reference,
            found=error,
            expected="the package datasets",
            remedy="pip install datasets",
        ) from error
    try:
        rows = datasets.load_dataset(found["name"], found["config"], split=found["split"] or _SPLIT)
    except Exception as error:
        raise DataError(
            "D012",
            "a data set of the hub cannot be had",
            where=reference,
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            remedy="check its name, its splits and the network; "
            "`huggingface-cli login` for one that needs an account",
        ) from error
    # The library offers its fingerprint of a data set's state under this name only.
    return RowStream(map(plain_row, rows), str(rows._fingerprint))
