"""The Python environment that vox runs in, and how a package gets into it.

Seen from `sys` and from the files that the tools leave behind, in this order:

    uv-tool              uv-receipt.toml at the prefix
    pipx                 pipx_metadata.json at the prefix
    venv                 the prefix is not the base prefix
    externally-managed   EXTERNALLY-MANAGED beside the standard library (PEP 668)
    conda                conda-meta at the prefix
    system               anything else

vox installs with pip where the environment has it, and with uv where it has not. It does not touch
an environment that belongs to a tool or to the operating system, or that it cannot write to: there
it says which command does the same. It never overrides PEP 668.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vox_core.errors import InputError

Kind: TypeAlias = Literal["venv", "uv-tool", "pipx", "conda", "externally-managed", "system"]

KINDS: dict[Kind, str] = {
    "venv": "a virtual environment",
    "uv-tool": "a tool environment of uv",
    "pipx": "a tool environment of pipx",
    "conda": "a conda environment",
    "externally-managed": "a Python that the operating system manages (PEP 668)",
    "system": "a Python of its own",
}
_KEYS = ("purelib", "platlib", "scripts")
_ELSEWHERE = (
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_SRC", "PIP_PYTHON", "PIP_REPORT"),
    *("PIP_REQUIREMENT", "PIP_EDITABLE", "PIP_GROUP"),
    *("PIP_PLATFORM", "PIP_PYTHON_VERSION", "PIP_IMPLEMENTATION", "PIP_ABI"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_TARGET", "UV_PREFIX", "UV_DRY_RUN"),
)
"""Settings of the installers that name another place, another Python or more packages."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where an interpreter keeps its packages.

    Args:
        python: the interpreter.
        base_prefix: the prefix of the Python that a virtual environment was made from.
        folders: where packages and commands go; `site_packages` is the first.
        standard_library: the folder that PEP 668 marks.
        has_pip: `python -m pip` works.
        uv: the `uv` command, if there is one.
    """

    python: Path
    prefix: Path
    base_prefix: Path
    folders: tuple[Path, ...]
    standard_library: Path
    has_pip: bool
    uv: str | None

    @classmethod
    def here(cls) -> Environment:
        """That of the running interpreter."""
        import importlib.util

        paths, pip = sysconfig.get_paths(), importlib.util.find_spec("pip")
        return cls(
            python=Path(sys.executable),
            prefix=Path(sys.prefix),
            base_prefix=Path(sys.base_prefix),
            folders=package_folders(paths),
            standard_library=Path(paths["stdlib"]),
            has_pip=pip is not None and pip.origin is not None,  # not just a folder of that name
            uv=find_uv(Path(paths["scripts"])),
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
        """Where packages of pure Python go."""
        return self.folders[0]

    @property
    def writable(self) -> bool:
        """Whether this user may write where packages and commands go."""
        return all(os.access(_existing(folder), os.W_OK | os.X_OK) for folder in self.folders)

    def __str__(self) -> str:
        return f"{self.prefix} ({KINDS[self.kind]})"

    def roots(self) -> tuple[Path, ...]:
        """The folders in which an installer writes; of a shared prefix only those of Python."""
        if self.kind != "venv":
            return self.folders
        return (*self.folders, *(self.prefix / name for name in ("share", "include", "etc")))

    def installer(self, verb: str) -> list[str]:
        """The command that installs here, pip's or uv's, up to what it is to work on.

        Args:
            verb: `install`, `uninstall`, or uv's `compile`.

        Raises:
            InputError: I001, this environment has no installer.
        """
        if self.has_pip:
            quiet = ["--no-input", "--disable-pip-version-check"]
            own = {"uninstall": ["--yes"], "install": ["--no-user"]}.get(verb, [])
            # -P: not a `pip` that happens to lie in the current folder.
            return [str(self.python), "-P", "-m", "pip", verb, *quiet, *own]
        if self.uv:
            return [self.uv, "pip", verb, "--python", str(self.python)]
        raise InputError(
            "I001",
            "this Python environment has no installer",
            where=self,
            found="neither pip in the environment nor uv on the PATH",
            remedy=f"{shlex.join([str(self.python), '-m', 'ensurepip'])}, and run again",
        )

    def require_changeable(self, add: Sequence[str] = (), remove: Sequence[str] = ()) -> None:
        """Refuse an environment that is not vox's to change.

        Args:
            add: what would be installed: requirements, folders or wheels.
            remove: names of distributions that would be removed.

        Raises:
            InputError: I001, with the exact command to run instead.
        """
        commands = {
            "uv-tool": self._uv_tool_command,
            "pipx": self._pipx_command,
            "externally-managed": self._own_environment,
        }
        if command := commands.get(self.kind):
            found, remedy = KINDS[self.kind], command(add, remove)
        elif not self.writable:
            found, remedy = "you may not write there", self._own_environment(add, remove)
        else:
            return
        raise InputError(
            "I001",
            "vox does not install into this Python environment",
            where=self.prefix,
            found=found,
            remedy=remedy,
        )

    def _uv_tool_command(self, add: Sequence[str], remove: Sequence[str]) -> str:
        """uv makes a tool's environment anew from one command line, so it has to say all."""
        tool, others = self._receipt()
        kept = [text for name, text in others.items() if name not in remove]
        packages = [part for text in [*kept, *add] for part in ("--with", text)]
        return f"run: {shlex.join(['uv', 'tool', 'install', tool, *packages])}"

    def _receipt(self) -> tuple[str, dict[str, str]]:
        """What the tool was installed as, and name -> requirement of what was added to it."""
        receipt = tomllib.loads((self.prefix / "uv-receipt.toml").read_text(encoding="utf-8"))
        rows = receipt.get("tool", {}).get("requirements", [])
        requirements = {row["name"]: _requirement(row) for row in rows}
        return requirements.pop(self.prefix.name, self.prefix.name), requirements

    def _pipx_command(self, add: Sequence[str], remove: Sequence[str]) -> str:
        """pipx names a tool's environment after the tool."""
        tool = self.prefix.name
        steps = [["inject", tool, *add]] if add else []
        steps += [["uninject", tool, *remove]] if remove else []
        return "run: " + " && ".join(shlex.join(["pipx", *step]) for step in steps)

    def _own_environment(self, add: Sequence[str], remove: Sequence[str]) -> str:
        if remove:
            return f"remove {', '.join(remove)} with the tool that installed it"
        make = [str(self.python), "-m", "venv", ".venv"]
        install = [".venv/bin/python", "-m", "pip", "install", "vox-ml", *add]
        return f"make an environment for vox: {shlex.join(make)} && {shlex.join(install)}"


def package_folders(paths: Mapping[str, str]) -> tuple[Path, ...]:
    """Of what `sysconfig.get_paths` gives, each folder that packages and commands go to, once."""
    return tuple(map(Path, dict.fromkeys(paths[key] for key in _KEYS)))


def installer_variables(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables in which an installer changes the environment that it is told, and no other.

    Where packages come from stays as the user has it set. What a `pip.conf` says of `dry-run` is
    overruled; a `target`, `prefix` or `root` in it cannot be.
    """
    kept = {name: value for name, value in given.items() if name not in _ELSEWHERE}
    return {**kept, "PIP_DRY_RUN": "0"}


def find_uv(scripts: Path) -> str | None:
    """Beside the interpreter, for an environment that is not activated, or on the PATH."""
    return shutil.which("uv", path=str(scripts)) or shutil.which("uv")


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


def _requirement(row: Mapping[str, Any]) -> str:
    """One row of a uv receipt as an argument of `--with`."""
    for key in ("directory", "editable", "path", "url"):
        if key in row:
            return str(row[key])
    if "git" in row:
        return f"{row['name']} @ git+{row['git']}"
    extras = f"[{','.join(row['extras'])}]" if row.get("extras") else ""
    return f"{row['name']}{extras}{row.get('specifier', '')}"
