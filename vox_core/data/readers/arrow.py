"""Rows of Parquet, some at a time, through pyarrow.

Arrow has no field that is absent: a null in a row or in an object within it is left out. What JSON
does not have is told as what it is (a time as text, bytes as an object that says how many), never
as text to be trained; a number that is not finite is null.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from vox_core.data.faults import RowError, RowFault
from vox_core.data.readers.needed import needed
from vox_core.data.readers.opened import most_bytes, too_much

ROWS_AT_A_TIME = 64
"""A row may have ten megabytes."""


def parquet_rows(path: Path) -> Iterator[dict[str, object]]:
    """Each row.

    Raises:
        DataError: D010, pyarrow is not installed.
        RowError: from here on nothing can be read.
    """
    parquet, arrow = needed("pyarrow.parquet", path), needed("pyarrow", path)
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16) as file:
            names = file.schema_arrow.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                found = f'the column "{twice}" more than once'
                raise RowError(RowFault("repeated key", (), found, "it once"))
            groups = (file.metadata.row_group(n) for n in range(file.num_row_groups))
            most = most_bytes(path.stat().st_size)
            if sum(group.total_byte_size for group in groups) > most:  # a page is read whole
                raise too_much(most)
            for batch in file.iter_batches(ROWS_AT_A_TIME, use_threads=False):
                for row in batch.to_pylist():
                    yield plain_row(row)
    except (arrow.ArrowException, OSError, ValueError) as error:
        said = str(error).strip().split("\n")[0]
        found = f"no Parquet that can be read ({said})"
        raise RowError(RowFault("damaged file", (), found, "Parquet")) from None


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
