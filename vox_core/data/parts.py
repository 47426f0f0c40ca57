"""Blocks of data files to parts of a data set, here or in other processes.

A block is tokenised by itself, so whoever does it gives the same part, and parts are put together
in the order of the blocks: the data set is the same, bit for bit, with any number of processes.

Other processes (`worker.py`) are started only for data that take much longer than starting one,
which imports transformers. They are fresh interpreters, not forks, so that threads of this one do
not matter, and are asked and answer over pipes; arrays come as files. This process works as well,
and does over what one that died has not done.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from vox_core.data.blocks import Block
from vox_core.data.dataset import account, encode_rows
from vox_core.data.documents import Columns
from vox_core.data.encode import Encoder
from vox_core.data.observed import Observed, Observer
from vox_core.data.store import Part
from vox_core.errors import VoxError

_BYTES_FOR_ONE_MORE = 24_000_000
"""Of JSONL; some four seconds of work for a process, which takes two or three to start."""
_MOST_WORKERS = 4
"""Each takes some 400 MB, and nobody has said how much there is."""
_COLUMNS = tuple(field.name for field in fields(Columns))


def workers_for(size: int) -> int:
    """How many processes to start for so many bytes of data files, beside this one."""
    return max(0, min(_MOST_WORKERS, _cpus() - 1, size // _BYTES_FOR_ONE_MORE))


def _cpus() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def make_part(encoder: Encoder, block: Block) -> Part:
    """Tokenise a block."""
    rows = answers = 0
    faults: list[str] = []
    documents, dropped, truncated = account(())
    sources = {block.path: block.file}
    observer = Observer(encoder, sources)
    for some, (encoded, refused) in encode_rows(encoder, block.records(), observer.rendered):
        observer.encoded(encoded)
        rows += len(some)
        answers += sum(record.kind != "text" for record in some)
        faults += refused
        kept, lost, cut = account(encoded)
        documents += kept
        dropped.update(lost)
        truncated.update(cut)
    columns = Columns.of(documents, sources)
    observer.columns(columns)
    return Part(columns, rows, answers, dropped, truncated, faults, observer.observed())


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
class Recipe:
    """What any process needs to make the encoder: the folder of its tokenizer, and the other
    arguments of `Encoder`."""

    model: Path
    seq_len: int
    quick: bool


def make_parts(
    load: Callable[[], Encoder],
    blocks: Iterator[Block],
    recipe: Recipe,
    scratch: Path,
    workers: int,
) -> Iterator[Part]:
    """The parts of all blocks, in order.

    Args:
        load: this process's encoder, as `recipe` says; made while others start.
        scratch: an empty folder for their arrays.
        workers: processes to start beside this one.
    """
    with ExitStack() as stack:
        queue = _Queue(blocks)
        for number in range(workers):
            with suppress(OSError):  # one process less
                worker = _Worker(queue, recipe, scratch / str(number))
                stack.callback(worker.stop)
        encoder = load()
        stack.enter_context(quick_collections())
        while (taken := queue.take()) is not None:
            queue.give(taken[0], make_part(encoder, taken[1]))
            for part in queue.ready():
                yield part if isinstance(part, Part) else make_part(encoder, part)
        while (last := queue.next()) is not None:
            yield last if isinstance(last, Part) else make_part(encoder, last)


class _Queue:
    """Blocks to be taken, and parts to be put in order; for several threads."""

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._blocks, self._changed = enumerate(blocks), threading.Condition()
        self._given: dict[int, Part | Block] = {}
        self._next = self._taken = 0
        self._failed: VoxError | None = None

    def take(self) -> tuple[int, Block] | None:
        """None after the last; a file that cannot be read is told by `next`."""
        with self._changed:
            try:
                taken = next(self._blocks, None)
            except VoxError as error:
                self._failed = error
                return None
            self._taken += taken is not None
            return taken

    def give(self, number: int, part: Part | Block) -> None:
        """A block that is given back is done by who asks for its part."""
        with self._changed:
            self._given[number] = part
            self._changed.notify_all()

    def ready(self) -> Iterator[Part | Block]:
        """The next parts, as far as they are there."""
        while (part := self._given.pop(self._next, None)) is not None:
            self._next += 1
            yield part

    def next(self) -> Part | Block | None:
        """The next part, waited for; None after the last.

        Raises:
            DataError: D001, a file could not be read.
        """
        with self._changed:
            if self._failed:
                raise self._failed
            if self._next == self._taken:
                return None
            self._changed.wait_for(lambda: self._next in self._given)
            self._next += 1
            return self._given.pop(self._next - 1)


class _Worker:
    """A process, and the thread that asks it."""

    def __init__(self, queue: _Queue, recipe: Recipe, scratch: Path) -> None:
        scratch.mkdir()
        self._queue, self._scratch = queue, scratch
        request = {**asdict(recipe), "model": str(recipe.model), "scratch": str(scratch)}
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TOKENIZERS_PARALLELISM": "false",  # the processes are the threads
            "RAYON_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vox_core.data.worker", json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._thread = threading.Thread(target=self._ask_on, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()

    def _ask_on(self) -> None:
        """Until there are no more blocks, or the process is gone."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():  # it says when it is ready
            return
        while (taken := self._queue.take()) is not None:
            number, block = taken
            part: Part | Block = block
            try:
                part = self._ask(number, block)
            except (OSError, ValueError, KeyError):
                return
            finally:
                self._queue.give(number, part)

    def _ask(self, number: int, block: Block) -> Part:
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None and answers is not None
        asked = {"number": number, "block": {**asdict(block), "path": str(block.path)}}
        pipe.write(json.dumps(asked).encode() + b"\n")
        pipe.flush()
        answer: dict[str, Any] = json.loads(answers.readline())
        observed = Observed.from_json(answer.pop("observed"))
        return Part(_loaded(self._scratch, number), **answer, observed=observed)


def save(columns: Columns, scratch: Path, number: int) -> None:
    """Leave the arrays of a part where `make_parts` finds them."""
    for name in _COLUMNS:
        np.save(scratch / f"{number}-{name}.npy", getattr(columns, name), allow_pickle=False)


def _loaded(scratch: Path, number: int) -> Columns:
    found: dict[str, Any] = {}
    for name in _COLUMNS:
        path = scratch / f"{number}-{name}.npy"
        found[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        path.unlink()  # what is mapped stays until it is let go
    return Columns(**found)
