"""Real packages and real environments that cost little: wheels zipped by hand, checkouts with a
build backend of their own, virtual environments that borrow what vox needs."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.core.warm import Warm
from vox_core.install.environment import Environment
from vox_core.install.uv import find_uv

_HERE = """
import pickle, sys
from vox_core.install.environment import Environment
sys.stdout.buffer.write(pickle.dumps(Environment.here()))
"""
ROOT = Path(__file__).resolve().parents[2]
BORROWED = Path(sysconfig.get_path("purelib"))
MANIFEST = """
id = "{id}"
name = "{id}"
version = "{version}"
api = "2.0"
licence = "MIT"
provides.hooks = ["vox_event"]
"""
CATALOG = """
[[plugin]]
id = "{id}"
description = "a plugin for tests"
provides.hooks = ["vox_event"]
distribution = "{distribution}"
import-package = "{package}"
licence = "MIT"
default-source = "{source}"
"""


def wheel(
    folder: str,
    name: str,
    version: str,
    files: dict[str, str],
    requires: Sequence[str] = (),
    entry_points: str = "",
) -> str:
    """Write a wheel and give its file name; complete in itself, as a backend carries its source."""
    import base64
    import hashlib
    import os
    import zipfile

    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    whole = {**files, f"{info}/METADATA": head + needs, f"{info}/WHEEL": tag}
    if entry_points:
        whole[f"{info}/entry_points.txt"] = entry_points
    record = f"{info}/RECORD,,\n"
    for path, text in whole.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text.encode())}\n"
    file = f"{stem}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, file), "w") as archive:  # noqa: PTH118
        for path, text in {**whole, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return file


def plugin(
    id: str,
    version: str,
    requires: Sequence[str] = (),
    manifest: str = MANIFEST,
    files: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The arguments of `wheel` for a plugin that must not be imported."""
    package = f"vox_t_{id}"
    return {
        "name": f"vox-t-{id}",
        "version": version,
        "files": {
            f"{package}/__init__.py": "raise SystemExit('imported')",
            f"{package}/vox_plugin.toml": manifest.format(id=id, version=version),
            **(files or {}),
        },
        "requires": list(requires),
        "entry_points": f"[vox_core.plugins]\n{id} = {package}:backend\n",
    }


def checkout(folder: Path, arguments: Mapping[str, Any], before_build: str = "") -> Path:
    """A project whose build needs nothing from outside.

    Args:
        before_build: Python to run before the wheel is built, and not before its metadata is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dynamic = 'dynamic = ["dependencies", "entry-points"]'
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{arguments["name"]}"\nversion = "{arguments["version"]}"\n{dynamic}\n'
    )
    (folder / "backend.py").write_text(
        f"from collections.abc import Sequence\nimport zipfile\n{inspect.getsource(wheel)}\n"
        f"made = {dict(arguments)!r}\n"
        "def prepare_metadata_for_build_wheel(folder, settings=None):\n"
        "    archive = zipfile.ZipFile(folder + '/' + wheel(folder, **made))\n"
        "    info = next(n for n in archive.namelist() if n.endswith('METADATA')).split('/')[0]\n"
        "    archive.extractall(folder, [n for n in archive.namelist() if n.startswith(info)])\n"
        "    return info\n"
        "def build_wheel(folder, settings=None, metadata=None):\n"
        f"    {before_build or 'pass'}\n"
        "    return wheel(folder, **made)\n"
    )
    return folder


def sdist(folder: Path, arguments: Mapping[str, Any], mark: Path) -> Path:
    """An archive of a project that writes `mark` as soon as any of its code runs."""
    import tarfile

    name, version = arguments["name"], arguments["version"]
    project = checkout(folder / "sources" / f"{name.replace('-', '_')}-{version}", arguments)
    backend = project / "backend.py"
    backend.write_text(f"{backend.read_text()}open({str(mark)!r}, 'w').close()\n")
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (project / "PKG-INFO").write_text(head)
    made = folder / f"{project.name}.tar.gz"
    with tarfile.open(made, "w:gz") as archive:
        archive.add(project, project.name)
    shutil.rmtree(folder / "sources")
    return made


class World:
    """A virtual environment with vox and without pip, a folder of wheels, a catalog.

    Args:
        plugins: names of folders in `plugins/` that are installed there, too.
    """

    def __init__(self, folder: Path, *plugins: str) -> None:
        self.folder = folder
        self.wheels, self.venv = folder / "wheels", folder / "venv"
        self.python = self.venv / "bin/python"
        self.wheels.mkdir(parents=True)
        self.catalog = folder / "catalog.toml"
        self.catalog.write_text("")
        make = [find_uv(), "venv", "--quiet", "--python", sys.executable, str(self.venv)]
        subprocess.run(make, check=True)
        (self.venv / "bin/uv").symlink_to(find_uv())
        borrowed = [ROOT, _borrow(folder, plugins), *(ROOT / "plugins" / name for name in plugins)]
        (self.site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
        core = self.site / f"vox_ml-{version('vox-ml')}.dist-info"
        core.mkdir()
        head = f"Metadata-Version: 2.1\nName: vox-ml\nVersion: {version('vox-ml')}\n"
        (core / "METADATA").write_text(head)
        (core / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-any\n")
        names = ("METADATA", "WHEEL", "RECORD")
        (core / "RECORD").write_text("".join(f"{core.name}/{name},,\n" for name in names))
        self._warm = Warm(self.python, self.environ(), [self.site])

    @property
    def site(self) -> Path:
        return next(self.venv.glob("lib/python*/site-packages"))

    def environment(self) -> Environment:
        """What `Environment.here` is for its interpreter."""
        command = [str(self.python), "-P", "-c", _HERE]
        answer = subprocess.run(command, capture_output=True, check=True, env=self.environ()).stdout
        made: Environment = pickle.loads(answer)
        return made

    def environ(self, **more: str) -> dict[str, str]:
        """No network, and no settings from outside."""
        ours = ("VOX_", "PIP_", "UV_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        return {
            **kept,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_NO_INDEX": "1",
            "UV_NO_CONFIG": "1",
            "UV_CACHE_DIR": str(self.folder / "uv-cache"),
            "VOX_CATALOG": str(self.catalog),
            "VOX_CACHE": str(self.folder / "cache"),
            **more,
        }

    def command(self, *arguments: object) -> list[str]:
        return [str(self.python), "-m", "vox_core.cli", "plugin", *map(str, arguments)]

    def vox(self, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        return self._warm.run(["plugin", *arguments], self.environ(**environ), self.folder)

    def done(self, *arguments: object, **environ: str) -> dict[str, Any]:
        """The JSON of a command that succeeds."""
        done = self.vox(*arguments, "--json", **environ)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def wheel(self, arguments: Mapping[str, Any]) -> Path:
        return self.wheels / wheel(str(self.wheels), **arguments)

    def refused(self, code: str, *arguments: object, **environ: str) -> str:
        """What a command says that is refused before anything is done."""
        before = self.state()
        done = self.vox(*arguments, **environ)
        assert (done.returncode, f"error[VOX-{code}]" in done.stderr) == (2, True), done.stderr
        assert self.state() == before
        return done.stderr

    def enter(self, id: str, source: str, more: str = "") -> None:
        """A plugin of this catalog and of no other."""
        package, distribution = f"vox_t_{id}", f"vox-t-{id}"
        text = CATALOG.format(id=id, distribution=distribution, package=package, source=source)
        self.catalog.write_text(text + more)

    def state(self) -> dict[str, str]:
        """Every file of the environment and its digest; bytecode and locks come and go."""
        files = (path for path in self.venv.rglob("*") if path.is_file())
        return {
            str(path.relative_to(self.venv)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if "__pycache__" not in path.parts and path.name not in (".lock", ".vox-lock")
        }

    def versions(self) -> dict[str, str]:
        """Distribution -> version, of what was installed beside the core."""
        stems = (path.name.removesuffix(".dist-info") for path in self.site.glob("*.dist-info"))
        pairs = (stem.split("-") for stem in stems)
        return {name: number for name, number in pairs if name != "vox_ml"}

    def clear(self) -> None:
        """Without packages, wheels and catalog."""
        for path in (*self.site.iterdir(), *self.wheels.iterdir()):
            if path.name != "borrowed.pth" and not path.name.startswith("vox_ml-"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.catalog.write_text("")


def present(world: World, part: Mapping[str, Any]) -> None:
    """A distribution that is in the environment already."""
    name = wheel(str(world.folder), **part)
    with zipfile.ZipFile(world.folder / name) as archive:
        archive.extractall(world.site)


def _borrow(folder: Path, plugins: Sequence[str]) -> Path:
    """Links to what vox needs from the environment that the tests run in, and to nothing else: each
    process of vox's looks at every distribution that it sees."""
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    ours = [name.replace("vox_", "vox-ml-") for name in plugins]
    for name in _needed(["vox-ml", "uv", *ours]):
        for top in {file.parts[0] for file in distribution(name).files or ()} - {
            "..",
            "__pycache__",
        }:
            if name != "vox-ml" and not top.endswith(".pth"):
                (borrowed / top).symlink_to(BORROWED / top)
    return borrowed


def _needed(names: Sequence[str]) -> set[str]:
    """These distributions and all that they require here, without extras."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:  # of another platform
            continue
        found.add(name)
        needs = [Requirement(text) for text in requires]
        waiting += [need.name for need in needs if not need.marker or need.marker.evaluate()]
    return found
