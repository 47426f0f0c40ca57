"""Data sets of the Hugging Face hub: `hf:owner/name`, `hf:owner/name:config`,
`hf:owner/name@split`.

The `datasets` library fetches them, and keeps them where it keeps all; code that a data set brings
is never run. Without a split it is `train`. Its rows become JSONL in the cache once for each state
of the data set, which the library's fingerprint tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vox_core.data.readers.arrow import plain_row
from vox_core.data.readers.needed import needed
from vox_core.errors import DataError

_ID = re.compile(
    r"hf:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?"
)
SPLIT = "train"


class HubData(NamedTuple):
    """A data set that has been fetched."""

    fingerprint: str
    rows: Any

    def __iter__(self) -> Iterator[dict[str, object]]:
        return (plain_row(row) for row in self.rows)


def fetch(path: Path) -> HubData:
    """The data set that is meant.

    Raises:
        DataError: D010, there is no `datasets`; D011, it is no id; D012, it cannot be had.
    """
    found = _ID.fullmatch(str(path))
    if found is None:
        raise DataError(
            "D011",
            "this names no data set of the hub",
            where=path,
            expected="hf:owner/name, hf:owner/name:config or hf:owner/name@split",
            remedy="correct the id; it is the one in the address of the data set's page",
        )
    library = needed("datasets", path)
    try:
        rows = library.load_dataset(found["name"], found["config"], split=found["split"] or SPLIT)
        return HubData(str(rows._fingerprint), rows)
    except Exception as error:
        raise DataError(
            "D012",
            "a data set of the hub cannot be had",
            where=path,
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            remedy="check its name, its splits and the network; "
            "`huggingface-cli login` for one that needs an account",
        ) from error
