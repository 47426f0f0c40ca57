"""Installed plugins: discover, probe, select and load them, as the conformance suite does."""

from vox_core.host import Request, Seen
from vox_core.host.discover import Found, discover
from vox_core.host.load import Backend, load_backend
from vox_core.host.manifest import Manifest
from vox_core.host.probe import Hardware, ProbeFault, probe_all
from vox_core.host.process import Failed, run
from vox_core.host.select import select
from vox_core.known import known_plugins
from vox_core.run.plan import resolve_dtype

__all__ = [
    "Backend",
    "Failed",
    "Found",
    "Hardware",
    "Manifest",
    "ProbeFault",
    "Request",
    "Seen",
    "discover",
    "known_plugins",
    "load_backend",
    "probe_all",
    "resolve_dtype",
    "run",
    "select",
]
