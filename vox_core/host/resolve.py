"""What an installer would change, known before anything is changed.

    changes = resolve(environment, ["vox-ml-cpu==0.1.0"])
    for command in pinned(environment, changes, file): …      # installs these, and nothing else

pip tells with `install --dry-run --report`, uv with `pip install --dry-run` and, for hashes and
sizes, `pip compile --format pylock.toml`. Both keep what is installed if it will do; of a wheel
that is named by path, what it holds decides, and not its version. The commands that then install
name every package with its version and hash and look for no other, so an index that changes in
between changes nothing.

A dry run builds what has no wheel, which is to run its code before anybody has agreed to anything.
So wheels alone are asked for, unless sources are allowed, and pip is kept from building what a
package requires by address (unbuilt.py). A folder or a commit that is itself asked for cannot be
planned without a build; what it requires by address is looked at first.

Which changes are acceptable is for install.py. Nothing here changes an environment.
"""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

from packaging.tags import sys_tags
from packaging.utils import (
    InvalidSdistFilename,
    canonicalize_name,
    canonicalize_version,
    parse_sdist_filename,
    parse_wheel_filename,
)

from vox_core.host.ask import ask, only_source
from vox_core.host.contents import digest, is_installed, project_table
from vox_core.host.discover import UNKNOWN, installed_versions
from vox_core.host.environment import Environment
from vox_core.host.origin import file_name, local_path, size_of
from vox_core.host.unbuilt import guarded, sources_among, static_needs

ONLY_WHEELS = "--only-binary=:all:"
_GIT = re.compile(r"(?P<name>[\w.-]+) @ git\+")
_UV_ROW = re.compile(r" (?P<sign>[+~-]) (?P<name>[\w.-]+)(==(?P<version>\S+)| @ (?P<url>\S+))")


@dataclass(frozen=True, slots=True)
class Change:
    """One distribution that comes, goes, or comes in another version or with other content.

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
        """The requirement that this change and no other fulfils; an archive with its SHA-256."""
        if not self.direct:
            return f"{self.name}=={self.after}"
        return f"{self.name} @ {_with_digest(self.source, self.sha256)}"

    @property
    def built(self) -> bool:
        """Whether it is known to be made from source, which runs its code."""
        file = file_name(self.source)
        if self.direct:
            return self.after is not None and not file.endswith(".whl")
        with suppress(InvalidSdistFilename):
            return parse_sdist_filename(file)[0] == self.name
        return False


def resolve(
    environment: Environment, requirements: Sequence[str], *, allow_source: bool = False
) -> tuple[Change, ...]:
    """The changes that would fulfil `requirements`, sorted by name.

    Args:
        allow_source: what there is no wheel of may be built, also to find out what it needs.

    Raises:
        InputError: I003, a wheel cannot be read; I004, there are none; what the installer says
            about it is shown.
    """
    resolver = _pip_changes if environment.has_pip else _uv_changes
    changes = resolver(environment, requirements, [] if allow_source else [ONLY_WHEELS])
    changes = _by_content(changes, requirements)
    return tuple(sorted(map(_with_size, changes), key=lambda change: change.name))


def must_build(requirement: str) -> bool:
    """Whether it is a folder or a commit: there is no wheel of it before it is built."""
    return bool(_GIT.match(requirement)) or Path(requirement).is_dir()


def pinned(
    environment: Environment, changes: Sequence[Change], requirements_file: Path
) -> Iterator[list[str]]:
    """The commands of the installer, one after the other; `requirements_file` is written for each.

    pip wants `--hash` for all packages of one call or for none, and folders have none; the hash of
    an archive that was asked for by URL stands in the URL.
    """
    hashed = [change for change in changes if change.sha256 and not change.direct]
    others = [change for change in changes if change not in hashed]
    for group in filter(None, (hashed, others)):
        lines = [f"{each.pin}{_hash_option(each)}\n" for each in group]
        requirements_file.write_text("".join(lines), encoding="utf-8")
        fresh = _afresh(environment, [each for each in group if each.direct])
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
    changes = _pip_changes(environment, pins, options) if pins else []
    kept = ((each.name, _with_size(each)) for each in changes)
    return {
        name: {"source": each.source, "sha256": each.sha256, "size": each.size}
        for name, each in kept
    }


def _with_size(change: Change) -> Change:
    if change.size is not None or not change.source:
        return change
    return replace(change, size=size_of(change.source))


def _hash_option(change: Change) -> str:
    return "" if change.direct or change.sha256 is None else f" --hash=sha256:{change.sha256}"


def _with_digest(url: str, sha256: str | None) -> str:
    """The address with the digest that installers hold what they get against."""
    if sha256 is None:
        return url
    address, fragment = urldefrag(url)
    kept = [part for part in fragment.split("&") if part and not part.startswith("sha256=")]
    return f"{address}#{'&'.join([*kept, f'sha256={sha256}'])}"


def _afresh(environment: Environment, changes: Sequence[Change]) -> list[str]:
    """What makes an installer install the version that is there already, from somewhere else."""
    if not environment.has_pip:
        return _reinstall(change.name for change in changes)
    again = any(change.before == change.after for change in changes)
    return ["--force-reinstall"] if again else []


def _by_content(changes: Iterable[Change], requirements: Iterable[str]) -> list[Change]:
    """With the wheels that hold something else than what is there in their version, and no other.

    pip takes the same version for the same content; uv goes by the time that the file was written.
    """
    found = {change.name: change for change in changes}
    for file in (Path(text) for text in requirements if text.endswith(".whl")):
        if not file.is_file():  # an address
            continue
        name, version = parse_wheel_filename(file.name)[:2]
        before = installed_versions([name]).get(name)
        if before is None or canonicalize_version(before) != canonicalize_version(version):
            continue
        if is_installed(file, name):
            found.pop(name, None)
        else:
            found[name] = Change(name, before, before, file.as_uri(), True, digest(file))
    return [*found.values()]


# --- pip ------------------------------------------------------------------------------------------


def _pip_changes(
    environment: Environment, requirements: Sequence[str], more: Sequence[str]
) -> list[Change]:
    command = environment.installer("install")
    if ONLY_WHEELS in more:
        if built := [text for text in requirements if must_build(text)]:
            _require_no_source(environment, built)
        else:
            command = guarded(command)
    rows = _pip_report([*command, *more, *requirements], environment)
    before = installed_versions(row["metadata"]["name"] for row in rows)
    return [_pip_change(row, before) for row in rows]


def _pip_report(command: Sequence[str], environment: Environment) -> list[dict[str, Any]]:
    """What pip says in a dry run that it would install."""
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder, "report.json"), Path(folder, "log")
        options = ["--quiet", "--dry-run", "--report", str(report), "--log", str(log)]
        ask([*command, *options], environment, log=log)
        rows: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return rows


def _require_no_source(environment: Environment, built: Sequence[str]) -> None:
    """Of what is asked for as a folder or a commit: they are built, what they name is not."""
    static = {text: static_needs(Path(text)) for text in built}
    needs = [need for each in static.values() for need in each or ()]
    if dynamic := [text for text in built if static[text] is None]:
        command = [*environment.installer("install"), "--no-deps", "--ignore-installed", *dynamic]
        for row in _pip_report(command, environment):
            needs += row["metadata"].get("requires_dist", [])
    if found := sorted(sources_among(needs)):
        raise only_source(environment, found)


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
        _pip_sha256(download),
    )


def _pip_sha256(download: Mapping[str, Any]) -> str | None:
    """Of an archive; pip 23.0 leaves it out where the archive lies in a folder."""
    told: str | None = download.get("archive_info", {}).get("hashes", {}).get("sha256")
    archive = local_path(download["url"])
    if told is None and archive is not None and archive.is_file():
        return digest(archive)
    return told


# --- uv -------------------------------------------------------------------------------------------


def _uv_changes(
    environment: Environment, requirements: Sequence[str], more: Sequence[str]
) -> list[Change]:
    """uv tells versions, or the URL of what was asked for by URL; hashes have to be asked for."""
    options = ["--dry-run", *_reinstall(_folder_names(requirements)), *more]
    if ONLY_WHEELS in more:  # uv means what was asked for by folder or commit as well
        options += [f"--no-binary={name}" for name in _built_names(requirements)]
    said = ask([*environment.installer("install"), *options, *requirements], environment)
    rows = [match.groupdict() for match in map(_UV_ROW.match, said.splitlines()) if match]
    rows = [row for row in rows if row["sign"] != "-"]
    before = installed_versions(row["name"] for row in rows)
    changes = [_uv_change(row, before) for row in rows]
    hashed = [change.pin for change in changes if not (change.direct and change.built)]
    files = _uv_files(environment, hashed, more)
    return [replace(change, **files.get(change.name, {})) for change in changes]


def _reinstall(names: Iterable[str]) -> list[str]:
    """uv takes a folder whose pyproject.toml has not changed for one that has not changed."""
    return [part for name in names for part in ("--reinstall-package", name)]


def _folder_names(requirements: Iterable[str]) -> Iterator[str]:
    """Of the projects in folders, where their metadata tells."""
    for text in requirements:
        if name := project_table(Path(text)).get("name"):
            yield str(name)


def _built_names(requirements: Sequence[str]) -> Iterator[str]:
    """Of what is asked for as a folder or a commit."""
    yield from _folder_names(requirements)
    yield from (match["name"] for text in requirements if (match := _GIT.match(text)))


def _uv_change(row: Mapping[str, str | None], before: Mapping[str, str]) -> Change:
    name, url = canonicalize_name(row["name"] or ""), row["url"]
    version = row["version"] or _version_at(url or "")
    return Change(name, before.get(name), version, url or "", direct=url is not None)


def _version_at(url: str) -> str:
    """The version that the name of a wheel or the metadata of a folder tells without building."""
    if file_name(url).endswith(".whl"):
        return str(parse_wheel_filename(file_name(url))[1])
    project = project_table(local_path(url) or Path())
    return str(project.get("version", UNKNOWN))


def _uv_files(
    environment: Environment, pins: Sequence[str], more: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Name -> source, sha256 and size of the archive that fits this machine."""
    if not pins:
        return {}
    options = ["--quiet", "--no-deps", "--no-header", "--format", "pylock.toml", *more, "-"]
    said = ask([*environment.installer("compile"), *options], environment, "\n".join(pins))
    packages = tomllib.loads(said)["packages"]
    return {package["name"]: _fitting(package) for package in packages}


def _fitting(package: Mapping[str, Any]) -> dict[str, Any]:
    """The archive that was asked for by URL, whose source is known; or the first wheel in the order
    of preference of this interpreter, or the sdist."""
    if archive := package.get("archive"):
        return {"sha256": archive.get("hashes", {}).get("sha256"), "size": archive.get("size")}
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    wheels = []
    for wheel in package.get("wheels", ()):
        tags = parse_wheel_filename(file_name(wheel["url"]))[3]
        wheels += [(rank, wheel) for tag in tags if (rank := ranks.get(tag)) is not None]
    best = min(wheels, key=lambda pair: pair[0])[1] if wheels else package.get("sdist", {})
    sha256 = best.get("hashes", {}).get("sha256")
    return {"source": best.get("url", ""), "sha256": sha256, "size": best.get("size")}
