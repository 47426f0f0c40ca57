"""The plugin host: list the installed backends, choose one for a request, and load it.

    backend, selection = choose(Request("train", quant="nf4"))
    print(selection.why)
    result = backend.train(job, context)

manifest.py parses `vox_plugin.toml`; discover.py finds installed plugins without importing them;
blocked.py reads the ids that the user disabled; probe.py finds hardware and checks a manifest's
requirements; judge.py and select.py choose; load.py finds the plugin of a name, and imports and
checks it; observers.py runs the plugins that watch a run. doctor.py reports on plugins
of any kind.
"""

from vox_core.host.judge import Operation as Operation, Request as Request, Verdict as Verdict
from vox_core.host.select import (
    TELLS_MORE as TELLS_MORE,
    Seen as Seen,
    Selection as Selection,
    choose as choose,
)
