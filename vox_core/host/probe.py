"""Find the hardware, by running each plugin's probe and by the core's own detection.

A probe is a script of the standard library that prints one JSON object, a `Hardware`:

    {"present": true, "detail": "2 cores, 24.0 GB",
     "devices": [{"name": "…", "tag": "cpu", "memory_bytes": 24000000000}]}

It runs in its own interpreter, without site-packages, for at most two seconds; probes run
concurrently. `present: false` means that there is no such hardware; `detail` gives the evidence. A
probe that fails, hangs or prints something else is a `ProbeFault`: the plugin is broken.

`VOX_OVERRIDE_HARDWARE` (`none`, `nvidia`, `apple`, or several with commas) replaces both: for
tests, and for planning on a machine other than the one that will train.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from vox_core.contract import DType
from vox_core.errors import ConfigError
from vox_core.host.discover import Found
from vox_core.host.manifest import Manifest
from vox_core.host.process import Failed, output_of

LIMIT_S = 2.0
OVERRIDE = "VOX_OVERRIDE_HARDWARE"

_CHILD = """
import runpy, sys
if libraries := sys.argv[2:]:
    import ctypes
    for library in libraries:
        ctypes.CDLL(library)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a kind (`tag`): `cpu`, `nvidia`, `apple`, …; all but `cpu` are accelerators.

    Args:
        memory_bytes: total memory; None if unknown.
        available_bytes: memory free now; None if unknown.
        best_dtype: dtype that `--dtype auto` selects on it.
        features: properties that decide dtypes and kernels, such as instruction sets.
    """

    name: str
    tag: str
    memory_bytes: int | None = None
    available_bytes: int | None = None
    best_dtype: DType | None = None
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices that a probe found, or in `detail` the evidence that there are none."""

    present: bool
    devices: tuple[Device, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class ProbeFault:
    """Why a probe gave no valid result."""

    reason: str


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Hardware that the core detects without a plugin, to notice a missing backend.

    `backend` is the id of the backend for it in the catalog.
    """

    tag: str
    name: str
    backend: str


_HARDWARE = TypeAdapter(Hardware)
NVIDIA = Accelerator("nvidia", "an NVIDIA GPU", "cuda")
APPLE = Accelerator("apple", "an Apple GPU", "mlx")
ACCELERATORS = (NVIDIA, APPLE)

_LOOK_AT = {
    "nvidia": "check that `nvidia-smi` lists the GPU; a container needs access to both",
    "apple": "check that macOS offers the GPU to Metal; a virtual machine may have none",
}
# The driver's control device; WSL has none, so there Windows' driver library.
_NVIDIA_DRIVER = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))


def accelerators(environ: Mapping[str, str] = os.environ) -> tuple[Accelerator, ...]:
    """Return the accelerators of this machine that the core detects without a plugin.

    Raises:
        ConfigError: `VOX_OVERRIDE_HARDWARE` names unknown hardware.
    """
    if (pretended := _override(environ)) is not None:
        return tuple(known for known in ACCELERATORS if known.tag in pretended)
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # set by the user
    here = {
        NVIDIA: not hidden and any(path.exists() for path in _NVIDIA_DRIVER),
        APPLE: sys.platform == "darwin" and platform.machine() == "arm64",
    }
    return tuple(known for known in ACCELERATORS if here[known])


def device_tags(environ: Mapping[str, str] = os.environ) -> set[str]:
    """Return the tags of this machine's devices that need no plugin to be detected."""
    return {"cpu", *(accelerator.tag for accelerator in accelerators(environ))}


def probe_all(
    plugins: Sequence[Found], environ: Mapping[str, str] = os.environ
) -> dict[str, Hardware | ProbeFault]:
    """Run the probes of `plugins` concurrently; return id -> hardware or fault.

    Args:
        plugins: discovered without a fault, each with a probe in its manifest.

    Raises:
        ConfigError: `VOX_OVERRIDE_HARDWARE` names unknown hardware.
    """
    pretended = _override(environ)
    if not plugins:
        return {}
    with ThreadPoolExecutor(max_workers=len(plugins)) as pool:
        results = pool.map(lambda plugin: _probe(plugin, pretended), plugins)
        return {plugin.id: result for plugin, result in zip(plugins, results, strict=True)}


def hardware_remedy(tag: str | None) -> str:
    """Return the remedy for hardware that is not found."""
    return _LOOK_AT.get(tag or "", "see that the hardware is connected and its driver works")


def probe_remedy(found: Found, reason: str) -> str:
    """Return the remedy for a probe that failed for `reason`."""
    assert found.manifest is not None, found.id
    requires = found.manifest.requires
    missing = [name for name in requires.native_libs if name in reason]
    if missing:
        return f"install what brings {', '.join(missing)}, and see that it is on the library path"
    if requires.hardware_tag:  # a hanging driver hangs the probe
        return f"{hardware_remedy(requires.hardware_tag)}; or {found.upgrade_or_report}"
    return found.upgrade_or_report


def _override(environ: Mapping[str, str]) -> frozenset[str] | None:
    if not (text := environ.get(OVERRIDE, "")):
        return None
    tags = {part.strip() for part in text.split(",")}
    known = {"none", *(accelerator.tag for accelerator in ACCELERATORS)}
    if unknown := sorted(tags - known):
        raise ConfigError(
            "C002",
            f"{OVERRIDE} names unknown hardware",
            found=", ".join(unknown),
            expected=f"some of {', '.join(sorted(known))}",
            remedy=f"correct it, or unset {OVERRIDE} to use the detected hardware",
        )
    return frozenset(tags - {"none"})


def _probe(plugin: Found, pretended: frozenset[str] | None) -> Hardware | ProbeFault:
    manifest, folder = plugin.manifest, plugin.folder
    assert manifest is not None and manifest.probe is not None and folder is not None, plugin.id
    tag = manifest.requires.hardware_tag
    if pretended is not None and tag is not None:
        said = f"{OVERRIDE}={','.join(sorted(pretended)) or 'none'}"
        if tag not in pretended:
            return Hardware(False, (), f"no {tag} hardware ({said})")
        return Hardware(True, (Device(tag, tag),), f"{tag} ({said})")
    try:
        hardware = _HARDWARE.validate_json(_run(folder / manifest.probe.file, manifest))
    except Failed as fault:
        return ProbeFault(f"its probe {fault}")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "output"
        return ProbeFault(f"its probe gave a wrong answer: {place}: {first['msg']}")
    if wrong := next(_wrong(hardware), None):
        return ProbeFault(f"its probe gave a wrong answer: {wrong}")
    return hardware


def _run(file: Path, manifest: Manifest) -> bytes:
    """Run a probe and return its output; -I and -S restrict it to the standard library."""
    script = [sys.executable, "-I", "-S", "-c", _CHILD, str(file)]
    return output_of([*script, *manifest.requires.native_libs], LIMIT_S)


def _wrong(hardware: Hardware) -> Iterator[str]:
    """Return the inconsistencies in a probe's result that has the right types."""
    if hardware.present != bool(hardware.devices):
        yield "`present` and `devices` disagree"
    if not hardware.detail.isprintable():
        yield f"detail: {hardware.detail!r} is not one line of text"
    for number, device in enumerate(hardware.devices):
        for text in (device.name, device.tag, *device.features):
            if not text.isprintable():
                yield f"devices.{number}: {text!r} is not one line of text"
        for size in (device.memory_bytes, device.available_bytes):
            if size is not None and size < 0:
                yield f"devices.{number}: {size} is no number of bytes"
