"""The plugin host: list the installed backends, choose one for a request, and load it.

    backend, selection = choose(Request("train", quant="nf4"))
    print(selection.why)
    result = backend.train(job, context)

manifest.py parses `vox_plugin.toml`; discover.py finds installed plugins without importing them;
machine.py checks a manifest's requirements; blocked.py reads the ids that the user disabled;
probe.py finds hardware; seen.py caches all of these for one command; judge.py and select.py choose,
as pure functions; load.py imports and checks one plugin; observers.py runs the plugins that watch a
run. inventory.py and doctor.py report on plugins of any kind. This module defines the types of a
request and of a choice, and the functions that go through all of the above.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vox_core.contract import DType, Method, Optimizer, Quant
from vox_core.errors import BackendError

if TYPE_CHECKING:
    from vox_core.host.discover import Found
    from vox_core.host.load import Backend
    from vox_core.host.machine import Machine
    from vox_core.host.probe import Accelerator, Hardware, ProbeFault
    from vox_core.host.seen import Seen

TELLS_MORE = "see `vox backend explain`"

Operation: TypeAlias = Literal["train", "merge", "load"]
Origin: TypeAlias = Literal["--backend", "--plan", "VOX_BACKEND", "vox.toml"]
Status: TypeAlias = Literal["chosen", "eligible", "rejected", "broken"]


@dataclass(frozen=True, slots=True)
class Request:
    """The requirements of an operation on its backend; None leaves one open.

    Args:
        explicit: the id that the user named; `explicit_origin` says where (flag, variable, file).
        resumed_from: the id of the backend that the resumed run used.
        memory_needed: bytes, on one device.
        allow_cpu: train on the CPU even if an accelerator stays idle.
        streamed: the job will set `LoadJob.streamed`.
    """

    operation: Operation
    quant: Quant | None = None
    dtype: DType | None = None
    method: Method | None = None
    model_type: str | None = None
    explicit: str | None = None
    explicit_origin: Origin | None = None
    resumed_from: str | None = None
    memory_needed: int | None = None
    allow_cpu: bool = False
    streamed: bool = False
    optimizer: Optimizer | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """The inputs of a selection besides the request and the plugins.

    Args:
        accelerators: those that the core detects without a plugin.
        blocked: id of a plugin that the user disabled or blocked -> where.
        known: id -> distribution, from the catalog.
        quantising: ids, from the catalog, of plugins for this machine that have the quantisation
            that the request needs.
    """

    machine: Machine
    accelerators: tuple[Accelerator, ...] = ()
    blocked: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)
    quantising: tuple[str, ...] = ()


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
class Selection:
    """The chosen backend, the reason in one line, its hardware, and every candidate's verdict."""

    chosen: str
    why: str
    hardware: Hardware
    verdicts: tuple[Verdict, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON types, for the record of the run."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The selection that `select` would make, or its refusal, with all verdicts."""

    selection: Selection | None
    refusal: BackendError | None
    verdicts: tuple[Verdict, ...]

    @property
    def why(self) -> str:
        """The reason for the choice or the refusal, on one line."""
        if self.selection:
            return self.selection.why
        assert self.refusal is not None
        return self.refusal.what + (f": {self.refusal.found}" if self.refusal.found else "")

    def to_json(self) -> dict[str, Any]:
        """Return the same JSON as `Selection.to_json`, with None where no backend is chosen."""
        if self.selection:
            return self.selection.to_json()
        verdicts = [asdict(verdict) for verdict in self.verdicts]
        return {"chosen": None, "why": self.why, "hardware": None, "verdicts": verdicts}


def choose(
    request: Request, known: Mapping[str, str] | None = None, seen: Seen | None = None
) -> tuple[Backend, Selection]:
    """Select a backend for `request` and load it.

    Args:
        known: id -> distribution of installable plugins; by default those of the catalog.
        seen: facts cached for another request of the same command.

    Raises:
        BackendError: none can be chosen, or the one chosen cannot be loaded.
        ConfigError: an environment variable about plugins or hardware is wrong.
    """
    from vox_core.host.load import load_backend
    from vox_core.host.seen import Seen
    from vox_core.host.select import select

    known = _catalogued() if known is None else known
    candidates, environment = (seen or Seen()).survey(request, known)
    selection = select(request, candidates, environment)
    found = next(each.found for each in candidates if each.found.id == selection.chosen)
    return load_backend(found, request.operation), selection


def explain(
    request: Request, known: Mapping[str, str] | None = None, seen: Seen | None = None
) -> Explanation:
    """Return the selection that `choose` would make for `request`, loading no plugin.

    Raises:
        ConfigError: an environment variable about plugins or hardware is wrong.
    """
    from vox_core.host.seen import Seen
    from vox_core.host.select import select, verdicts

    known = _catalogued() if known is None else known
    candidates, environment = (seen or Seen()).survey(request, known)
    try:
        selection = select(request, candidates, environment)
    except BackendError as refusal:
        return Explanation(None, refusal, verdicts(request, candidates, environment))
    return Explanation(selection, None, selection.verdicts)


def list_backends() -> tuple[Verdict, ...]:
    """Return every installed backend: `eligible` with its hardware, or refused with the reason.

    Raises:
        ConfigError: an environment variable about plugins or hardware is wrong.
    """
    from vox_core.host.select import verdicts

    request = Request("load")
    return verdicts(request, *survey(request, {}))


def survey(
    request: Request, known: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> tuple[list[Candidate], Environment]:
    """Collect the installed plugins and, as far as `request` needs it, the hardware."""
    from vox_core.host.seen import Seen

    return Seen(environ).survey(request, known)


def _catalogued() -> dict[str, str]:
    from vox_core.host.known import known_plugins

    return {plugin.id: plugin.distribution for plugin in known_plugins().values()}
