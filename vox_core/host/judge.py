"""The request for a backend, and the judgement on each candidate: refused for a reason, or ranked.

The first applicable reason counts, in this order: a damaged manifest, the user named another
backend, blocked, API, platform, Python, distributions, capabilities, chosen only by name; then the
result of its probe. A plugin refused before that is never probed.

select.py chooses among several candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from vox_core.contract import DType, Method, Optimizer, Quant
from vox_core.errors import SOURCES, VoxError
from vox_core.host.blocked import blocking, unblock
from vox_core.host.discover import Found
from vox_core.host.manifest import Capabilities
from vox_core.host.probe import (
    Accelerator,
    Hardware,
    Machine,
    ProbeFault,
    hardware_remedy,
    probe_remedy,
    requirement_remedy,
    unmet,
)

Operation: TypeAlias = Literal["train", "merge", "load"]
Status: TypeAlias = Literal["chosen", "available", "rejected", "broken"]

ABSENT = "no such hardware: "
_BROKEN = ("manifest", "distribution", "probe")
_NOT_PROBED = Hardware(False, (), "")


@dataclass(frozen=True, slots=True)
class Request:
    """The requirements of an operation on its backend; None leaves one open.

    Args:
        explicit: the id that the user named.
        resumed_from: the id of the backend that the resumed run used.
        memory_needed: bytes, on one device.
        allow_cpu: train on the CPU even if an accelerator stays idle.
        streamed: the job will set `LoadJob.streamed`.
        several_targets: batches will have several targets at each position.
    """

    operation: Operation
    quant: Quant | None = None
    dtype: DType | None = None
    method: Method | None = None
    model_type: str | None = None
    explicit: str | None = None
    resumed_from: str | None = None
    memory_needed: int | None = None
    allow_cpu: bool = False
    streamed: bool = False
    several_targets: bool = False
    optimizer: Optimizer | None = None

    @property
    def asked(self) -> str:
        """The flag or setting that chose the backend: `--backend cpu`."""
        return f"{SOURCES.get({}).get('backend', '--backend')} {self.explicit}"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The inputs of a selection besides the request and the plugins.

    Args:
        accelerators: those that the core detects without a plugin.
        blocked: id of a plugin that the user disabled or blocked -> where.
        known: ids of the catalog.
        able: ids, from the catalog, of plugins for this machine that have the quantisation and the
            method that the request needs, where not every backend has them.
    """

    machine: Machine
    accelerators: tuple[Accelerator, ...] = ()
    blocked: Mapping[str, str] = field(default_factory=dict)
    known: Collection[str] = ()
    able: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """An installed backend and the result of its probe; None if the probe was not needed."""

    found: Found
    hardware: Hardware | ProbeFault | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one candidate is chosen or refused, and why."""

    id: str
    version: str
    distribution: str
    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a candidate is refused, and what repairs the part at fault, if anything does; `kind` is
    the filter that refused it."""

    kind: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate with its refusal, or with its hardware and rank."""

    found: Found
    refusal: Refusal | None
    hardware: Hardware = _NOT_PROBED
    rank: tuple[int, bool, int] = (0, False, 0)

    @property
    def verdict(self) -> Verdict:
        plugin, reason = self.found, self.hardware.detail
        status: Status = "available"
        if self.refusal:
            status = "broken" if self.refusal.kind in _BROKEN else "rejected"
            reason = self.refusal.reason
        return Verdict(plugin.id, plugin.shown_version, plugin.distribution, status, reason)

    @property
    def accelerates(self) -> bool:
        return any(device.tag != "cpu" for device in self.hardware.devices)


def judge_all(
    request: Request, candidates: Sequence[Candidate], environment: Surroundings
) -> list[Judged]:
    """Judge every candidate, sorted by id and distribution."""
    ordered = sorted(candidates, key=lambda each: (each.found.id, each.found.distribution))
    return [_judge(request, each, environment) for each in ordered]


def _judge(request: Request, candidate: Candidate, environment: Surroundings) -> Judged:
    plugin, hardware = candidate.found, candidate.hardware
    refusal = static_refusal(request, plugin, environment)
    if refusal or plugin.manifest is None:
        return Judged(plugin, refusal)
    assert hardware is not None, f"{plugin.id} was not probed"
    if isinstance(hardware, ProbeFault):
        remedy = probe_remedy(plugin, hardware.reason)
        return Judged(plugin, Refusal("probe", hardware.reason, remedy))
    tag = plugin.manifest.requires.hardware_tag
    if absence := _absence(hardware, tag):
        return Judged(plugin, Refusal("hardware", f"{ABSENT}{absence}", hardware_remedy(tag)))
    judged = Judged(plugin, None, hardware)
    level = 0 if not _has_memory(judged, request.memory_needed) else 2 if judged.accelerates else 1
    rank = (level, plugin.id == request.resumed_from, plugin.manifest.priority)
    return replace(judged, rank=rank)


def static_refusal(request: Request, plugin: Found, environment: Surroundings) -> Refusal | None:
    """Return the first reason for refusal that needs no probe, or None."""
    manifest = plugin.manifest
    if manifest is None:
        assert plugin.fault is not None, plugin.id
        return Refusal("manifest", on_one_line(plugin.fault), plugin.fault.remedy)
    if not manifest.is_backend:  # and named all the same
        return Refusal("capability", "no backend: its manifest has no [capabilities]")
    if request.explicit not in (None, plugin.id):
        return Refusal("explicit", f"not asked for ({request.asked})")
    if who := environment.blocked.get(plugin.id):
        return Refusal("blocked", blocking(plugin.id, who), unblock(plugin.id, who))
    if requirement := unmet(manifest, environment.machine):
        remedy = requirement_remedy(manifest, requirement[0])
        return Refusal(requirement[0], ": ".join(requirement), remedy)
    if lack := lacking(request, manifest.capabilities):
        return Refusal("capability", f"capability: {lack}")
    if request.explicit is None and not manifest.automatic:
        return Refusal("automatic", f"only by name: --backend {plugin.id}")
    return None


def lacking(request: Request, has: Capabilities) -> str:
    """List the requested features that the capabilities lack; empty if none."""
    wanted: list[tuple[str, str | None, tuple[str, ...]]] = [
        ("quantisation", request.quant, has.quantisations),
        ("dtype", request.dtype, has.dtypes),
        ("method", request.method, has.methods),
        ("optimizer", request.optimizer, has.optimizers),
        ("model family", None if "*" in has.families else request.model_type, has.families),
        ("load", "streamed" if request.streamed else None, ("streamed",) * has.streamed_load),
        (
            "targets of a position",
            "several" if request.several_targets else None,
            ("several",) * has.several_targets,
        ),
    ]
    return ", ".join(
        f"{what} {value} (has: {', '.join(values) or 'none'})"
        for what, value, values in wanted
        if value is not None and value not in values
    )


def _absence(hardware: Hardware, tag: str | None) -> str:
    if not hardware.present:
        return hardware.detail
    tags = [device.tag for device in hardware.devices]
    return "" if tag is None or tag in tags else f"needs {tag}, found {', '.join(tags)}"


def _has_memory(judged: Judged, needed: int | None) -> bool:
    """Whether one device has enough memory; unknown sizes count as enough."""
    devices = judged.hardware.devices
    counted = [d for d in devices if d.tag != "cpu"] if judged.accelerates else devices
    sizes = [d.memory_bytes if d.available_bytes is None else d.available_bytes for d in counted]
    return needed is None or any(size is None or size >= needed for size in sizes)


def on_one_line(fault: VoxError) -> str:
    """Format a fault on one line, as the reason of a verdict."""
    details = "; ".join(fault.faults) or fault.found
    return f"{fault.what}: {details}" if details else fault.what
