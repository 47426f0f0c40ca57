"""vox plugin: look at data, mix it, and read it from Parquet, Arrow and Hugging Face data sets.

The hooks are below; the commands are in cli.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from vox_core.contract import Ints, RowStream
from vox_core.hookspecs import hookimpl


@hookimpl
def vox_open_rows(reference: str) -> RowStream:
    from vox_data.row_sources import open_rows

    return open_rows(reference)


@hookimpl
def vox_near_duplicates(texts: Iterable[str], count: int, threshold: float) -> Ints:
    from vox_data.near_duplicates import near_duplicates

    return near_duplicates(texts, count, threshold)
