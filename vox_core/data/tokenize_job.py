"""Blocks of data files to parts of a data set, here or in child processes.

A block is tokenised by itself, so whoever does it gives the same part, and parts are put together
in the order of the blocks: the data set is the same, bit for bit, with any number of processes.

Children are started only for data that take much longer than starting one, which imports
transformers. This process tokenises what one that died has not done.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

from vox_core.data.blocks import Block
from vox_core.data.dataset import Dataset, encode_rows
from vox_core.data.encode import Encoder
from vox_core.data.tokenizer import load_tokenizer
from vox_core.data.worker import Worker, WorkerDied

_BYTES_FOR_ONE = 2_000_000
"""Of JSONL; a second of work here, half of it in waiting for the child that renders."""
_BYTES_FOR_ONE_MORE = 24_000_000
"""Some four seconds of work for a process, which takes two or three to start."""
_MOST_WORKERS = 4
"""Each takes some 400 MB, and nobody has said how much there is."""


def workers_for(size: int) -> int:
    """How many child processes pay for so many bytes of data files."""
    workers = min(_MOST_WORKERS, _cpus(), 1 + size // _BYTES_FOR_ONE_MORE)
    return workers if size >= _BYTES_FOR_ONE else 0


def _cpus() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def make_part(encoder: Encoder, block: Block) -> Dataset:
    """Tokenise a block."""
    return encode_rows(encoder, block.records(), {block.path: block.file})


def make_parts(
    load: Callable[[], Encoder], blocks: Iterator[Block], model: Path, seq_len: int, workers: int
) -> Iterator[Dataset]:
    """The parts of all blocks, in order.

    Args:
        load: this process's encoder, of the tokenizer in `model` and of `seq_len`.
        workers: child processes; with 0 all is done here.

    Raises:
        DataError: D001, a file could not be read.
    """
    if not workers:
        yield from (make_part(load(), block) for block in blocks)
        return
    children, idle = [Worker() for _ in range(workers)], SimpleQueue[Worker]()
    for child in children:
        idle.put(child)

    def ask(block: Block) -> Dataset | Block:
        child = idle.get()
        try:
            return child(_part, model, seq_len, block)
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
            yield part if isinstance(part, Dataset) else make_part(load(), part)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.close()
        threads.shutdown()


def _part(model: Path, seq_len: int, block: Block) -> Dataset:
    return make_part(_encoder(model, seq_len), block)


@cache
def _encoder(model: Path, seq_len: int) -> Encoder:
    return Encoder(load_tokenizer(model), seq_len)
