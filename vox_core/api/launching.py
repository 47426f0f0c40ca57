"""For plugins that provide a launcher: ranks on this machine, watched."""

from vox_core.host.launching import run_ranks as run_ranks
