"""uv as vox calls it: its program, the indexes of the user's pip configuration, its refusals.

    uv = Uv(environment)
    uv.plan(["vox-ml-cpu==0.1.0"], constraints)      # what an install would change
    uv.lock(pins, ["--no-deps"])                     # pylock.toml: files, hashes, sizes
    uv.run("install", ["--no-deps", "-r", lock])     # changes the environment

pip's files and `PIP_*` variables become the `UV_*` variables of the same meaning; a `UV_*` variable
that is already set wins. uv reads its own `uv.toml` itself. What has no equal in uv is in
`Uv.ignored`. Variables that point uv at another Python or folder are removed.

vox reads the lines that uv prints for people (` + name==1.0`): its JSON has no addresses yet.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from packaging.utils import canonicalize_name

from vox_core.errors import InputError, WorkError
from vox_core.install import undo
from vox_core.install.environment import Environment

Report: TypeAlias = Callable[[str], None]
"""Called with each line that uv prints."""

ONLY_WHEELS = ("--only-binary", ":all:")
OFFLINE = ("--no-index", "--offline")
_LINES_SHOWN = 15
_ROW = re.compile(r" \+ (?P<name>[\w.-]+)(==(?P<version>\S+)| @ (?P<url>\S+))")
_SOURCE_ONLY = re.compile(
    r"Wheels are required for `([\w.-]+)|Building source distributions for `([\w.-]+)"
)
_ELSEWHERE = (
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_TARGET", "UV_PREFIX", "UV_DRY_RUN"),
    *("UV_CONFIG_FILE", "UV_NO_CONFIG"),
)
_NOT_WITH_A_LOCK = ("UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE")
_KEPT_OFFLINE = ("UV_CACHE_DIR", "UV_LINK_MODE")

_VARIABLES: dict[str, tuple[tuple[str, ...], str]] = {
    "index-url": (("UV_DEFAULT_INDEX", "UV_INDEX_URL"), ""),
    "extra-index-url": (("UV_INDEX", "UV_EXTRA_INDEX_URL"), " "),
    "find-links": (("UV_FIND_LINKS",), ","),
    "trusted-host": (("UV_INSECURE_HOST",), " "),
    "constraint": (("UV_CONSTRAINT",), " "),
    "keyring-provider": (("UV_KEYRING_PROVIDER",), ""),
    "timeout": (("UV_HTTP_TIMEOUT",), ""),
    "default-timeout": (("UV_HTTP_TIMEOUT",), ""),
    "retries": (("UV_HTTP_RETRIES",), ""),
    "cert": (("SSL_CERT_FILE",), ""),
    "client-cert": (("SSL_CLIENT_CERT",), ""),
    "proxy": (("ALL_PROXY",), ""),
}
"""Key of pip -> variables of uv, of which the first is set if none is; what separates values."""
_OF_NO_MATTER = {
    *("cache-dir", "no-cache-dir", "compile", "no-compile", "config-file", "log", "no-color"),
    *("disable-pip-version-check", "no-input", "no-python-version-warning", "progress-bar"),
    *("quiet", "require-virtualenv", "root-user-action", "verbose", "no-warn-script-location"),
}


class Resolved(NamedTuple):
    """A distribution that uv would install: from an index by version, or from a URL."""

    name: str
    version: str | None
    url: str | None


class Uv:
    """uv, set up for one environment (I001 if there is no uv).

    Args:
        only: the folder of a bundle's wheels; no index, no network and no settings of the user.
    """

    def __init__(
        self,
        environment: Environment,
        only: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.environment, self.program = environment, find_uv()
        self.ignored: tuple[str, ...] = ()
        self.options: list[str] = []
        # uv would read [tool.uv] of the folder that the user's shell happens to be in, and of those
        # above it: a cloned repository would decide about indexes.
        self.config = ["--no-config"]
        if only is not None:
            self.options = [*OFFLINE, "--find-links", str(only)]
            uvs = {key: environ[key] for key in _KEPT_OFFLINE if key in environ}
            others = {key: value for key, value in environ.items() if not key.startswith("UV_")}
            self.environ = {**others, **uvs}
            return
        if own := _config_file(environ):
            self.config = ["--config-file", str(own)]
        kept = {key: value for key, value in environ.items() if key not in _ELSEWHERE}
        found = pip_settings(environment.prefix, environ)
        self.environ = {**kept, **_variables(found, kept)}
        if found.pop("no-index", "").lower() in ("1", "true", "yes", "on"):
            self.options.append("--no-index")
        if "extra-index-url" in found and "UV_INDEX_STRATEGY" not in kept:
            self.environ["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # all indexes alike, as in pip
        self.ignored = tuple(sorted(found.keys() - _VARIABLES.keys() - _OF_NO_MATTER))

    def command(self, verb: str, arguments: Sequence[str] = ()) -> list[str]:
        """`uv pip VERB` on the environment."""
        options = [] if verb == "uninstall" else self.options
        python = ["--python", str(self.environment.python), "--color", "never", "--no-progress"]
        return [self.program, "pip", verb, *self.config, *python, *options, *arguments]

    def plan(self, wanted: Sequence[str], constraints: Sequence[str]) -> list[Resolved]:
        """Resolve requirements; return the distributions that would be installed.

        Args:
            wanted: requirements and options of `uv pip install`.

        Raises:
            InputError: I004, uv finds no solution.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "constraints.txt")
            file.write_text("".join(f"{line}\n" for line in constraints), encoding="utf-8")
            # The flag replaces the variable, so the files of both are named.
            files = [str(file), *self.environ.get("UV_CONSTRAINT", "").split()]
            held = [text for each in files for text in ("--constraints", each)]
            said = self._ask("install", ["--dry-run", *held, *wanted])
        matches = filter(None, map(_ROW.match, said.splitlines()))
        return [
            Resolved(canonicalize_name(match["name"]), match["version"], match["url"])
            for match in matches
        ]

    def lock(self, pins: Sequence[str], options: Sequence[str]) -> str:
        """`pylock.toml` of these requirements and, without `--no-deps`, of what they need (I004 if
        uv finds no solution)."""
        how = ["--no-header", "--quiet", "--format", "pylock.toml", *options, "-"]
        return self._ask("compile", how, given="".join(f"{pin}\n" for pin in pins))

    def _ask(self, verb: str, arguments: Sequence[str], given: str = "") -> str:
        """Output of a command that changes nothing: stdout, or stderr where that is empty."""
        done = subprocess.run(
            self.command(verb, arguments),
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=self.environ,
        )
        if done.returncode:
            raise self._refusal(done.stderr or done.stdout)
        return done.stdout or done.stderr

    def run(self, verb: str, arguments: Sequence[str], report: Report, doing: str) -> None:
        """Run a command that changes files, in a session that is killed whole on an interrupt (I008
        if it fails)."""
        said: list[str] = []
        environ = {key: text for key, text in self.environ.items() if key not in _NOT_WITH_A_LOCK}
        with (
            undo.working(self.environment.site_packages.resolve()) as held,
            subprocess.Popen(
                self.command(verb, arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environ,
                start_new_session=True,
                pass_fds=(held,),
            ) as process,
        ):
            try:
                for line in process.stdout or ():
                    said.append(line)
                    report(line.rstrip())
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # with the builds that it has started
                raise
        if process.returncode:
            lines, found = last_lines("".join(said)), f"uv ended with {process.returncode}"
            raise failure(doing, self.environment, found, lines)

    def _refusal(self, said: str) -> InputError:
        """The error for uv's refusal; the user may allow packages that have no wheel."""
        what, found = "uv finds no way to install this", None
        remedy = "mend what uv names: the connection, the index that it is set up with, or what "
        remedy += "the package requires"
        if "vox-ml" in said:
            remedy += "; a plugin for another version of vox-ml needs that version first"
        if sources := {match[1] or match[2] for match in _SOURCE_ONLY.finditer(said)}:
            names = ", ".join(sorted(map(canonicalize_name, sources)))
            what = f"there is no wheel for this machine of {names}"
            found = "the source alone, and building it runs its code"
            remedy = "name a version that has a wheel, or, if you trust the source, run again with "
            remedy += "--allow-source"
        where, lines = self.environment, last_lines(said)
        return InputError("I004", what, where=where, found=found, faults=lines, remedy=remedy)


def failure(
    doing: str, environment: Environment, found: str, faults: Sequence[str] = ()
) -> WorkError:
    """Return the error for a change that failed and was undone (I008)."""
    what = f"could not {doing}; the environment is as it was"
    remedy = "mend what is named, and run again"
    return WorkError("I008", what, where=environment, found=found, faults=faults, remedy=remedy)


def find_uv() -> str:
    """Return the program of the `uv` package, or the one on the PATH (I001 if there is none)."""
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        if found := shutil.which("uv"):
            return found
    what = "uv is missing, which vox installs with"
    remedy = "install it beside vox: the package `uv` from PyPI"
    raise InputError("I001", what, where=sys.prefix, remedy=remedy)


def _config_file(environ: Mapping[str, str]) -> Path | None:
    """The user's uv.toml, or the file that UV_CONFIG_FILE names."""
    if named := environ.get("UV_CONFIG_FILE"):
        return Path(named)
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~"), ".config"))
    file = home.expanduser() / "uv" / "uv.toml"
    return file if file.is_file() else None


def pip_settings(prefix: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """pip's settings for `install`: sections [global] and [install] of its files, then `PIP_*`."""
    found: dict[str, str] = {}
    parsers = []
    for file in _pip_files(prefix, environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, ValueError) as error:
            raise InputError(
                "I003",
                "a configuration file of pip cannot be read, and may name another index",
                where=file,
                found=str(error).partition("\n")[0],
                remedy="mend the file; or go without it: PIP_CONFIG_FILE=/dev/null",
            ) from error
        parsers.append(parser)
    for section in ("global", "install"):
        for parser in parsers:
            if parser.has_section(section):
                found |= {_key(key): value for key, value in parser.items(section)}
    variables = {_key(key[4:]): value for key, value in environ.items() if key[:4] == "PIP_"}
    return {**found, **{key: value for key, value in variables.items() if value}}


def _pip_files(prefix: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """From the least to the most important."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    home = Path(environ.get("HOME", "~")).expanduser()
    if sys.platform == "darwin":
        library = Path("Library/Application Support/pip/pip.conf")
        yield from ("/" / library, home / library)
    for folder in reversed(environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(os.pathsep)):
        yield Path(folder, "pip/pip.conf")
    yield from (Path("/etc/pip.conf"), home / ".pip/pip.conf")
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "pip/pip.conf")
    yield prefix / "pip.conf"
    if named:
        yield Path(named).expanduser()


def _variables(found: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    made = {}
    for key, (names, separator) in _VARIABLES.items():
        if key not in found or not environ.keys().isdisjoint(names):
            continue
        values = found[key].split() if separator else [found[key]]
        if key in ("find-links", "constraint", "cert", "client-cert"):
            values = [text if "://" in text else str(Path(text).expanduser()) for text in values]
        made[names[0]] = separator.join(values)
    return made


def _key(name: str) -> str:
    return name.lower().replace("_", "-").removeprefix("--")


def last_lines(output: str) -> list[str]:
    """The end of what a program has printed, for a message."""
    return [line.rstrip() for line in output.splitlines() if line.strip()][-_LINES_SHOWN:]
