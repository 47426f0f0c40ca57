"""Limit memory while loading, and on out-of-memory continue once with smaller micro-batches.

The loss of a step is a sum over its documents, so splitting a micro-batch changes memory and time,
not the result.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from vox_core.contract import ExecutionPlan, Notice
from vox_core.errors import TrainingError

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
"""What allocators, drivers and libraries under torch say, in errors of no class of their own."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_SET_BY_USERS = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
_MOST = 32 * 2**20  # DEFAULT_MMAP_THRESHOLD_MAX on 64 bits, up to which glibc raises it by itself


@contextmanager
def no_holes() -> Iterator[None]:
    """Make glibc map blocks over 256 KB instead of using its heap, so that freeing them returns
    memory.

    Packed weights lie in the heap after temporary copies, whose freed holes do not fit the next
    ones: packing SmolLM2-135M to nf4 left 0.4 GB of holes until the end. Experts are smaller than
    layers: a mixture of 1.0B parameters left 1 GB with a limit of 1 MB. Afterwards glibc's own
    rule for freed large blocks applies. Options set by the user stay.
    """
    libc = _libc()
    if libc is None or _SET_BY_USERS & os.environ.keys():
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, 2**18)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _MOST)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _MOST)
        give_back()


def give_back() -> None:
    """Return unused memory of glibc's heap to the system. Takes milliseconds."""
    if libc := _libc():
        libc.malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    """Return glibc; None with another C library."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # as on Windows
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None


class Shortage:
    """Handles out-of-memory in a run; `met` once it has happened."""

    def __init__(self, plan: ExecutionPlan, device: str) -> None:
        self.met = False
        self._plan, self._device = plan, device

    def meet(self, error: Exception) -> Notice:
        """Return a notice for the first out-of-memory; raise any other error again.

        Raises:
            TrainingError: T002, it is not the first.
        """
        if not is_out_of_memory(error):
            raise error
        if self.met:
            raise _out_of_memory(error, self._device, self._remedy()) from error
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
        """Free torch's cached memory."""
        import torch

        # A failed backward leaves nodes in autograd's queue with their saved tensors; the next
        # backward clears it.
        with torch.inference_mode(False), torch.enable_grad():
            torch.zeros((), requires_grad=True).backward()
        if self._device != "cpu":
            torch.accelerator.empty_cache()

    def final(self) -> AbstractContextManager[None]:
        """Convert an out-of-memory that smaller micro-batches cannot avoid; see `enough_memory`."""
        return enough_memory(self._device, self._remedy())

    def peak(self) -> int | None:
        """Return the peak bytes of tensors on the device; None for the CPU, where the core measures
        the process."""
        import torch

        if torch.device(self._device).type == "cpu":
            return None
        return torch.accelerator.max_memory_allocated(self._device)

    @property
    def may_quantise(self) -> bool:
        """Whether the run could quantise its base."""
        return self._plan.contract.quant == "none" and self._plan.contract.adapter.method != "full"

    def _remedy(self) -> str:
        plan = self._plan
        tokens = max(1, plan.micro_batch_tokens // 4)
        shorter = f"a smaller --seq-len than {plan.contract.seq_len}"
        ways = [f"--micro-batch-tokens {tokens}", shorter]
        if not plan.gradient_checkpointing:
            ways.insert(0, "--gradient-checkpointing")
        if self.may_quantise:
            ways.append("--quant nf4")
        return f"the step was not applied; resume or train again with {', '.join(ways)}"


@contextmanager
def enough_memory(device: str, remedy: str) -> Iterator[None]:
    """Convert an out-of-memory to an error with a remedy.

    Raises:
        TrainingError: T002.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise _out_of_memory(error, device, remedy) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, on a GPU or on the CPU, which has no exception class
    for it."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(words in said for words in _OUT_OF_MEMORY)


def _out_of_memory(error: Exception, device: str, remedy: str) -> TrainingError:
    return TrainingError(
        "T002", "out of memory", where=device, found=_first_line(error), remedy=remedy
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
