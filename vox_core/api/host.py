"""Installed plugins: discover, probe, select and load them, as the conformance suite does."""

from vox_core.data.dataset_cache import cpus as cpus
from vox_core.host import Request as Request, Seen as Seen
from vox_core.host.discover import Found as Found, discover as discover
from vox_core.host.load import (
    Backend as Backend,
    foreign_errors as foreign_errors,
    load_backend as load_backend,
)
from vox_core.host.manifest import Manifest as Manifest
from vox_core.host.probe import (
    Hardware as Hardware,
    ProbeFault as ProbeFault,
    probe_all as probe_all,
)
from vox_core.host.process import ENDING as ENDING, Failed as Failed, handled as handled, run as run
from vox_core.host.select import select as select
from vox_core.host.discover import known_plugins as known_plugins
from vox_core.run.plan import resolve_dtype as resolve_dtype
