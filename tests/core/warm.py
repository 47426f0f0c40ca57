"""`vox` in processes of another interpreter, without the imports that most of a short command is:
one process imports vox, and every command is a fork of it.

A fork has the arguments, folder, variables and output that a new process would have, and reads the
.pth files anew. A test of what a start itself does, or of signals, starts the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from select import select
from signal import SIGKILL

_PROGRAM = """
import importlib, json, os, site, sys
import vox_core.cli.backends, vox_core.cli.plugin, vox_core.cli.plugin_install
import vox_core.host.doctor, vox_core.install.apply, vox_core.install.plan
from vox_core.cli import main

for line in sys.stdin:
    asked = json.loads(line)
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

os.chdir(asked["folder"])
before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ.clear()
os.environ.update(asked["environ"])
for number, name in enumerate((os.devnull, asked["out"], asked["err"])):
    os.dup2(os.open(name, os.O_RDWR), number)
sys.path[0] = asked["folder"]
sys.path[1:] = [path for path in sys.path[1:] if path not in before]
sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
importlib.invalidate_caches()
for packages in asked["packages"]:
    site.addsitedir(packages)
main(asked["arguments"])
"""


@cache
def here() -> Warm:
    """Return the one of this environment."""
    return Warm(sys.executable, os.environ)


class Warm:
    """An interpreter that has imported vox.

    Args:
        python: the interpreter; it sees vox.
        environ: its variables while it imports vox.
        packages: folders whose .pth files every command reads, if they may have changed since.
    """

    def __init__(
        self, python: str | Path, environ: Mapping[str, str], packages: Sequence[Path] = ()
    ) -> None:
        self._start = [str(python), "-c", _PROGRAM], {**environ}
        self._packages = [*map(str, packages)]
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        arguments: Sequence[object],
        environ: Mapping[str, str],
        folder: Path,
        limit_s: float = 240,
    ) -> subprocess.CompletedProcess[str]:
        """Run `vox` with these arguments and no input, as `subprocess.run` does."""
        with tempfile.TemporaryDirectory() as scratch:
            out, err = Path(scratch, "out"), Path(scratch, "err")
            out.touch()
            err.touch()
            asked = {
                "arguments": [*map(str, arguments)],
                "environ": {**environ},
                "folder": str(folder),
                "packages": self._packages,
                "out": str(out),
                "err": str(err),
            }
            process = self._process = self._process or self._started()
            assert process.stdin and process.stdout
            print(json.dumps(asked), file=process.stdin, flush=True)
            if not select([process.stdout], [], [], limit_s)[0]:
                self._process = None
                os.killpg(process.pid, SIGKILL)
                raise subprocess.TimeoutExpired([*asked["arguments"]], limit_s)
            code = int(process.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())

    def _started(self) -> subprocess.Popen[str]:
        (command, environ), pipe = self._start, subprocess.PIPE
        process = subprocess.Popen(
            command, env=environ, stdin=pipe, stdout=pipe, text=True, process_group=0
        )
        weakref.finalize(self, process.communicate)  # the end of its input ends it
        return process
