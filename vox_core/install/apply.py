"""Carry out a plan, whole or not at all.

    apply(plan)

1. uv fetches and builds everything into a scratch folder (`--prefix`). Its RECORDs and manifests
   are checked there: no file of another distribution or of vox, the plugin that was wanted.
2. What the change replaces is kept (undo.py).
3. uv removes the old versions and installs the new ones, from its cache.
4. A fresh interpreter finds the plugins, and `uv pip check` has no new line.

A failure or signal after 2 puts the files back; before it, the environment is untouched.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from packaging.utils import canonicalize_name

from vox_core.errors import InputError, WorkError
from vox_core.files import storage_errors
from vox_core.host.discover import Found, discover
from vox_core.host.judge import on_one_line
from vox_core.host.machine import Machine, requirements, this_machine, unmet
from vox_core.install import undo
from vox_core.install.environment import CORE, Environment, Installed, local_path
from vox_core.install.plan import InstallPlan, belongs_to_core, require_ended
from vox_core.install.targets import Target, misfit
from vox_core.install.uv import Report, Uv

LOCK = "pylock.toml"
_FROM_LOCK = ("--preview-features", "pylock", "--no-deps", "--requirements")
_CHILD = "from vox_core.install.apply import answer; print('\\n' + {token!r} + answer())"
_TOKEN = "vox answers: "
"""Begins the line with the answer; a .pth file may print before it, and after it at exit."""
_LIMIT_S = 60.0


def apply(plan: InstallPlan, report: Report = lambda line: None) -> None:
    """Carry out a plan; if anything fails or is interrupted, the environment is as before.

    Raises:
        InputError: I003, a package is not the plugin, or brings files of others; I011, another
            process is changing this environment, or has since the plan.
        WorkError: I008, it failed; I009, and not everything could be put back.
        StorageError: the disk is full, or an I/O error.
    """
    if not plan.changes:
        return
    environment = plan.environment
    site = environment.site_packages.resolve()
    scratch = undo.folder(site)
    with storage_errors(environment.prefix), environment.locked(), _signals_raise():
        require_ended(environment)  # else its copies of files would go with the scratch folder
        there = environment.installed()
        _require_as_planned(plan, there.versions)
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            scratch.mkdir()
            _carry_out(plan, there, site, scratch, report)
        finally:
            with _signals_wait():
                if undo.unfinished(site) is None:
                    shutil.rmtree(scratch, ignore_errors=True)


def answer() -> str:
    """The installed plugins as JSON: distribution, id and fault or null; runs in a child."""
    plugins = discover()
    machine = this_machine(plugins)
    rows = []
    for plugin in plugins:
        fault = on_one_line(plugin.fault) if plugin.fault else None
        if plugin.manifest and (lacking := unmet(plugin.manifest, machine)):
            fault = ": ".join(lacking)
        rows.append([canonicalize_name(plugin.distribution), plugin.id, fault])
    return json.dumps(rows)


# --- the steps ------------------------------------------------------------------------------------


def _carry_out(
    plan: InstallPlan, there: Installed, site: Path, scratch: Path, report: Report
) -> None:
    environment, removes = plan.environment, plan.action == "remove"
    source = scratch / "source"
    source.mkdir()
    if plan.unpack is not None:
        plan.unpack(source)
    else:
        (source / LOCK).write_text(plan.lock, encoding="utf-8")
    uv = Uv(environment, only=source if plan.unpack is not None else None)
    added = [] if removes else _fetched(plan, there, uv, scratch, report)
    going = [
        each.name
        for each in plan.changes
        if each.before is not None and environment.owns(there.distributions[each.name])
    ]
    replaced = [path for name in going for path in _files(there.distributions[name])]
    owned = _owned({*replaced}, there, but=going) if replaced else {}
    change = undo.begin(site, _named(plan), added, replaced)
    try:
        faults = uv.faults()
        if going:
            uv.run("uninstall", going, report, _named(plan))
        if not removes:
            how = [*_FROM_LOCK, str(source / LOCK), *plan.options]
            uv.run("install", how, report, _named(plan))
        for path in owned:  # which two distributions shared
            if not os.path.lexists(path):
                change.put_back(str(path))
        _require_working(plan, uv, faults)
        with _signals_wait():
            change.forget()
    except BaseException as error:
        with _signals_wait():
            lost = change.back()
        if lost:
            raise _not_whole(environment, lost) from error
        raise


def _fetched(
    plan: InstallPlan, there: Installed, uv: Uv, scratch: Path, report: Report
) -> list[Path]:
    """Have uv install into a scratch folder, check what it holds, and give where it would go."""
    stage = scratch / "stage"
    afresh = [
        part for each in plan.changes if each.direct for part in ("--refresh-package", each.name)
    ]
    how = ["--prefix", str(stage), *_FROM_LOCK, str(scratch / "source" / LOCK), *plan.options]
    uv.run("install", [*how, *afresh], lambda line: None, _named(plan))
    sites = sorted({info.parent for info in stage.glob("**/*.dist-info")})
    names = {change.name for change in plan.changes}
    rows = [row for site in sites for row in _staged(site, stage, plan.environment)]
    rows = [row for row in rows if row.name in names]
    touched = [change.name for change in plan.changes if change.before is not None]
    if faults := [*_taken(rows, plan.environment, there, touched)]:
        raise InputError(
            "I003",
            "a wheel would overwrite files that are not its own",
            where=plan.environment,
            faults=faults,
            remedy="do not install it; tell its authors what it brings; nothing was changed",
        )
    if faults := [*_misfits(plan, sites)]:
        raise misfit(faults, plan.environment)
    shutil.rmtree(stage)
    report(f"fetched {', '.join(sorted(names))}")
    return [row.path for row in rows]


class _File(NamedTuple):
    """A file that a distribution brings: where it goes, its path and digest in RECORD."""

    name: str
    path: Path
    recorded: str
    digest: str


def _staged(site: Path, stage: Path, environment: Environment) -> Iterator[_File]:
    """Files of the distributions below a staged site-packages."""
    there = environment.prefix / site.relative_to(stage)
    target = there if there in environment.folders else environment.site_packages
    for distribution in metadata.distributions(path=[str(site)]):
        name = canonicalize_name(distribution.metadata["Name"])
        for recorded, digest in _record(distribution):
            path = os.path.normpath(target.resolve() / recorded)
            yield _File(name, Path(path), recorded, digest)


def _taken(
    files: Sequence[_File], environment: Environment, there: Installed, touched: Collection[str]
) -> Iterator[str]:
    """Files of other distributions that would be overwritten, and additions to vox's own."""
    commands = environment.folders[-1].resolve()
    owned = _owned({each.path for each in files if os.path.lexists(each.path)}, there)
    seen: dict[Path, _File] = {}
    for each in files:
        brings = f"{each.name} brings {each.path}, which belongs to"
        had = owned.get(each.path, {})
        losers = [
            name
            for name, digest in had.items()
            if name not in {*touched, each.name} and (not digest or digest != each.digest)
        ]
        other = seen.setdefault(each.path, each)
        if each.path.is_dir():
            yield f"{brings} a folder"
        elif each.name != CORE and belongs_to_core(each.recorded):
            yield f"{brings} {CORE}"
        elif losers:
            yield f"{brings} {' and '.join(losers)}"
        elif not had and each.path.parent == commands and os.path.lexists(each.path):
            yield f"{brings} no package"
        elif other.digest != each.digest:
            yield f"{brings} {other.name}"


def _owned(
    paths: Collection[Path], there: Installed, but: Collection[str] = ()
) -> dict[Path, dict[str, str]]:
    """Path -> distributions that list it, with its digest in their RECORDs."""
    found: dict[Path, dict[str, str]] = {}
    if not paths:
        return found
    for name, distribution in there.distributions.items():
        base = str(Path(str(distribution.locate_file(""))).resolve())
        for recorded, digest in () if name in but else _record(distribution):
            path = Path(os.path.normpath(os.path.join(base, recorded)))  # noqa: PTH118 - thousands
            if path in paths:
                found.setdefault(path, {})[name] = digest
    return found


def _misfits(plan: InstallPlan, sites: Sequence[Path]) -> Iterator[str]:
    """Faults of the staged plugins, apart from requirements on other distributions."""
    found = discover([str(site) for site in sites])
    changed = {change.name for change in plan.changes}
    machine = this_machine(found)
    for target in plan.targets:
        name = _distribution(target, plan)
        mine = [each for each in found if canonicalize_name(each.distribution) == name]
        if name in changed:
            yield from target.misnamed([each.id for each in mine])
            for version in {each.version for each in mine}:
                yield from target.mismatched(version)
        for plugin in mine:
            yield from (f"{plugin.id}: {fault}" for fault in _own_faults(plugin, machine))


def _own_faults(plugin: Found, machine: Machine) -> Iterator[str]:
    if plugin.fault:
        yield on_one_line(plugin.fault)
    if plugin.manifest:
        for kind, reason in requirements(plugin.manifest, machine).items():
            if reason and kind != "distribution":
                yield f"{kind}: {reason}"


def _distribution(target: Target, plan: InstallPlan) -> str | None:
    """Canonical name; of a folder whose metadata tells none, the one that was built from it."""
    sources = {local_path(change.source): change.name for change in plan.changes}
    return target.distribution or sources.get(target.source)


# --- checks ---------------------------------------------------------------------------------------


def _require_as_planned(plan: InstallPlan, now: Mapping[str, str]) -> None:
    """Raises InputError I011 if other versions are installed than when the plan was made."""
    if faults := [
        f"{name}: {plan.installed.get(name, 'not there')} in the plan, "
        f"{now.get(name, 'not there')} now"
        for name in sorted({*now, *plan.installed})
        if now.get(name) != plan.installed.get(name)
    ]:
        raise InputError(
            "I011",
            "the environment has changed since the plan was made",
            where=plan.environment,
            faults=faults,
            remedy="run again, for a plan of what is there now",
        )


def _require_working(plan: InstallPlan, uv: Uv, before: Collection[str]) -> None:
    """Raises WorkError I008 if the plugins are not there, or a requirement is not met any more."""
    changed = {change.name for change in plan.changes}  # uv or the plan has seen to what these need
    new = [line for need, line in uv.faults().items() if need not in before]
    faults = [line for line in new if line.split("`")[1] not in changed]
    rows = _asked(plan)
    if plan.action == "remove":
        faults += [f"{name} is still there" for name, *_ in rows if name in changed]
    for target in plan.targets:
        mine = [row for row in rows if row[0] == _distribution(target, plan)]
        faults += target.misnamed([id for _, id, _ in mine])
        faults += [f"{id}: {fault}" for _, id, fault in mine if fault]
    if faults:
        raise _failed(plan, "; ".join(faults))


def _asked(plan: InstallPlan) -> list[list[str]]:
    """What `answer` gives in a fresh interpreter, which sees metadata and .pth files anew."""
    # -P: a folder `vox_core` that happens to be the current one is not what is installed.
    command = [str(plan.environment.python), "-P", "-c", _CHILD.format(token=_TOKEN)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(plan, f"the environment's Python fails: {error}") from error
    _, token, rest = done.stdout.rpartition(_TOKEN)
    try:
        rows: list[list[str]] = json.loads(rest.partition("\n")[0])
    except ValueError:
        token = ""
    if not token or done.returncode:
        last = done.stderr.strip().rpartition("\n")[2] or "it ended without an answer"
        raise _failed(plan, f"the environment's Python fails: {last}")
    return rows


def _record(distribution: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """Path and digest of each row of RECORD; nothing where it is damaged."""
    try:
        rows = [*csv.reader((distribution.read_text("RECORD") or "").splitlines())]
    except (OSError, ValueError, csv.Error):
        return
    yield from ((row[0], row[1] if len(row) > 1 else "") for row in rows if row)


def _files(distribution: metadata.Distribution) -> list[Path]:
    base = Path(str(distribution.locate_file(""))).resolve()
    return [Path(os.path.normpath(base / recorded)) for recorded, _ in _record(distribution)]


def _named(plan: InstallPlan) -> str:
    return f"{plan.action} {', '.join(change.name for change in plan.changes)}"


def _failed(plan: InstallPlan, found: str) -> WorkError:
    return WorkError(
        "I008",
        f"could not {_named(plan)}; the environment is as it was",
        where=plan.environment,
        found=found,
        remedy="mend what is named, and run again",
    )


def _not_whole(environment: Environment, lost: Sequence[str]) -> WorkError:
    return WorkError(
        "I009",
        "the environment could not be restored entirely",
        where=environment,
        faults=lost,
        remedy=f"mend what is named, then {undo.remedy(environment.python)}",
    )


# --- signals --------------------------------------------------------------------------------------


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and a closed terminal interrupt the block as Ctrl-C does, so that it is undone."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handling([signal.SIGTERM, signal.SIGHUP], stop):
        yield


@contextmanager
def _signals_wait() -> Iterator[None]:
    """No signal interrupts the block."""
    with _handling([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], signal.SIG_IGN):
        yield


@contextmanager
def _handling(numbers: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handled in previous.items():
            signal.signal(number, handled)
