"""Find the NVIDIA GPUs that this process may use: vox's hardware probe.

Run as a script, it prints one JSON object (its shape is in `vox_core.host.probe`). Standard library
only, so that it works where torch is missing or broken. It queries NVML, which uses no GPU memory
and knows how much is free. Without NVML, or if the environment selects what NVML does not know (MIG
instances, another order), it queries the CUDA driver, as torch does.

A process uses one GPU, the first visible one, which decides whether any is usable. `ready.py`
checks that torch can use it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

NVML, CUDA = "libnvidia-ml.so.1", "libcuda.so.1"
FOLDERS = ("", "/usr/lib/wsl/lib/")  # found by the loader; Windows' library in WSL

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"

OLDEST = (6, 0)  # minimum of bitsandbytes 0.50, by its installation guide; torch's wheels differ
NATIVE_BF16 = (8, 0)  # as torch.cuda.is_bf16_supported has it, without emulation
TEXT = 256  # bytes of a name; NVML's own limit is 96
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
NOT_PERMITTED = 4  # NVML_ERROR_NO_PERMISSION


class Unusable(Exception):
    """No GPU can be used; the text is the probe's `detail`."""


class Refused(Unusable):
    """A call that the driver answered with an error."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Card:
    """A GPU. Sizes are None if the driver does not report them."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int | None
    available_bytes: int | None

    @property
    def architecture(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @property
    def best_dtype(self) -> Literal["bf16", "fp16"]:
        return "bf16" if self.capability >= NATIVE_BF16 else "fp16"

    @property
    def device(self) -> dict[str, object]:
        return {
            "name": self.name,
            "tag": "nvidia",
            "memory_bytes": self.memory_bytes,
            "available_bytes": self.available_bytes,
            "best_dtype": self.best_dtype,
            "features": [self.architecture],
        }

    @property
    def summary(self) -> str:
        """A description on one line."""
        sizes = ((self.memory_bytes, "memory"), (self.available_bytes, "free"))
        told = [f"{size / 1e9:.1f} GB {what}" for size, what in sizes if size is not None]
        return ", ".join([f"{self.name} ({self.architecture})", *told, self.best_dtype])


class Library:
    """A driver library whose functions return 0 or an error code that `words` explains."""

    def __init__(self, library: ctypes.CDLL, words: Callable[[ctypes.CDLL, int], str]) -> None:
        self._library, self._words = library, words

    def __call__(self, function: str, *arguments: object) -> None:
        if status := getattr(self._library, function)(*arguments):
            text = f"{function}: {self._words(self._library, status)} ({status})"
            raise Refused(f"the NVIDIA driver is here and does not work: {text}", status)

    def text(self, function: str, *before: object, after: bool = False) -> str:
        """Call a function that fills a text buffer; the handle is an argument `before` or `after`
        it."""
        buffer = ctypes.create_string_buffer(TEXT)
        self(function, *(() if after else before), buffer, TEXT, *(before if after else ()))
        return "".join(filter(str.isprintable, buffer.value.decode(errors="replace")))


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def hardware() -> dict[str, object]:
    """Return the probe's result."""
    try:
        driver, cards = found()
        require_new_enough(cards)
    except Unusable as reason:
        return {"present": False, "devices": [], "detail": str(reason)}
    detail = f"{cards[0].summary}, {driver}"
    if more := len(cards) - 1:
        detail += f"; {more} more, not used"
    return {"present": True, "devices": [card.device for card in cards], "detail": detail}


def found() -> tuple[str, list[Card]]:
    """Return the driver's version and the usable GPUs in CUDA's order, at least one.

    Raises:
        Unusable: this process may use none.
    """
    (nvml, no_nvml), (cuda, no_cuda) = _opened(NVML), _opened(CUDA)
    if cuda is None:
        reasons = f"{no_cuda}, though {NVML} is" if nvml else f"{no_nvml}, {no_cuda}"
        raise Unusable(f"no NVIDIA driver library ({reasons})")
    names = os.environ.get(VISIBLE)
    if names is not None and names.strip() in ("", "-1"):
        raise Unusable(f"{VISIBLE}={names!r} hides every GPU")
    by_bus = os.environ.get(ORDER, "PCI_BUS_ID") == "PCI_BUS_ID"
    if nvml and by_bus and "MIG-" not in (names or ""):
        return by_nvml(nvml, names) or by_cuda(cuda)
    return by_cuda(cuda)


def require_new_enough(cards: Sequence[Card]) -> None:
    """Raise Unusable if the first GPU is too old for bitsandbytes."""
    first, *others = cards
    if first.capability >= OLDEST:
        return
    text = "{} has compute capability {}.{}, and bitsandbytes needs {}.{} or newer"
    better = next((card.name for card in others if card.capability >= OLDEST), None)
    hint = f"; {better} would do, if {VISIBLE} named it first" if better else ""
    raise Unusable(text.format(first.name, *first.capability, *OLDEST) + hint)


# --- NVML -----------------------------------------------------------------------------------------


def by_nvml(library: ctypes.CDLL, names: str | None) -> tuple[str, list[Card]] | None:
    """Return the GPUs by NVML; None if one is split into MIG instances, which only CUDA lists."""
    nvml = Library(library, _nvml_words)
    nvml("nvmlInit_v2")
    try:
        handles = _handles(nvml)
        if not handles:
            raise Unusable("the NVIDIA driver is here, and no GPU")
        uuids = [nvml.text("nvmlDeviceGetUUID", handle) for handle in handles]
        chosen = [handles[number] for number in visible(names, uuids)]
        if not chosen:
            raise Unusable(f"{VISIBLE}={names!r} names none of the {len(handles)} GPUs here")
        if any(_is_split(nvml, handle) for handle in chosen):
            return None
        driver = f"driver {nvml.text('nvmlSystemGetDriverVersion')}"
        return driver, [_nvml_card(nvml, handle) for handle in chosen]
    finally:
        nvml("nvmlShutdown")


def visible(names: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in its order.

    By CUDA's rules: the list ends at the first invalid entry, and a duplicate hides all GPUs.
    Entries are numbers, UUIDs or prefixes of UUIDs.
    """
    if names is None:
        return list(range(len(uuids)))
    one_of = _by_uuid if names.startswith("GPU-") else _by_number
    chosen: list[int] = []
    for entry in names.split(","):
        if (number := one_of(entry.strip(), uuids)) is None:
            break
        if number in chosen:
            return []
        chosen.append(number)
    return chosen


def _by_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    fitting = [number for number, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return fitting[0] if entry.startswith("GPU-") and len(fitting) == 1 else None


def _by_number(entry: str, uuids: Sequence[str]) -> int | None:
    digits = re.match(r"\+?([0-9]+)", entry)  # CUDA ignores the rest
    return int(digits[1]) if digits and int(digits[1]) < len(uuids) else None


def _handles(nvml: Library) -> list[ctypes.c_void_p]:
    """Return NVML handles of usable GPUs; NVML in a container sees all, CUDA only its own."""
    count = ctypes.c_uint()
    nvml("nvmlDeviceGetCount_v2", ctypes.byref(count))
    handles = []
    for number in range(count.value):
        handle = ctypes.c_void_p()
        try:
            nvml("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(handle))
        except Refused as refused:
            if refused.status != NOT_PERMITTED:
                raise
        else:
            handles.append(handle)
    return handles


def _is_split(nvml: Library, handle: ctypes.c_void_p) -> bool:
    now, later = ctypes.c_uint(), ctypes.c_uint()
    try:
        nvml("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(later))
    except (Refused, AttributeError):  # not supported by the card or the driver
        return False
    return now.value == 1


def _nvml_card(nvml: Library, handle: ctypes.c_void_p) -> Card:
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), Memory()
    nvml("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    name, capability = nvml.text("nvmlDeviceGetName", handle), (major.value, minor.value)
    try:
        nvml("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    except Refused:  # GPU and processor share memory
        return Card(name, capability, None, None)
    return Card(name, capability, memory.total, memory.free)


def _nvml_words(library: ctypes.CDLL, status: int) -> str:
    library.nvmlErrorString.restype = ctypes.c_char_p
    return str(library.nvmlErrorString(status).decode(errors="replace"))


# --- the CUDA driver ------------------------------------------------------------------------------


def by_cuda(library: ctypes.CDLL) -> tuple[str, list[Card]]:
    """Return the GPUs by the CUDA driver, which applies the environment; free memory is unknown, as
    querying it allocates some."""
    os.environ.setdefault(ORDER, "PCI_BUS_ID")
    cuda = Library(library, _cuda_words)
    count, version, names = ctypes.c_int(), ctypes.c_int(), os.environ.get(VISIBLE)
    try:
        cuda("cuInit", ctypes.c_uint(0))
    except Refused as refused:
        raise Unusable(f"{refused}" + (f"; {VISIBLE}={names!r}" if names else "")) from refused
    cuda("cuDriverGetVersion", ctypes.byref(version))
    cuda("cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise Unusable("the NVIDIA driver is here, and no GPU")
    driver = f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return driver, [_cuda_card(cuda, number) for number in range(count.value)]


def _cuda_card(cuda: Library, number: int) -> Card:
    device, size, parts = ctypes.c_int(), ctypes.c_size_t(), []
    cuda("cuDeviceGet", ctypes.byref(device), number)
    cuda("cuDeviceTotalMem_v2", ctypes.byref(size), device)
    for attribute in (MAJOR, MINOR):
        part = ctypes.c_int()
        cuda("cuDeviceGetAttribute", ctypes.byref(part), attribute, device)
        parts.append(part.value)
    name = cuda.text("cuDeviceGetName", device, after=True)
    return Card(name, (parts[0], parts[1]), size.value, available_bytes=None)


def _cuda_words(library: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    known = library.cuGetErrorString(status, ctypes.byref(text)) == 0
    return text.value.decode(errors="replace") if known and text.value else "an error of its own"


# --- both -----------------------------------------------------------------------------------------


def _opened(name: str) -> tuple[ctypes.CDLL | None, str]:
    """Open the library, or return why it cannot be."""
    reason = f"{name} is not there"
    for folder in FOLDERS:
        try:
            return ctypes.CDLL(folder + name), ""
        except OSError as error:
            if not str(error).startswith(f"{folder}{name}: cannot open shared object file"):
                reason = f"{name} cannot be loaded ({error})"
    return None, reason


if __name__ == "__main__":
    sys.stdout.write(json.dumps(hardware()))
