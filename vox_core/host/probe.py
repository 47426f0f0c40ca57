"""This machine: its hardware, and whether it meets a manifest's `requires`.

A probe is a script of the standard library that prints one JSON object, a `Hardware`:

    {"present": true, "detail": "2 cores, 24.0 GB",
     "devices": [{"name": "…", "tag": "cpu", "memory_bytes": 24000000000}]}

It runs in its own interpreter, without site-packages, for at most 20 seconds (on a busy machine);
probes run concurrently. `present: false` means that there is no such hardware; `detail` gives the
evidence. A probe that fails, hangs or prints something else is a `ProbeFault`.

`VOX_OVERRIDE_HARDWARE` (`none`, `nvidia`, `apple`, or several with commas) replaces probes and the
core's own detection: for tests, and for planning on a machine other than the one that will train.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, TypeAlias

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import Field, TypeAdapter, ValidationError

from vox_core.bounded_json import schema_faults
from vox_core.catalog import checked_by
from vox_core.contract import API_VERSION, DType
from vox_core.errors import ConfigError
from vox_core.host.discover import Found, installed_version
from vox_core.host.manifest import Manifest
from vox_core.host.process import Failed, output_of

LIMIT_S = 20.0
OVERRIDE = "VOX_OVERRIDE_HARDWARE"

_CHILD = """
import runpy, sys
if libraries := sys.argv[2:]:
    import ctypes
    for library in libraries:
        ctypes.CDLL(library)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def _one_line(text: str) -> None:
    if not text.isprintable():
        raise ValueError(f"{text!r} is not one line of text")


Line: TypeAlias = Annotated[str, checked_by(_one_line)]
Bytes: TypeAlias = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a kind (`tag`): `cpu`, `nvidia`, `apple`, …; all but `cpu` are accelerators.

    Args:
        memory_bytes: total memory; None if unknown.
        available_bytes: memory free now; None if unknown.
        best_dtype: dtype that `--dtype auto` selects on it.
        features: properties that decide dtypes and kernels, such as instruction sets.
    """

    name: Line
    tag: Line
    memory_bytes: Bytes | None = None
    available_bytes: Bytes | None = None
    best_dtype: DType | None = None
    features: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices that a probe found, or in `detail` the evidence that there are none. That of a
    chosen backend has at least one."""

    present: bool
    devices: tuple[Device, ...]
    detail: Line


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
    """Return the accelerators of this machine that the core detects without a plugin (C002 if
    `VOX_OVERRIDE_HARDWARE` names unknown hardware)."""
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
    """
    pretended = _override(environ)
    if not plugins:
        return {}
    with ThreadPoolExecutor(max_workers=len(plugins)) as pool:
        results = pool.map(lambda plugin: _probe(plugin, pretended), plugins)
        return {plugin.id: result for plugin, result in zip(plugins, results, strict=True)}


def hardware_remedy(tag: str | None) -> str:
    return _LOOK_AT.get(tag or "", "see that the hardware is connected and its driver works")


def probe_remedy(found: Found, reason: str) -> str:
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
        wrong, found = schema_faults(error)[0], repr(error.errors()[0]["input"])[:100]
        return ProbeFault(f"its probe gave a wrong answer: {wrong} (found: {found})")
    if hardware.present != bool(hardware.devices):
        return ProbeFault("its probe gave a wrong answer: `present` and `devices` disagree")
    return hardware


def _run(file: Path, manifest: Manifest) -> bytes:
    """Run a probe and return its output; -I and -S restrict it to the standard library."""
    script = [sys.executable, "-I", "-S", "-c", _CHILD, str(file)]
    return output_of([*script, *manifest.requires.native_libs], LIMIT_S)


_SYSTEMS = {"darwin": "macos", "win32": "windows"}
_ARCHITECTURES = {"aarch64": "arm64", "amd64": "x86_64"}


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that `requires` is compared with.

    Args:
        os: `linux`, `macos` or `windows`.
        arch: in a manifest's spelling: `x86_64`, `arm64`, …
        python: version.
        version_of: returns the version of a distribution, None if it is not installed.
    """

    os: str
    arch: str
    python: str
    version_of: Callable[[str], str | None] = installed_version


def this_machine() -> Machine:
    architecture = platform.machine().lower()
    return Machine(
        os=_SYSTEMS.get(sys.platform, sys.platform),
        arch=_ARCHITECTURES.get(architecture, architecture),
        python=platform.python_version(),
    )


def unmet(manifest: Manifest, machine: Machine) -> tuple[str, str] | None:
    """Return the first unmet kind of requirement and the reason; None if all are met."""
    reasons = requirements(manifest, machine)
    return next(((kind, reason) for kind, reason in reasons.items() if reason), None)


def requirements(manifest: Manifest, machine: Machine) -> dict[str, str]:
    """Return each kind of requirement -> why it is not met, or ""."""
    needs = manifest.requires
    sides = ((machine.os, needs.os), (machine.arch, needs.arch))
    platforms = [
        f"{here} (needs: {', '.join(allowed)})"
        for here, allowed in sides
        if allowed and here not in allowed
    ]
    theirs, ours = Version(manifest.api), Version(API_VERSION)
    api = f"written for {manifest.api}, this vox speaks {API_VERSION}; {_api_remedy(manifest)}"
    python = SpecifierSet(needs.python).contains(machine.python, prereleases=True)
    return {
        "api": "" if theirs.major == ours.major and theirs <= ours else api,
        "platform": ", ".join(platforms),
        "python": "" if python else f"{machine.python} (needs: {needs.python})",
        "distribution": _unmet(map(Requirement, needs.distributions), machine.version_of),
    }


def requirement_remedy(manifest: Manifest, kind: str) -> str:
    return {
        "api": _api_remedy(manifest),
        "platform": "install a plugin for this machine: `vox plugin list` shows them",
        "python": "install vox and the plugin under a Python that it supports",
        "distribution": f"install its requirements: vox plugin upgrade {manifest.id}, or by hand",
    }[kind]


def _api_remedy(manifest: Manifest) -> str:
    newer = Version(manifest.api) > Version(API_VERSION)
    return "upgrade vox-ml" if newer else f"vox plugin upgrade {manifest.id}"


def missing_libraries(distribution: str) -> str:
    """Return which requirements in a distribution's own metadata are not met; "" if all are."""
    with suppress(metadata.PackageNotFoundError):
        return _unmet(applicable(metadata.requires(distribution) or ()), installed_version)
    return ""


def applicable(texts: Iterable[str]) -> Iterator[Requirement]:
    """Parse requirements; skip invalid ones and those whose markers do not hold here."""
    for text in texts:
        with suppress(InvalidRequirement):
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                yield need


def _unmet(needs: Iterable[Requirement], version_of: Callable[[str], str | None]) -> str:
    reasons = []
    for required in needs:
        version = version_of(required.name)
        if version is None:
            reasons.append(f"{required} is not installed")
        elif not required.specifier.contains(version, prereleases=True):
            reasons.append(f"{required.name} is {version} (needs: {required.specifier})")
    return ", ".join(reasons)
