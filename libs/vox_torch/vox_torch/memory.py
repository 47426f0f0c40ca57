"""Memory: what is taken of it while loading, and what is done when it does not suffice, once per
run: go on in smaller micro-batches.

The loss of a step is a sum over its documents, so cutting a micro-batch in two changes memory and
time and not what is learned.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vox_core.contract import Batch, ExecutionPlan, Notice
from vox_core.errors import TrainingError

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
"""What allocators, drivers and libraries under torch say, in errors of no class of their own."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_SET_BY_USERS = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
_MOST = 32 * 2**20  # DEFAULT_MMAP_THRESHOLD_MAX on 64 bits, up to which glibc raises it by itself


@contextmanager
def no_holes() -> Iterator[None]:
    """Have the C library, where it is glibc, take what is over 1 MB from the system and return it,
    and not from its heap.

    What is packed lies in the heap after each weight's passing copies, whose holes the next ones do
    not fit into: packing SmolLM2-135M to nf4 left 0.4 GB of them, which stayed to the end.
    Afterwards it is as glibc's own rule has it once a large block was freed. What the user has set
    of it stays.
    """
    libc = _libc()
    if libc is None or _SET_BY_USERS & os.environ.keys():
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _MOST)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _MOST)
        give_back()


def give_back() -> None:
    """Return to the system what the heap of glibc holds and nothing uses. Takes milliseconds."""
    if libc := _libc():
        libc.malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    """glibc; None where there is another C library."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # as on Windows
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def halved(batches: Sequence[Batch]) -> list[Batch]:
    """Each micro-batch of several documents as two; a single document cannot be cut."""
    return list(itertools.chain.from_iterable(map(_halves, batches)))


class Shortage:
    """What became of the memory in this run; `met` once it was short."""

    def __init__(self, plan: ExecutionPlan, device: str) -> None:
        self.met = False
        self._plan, self._device = plan, device

    def meet(self, error: Exception) -> Notice:
        """What to tell of the first shortage; any other error is raised again."""
        if not is_out_of_memory(error):
            raise error
        self.met = True
        return Notice(
            f"{self._device}: out of memory; from here on micro-batches are half as large, which "
            f"changes {self._changes()}. {_first_line(error)}",
            "warning",
        )

    def _changes(self) -> str:
        dropout = self._plan.contract.adapter.dropout > 0
        return "what dropout drops, and no loss beside" if dropout else "no loss"

    def release(self) -> None:
        """Give back what torch keeps for later."""
        import torch

        # A backward that failed leaves nodes in autograd's queue, and they what they kept; the next
        # one clears it.
        with torch.inference_mode(False), torch.enable_grad():
            torch.zeros((), requires_grad=True).backward()
        if self._device != "cpu":
            torch.accelerator.empty_cache()

    @contextmanager
    def final(self) -> Iterator[None]:
        """Turn a shortage that smaller micro-batches do not help into an error that says what does.

        Raises:
            TrainingError: T002.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._exhausted(error) from error

    def peak(self) -> int | None:
        """The most bytes of tensors on the device so far; None for the CPU, where the core looks
        at the process."""
        import torch

        if torch.device(self._device).type == "cpu":
            return None
        return torch.accelerator.max_memory_allocated(self._device)

    def _exhausted(self, error: Exception) -> TrainingError:
        plan = self._plan
        tokens = max(1, plan.micro_batch_tokens // 4)
        shorter = f"a smaller --seq-len than {plan.contract.seq_len}"
        ways = [f"--micro-batch-tokens {tokens}", shorter]
        if not plan.gradient_checkpointing:
            ways.insert(0, "--gradient-checkpointing")
        if plan.contract.quant == "none":
            ways.append("--quant nf4")
        return TrainingError(
            "T002",
            "the device has not got the memory for this run",
            where=self._device,
            found=_first_line(error),
            remedy=f"the step was not applied; resume or train again with {', '.join(ways)}",
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch ran out of memory, on a GPU or on the CPU, which has no class for it."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(words in said for words in _OUT_OF_MEMORY)


def _halves(batch: Batch) -> Iterator[Batch]:
    """Two batches of about as many tokens each."""
    starts = batch.starts_D.tolist()
    if len(starts) == 1:
        yield batch
        return
    middle = len(batch.tokens_T) / 2
    cut = min(starts[1:], key=lambda start: abs(start - middle))
    yield _part(batch, 0, cut)
    yield _part(batch, cut, len(batch.tokens_T))


def _part(batch: Batch, start: int, stop: int) -> Batch:
    inside = batch.starts_D[(batch.starts_D >= start) & (batch.starts_D < stop)]
    return Batch(
        batch.tokens_T[start:stop],
        batch.targets_T[start:stop],
        batch.weights_T[start:stop],
        inside - start,
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
