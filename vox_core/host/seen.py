"""Cache the installed plugins and the hardware for all requests of one command.

    seen = Seen()
    candidates, environment = seen.survey(Request("train"), known)

Each part is read on first use and then kept: the metadata of all packages is read once, and a probe
runs once, for the first request that needs it. Later changes are not noticed; after a long wait,
make a new `Seen`. select.py chooses the backend.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from vox_core.host import Candidate, Environment, Request

if TYPE_CHECKING:
    from vox_core.host.discover import Found
    from vox_core.host.machine import Machine
    from vox_core.host.probe import Accelerator, Hardware, ProbeFault


class Seen:
    """The plugins, machine and probe results as of their first use."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._hardware: dict[str, Hardware | ProbeFault] = {}

    @cached_property
    def plugins(self) -> tuple[Found, ...]:
        """Installed plugins of every kind."""
        from vox_core.host.discover import discover

        return discover()

    @cached_property
    def machine(self) -> Machine:
        """The machine that manifests are compared with."""
        from vox_core.host.machine import this_machine

        return this_machine(self.plugins)

    @cached_property
    def blocked(self) -> dict[str, str]:
        """Id of a blocked plugin -> the place that blocks it.

        Raises:
            ConfigError: the variable names one that is unknown, or a file cannot be read.
        """
        from vox_core.host.blocked import blocked_plugins

        return blocked_plugins([plugin.id for plugin in self.plugins], self._environ)

    def survey(
        self, request: Request, known: Mapping[str, str]
    ) -> tuple[list[Candidate], Environment]:
        """Return the installed backends, probed as far as `request` needs it, and the other inputs
        of a selection.

        Args:
            known: id -> distribution of installable plugins.

        Raises:
            ConfigError: an environment variable about plugins or hardware is wrong.
        """
        from vox_core.host.probe import probe_all
        from vox_core.host.select import needs_probe

        backends = [plugin for plugin in self.plugins if _may_be_backend(plugin)]
        environment = Environment(
            accelerators=self._accelerators,
            machine=self.machine,
            blocked=self.blocked,
            known=known,
            quantising=_quantising(request, self._accelerators) if known else (),
        )
        asked = [plugin for plugin in backends if needs_probe(request, plugin, environment)]
        unasked = [plugin for plugin in asked if plugin.id not in self._hardware]
        self._hardware |= probe_all(unasked, self._environ)
        hardware = {plugin.id: self._hardware[plugin.id] for plugin in asked}
        return [Candidate(plugin, hardware.get(plugin.id)) for plugin in backends], environment

    @cached_property
    def _accelerators(self) -> tuple[Accelerator, ...]:
        from vox_core.host.probe import accelerators

        return accelerators(self._environ)


def _quantising(request: Request, present: tuple[Accelerator, ...]) -> tuple[str, ...]:
    if request.quant in (None, "none"):
        return ()
    from vox_core.catalog import objections
    from vox_core.host.known import known_plugins

    tags = {each.tag for each in present}
    return tuple(
        entry.id
        for entry in known_plugins().values()
        if request.quant in entry.quantisations and not objections(entry, tags)
    )


def _may_be_backend(plugin: Found) -> bool:
    """Whether a plugin may be a backend; one with a faulty manifest may."""
    return plugin.manifest is None or plugin.manifest.is_backend
