"""Choose, explain and list backends, with the installed plugins and hardware of one command.

    seen = Seen()
    backend, selection = choose(Request("train", quant="nf4"), seen=seen)

Each part of a `Seen` is read on first use and then kept: the metadata of all packages is read once,
and a probe runs once, for the first request that needs it. Later changes are not noticed; after a
long wait, make a new `Seen`. select.py chooses the backend.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from vox_core.catalog import objections
from vox_core.errors import BackendError
from vox_core.host import discover, probe
from vox_core.host.blocked import blocked_plugins
from vox_core.host.discover import Found
from vox_core.host.judge import Candidate, Request, Surroundings, Verdict
from vox_core.host.load import Backend, load_backend
from vox_core.host.machine import Machine, this_machine
from vox_core.host.select import Selection, needs_probe, select, verdicts
from vox_core.known import known


class Seen:
    """The plugins, machine and probe results as of their first use."""

    def __init__(self) -> None:
        self._hardware: dict[str, probe.Hardware | probe.ProbeFault] = {}

    @cached_property
    def plugins(self) -> tuple[Found, ...]:
        """Installed plugins of every kind."""
        return discover.discover()

    @cached_property
    def machine(self) -> Machine:
        """The machine that manifests are compared with."""
        return this_machine(self.plugins)

    @cached_property
    def blocked(self) -> dict[str, str]:
        """Id of a blocked plugin -> the place that blocks it."""
        return blocked_plugins([plugin.id for plugin in self.plugins])

    @cached_property
    def _accelerators(self) -> tuple[probe.Accelerator, ...]:
        return probe.accelerators()

    def survey(
        self, request: Request, known: Collection[str]
    ) -> tuple[list[Candidate], Surroundings]:
        """Return the installed backends, probed as far as `request` needs it, and the other inputs
        of a selection.

        Args:
            known: ids of installable plugins; empty where no advice is needed.

        Raises:
            ConfigError: an environment variable about plugins or hardware is wrong.
        """
        backends = [plugin for plugin in self.plugins if _is_candidate(plugin, request)]
        environment = Surroundings(
            accelerators=self._accelerators,
            machine=self.machine,
            blocked=self.blocked,
            known=known,
            able=_able(request, self._accelerators) if known else (),
        )
        asked = [plugin for plugin in backends if needs_probe(request, plugin, environment)]
        unasked = [plugin for plugin in asked if plugin.id not in self._hardware]
        self._hardware |= probe.probe_all(unasked)
        hardware = {plugin.id: self._hardware[plugin.id] for plugin in asked}
        return [Candidate(plugin, hardware.get(plugin.id)) for plugin in backends], environment


def _able(request: Request, present: tuple[probe.Accelerator, ...]) -> tuple[str, ...]:
    quantised = request.quant not in (None, "none")
    if not quantised and request.method != "full":  # every backend has the rest
        return ()
    tags = {each.tag for each in present}
    return tuple(
        entry.id
        for entry in known().plugins.values()
        if (not quantised or request.quant in entry.quantisations)
        and (request.method is None or request.method in entry.methods)
        and not objections(entry, tags)
    )


def _is_candidate(plugin: Found, request: Request) -> bool:
    """Whether a plugin may be a backend, as one with a faulty manifest, or was named as one."""
    manifest = plugin.manifest
    return manifest is None or manifest.is_backend or plugin.id == request.explicit


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


def choose(request: Request, seen: Seen | None = None) -> tuple[Backend, Selection]:
    """Select a backend for `request` and load it.

    Args:
        seen: facts cached for another request of the same command.

    Raises:
        BackendError: none can be chosen, or the one chosen cannot be loaded.
        ConfigError: an environment variable about plugins or hardware is wrong.
    """
    candidates, environment = (seen or Seen()).survey(request, known().plugins)
    selection = select(request, candidates, environment)
    found = next(each.found for each in candidates if each.found.id == selection.chosen)
    return load_backend(found, request.operation), selection


def explain(request: Request, seen: Seen | None = None) -> Explanation:
    """Return the selection that `choose` would make for `request`, loading no plugin.

    Raises:
        ConfigError: an environment variable about plugins or hardware is wrong.
    """
    candidates, environment = (seen or Seen()).survey(request, known().plugins)
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
    request = Request("load")
    return verdicts(request, *Seen().survey(request, ()))
