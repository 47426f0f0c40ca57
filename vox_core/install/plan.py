"""Plans to install, upgrade and remove plugins: what would change, found without changing it.

    plan = plan_install(["cpu"])
    plan.changes             # each with versions, source, SHA-256 and size as far as uv tells them

uv resolves against what is installed (`uv pip install --dry-run`), with vox, torch and every other
installed plugin held at their versions, and writes the exact files as `pylock.toml`; apply.py
installs from that file. Only wheels are resolved: what an index has as source alone is refused,
unless sources are allowed. A folder or commit that was named is built when its plan is carried out,
and before only if nothing else tells its dependencies.

A plan is refused if the environment is not vox's to change, if vox, torch or what an installed
distribution needs would change, or if a file is not the one that the catalog pins.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name, parse_wheel_filename

from vox_core.contract import Check
from vox_core.errors import InputError, command
from vox_core.host.discover import UNKNOWN, Found, discover, known_plugins
from vox_core.host.probe import NVIDIA, accelerators, hardware_remedy
from vox_core.install import undo
from vox_core.install.environment import (
    CORE,
    KEPT,
    Environment,
    Installed,
    closure,
    is_editable,
    is_met,
    local_path,
    origin,
)
from vox_core.install.requirements import (
    Target,
    from_catalog,
    from_source,
    misfit,
    needs_build,
    project_table,
)
from vox_core.install.uv import ONLY_WHEELS, Report, Resolved, Uv

Action: TypeAlias = Literal["install", "upgrade", "remove"]
_GIT = re.compile(r"(?P<name>[\w.-]+) @ git\+")


@dataclass(frozen=True, slots=True)
class Change:
    """A distribution that is added, removed, or replaced by other content.

    Args:
        name: canonical.
        before: the installed version; None if it is new.
        after: the version that will be there; None if it goes.
        source: URL of the folder, file or repository; empty where uv tells none.
        direct: named by `source`, and not resolved from an index by version.
        sha256: of the file, in hex.
        size: of the file, in bytes.
    """

    name: str
    before: str | None
    after: str | None
    source: str = ""
    direct: bool = False
    sha256: str | None = None
    size: int | None = None

    @property
    def built(self) -> bool:
        """Whether it is built from source, which runs its code."""
        file = file_name(self.source)
        return bool(self.after and (file or self.direct)) and not file.endswith(".whl")


@dataclass(frozen=True, slots=True)
class InstallPlan:
    """Changes to an environment, with what `apply` needs to make them.

    Args:
        changes: nothing is to be done if there are none.
        targets: the plugins that will be there afterwards.
        notes: what the user should know, in words.
        lock: `pylock.toml` of the changes.
        options: of `uv pip install`: which sources may be built.
        unpack: writes a lock and its wheels into a folder; uv then sees nothing else.
    """

    action: Action
    environment: Environment
    changes: tuple[Change, ...]
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    lock: str = ""
    options: tuple[str, ...] = ()
    unpack: Callable[[Path], None] | None = None


def plan_install(
    ids: Sequence[str] = (),
    source: Path | str | None = None,
    *,
    allow_source: bool = False,
    report: Report = lambda line: None,
) -> InstallPlan:
    """Plan to install plugins of the catalog, or one plugin from a source.

    Args:
        ids: of the catalog; with a source at most one, of the plugin that it holds.
        source: a folder with the plugin's source, a wheel of it, or `NAME==VERSION`.
        allow_source: build what an index has no wheel of.
        report: called before something is built to make the plan.

    Raises:
        InputError: I001 to I007, I013: why it is refused.
    """
    environment = _here()
    if source is None:
        wanted = from_catalog(ids, environment.installed)
    else:
        wanted = [from_source(source, ids[0] if ids else None, environment.installed)]
    return _plan("install", environment, wanted, (), allow_source, report)


def plan_upgrade(
    ids: Sequence[str] = (), *, allow_source: bool = False, report: Report = lambda line: None
) -> InstallPlan:
    """Plan to bring installed plugins, or all of them, to what their sources now hold.

    Raises:
        InputError: I001 to I007, I010, I013: why it is refused.
    """
    environment = _here()
    found = discover()
    chosen = [_installed(id, found) for id in ids] if ids else found
    newer = [_newer(plugin, environment.installed) for plugin in chosen]
    wanted = [each for each in newer if isinstance(each, Target)]
    notes = [each for each in newer if isinstance(each, str)]
    return _plan("upgrade", environment, wanted, notes, allow_source, report)


def plan_remove(ids: Sequence[str]) -> InstallPlan:
    """Plan to remove plugins, broken ones too; libraries that they came with stay, with a note.

    Args:
        ids: of plugins, or names of their distributions.

    Raises:
        InputError: I001, I005, I010 or I013: why it is refused.
    """
    environment = _here()
    found = discover()
    names = sorted({canonicalize_name(_installed(id, found).distribution) for id in ids})
    environment.require_changeable(remove=names)
    for name in names:
        _require_inside(name, environment)
    there = environment.installed
    changes = tuple(Change(name, there.versions[name], None) for name in names)
    require_kept(changes, environment)
    theirs = {*closure(names, there.needs)}
    left = theirs - {*names, *closure([*KEPT, *(there.needs.keys() - theirs)], there.needs)}
    notes = (f"nothing else needs: {', '.join(sorted(left))}; they stay",) if left else ()
    return InstallPlan("remove", environment, changes, (), notes)


def plan_wheels(
    changes: Sequence[Change],
    wanted: Sequence[Target],
    notes: Sequence[str],
    unpack: Callable[[Path], None],
) -> InstallPlan:
    """Plan to install exactly these wheels, without a network.

    Args:
        unpack: writes `pylock.toml` and the wheels into a folder.

    Raises:
        InputError: I001, I005, I006 or I013: why it is refused.
    """
    environment = _here()
    environment.require_changeable(add=[file_name(change.source) for change in changes])
    _require_no_intruder(environment)
    require_kept(changes, environment)
    return InstallPlan(
        "install",
        environment,
        tuple(changes),
        tuple(wanted),
        (*notes, *_unusable(wanted, changes, environment.installed.versions)),
        unpack=unpack,
    )


def cut_off() -> list[Check]:
    """For the doctor: a failed check if a change was killed, none while one is under way."""
    try:
        _here()
    except InputError as error:
        if error.code == "VOX-I013":
            return [Check("installation", False, f"cut off: {error.found}", error.remedy)]
    return []


# --- installing -----------------------------------------------------------------------------------


def _plan(
    action: Action,
    environment: Environment,
    wanted: Sequence[Target],
    notes: Sequence[str],
    allow_source: bool,
    report: Report,
) -> InstallPlan:
    requirements = [text for target in wanted for text in (target.requirement, *target.libraries)]
    requirements = list(dict.fromkeys(requirements))
    if not requirements:
        return InstallPlan(action, environment, (), (), tuple(notes))
    environment.require_changeable(add=requirements)
    _require_no_intruder(environment)
    uv, versions = Uv(environment), environment.installed.versions
    named = {text: name for text in requirements if (name := _built_name(text))}
    unclear = [text for text in named if not Path(text).is_dir() or needs_build(Path(text))]
    for text in unclear:
        report(f"Building metadata of {text} (runs its build script)")
    options = () if allow_source else _build_only(named[text] for text in unclear)
    # uv compares a folder's pyproject.toml alone with what is installed.
    again = [f"--reinstall-package={named[text]}" for text in named if Path(text).is_dir()]
    rows = _rows(uv, [*options, *again, *requirements], _held(wanted, versions))
    pins = [f"{row.name} @ {row.url}" if row.url else f"{row.name}=={row.version}" for row in rows]
    lock = uv.lock(pins, ["--no-deps", *options]) if pins else ""
    changes = _changes(rows, lock, versions) if rows else ()
    require_kept(changes, environment)
    _require_pinned(changes, wanted)
    _require_as_named(changes, wanted, versions)
    if uv.ignored:
        notes = [*notes, f"settings of pip that uv has no equal for: {', '.join(uv.ignored)}"]
    notes = [*notes, *_unusable(wanted, changes, versions)]
    options = () if allow_source else _build_only(named.values())
    return InstallPlan(action, environment, changes, tuple(wanted), tuple(notes), lock, options)


def _rows(uv: Uv, arguments: Sequence[str], held: Mapping[str, str]) -> list[Resolved]:
    """uv's plan, or why there is none with what has to stay as it is."""
    try:
        return uv.plan(arguments, [f"{name}=={version}" for name, version in held.items()])
    except InputError as refusal:
        try:
            rows = uv.plan(arguments, [])
        except InputError:
            raise refusal from None
        held_ones = [row for row in rows if row.name in held]
        moved = [Change(row.name, held[row.name], row.version) for row in held_ones]
        _require_unchanged(moved, uv.environment)
        raise refusal from None


def _held(wanted: Iterable[Target], installed: Mapping[str, str]) -> dict[str, str]:
    """vox, torch, and the plugins that are not to be installed: name -> version."""
    asked = {target.distribution for target in wanted}
    plugins = (canonicalize_name(plugin.distribution) for plugin in discover())
    names = dict.fromkeys([*KEPT, *plugins])
    return {name: installed[name] for name in names if name in installed and name not in asked}


def _built_name(requirement: str) -> str | None:
    """Of what has no wheel before it is built: the name of a folder's project or of a commit."""
    if match := _GIT.match(requirement):
        return match["name"]
    name = project_table(Path(requirement)).get("name") if Path(requirement).is_dir() else None
    return str(name) if name else None


def _build_only(names: Iterable[str]) -> tuple[str, ...]:
    return (*ONLY_WHEELS, *(f"--no-binary={name}" for name in names))


def _changes(
    rows: Iterable[Resolved], lock: str, installed: Mapping[str, str]
) -> tuple[Change, ...]:
    """The rows of uv's plan with the facts of its lock, sorted by name."""
    from packaging.pylock import PackageArchive, PackageSdist, PackageWheel, Pylock

    chosen = {str(each.name): file for each, file in Pylock.from_dict(tomllib.loads(lock)).select()}
    changes = []
    for row in rows:
        file, source, sha256, size = chosen[row.name], row.url or "", None, None
        if isinstance(file, PackageArchive | PackageSdist | PackageWheel):
            source = source or file.url or Path(file.path or "").as_uri()
            path, sha256 = local_path(source), file.hashes.get("sha256")
            size = path.stat().st_size if path and path.is_file() else file.size
        after, before = row.version or _version_at(source), installed.get(row.name)
        changes.append(Change(row.name, before, after, source, row.url is not None, sha256, size))
    return tuple(sorted(changes, key=lambda change: change.name))


def _version_at(url: str) -> str:
    """Read the version from a wheel's name or a folder's metadata, without building."""
    if file_name(url).endswith(".whl"):
        return str(parse_wheel_filename(file_name(url))[1])
    return str(project_table(local_path(url) or Path("-")).get("version", UNKNOWN))


def file_name(source: str) -> str:
    """The file at the end of a path or an address, without the query."""
    return unquote(urlsplit(source).path).rpartition("/")[2]


def _unusable(
    wanted: Iterable[Target], changes: Iterable[Change], installed: Mapping[str, str]
) -> Iterator[str]:
    """Why the backend for NVIDIA GPUs would not run; a torch without `+cpu` may lack CUDA, too."""
    torch = {**installed, **{each.name: each.after for each in changes}}.get("torch") or ""
    planned = NVIDIA.backend in [target.id for target in wanted]
    if planned and NVIDIA not in accelerators():
        yield f"{NVIDIA.backend} does not run without {NVIDIA.name}: {hardware_remedy(NVIDIA.tag)}"
    elif planned and torch.endswith("+cpu"):
        yield f"{NVIDIA.backend} does not run with torch {torch}, a build without CUDA: " + (
            f"pip uninstall torch, then pip install torch=={torch.removesuffix('+cpu')} "
            "--index-url https://download.pytorch.org/whl/cuXXX (cu126 for CUDA 12.6)"
        )


# --- refusals -------------------------------------------------------------------------------------


def _here() -> Environment:
    """Raises InputError I013 if an earlier change was cut off, I011 if it is under way."""
    environment = Environment.here()
    if undo.unfinished(environment.site_packages.resolve()):
        with suppress(OSError), environment.locked():  # or else it is under way
            require_ended(environment)
        require_ended(environment)
    return environment


def require_ended(environment: Environment) -> None:
    """Raises InputError I013 if an earlier change was cut off, and not by one that is under way."""
    if change := undo.unfinished(environment.site_packages.resolve()):
        what = "an earlier change of this environment was cut off"
        remedy = undo.remedy(environment.python)
        raise InputError("I013", what, where=environment, found=change.what, remedy=remedy)


def require_kept(changes: Sequence[Change], environment: Environment) -> None:
    """Raises InputError I005 if vox, torch or what an installed distribution needs would change."""
    before = environment.installed.versions
    _require_unchanged([each for each in changes if each.name in KEPT and each.before], environment)
    names = [change.name for change in changes]
    after = {name: version for name, version in before.items() if name not in names}
    after |= {change.name: change.after for change in changes if change.after}
    if faults := [
        f"{owner} needs {need}, which would be {after.get(canonicalize_name(need.name), 'gone')}"
        for owner, needs in sorted(environment.installed.needs.items())
        for need in needs
        if owner not in names and is_met(need, before) and not is_met(need, after)
    ]:
        raise InputError(
            "I005",
            "this would break what is installed",
            where=environment,
            faults=faults,
            remedy="remove or upgrade what is named together with it"
            + ("" if all(each.after is None for each in changes) else ", or choose other versions"),
        )


def _require_unchanged(moved: Sequence[Change], environment: Environment) -> None:
    if moved:
        raise InputError(
            "I005",
            f"this would change {' and '.join(change.name for change in moved)}",
            where=environment,
            faults=[f"{each.name} {each.before} -> {each.after or 'none'}" for each in moved],
            remedy="if you want that, install that version yourself first, and run again",
        )


def _require_no_intruder(environment: Environment) -> None:
    """Raises InputError I006 if another distribution brings a `vox` command or `vox_core`."""
    there = environment.installed
    found = sorted(
        f"{name} {there.versions[name]} ({file})"
        for name, each in there.distributions.items()
        if name != CORE and "vox" in (each.read_text("RECORD") or "")
        for file in each.files or ()
        if belongs_to_core(str(file))
    )
    if found:
        what = "the vox command or the vox_core package belongs to another distribution"
        remedy = f"use an environment without it, or remove it and install {CORE} again"
        raise InputError("I006", what, where=environment, found=", ".join(found), remedy=remedy)


def belongs_to_core(recorded: str) -> bool:
    """Whether a path of a RECORD is the `vox` command or lies in `vox_core`."""
    parts = Path(recorded).parts
    return parts[:1] == ("vox_core",) or (parts[:1] == ("..",) and parts[-1] in ("vox", "vox.exe"))


def _require_pinned(changes: Sequence[Change], wanted: Iterable[Target]) -> None:
    """Raises InputError I007 if a file is not one that the catalog pins.

    Where a plugin has pins, neither its source nor another build will do. Folders and commits have
    no file that could be pinned.
    """
    faults = []
    for target in wanted:
        for change in changes:
            file, path = file_name(change.source), local_path(change.source)
            pinned = target.sha256.get(file)
            has_file = "+" not in urlsplit(change.source).scheme and not (path and path.is_dir())
            if pinned and change.sha256 != pinned:
                faults.append(f"{change.source}: found {change.sha256}, expected {pinned}")
            elif not pinned and target.sha256 and has_file and change.name == target.distribution:
                pins = ", ".join(target.sha256)
                faults.append(
                    f"{change.source}: not one of the files that the catalog pins: {pins}"
                )
    if faults:
        raise InputError(
            "I007",
            "a file does not have the SHA-256 of the catalog",
            faults=faults,
            remedy="do not install it; get a file that the catalog pins from a place that you "
            "trust: vox plugin install --from-wheel FILE",
        )


def _require_as_named(
    changes: Sequence[Change], wanted: Iterable[Target], installed: Mapping[str, str]
) -> None:
    """Raises InputError I003 if a version, or a plugin that is installed, is not the one wanted."""
    after = {change.name: change.after for change in changes}
    for target in wanted:
        name = target.distribution or ""
        faults = [*target.mismatched(after.get(name) or installed.get(name) or "")]
        if name and name not in after:
            faults += target.misnamed([each.id for each in discover() if _is_of(each, name)])
        if faults:
            raise misfit(faults, target.requirement)


# --- upgrading and removing -----------------------------------------------------------------------


def _newer(plugin: Found, there: Installed) -> Target | str:
    """Return the target of an upgrade of `plugin`, or the reason for none."""
    name = canonicalize_name(plugin.distribution)
    distribution = there.distributions.get(name)
    if is_editable(distribution):
        return f"{plugin.id}: installed from a checkout in place, which is as new as the checkout"
    entry = known_plugins().get(plugin.id)
    if entry and canonicalize_name(entry.distribution) == name:
        return from_catalog([plugin.id], there, upgrade=True)[0]
    source = origin(distribution)
    folder = local_path(source.get("url", "")) if "dir_info" in source else None
    if folder and folder.is_dir():
        return from_source(folder, plugin.id, there)
    return f"{plugin.id}: in no catalog; a newer version is named whole: " + command(
        "vox", "plugin", "install", "--from-pypi", f"{plugin.distribution}==VERSION"
    )


def _is_of(plugin: Found, distribution: str) -> bool:
    return canonicalize_name(plugin.distribution) == distribution


def _installed(id: str, installed: Sequence[Found]) -> Found:
    """The one plugin of that id, or of the distribution of that name."""
    of_name = [plugin for plugin in installed if _is_of(plugin, canonicalize_name(id))]
    matches = [plugin for plugin in installed if plugin.id == id] or of_name
    names = list(dict.fromkeys(plugin.distribution for plugin in matches))
    if len(names) == 1:
        return matches[0]
    there = f"distributions {', '.join(names)}" if names else "installed: "
    raise InputError(
        "I010",
        f"more than one plugin has the id {id!r}" if names else f"plugin {id!r} is not installed",
        found=there if names else there + (", ".join(each.id for each in installed) or "none"),
        remedy=f"name the distribution: {names[-1]}" if names else "see `vox plugin list`",
    )


def _require_inside(name: str, environment: Environment) -> None:
    """Raises InputError I010 if another environment lends a distribution to this one."""
    distribution = environment.installed.distributions.get(name)
    if distribution is None or not environment.owns(distribution):
        place = distribution.locate_file("") if distribution else "a place without its metadata"
        raise InputError(
            "I010",
            f"{name} is not in this environment",
            where=environment,
            found=f"it is in {place}, which this environment sees",
            remedy="remove it with the Python that it was installed with",
        )
