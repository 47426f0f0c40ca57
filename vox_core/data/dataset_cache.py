"""Data sets from files: tokenised once, kept in the cache, mapped from then on.

An entry of the cache is named after everything that decides its content: the bytes of the data
files and which of their rows are used, every file of the model folder that a tokenizer or its chat
template is read from, the sequence length, the objective with its plugin's version, the versions of
the libraries and `CACHE_VERSION`. On a hit no row is read and no tokenizer loaded. Where the cache
cannot be written, the arrays lie in a temporary folder as long as they are needed, and the data set
says so.

A block of rows is tokenised by itself, here or in a child process, and parts are put together in
the order of the blocks, so the data set is the same, bit for bit, with any number of processes.
This process tokenises what a child that died has not done.

Each array of an entry is a file of its own, little-endian, without a header; `entry.json` says what
became of the rows, and has a SHA-256 of all this. An entry that has another counts as a miss.

Shape legend: T tokens of all documents, D documents.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from vox_core.cache import CACHE_VERSION, cache_root, cached, file_sha256
from vox_core.config import named_file, reading
from vox_core.contract import SFT, ObjectiveSpec
from vox_core.data.checked import BLOCK_BYTES, Block, CheckedFile, cut
from vox_core.data.dataset import DOCUMENT, Dataset, encode_rows, require_trained
from vox_core.data.encode import Encoder, EncodeStats
from vox_core.data.records import Progress
from vox_core.data.rows import examples_of, identity_of
from vox_core.data.tokenizer import files_of, load_tokenizer
from vox_core.data.worker import Worker, WorkerDied
from vox_core.errors import StorageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER, ENTRY = "documents", "entry.json"
_ARRAYS: dict[str, Any] = {"tokens_T": "<i4", "weights_T": "<f4", "documents_D": DOCUMENT}
_BYTES_FOR_ONE = 2_000_000
"""Of JSONL; a second of work here, half of it in waiting for the child that renders."""
_BYTES_FOR_ONE_MORE = 24_000_000
"""Some four seconds of work for a process, which takes two or three to start."""
_MOST_WORKERS = 4
"""Each takes some 400 MB, and nobody has said how much there is."""
_STATS = TypeAdapter(EncodeStats)
_LIBRARIES = ("jinja2", "tokenizers", "transformers")

Load = Callable[[], "PreTrainedTokenizerBase"]


def open_dataset(
    checked: Sequence[CheckedFile],
    model: Path,
    load: Load,
    seq_len: int,
    objective: ObjectiveSpec = SFT,
    *,
    progress: Progress | None = None,
    workers: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Dataset:
    """The data set of some files, from the cache or made now.

    Args:
        model: the folder that `load` reads the tokenizer from.
        seq_len: greatest length of a document, in tokens; at least 2.
        objective: decides which documents a row makes.
        workers: child processes, 0 for none; as many as pay, if not given.

    Raises:
        DataError: D001, a file has changed since it was looked at; D005, the chat template is
            missing or refuses rows (all of them are named), or the tokenizer cannot be used; D006,
            every row was dropped; D004, nothing would be trained, or no answer's end.
        StorageError: not even a temporary folder can be written.
    """
    sources, rows = [file.path for file in checked], sum(file.used for file in checked)
    size = sum(file.lines.stat().st_size for file in checked)
    workers = workers_for(size) if workers is None else workers

    def make(folder: Path) -> None:
        encoder = cache(lambda: Encoder(load(), seq_len))
        blocks = cut(checked, block_bytes)
        parts = make_parts(encoder, blocks, model, seq_len, workers, objective)
        tell = progress or (lambda *_: None)
        stats, hashes = _write(folder, parts, lambda n: tell("tokenising", size * n // rows, size))
        for file in checked:
            file.require_unchanged()
        assert stats.rows == rows
        require_trained(stats, encoder, objective.name)
        dataset = _open(folder, sources, stats)
        about = {
            "stats": _STATS.dump_python(stats, mode="json"),
            "digest": dataset.digest,
            "trained_tokens": dataset.trained_tokens,
        }
        text = json.dumps({**about, "sha256": _sha256(about, hashes)}, indent=2)
        (folder / ENTRY).write_text(text + "\n", encoding="utf-8")

    name = _key(checked, model, seq_len, objective)
    found = cached(FOLDER, name, make, lambda folder, owner: read_dataset(folder, sources, owner))
    if found.fault:
        why = f"{found.fault.what}: {found.fault.where or cache_root()}"
        found.value.notes = (f"the tokens are kept for this run only, because {why}",)
    return found.value


def _key(
    checked: Sequence[CheckedFile], model: Path, seq_len: int, objective: ObjectiveSpec
) -> str:
    """The name of an entry. No library is imported for it."""
    decides = {
        "files": [file.identity for file in checked],
        "tokenizer": {str(path.relative_to(model)): file_sha256(path) for path in files_of(model)},
        "seq_len": seq_len,
        "objective": identity_of(objective),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "version": CACHE_VERSION,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _write(
    folder: Path, parts: Iterable[Dataset], tell: Callable[[int], object]
) -> tuple[EncodeStats, list[str]]:
    """Write the arrays of all parts, end to end: their statistics, and the SHA-256 of each file."""
    stats, hashes = EncodeStats(), [hashlib.sha256() for _ in _ARRAYS]
    with ExitStack() as stack:
        opened = [stack.enter_context((folder / name).open("xb")) for name in _ARRAYS]
        for part in parts:
            for (name, dtype), file, sha256 in zip(_ARRAYS.items(), opened, hashes, strict=True):
                data = getattr(part, name).astype(dtype).tobytes()
                file.write(data)
                sha256.update(data)
            stats.add(part.stats)
            tell(stats.rows)
    return stats, [sha256.hexdigest() for sha256 in hashes]


def read_dataset(folder: Path, sources: Sequence[Path], owner: object = None) -> Dataset | None:
    """The data set in `folder`; None if there is none, or it is torn or altered.

    Args:
        sources: the data files, in the order in which they were read.
        owner: kept as long as the arrays are.
    """
    try:
        about = json.loads((folder / ENTRY).read_bytes())
        if about.pop("sha256") != _sha256(about, [file_sha256(folder / name) for name in _ARRAYS]):
            return None
        dataset = _open(folder, sources, _STATS.validate_python(about["stats"]), owner)
        dataset.digest, dataset.trained_tokens = about["digest"], about["trained_tokens"]
    except (OSError, StorageError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return dataset


def _sha256(about: Mapping[str, Any], hashes: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([about, hashes], sort_keys=True).encode()).hexdigest()


def _open(
    folder: Path, sources: Sequence[Path], stats: EncodeStats, owner: object = None
) -> Dataset:
    arrays: dict[str, Any] = {
        name: np.asarray(np.memmap(folder / name, dtype, mode="r"))
        for name, dtype in _ARRAYS.items()
    }
    return Dataset(**arrays, files=tuple(sources), stats=stats, owner=owner)


# --- processes ------------------------------------------------------------------------------------


def workers_for(size: int) -> int:
    """Return the number of child processes worth starting for `size` bytes of data files."""
    workers = min(_MOST_WORKERS, cpus(), 1 + size // _BYTES_FOR_ONE_MORE)
    return workers if size >= _BYTES_FOR_ONE else 0


def cpus() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def make_part(encoder: Encoder, block: Block, objective: ObjectiveSpec) -> Dataset:
    return encode_rows(encoder, block.rows(examples_of(objective)), {block.path: block.file})


def make_parts(
    load: Callable[[], Encoder],
    blocks: Iterator[Block],
    model: Path,
    seq_len: int,
    workers: int,
    objective: ObjectiveSpec = SFT,
) -> Iterator[Dataset]:
    """The parts of all blocks, in order (D001 if a file cannot be read).

    Args:
        load: this process's encoder, of the tokenizer in `model` and of `seq_len`.
        workers: child processes; with 0 all is done here.
    """
    if not workers:
        yield from (make_part(load(), block, objective) for block in blocks)
        return
    children, idle = [Worker() for _ in range(workers)], SimpleQueue[Worker]()
    config = named_file()  # it may say which plugin provides the objective
    for child in children:
        idle.put(child)

    def ask(block: Block) -> Dataset | Block:
        child = idle.get()
        try:
            return child(_part, model, seq_len, objective, block, config)
        except WorkerDied:
            return block
        finally:
            idle.put(child)

    threads = ThreadPoolExecutor(workers)
    try:
        waiting = deque(threads.submit(ask, block) for block in islice(blocks, 2 * workers))
        while waiting:
            part = waiting.popleft().result()
            waiting.extend(threads.submit(ask, block) for block in islice(blocks, 1))
            yield part if isinstance(part, Dataset) else make_part(load(), part, objective)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.close()
        threads.shutdown()


def _part(
    model: Path, seq_len: int, objective: ObjectiveSpec, block: Block, config: Path | None
) -> Dataset:
    with reading(config):
        return make_part(_encoder(model, seq_len), block, objective)


@cache
def _encoder(model: Path, seq_len: int) -> Encoder:
    return Encoder(load_tokenizer(model), seq_len)
