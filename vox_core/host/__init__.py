"""The plugin host: which backends are installed, which one serves a request, and that one loaded.

    backend, selection = choose(Request("train", quant="nf4"))
    print(selection.why)
    result = backend.train(job, context)

The pieces, each usable by itself: manifest.py (`vox_plugin.toml`), discover.py (what is installed,
nothing imported), machine.py (what it is held against), blocked.py (what the user does not want),
probe.py (what hardware is here), seen.py (all of these, once for a command), judge.py and select.py
(a pure choice), load.py (one plugin, imported and checked), observers.py (those that watch a run).
inventory.py and doctor.py tell about plugins of any kind. Here are the words in which a choice is
asked for and explained, and the way through all of them.
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
    """What a backend is wanted for; None leaves a point open.

    Args:
        explicit: the id asked for by name; `explicit_origin` is where that was said.
        resumed_from: the id of the backend that the run to be resumed was on.
        memory_needed: bytes, on one device.
        allow_cpu: train on the CPU though an accelerator lies idle.
        streamed: `LoadJob.streamed` will be asked for.
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
    """What a selection depends on beside the request and the plugins.

    Args:
        accelerators: those that the core sees by itself.
        blocked: id of a plugin that is not to be used -> who says so.
        known: id -> distribution, from the catalog.
        quantising: ids, from the catalog, of plugins for this machine that have the quantisation
            which is asked for.
    """

    machine: Machine
    accelerators: tuple[Accelerator, ...] = ()
    blocked: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)
    quantising: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """An installed backend and what its probe found; None if there was no need to run it."""

    found: Found
    hardware: Hardware | ProbeFault | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one candidate, and why."""

    id: str
    version: str
    distribution: str
    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend chosen, why in one line, its hardware, and the verdict on every candidate."""

    chosen: str
    why: str
    hardware: Hardware
    verdicts: tuple[Verdict, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON types, for the record of the run."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `select` would answer: a selection, or the refusal with the verdicts that led to it."""

    selection: Selection | None
    refusal: BackendError | None
    verdicts: tuple[Verdict, ...]

    @property
    def why(self) -> str:
        """Of the choice, or of the refusal, on one line."""
        if self.selection:
            return self.selection.why
        assert self.refusal is not None
        return self.refusal.what + (f": {self.refusal.found}" if self.refusal.found else "")

    def to_json(self) -> dict[str, Any]:
        """In the shape of `Selection.to_json`, with None where nothing is chosen."""
        if self.selection:
            return self.selection.to_json()
        verdicts = [asdict(verdict) for verdict in self.verdicts]
        return {"chosen": None, "why": self.why, "hardware": None, "verdicts": verdicts}


def choose(
    request: Request, known: Mapping[str, str] | None = None, seen: Seen | None = None
) -> tuple[Backend, Selection]:
    """Select a backend for `request` and load it.

    Args:
        known: id -> distribution of what can be installed; without it, the catalog's plugins.
        seen: what was looked at for another request of the same command.

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
    """What `choose` would select for `request`, and why; nothing is loaded.

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
    """Every installed backend: `eligible` with its hardware, or the reason why not.

    Raises:
        ConfigError: an environment variable about plugins or hardware is wrong.
    """
    from vox_core.host.select import verdicts

    request = Request("load")
    return verdicts(request, *survey(request, {}))


def survey(
    request: Request, known: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> tuple[list[Candidate], Environment]:
    """Look at what is installed and, as far as `request` needs it, at the hardware."""
    from vox_core.host.seen import Seen

    return Seen(environ).survey(request, known)


def _catalogued() -> dict[str, str]:
    from vox_core.host.known import known_plugins

    return {plugin.id: plugin.distribution for plugin in known_plugins().values()}
