"""What an installer would change, known before anything is changed.

    changes = resolve(environment, ["vox-ml-cpu==0.1.0"])
    for command in pinned(environment, changes, file): …      # installs these, and nothing else

pip tells with `install --dry-run --report`, uv with `pip install --dry-run` and, for hashes and
sizes, `pip compile --format pylock.toml`. Both keep what is installed if it will do. The commands
that then install name every package with its version and hash and look for no other, so an index
that changes in between changes nothing.

Which changes are acceptable is for install.py. Nothing here changes an environment.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from vox_core.errors import InputError
from vox_core.host.discover import UNKNOWN, installed_versions
from vox_core.host.environment import Environment

LINES_SHOWN = 15
_HEAD_SECONDS = 5.0
_UV_ROW = re.compile(r" (?P<sign>[+~-]) (?P<name>[\w.-]+)(==(?P<version>\S+)| @ (?P<url>\S+))")


@dataclass(frozen=True, slots=True)
class Change:
    """One distribution that comes, goes, or comes in another version.

    Args:
        name: canonical.
        before: the version that is installed; None if it is not.
        after: the version that will be; None if it will not.
        source: URL of the folder, archive or repository it comes from; empty where it only goes,
            or where uv alone knows.
        direct: asked for by `source`, and not by version from an index.
        sha256: of the archive, in hex, where that is known.
        size: of the archive, in bytes, where that is known.
    """

    name: str
    before: str | None
    after: str | None
    source: str = ""
    direct: bool = False
    sha256: str | None = None
    size: int | None = None

    @property
    def pin(self) -> str:
        """The requirement that this change and no other fulfils."""
        return f"{self.name} @ {self.source}" if self.direct else f"{self.name}=={self.after}"


def resolve(environment: Environment, requirements: Sequence[str]) -> tuple[Change, ...]:
    """The changes that would fulfil `requirements`, sorted by name.

    Raises:
        InputError: I004, there are none; what the installer says about it is shown.
    """
    resolver = _pip_changes if environment.has_pip else _uv_changes
    changes = resolver(environment, requirements)
    return tuple(sorted(map(_with_size, changes), key=lambda change: change.name))


def pinned(
    environment: Environment, changes: Sequence[Change], requirements_file: Path
) -> Iterator[list[str]]:
    """The commands of the installer, one after the other; `requirements_file` is written for each.

    pip wants hashes for all packages of one call or for none, and folders have none.
    """
    hashed = [change for change in changes if change.sha256 and not change.direct]
    others = [change for change in changes if change not in hashed]
    for group in filter(None, (hashed, others)):
        lines = [f"{each.pin}{_hash_option(each, environment)}\n" for each in group]
        requirements_file.write_text("".join(lines), encoding="utf-8")
        fresh = _reinstall(environment, [each.name for each in group if each.direct])
        options = ["--no-deps", *fresh, "-r", str(requirements_file)]
        yield [*environment.installer("install"), *options]


def archives(environment: Environment, pins: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> `source`, `sha256` and `size` of the file of each pinned version (NAME==VERSION).

    Raises:
        InputError: I004, the installer does not find one of them.
    """
    if not environment.has_pip:
        return _uv_files(environment, pins)
    options = ["--no-deps", "--ignore-installed"]
    changes = _pip_changes(environment, [*options, *pins]) if pins else []
    kept = ((each.name, _with_size(each)) for each in changes)
    return {
        name: {"source": each.source, "sha256": each.sha256, "size": each.size}
        for name, each in kept
    }


def last_lines(output: str) -> list[str]:
    """The end of what a program said, without empty lines."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    return lines[-LINES_SHOWN:]


def local_path(url: str) -> Path | None:
    """The file or folder of a `file:` URL; None for other URLs."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _hash_option(change: Change, environment: Environment) -> str:
    if change.sha256 is None or (change.direct and environment.has_pip):
        return ""  # in pip one hash would ask for all; `_examine_archives` has compared this one
    return f" --hash=sha256:{change.sha256}"


def _reinstall(environment: Environment, names: Iterable[str]) -> list[str]:
    """uv takes a folder whose pyproject.toml has not changed for one that has not changed."""
    if environment.has_pip:
        return []
    return [part for name in names for part in ("--reinstall-package", name)]


# --- pip ------------------------------------------------------------------------------------------


def _pip_changes(environment: Environment, requirements: Sequence[str]) -> list[Change]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--quiet", "--dry-run", "--report", str(report)]
        _ask([*environment.installer("install"), *options, *requirements], environment)
        rows = json.loads(report.read_text(encoding="utf-8"))["install"]
    before = installed_versions(row["metadata"]["name"] for row in rows)
    return [_pip_change(row, before) for row in rows]


def _pip_change(row: Mapping[str, Any], before: Mapping[str, str]) -> Change:
    name, download = canonicalize_name(row["metadata"]["name"]), row["download_info"]
    source = download["url"]
    if vcs := download.get("vcs_info"):
        source = f"{vcs['vcs']}+{source}@{vcs['commit_id']}"
    return Change(
        name,
        before.get(name),
        row["metadata"]["version"],
        source,
        row["is_direct"],
        download.get("archive_info", {}).get("hashes", {}).get("sha256"),
    )


# --- uv -------------------------------------------------------------------------------------------


def _uv_changes(environment: Environment, requirements: Sequence[str]) -> list[Change]:
    """uv tells versions, or the URL of what was asked for by URL; hashes have to be asked for."""
    folders = [project_table(Path(text)).get("name") for text in requirements]
    options = ["--dry-run", *_reinstall(environment, filter(None, folders))]
    said = _ask([*environment.installer("install"), *options, *requirements], environment)
    rows = [match.groupdict() for match in map(_UV_ROW.match, said.splitlines()) if match]
    rows = [row for row in rows if row["sign"] != "-"]
    before = installed_versions(row["name"] for row in rows)
    changes = [_uv_change(row, before) for row in rows]
    files = _uv_files(environment, [change.pin for change in changes if not change.direct])
    return [replace(change, **files.get(change.name, {})) for change in changes]


def _uv_change(row: Mapping[str, str | None], before: Mapping[str, str]) -> Change:
    name, url = canonicalize_name(row["name"] or ""), row["url"]
    version = row["version"] or _version_at(url or "")
    return Change(name, before.get(name), version, url or "", direct=url is not None)


def _version_at(url: str) -> str:
    """The version that the name of a wheel or the metadata of a folder tells without building."""
    if url.endswith(".whl"):
        return str(parse_wheel_filename(Path(urlsplit(url).path).name)[1])
    project = project_table(local_path(url) or Path())
    return str(project.get("version", UNKNOWN))


def project_table(folder: Path) -> Mapping[str, Any]:
    """`[project]` of the pyproject.toml in a folder; empty if there is none that can be read."""
    try:
        document = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    project = document.get("project", {})
    return project if isinstance(project, dict) else {}


def _uv_files(environment: Environment, pins: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> source, sha256 and size of the archive that fits this machine."""
    if not pins:
        return {}
    options = ["--quiet", "--no-deps", "--no-header", "--format", "pylock.toml", "-"]
    said = _ask([*environment.installer("compile"), *options], environment, "\n".join(pins))
    packages = tomllib.loads(said)["packages"]
    return {package["name"]: _fitting(package) for package in packages}


def _fitting(package: Mapping[str, Any]) -> dict[str, Any]:
    """The first wheel in the order of preference of this interpreter, or the sdist."""
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    wheels = []
    for wheel in package.get("wheels", ()):
        tags = parse_wheel_filename(Path(urlsplit(wheel["url"]).path).name)[3]
        wheels += [(rank, wheel) for tag in tags if (rank := ranks.get(tag)) is not None]
    best = min(wheels, key=lambda pair: pair[0])[1] if wheels else package.get("sdist", {})
    sha256 = best.get("hashes", {}).get("sha256")
    return {"source": best.get("url", ""), "sha256": sha256, "size": best.get("size")}


# --- both -----------------------------------------------------------------------------------------


def _ask(command: Sequence[str], environment: Environment, given: str = "") -> str:
    """What the installer answers; a refusal is an error of the user's."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(
            "I004",
            "the installer finds no way to install this",
            where=environment,
            faults=last_lines(done.stderr or done.stdout),
            remedy="mend what the installer names: the connection, the index that it is set up "
            "with, or what the package requires",
        )
    return done.stdout or done.stderr


def _with_size(change: Change) -> Change:
    """With the size of its archive; of a remote one the server's word, if it gives it."""
    if change.size is not None or not change.source:
        return change
    if (path := local_path(change.source)) is not None:
        return replace(change, size=path.stat().st_size) if path.is_file() else change
    return replace(change, size=_content_length(change.source))


def _content_length(url: str) -> int | None:
    from urllib.request import Request, urlopen

    if urlsplit(url).scheme not in ("http", "https"):
        return None
    try:
        with urlopen(Request(url, method="HEAD"), timeout=_HEAD_SECONDS) as answer:
            length = answer.headers.get("Content-Length")
    except (OSError, ValueError):  # a size is a courtesy; the installer has its own connection
        return None
    return int(length) if length and length.isdigit() else None
