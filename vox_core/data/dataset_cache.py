"""Data sets from files: tokenised once, kept in the cache, mapped from then on.

An entry of the cache is named after everything that decides its content: the bytes of the data
files and which of their rows are used, every file of the model folder that a tokenizer or its chat
template is read from, the sequence length, the versions of the libraries and `CACHE_VERSION`. On a
hit no row is read and no tokenizer loaded. Where the cache cannot be written, the arrays lie in a
temporary folder as long as they are needed, and the data set says so.

Each array of an entry is a file of its own, little-endian, without a header; `entry.json` has the
size and SHA-256 of each, and what became of the rows. An entry of which anything does not fit
together counts as a miss and is made anew.

Shape legend: T tokens of all documents, D documents.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from vox_core.cache import CACHE_VERSION, cache_root, cached
from vox_core.data import tokenize_job
from vox_core.data.blocks import BLOCK_BYTES, cut
from vox_core.data.checked import CheckedFile
from vox_core.data.dataset import Dataset, require_rendered, require_trained
from vox_core.data.documents import Columns, Documents
from vox_core.data.encode import Encoder
from vox_core.data.encode_stats import EncodeStats
from vox_core.data.tokenize_job import Part
from vox_core.data.tokenizer import files_of
from vox_core.errors import StorageError
from vox_core.hashes import file_sha256

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

FOLDER = "documents"
_LIBRARIES = ("jinja2", "tokenizers", "transformers")

Load = Callable[[], "PreTrainedTokenizerBase"]


def open_dataset(
    checked: Sequence[CheckedFile],
    model: Path,
    load: Load,
    seq_len: int,
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Dataset:
    """The data set of some files, from the cache or made now.

    Args:
        model: the folder that `load` reads the tokenizer from.
        seq_len: greatest length of a document, in tokens; at least 2.
        progress: called with the rows done and all rows.
        workers: child processes, 0 for none; as many as pay, if not given.

    Raises:
        DataError: D001, a file has changed since it was looked at; D005, the chat template is
            missing or refuses rows (all of them are named), or the tokenizer cannot be used; D006,
            every row was dropped; D004, nothing would be trained, or no answer's end.
        StorageError: not even a temporary folder can be written.
    """
    sources = [file.path for file in checked]
    name = _key(checked, model, seq_len)
    if workers is None:
        workers = tokenize_job.workers_for(sum(file.lines.stat().st_size for file in checked))
    make = _Making(checked, model, load, seq_len, progress, workers, block_bytes)
    found = cached(FOLDER, name, make, lambda folder, owner: read_dataset(folder, sources, owner))
    if found.fault is None:
        return found.value
    why = f"{found.fault.what}: {found.fault.where or cache_root()}"
    note = f"the tokens are kept for this run only, because {why}"
    return replace(found.value, notes=(note,))


def _key(checked: Sequence[CheckedFile], model: Path, seq_len: int) -> str:
    """The name of an entry. No library is imported for it."""
    decides = {
        "format": 1,
        "files": [file.identity for file in checked],
        "tokenizer": {str(path.relative_to(model)): file_sha256(path) for path in files_of(model)},
        "seq_len": seq_len,
        "libraries": {name: version(name) for name in _LIBRARIES},
        "version": CACHE_VERSION,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


class _Making:
    """Tokenises into a folder."""

    def __init__(
        self,
        checked: Sequence[CheckedFile],
        model: Path,
        load: Load,
        seq_len: int,
        progress: Callable[[int, int], None] | None,
        workers: int,
        block_bytes: int,
    ) -> None:
        self._checked, self._model, self._load, self._seq_len = checked, model, load, seq_len
        self._progress, self._workers, self._block_bytes = progress, workers, block_bytes

    def __call__(self, folder: Path) -> None:
        recipe = tokenize_job.TokenizeJob(self._model, self._seq_len)
        encoder = cache(lambda: Encoder(self._load(), self._seq_len))
        sources = [file.path for file in self._checked]
        faults: list[str] = []
        with Writer(folder) as writer:
            lines, masks = zip(*((file.lines, file.chosen) for file in self._checked), strict=True)
            blocks = cut(sources, self._block_bytes, masks, lines)
            for part in tokenize_job.make_parts(encoder, blocks, recipe, self._workers):
                faults += part.faults
                writer.add(part)
                self._tell(writer.rows)
            for file in self._checked:
                file.require_unchanged()
            assert faults or writer.rows == sum(file.used for file in self._checked)
            require_rendered(faults, encoder())
            dataset = writer.finish(sources)
        require_trained(dataset, encoder(), answers=writer.answers > 0)

    def _tell(self, done: int) -> None:
        if self._progress:
            self._progress(done, sum(file.used for file in self._checked))


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


class Writer:
    """Writes parts, in the order of their rows, into a folder; use it as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self.rows = self.answers = 0
        self.dropped: Counter[str] = Counter()
        self.truncated: Counter[str] = Counter()
        self._stats = EncodeStats()
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
        self._stats.add(part.stats)

    def finish(self, sources: Sequence[Path]) -> Dataset:
        """The data set, mapped; the folder is whole afterwards."""
        self._stack.close()
        found: dict[str, Any] = {
            "rows": self.rows,
            "dropped": dict(self.dropped),
            "truncated": dict(self.truncated),
            "stats": self._stats.to_json(),
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


def read_dataset(folder: Path, sources: Sequence[Path], owner: object = None) -> Dataset | None:
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
    return Dataset(
        Documents(
            columns, starts_D1, sources, owner, found.get("digest"), found.get("trained_tokens")
        ),
        found["rows"],
        found["dropped"],
        found["truncated"],
        stats=EncodeStats.from_json(found["stats"]),
    )


def _mapped(path: Path, dtype: str) -> NDArray[Any]:
    """The array in a file, read when it is looked at; nothing can be mapped of an empty file."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))
