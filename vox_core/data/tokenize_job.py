"""Blocks of data files to parts of a data set, here or in child processes.

A block is tokenised by itself, so whoever does it gives the same part, and parts are put together
in the order of the blocks: the data set is the same, bit for bit, with any number of processes.

Children are started only for data that take much longer than starting one, which imports
transformers. This process tokenises what one that died has not done.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

from vox_core.data.blocks import Block
from vox_core.data.dataset import account, encode_rows
from vox_core.data.documents import Columns
from vox_core.data.encode import Encoder
from vox_core.data.encode_stats import EncodeStats, StatsCollector
from vox_core.data.tokenizer import load_tokenizer
from vox_core.data.worker import Worker, WorkerDied

_BYTES_FOR_ONE = 2_000_000
"""Of JSONL; a second of work here, half of it in waiting for the child that renders."""
_BYTES_FOR_ONE_MORE = 24_000_000
"""Some four seconds of work for a process, which takes two or three to start."""
_MOST_WORKERS = 4
"""Each takes some 400 MB, and nobody has said how much there is."""


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
    stats: EncodeStats = field(default_factory=EncodeStats)


def workers_for(size: int) -> int:
    """How many child processes pay for so many bytes of data files."""
    workers = min(_MOST_WORKERS, _cpus(), 1 + size // _BYTES_FOR_ONE_MORE)
    return workers if size >= _BYTES_FOR_ONE else 0


def _cpus() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def make_part(encoder: Encoder, block: Block) -> Part:
    """Tokenise a block."""
    rows = answers = 0
    faults: list[str] = []
    documents, dropped, truncated = account(())
    sources = {block.path: block.file}
    collector = StatsCollector(encoder, sources)
    for some, (encoded, refused) in encode_rows(encoder, block.records(), collector.rendered):
        collector.encoded(encoded)
        rows += len(some)
        answers += sum(record.kind != "text" for record in some)
        faults += refused
        kept, lost, cut = account(encoded)
        documents += kept
        dropped.update(lost)
        truncated.update(cut)
    columns = Columns.of(documents, sources)
    collector.columns(columns)
    return Part(columns, rows, answers, dropped, truncated, faults, collector.stats)


@contextmanager
def quick_collections() -> Iterator[None]:
    """The objects of large libraries are not looked through each time that garbage is collected."""
    if gc.get_freeze_count():  # the caller has frozen some, and they would be thawed
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """What any process needs to make the encoder: the folder of its tokenizer, and the other
    arguments of `Encoder`."""

    model: Path
    seq_len: int


def make_parts(
    load: Callable[[], Encoder], blocks: Iterator[Block], recipe: TokenizeJob, workers: int
) -> Iterator[Part]:
    """The parts of all blocks, in order.

    Args:
        load: this process's encoder, as `recipe` says.
        workers: child processes; with 0 all is done here.

    Raises:
        DataError: D001, a file could not be read.
    """
    if not workers:
        with quick_collections():
            yield from (make_part(load(), block) for block in blocks)
        return
    with _Pool(recipe, workers) as pool:
        waiting = deque(map(pool.submit, islice(blocks, 2 * workers)))
        load()  # while the children start
        while waiting:
            part = waiting.popleft().result()
            waiting.extend(map(pool.submit, islice(blocks, 1)))
            yield part if isinstance(part, Part) else make_part(load(), part)


class _Pool:
    """Children that make parts; one that died gives its block back, and starts again."""

    def __init__(self, recipe: TokenizeJob, workers: int) -> None:
        self._recipe, self._idle = recipe, SimpleQueue[Worker]()
        self._children = [Worker() for _ in range(workers)]
        self._threads = ThreadPoolExecutor(workers)
        for child in self._children:
            self._idle.put(child)

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()
        self._threads.shutdown()

    def submit(self, block: Block) -> Future[Part | Block]:
        return self._threads.submit(self._ask, block)

    def _ask(self, block: Block) -> Part | Block:
        child = self._idle.get()
        try:
            return child(_part, self._recipe, block)
        except WorkerDied:
            return block
        finally:
            self._idle.put(child)


def _part(recipe: TokenizeJob, block: Block) -> Part:
    with quick_collections():
        return make_part(_encoder(recipe), block)


@cache
def _encoder(recipe: TokenizeJob) -> Encoder:
    return Encoder(load_tokenizer(recipe.model), recipe.seq_len)
