"""A folder of arrays that hold documents, written in one go and mapped when it is opened.

Each array is a file of its own, little-endian, without a header; `entry.json` says how large each
is, its SHA-256, and what became of the rows. A folder of which anything does not fit together is no
folder: `read` gives None, never what is left of it.

Nothing here knows where the folder lies or when it may be used (`kept.py`).

Shape legend: T tokens of all documents, D documents.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from vox_core.data.dataset import Dataset
from vox_core.data.documents import Columns, Documents
from vox_core.data.observed import Observed, Tally
from vox_core.errors import StorageError
from vox_core.hashes import file_sha256

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENTRY = "entry.json"
_ARRAYS = {
    "tokens_T": "<i4",
    "weights_T": "<f4",
    "starts_D1": "<i8",
    "sources_D": "<i4",
    "lines_D": "<i8",
    "ends_D": "<i4",
    "difficulty_D": "<f4",
}


@dataclass(frozen=True, slots=True)
class Part:
    """What became of some rows that follow one another in a file.

    Args:
        faults: of the rows that cannot be rendered.
        answers: rows that are not of the form text.
    """

    columns: Columns
    rows: int
    answers: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    truncated: Mapping[str, int] = field(default_factory=dict)
    faults: Sequence[str] = ()
    observed: Observed = field(default_factory=Observed)


class Writer:
    """Writes parts, in the order of their rows, into a folder; use it as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self.rows = self.answers = 0
        self.dropped: Counter[str] = Counter()
        self.truncated: Counter[str] = Counter()
        self._observed = Tally()
        self._tokens = 0

    def __enter__(self) -> Writer:
        self._files = {
            name: self._stack.enter_context(_Hashed(self._folder / name)) for name in _ARRAYS
        }
        self._write("starts_D1", np.zeros(1, np.int64))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def add(self, part: Part) -> None:
        columns = part.columns
        for name in _ARRAYS.keys() - {"starts_D1"}:
            self._write(name, getattr(columns, name))
        self._write("starts_D1", self._tokens + np.cumsum(columns.lengths_D, dtype=np.int64))
        self._tokens += len(columns.tokens_T)
        self.rows += part.rows
        self.answers += part.answers
        self.dropped.update(part.dropped)
        self.truncated.update(part.truncated)
        self._observed.add(part.observed)

    def finish(self, sources: Sequence[Path]) -> Dataset:
        """The data set, mapped; the folder is whole afterwards."""
        self._stack.close()
        found: dict[str, Any] = {
            "rows": self.rows,
            "dropped": dict(self.dropped),
            "truncated": dict(self.truncated),
            "observed": self._observed.observed().to_json(),
            "arrays": {
                name: {"bytes": file.size, "sha256": file.sha256.hexdigest()}
                for name, file in self._files.items()
            },
        }
        dataset = _open(self._folder, found, sources, None)
        found["digest"] = dataset.digest
        found["trained_tokens"] = dataset.trained_tokens
        text = json.dumps({**found, "sha256": _own_sha256(found)}, indent=2)
        (self._folder / ENTRY).write_text(text + "\n", encoding="utf-8")
        return dataset

    def _write(self, name: str, values: NDArray[Any]) -> None:
        self._files[name].write(values.astype(_ARRAYS[name], copy=False))


class _Hashed:
    """A file that is hashed as it is written."""

    def __init__(self, path: Path) -> None:
        self._path, self.size, self.sha256 = path, 0, hashlib.sha256()

    def __enter__(self) -> _Hashed:
        self._file: IO[bytes] = self._path.open("xb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values).tobytes()
        self._file.write(data)
        self.sha256.update(data)
        self.size += len(data)


def read(folder: Path, sources: Sequence[Path], owner: object = None) -> Dataset | None:
    """The data set in `folder`; None if there is none, or it is torn or altered.

    Args:
        sources: the data files, in the order in which they were read.
        owner: kept as long as the arrays are.
    """
    try:
        found = json.loads((folder / ENTRY).read_bytes())
        if found.pop("sha256") != _own_sha256(found) or not _intact(folder, found["arrays"]):
            return None
        return _open(folder, found, sources, owner)
    except (OSError, StorageError, ValueError, KeyError, AttributeError, TypeError):
        return None


def _intact(folder: Path, arrays: Mapping[str, Mapping[str, Any]]) -> bool:
    return arrays.keys() == _ARRAYS.keys() and all(
        (folder / name).stat().st_size == said["bytes"]
        and file_sha256(folder / name) == said["sha256"]
        for name, said in arrays.items()
    )


def _own_sha256(found: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _open(
    folder: Path, found: Mapping[str, Any], sources: Sequence[Path], owner: object
) -> Dataset:
    mapped = {name: _mapped(folder / name, dtype) for name, dtype in _ARRAYS.items()}
    starts_D1 = mapped.pop("starts_D1")
    columns = Columns(**mapped, lengths_D=np.diff(starts_D1))
    dataset = Dataset(
        Documents(columns, starts_D1, sources, owner),
        found["rows"],
        found["dropped"],
        found["truncated"],
        observed=Observed.from_json(found["observed"]),
    )
    for name in ("digest", "trained_tokens"):  # looked up instead of computed
        if name in found:
            dataset.__dict__[name] = found[name]
    return dataset


def _mapped(path: Path, dtype: str) -> NDArray[Any]:
    """The array in a file, read when it is looked at; nothing can be mapped of an empty file."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))
