"""Data sets from files: tokenised once, kept in the cache, mapped from then on.

An entry of the cache is named after everything that decides its content: the bytes of the data
files and which of their rows are used, every file of the model folder that a tokenizer or its chat
template is read from, the sequence length, the versions of the libraries and `CACHE_VERSION`. On a
hit no row is read and no tokenizer loaded. One that is torn or altered is made anew.

Where the cache cannot be written, the arrays lie in a temporary folder as long as they are needed,
and the data set says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core.cache import CACHE_VERSION, cache_root, cached
from vox_core.data import parts, store
from vox_core.data.blocks import BLOCK_BYTES, cut
from vox_core.data.checked import CheckedFile
from vox_core.data.dataset import Dataset, require_rendered, require_trained
from vox_core.data.encode import Encoder
from vox_core.data.tokenizer import files_of
from vox_core.hashes import file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = "documents"
_FORMAT = 1
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
        workers = parts.workers_for(sum(file.lines.stat().st_size for file in checked))
    make = _Making(checked, model, load, seq_len, progress, workers, block_bytes)
    found = cached(FOLDER, name, make, lambda folder, owner: store.read(folder, sources, owner))
    if found.fault is None:
        return found.value
    why = f"{found.fault.what}: {found.fault.where or cache_root()}"
    note = f"the tokens are kept for this run only, because {why}"
    return replace(found.value, notes=(note,))


def _key(checked: Sequence[CheckedFile], model: Path, seq_len: int) -> str:
    """The name of an entry. No library is imported for it."""
    decides = {
        "format": _FORMAT,
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
        recipe = parts.Recipe(self._model, self._seq_len)
        encoder = cache(lambda: Encoder(self._load(), self._seq_len))
        sources = [file.path for file in self._checked]
        faults: list[str] = []
        with store.Writer(folder) as writer:
            lines, masks = zip(*((file.lines, file.chosen) for file in self._checked), strict=True)
            blocks = cut(sources, self._block_bytes, masks, lines)
            for part in parts.make_parts(encoder, blocks, recipe, self._workers):
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
