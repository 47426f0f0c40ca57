"""Judge one candidate backend: refuse it for a reason, or give its hardware and rank.

The first applicable reason counts, in this order: a damaged manifest, the user named another
backend, blocked, API, platform, Python, distributions, capabilities, chosen only by name; then the
result of its probe. A plugin refused before that is never probed.

select.py chooses among several candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vox_core.errors import VoxError
from vox_core.host import Candidate, Environment, Request, Status, Verdict
from vox_core.host.blocked import blocking
from vox_core.host.discover import Found
from vox_core.host.machine import unmet
from vox_core.host.manifest import Capabilities
from vox_core.host.probe import Device, Hardware, ProbeFault

ABSENT = "no such hardware: "

_BROKEN = ("manifest", "distribution", "probe")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a candidate is refused; `kind` is the filter that refused it."""

    kind: str
    reason: str


_NOT_ASKED = Hardware(False, (), "")


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate with its refusal, or with its hardware and rank."""

    found: Found
    refusal: Refusal | None
    hardware: Hardware = _NOT_ASKED
    rank: tuple[int, bool, int] = (0, False, 0)

    @property
    def verdict(self) -> Verdict:
        plugin = self.found
        version = plugin.manifest.version if plugin.manifest else plugin.version
        status: Status = "eligible"
        reason = self.hardware.detail
        if self.refusal:
            status = "broken" if self.refusal.kind in _BROKEN else "rejected"
            reason = self.refusal.reason
        return Verdict(plugin.id, version, plugin.distribution, status, reason)

    @property
    def accelerates(self) -> bool:
        return any(device.tag != "cpu" for device in self.hardware.devices)


def judge_all(
    request: Request, candidates: Sequence[Candidate], environment: Environment
) -> list[Judged]:
    """Judge every candidate, sorted by id and distribution."""
    ordered = sorted(candidates, key=lambda each: (each.found.id, each.found.distribution))
    return [_judge(request, each, environment) for each in ordered]


def _judge(request: Request, candidate: Candidate, environment: Environment) -> Judged:
    plugin, hardware = candidate.found, candidate.hardware
    refusal = static_refusal(request, plugin, environment)
    if refusal or plugin.manifest is None:
        return Judged(plugin, refusal)
    assert hardware is not None, f"{plugin.id} was not probed"
    if isinstance(hardware, ProbeFault):
        return Judged(plugin, Refusal("probe", hardware.reason))
    if absence := _absence(hardware, plugin.manifest.requires.hardware_tag):
        return Judged(plugin, Refusal("hardware", f"{ABSENT}{absence}"))
    judged = Judged(plugin, None, hardware)
    level = 0 if not _has_memory(judged, request.memory_needed) else 2 if judged.accelerates else 1
    rank = (level, plugin.id == request.resumed_from, plugin.manifest.priority)
    return replace(judged, rank=rank)


def static_refusal(request: Request, plugin: Found, environment: Environment) -> Refusal | None:
    """Return the first reason for refusal that needs no probe, or None."""
    manifest = plugin.manifest
    if plugin.fault or manifest is None:
        return Refusal("manifest", on_one_line(plugin.fault) if plugin.fault else "no manifest")
    if request.explicit not in (None, plugin.id):
        return Refusal("explicit", f"not asked for ({how_asked(request)})")
    if who := environment.blocked.get(plugin.id):
        return Refusal("blocked", blocking(plugin.id, who))
    if requirement := unmet(manifest, environment.machine):
        return Refusal(requirement[0], ": ".join(requirement))
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
    sizes = [_memory(device) for device in counted]
    return needed is None or any(size is None or size >= needed for size in sizes)


def _memory(device: Device) -> int | None:
    return device.memory_bytes if device.available_bytes is None else device.available_bytes


def how_asked(request: Request) -> str:
    """Name the flag or setting that chose the backend: `--backend cpu`."""
    return f"{request.explicit_origin or 'by name:'} {request.explicit}"


def on_one_line(fault: VoxError) -> str:
    """Format a fault on one line, as the reason of a verdict."""
    details = "; ".join(fault.faults) or fault.found
    return f"{fault.what}: {details}" if details else fault.what
