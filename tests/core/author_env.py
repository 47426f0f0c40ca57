"""An environment that a test can install a package into: it sees the packages of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


class Environment:
    """A venv in `folder`, without pip; this environment's pip serves it, and fetches nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / "env/bin/python"
        venv.create(folder / "env", symlinks=True)
        (site,) = (folder / "env/lib").glob("python*/site-packages")
        outer = sysconfig.get_path("purelib")
        # Not the folder alone: what is installed there editable has .pth files of its own.
        (site / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")

    def install_editable(self, *projects: Path) -> None:
        self.install(*[part for project in projects for part in ("-e", project)])

    def install(self, *arguments: str | Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q"]
        offline = ["--no-index", "--no-build-isolation", "--no-deps"]
        scripts = sysconfig.get_path("scripts")  # uv_build calls its program by name
        path = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run([*pip, *offline, *arguments], check=True, env=path)

    def run(self, *arguments: str, folder: str = ".") -> subprocess.CompletedProcess[str]:
        """Its Python, in a folder relative to that of the environment."""
        return subprocess.run(
            [self.python, *arguments],
            cwd=self.folder / folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
