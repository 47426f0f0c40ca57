"""The Python environment that vox changes: its kind, its distributions, its lock.

The kind follows from `sys` and from the files that tools leave, in this order:

    uv-tool              uv-receipt.toml at the prefix
    pipx                 pipx_metadata.json at the prefix
    venv                 the prefix is not the base prefix
    externally-managed   EXTERNALLY-MANAGED beside the standard library (PEP 668)
    conda                conda-meta at the prefix
    system               anything else

vox refuses an environment that belongs to a tool or to the operating system, or that it cannot
write to, and names the command that does the same. It never overrides PEP 668.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vox_core.errors import InputError
from vox_core.files import existing
from vox_core.host.probe import applicable
from vox_core.install.undo import LOCK

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Kind: TypeAlias = Literal["venv", "uv-tool", "pipx", "conda", "externally-managed", "system"]

KINDS: dict[Kind, str] = {
    "venv": "a virtual environment",
    "uv-tool": "a tool environment of uv",
    "pipx": "a tool environment of pipx",
    "conda": "a conda environment",
    "externally-managed": "a Python that the operating system manages (PEP 668)",
    "system": "a Python of its own",
}
CORE = "vox-ml"
KEPT = (CORE, "torch")
"""Distributions whose versions no plugin may change."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Distributions by canonical name; the first on the path hides others of its name.

    Args:
        needs: what each requires here, without its extras.
    """

    distributions: dict[str, metadata.Distribution]
    versions: dict[str, str]
    needs: dict[str, list[Requirement]]


@dataclass(frozen=True)
class Environment:
    """An interpreter's folders of packages and commands, and the distributions there as of their
    first use.

    Args:
        base_prefix: the prefix of the Python that a virtual environment was made from.
        folders: where packages and commands go; the first is `site_packages`, the last `scripts`.
        standard_library: the folder that PEP 668 marks.
        path: `sys.path` of the interpreter.
    """

    python: Path
    prefix: Path
    base_prefix: Path
    folders: tuple[Path, ...]
    standard_library: Path
    path: tuple[str, ...]

    @classmethod
    def here(cls) -> Environment:
        """The environment of this process."""
        paths = sysconfig.get_paths()
        places = dict.fromkeys(paths[key] for key in ("purelib", "platlib", "scripts"))
        return cls(
            Path(sys.executable),
            Path(sys.prefix),
            Path(sys.base_prefix),
            tuple(map(Path, places)),
            Path(paths["stdlib"]),
            tuple(sys.path),
        )

    @property
    def kind(self) -> Kind:
        if (self.prefix / "uv-receipt.toml").is_file():
            return "uv-tool"
        if (self.prefix / "pipx_metadata.json").is_file():
            return "pipx"
        if self.prefix != self.base_prefix:
            return "venv"
        if (self.standard_library / "EXTERNALLY-MANAGED").is_file():
            return "externally-managed"
        return "conda" if (self.prefix / "conda-meta").is_dir() else "system"

    @property
    def site_packages(self) -> Path:
        return self.folders[0]

    def __str__(self) -> str:
        return f"{self.prefix} ({KINDS[self.kind]})"

    @cached_property
    def installed(self) -> Installed:
        """The distributions that the interpreter sees."""
        found = Installed({}, {}, {})
        for each in metadata.distributions(path=[*self.path]):
            with suppress(OSError, ValueError, KeyError, TypeError):  # damaged metadata
                known = each.metadata  # is parsed anew each time
                name, version = canonicalize_name(known["Name"]), known["Version"]
                if version and name not in found.versions:
                    texts = known.get_all("Requires-Dist") or ()
                    found.versions[name], found.distributions[name] = version, each
                    found.needs[name] = [*applicable(texts)]
        return found

    def owns(self, distribution: metadata.Distribution) -> bool:
        """Whether it is installed here, and not in an environment that lends it to this one."""
        place = Path(str(distribution.locate_file(""))).resolve()
        return place in {folder.resolve() for folder in self.folders}

    def place_of(self, site: Path, prefix: Path) -> Path:
        """Map a site-packages folder below `--prefix` to its folder in this environment."""
        place = self.prefix / site.relative_to(prefix)
        return place if place in self.folders else self.site_packages

    def require_changeable(self, add: Sequence[str] = (), remove: Sequence[str] = ()) -> None:
        """Refuse an environment that is not vox's to change.

        Args:
            add: what would be installed: requirements, folders or wheels.
            remove: names of distributions that would be removed, if nothing is added.

        Raises:
            InputError: I001, with the command to run instead.
        """
        found = KINDS[self.kind]
        if self.kind not in ("uv-tool", "pipx", "externally-managed"):
            if all(os.access(existing(each), os.W_OK | os.X_OK) for each in self.folders):
                return
            found = "no permission to write there"
        what = "vox does not install into this Python environment"
        remedy = self._instead(add, remove)
        raise InputError("I001", what, where=self.prefix, found=found, remedy=remedy)

    def _instead(self, add: Sequence[str], remove: Sequence[str]) -> str:
        if self.kind == "pipx":
            verb = "inject" if add else "uninject"
            return f"run: {shlex.join(['pipx', verb, self.prefix.name, *add, *remove])}"
        if self.kind == "uv-tool":
            change = [part for text in (*add, *remove) for part in ("--with", text)]
            how = f"{'with' if add else 'without'} {shlex.join(change)}"
            return f"uv makes this environment anew: repeat its whole `uv tool install`, {how}"
        if remove:
            return f"remove {', '.join(remove)} with the tool that installed it"
        make = shlex.join([str(self.python), "-m", "venv", ".venv"])
        install = shlex.join([".venv/bin/python", "-m", "pip", "install", CORE, *add])
        return f"make an environment for vox: {make} && {install}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the environment's install lock; two concurrent installs would undo each other.

        Raises:
            InputError: I011, another process holds it.
            OSError: the lock file cannot be made.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.site_packages.resolve() / LOCK, mode=0o666)  # for every user of it
        try:
            held = lock.acquire(timeout=0)
        except Timeout as error:
            what = "another vox is changing this Python environment"
            remedy = "wait until it is done, and run again"
            raise InputError("I011", what, where=self, remedy=remedy) from error
        with held:
            yield


def is_met(need: Requirement, versions: Mapping[str, str]) -> bool:
    """Whether one of these distributions has a version that `need` allows."""
    version = versions.get(canonicalize_name(need.name))
    if version is None:
        return False
    try:
        return need.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:  # only a build tells the version
        return True


def closure(names: Sequence[str], needs: Mapping[str, Sequence[Requirement]]) -> list[str]:
    """Return `names` and everything they require, as far as `needs` has it; sorted."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name in needs and name not in found:
            found.add(name)
            waiting += [canonicalize_name(need.name) for need in needs[name]]
    return sorted(found)


def origin(distribution: metadata.Distribution | None) -> dict[str, Any]:
    """Content of direct_url.json (PEP 610); empty for what came from an index."""
    with suppress(OSError, ValueError):
        document = json.loads((distribution and distribution.read_text("direct_url.json")) or "{}")
        return document if isinstance(document, dict) else {}
    return {}


def is_editable(distribution: metadata.Distribution | None) -> bool:
    return bool(origin(distribution).get("dir_info", {}).get("editable"))


def local_path(url: str) -> Path | None:
    """The file or folder of a `file:` URL; None for other URLs."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
