"""Carry out a plan, whole or not at all.

    apply(plan)

1. uv fetches and builds everything into a scratch folder (`--prefix`). Its RECORDs and manifests
   are checked there: no file of another distribution or of vox, the plugin that was wanted.
2. What the change replaces is kept (undo.py).
3. uv removes the old versions and installs the new ones, from its cache.
4. A fresh interpreter finds the plugins.

A failure or signal after 2 puts the files back; before it, the environment is untouched.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from vox_core.errors import InputError, WorkError
from vox_core.files import storage_errors
from vox_core.host.discover import discover
from vox_core.host.judge import on_one_line
from vox_core.host.probe import requirements, this_machine, unmet
from vox_core.host.process import ENDING, Failed, handled, output_of
from vox_core.install import undo
from vox_core.install.environment import CORE, Environment, local_path
from vox_core.install.plan import InstallPlan, belongs_to_core, require_ended, require_kept
from vox_core.install.requirements import Target, misfit
from vox_core.install.uv import Report, Uv, failure

LOCK = "pylock.toml"
_FROM_LOCK = ("--preview-features", "pylock", "--no-deps", "--requirements")
_TOKEN = "vox answers: "
"""Begins the line with the answer; a .pth file may print before it, and after it at exit."""
_CHILD = f"from vox_core.install.apply import answer; print('\\n{_TOKEN}' + answer())"
_LIMIT_S = 60.0


def apply(plan: InstallPlan, report: Report = lambda line: None) -> None:
    """Carry out a plan; if anything fails or is interrupted, the environment is as before.

    Raises:
        InputError: I003, a package is not the plugin, or brings files of others; I005, it would
            break what is installed; I011, another process is changing this environment, or has
            since the plan.
        WorkError: I008, it failed; I009, and not everything could be put back.
        StorageError: the disk is full, or an I/O error.
    """
    if not plan.changes:
        return
    environment = plan.environment
    site = environment.site_packages.resolve()
    scratch = undo.folder(site)
    # SIGTERM and a closed terminal interrupt as Ctrl-C does, so that the change is undone.
    interrupting = handled(signal.default_int_handler, *ENDING)
    with storage_errors(environment.prefix), environment.locked(), interrupting:
        require_ended(environment)  # else its copies of files would go with the scratch folder
        now = replace(environment)  # with what is installed now, under the lock
        _require_as_planned(plan, now)
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            scratch.mkdir()
            _carry_out(replace(plan, environment=now), site, scratch, report)
        finally:
            with handled(signal.SIG_IGN, *ENDING):
                if undo.unfinished(site) is None:
                    shutil.rmtree(scratch, ignore_errors=True)


def answer() -> str:
    """The installed plugins as JSON: distribution, id and fault or null; runs in a child."""
    plugins = discover()
    machine = this_machine()
    rows = []
    for plugin in plugins:
        fault = on_one_line(plugin.fault) if plugin.fault else None
        if plugin.manifest and (lacking := unmet(plugin.manifest, machine)):
            fault = ": ".join(lacking)
        rows.append([canonicalize_name(plugin.distribution), plugin.id, fault])
    return json.dumps(rows)


# --- the steps ------------------------------------------------------------------------------------


def _carry_out(plan: InstallPlan, site: Path, scratch: Path, report: Report) -> None:
    environment, removes, doing = plan.environment, plan.action == "remove", _named(plan)
    distributions = environment.installed.distributions
    source = scratch / "source"
    source.mkdir()
    if plan.unpack is not None:
        plan.unpack(source)
    else:
        (source / LOCK).write_text(plan.lock, encoding="utf-8")
    uv = Uv(environment, only=source if plan.unpack is not None else None)
    how = [*_FROM_LOCK, str(source / LOCK), *plan.options]
    added = [] if removes else _fetched(plan, uv, how, scratch / "stage")
    if added:
        report(f"fetched {', '.join(change.name for change in plan.changes)}")
    going = [
        each.name
        for each in plan.changes
        if each.before is not None and environment.owns(distributions[each.name])
    ]
    replaced = [path for name in going for path, _, _ in _files(distributions[name])]
    owned = _owned({*replaced}, environment, but=going)
    change = undo.begin(site, doing, added, replaced)
    try:
        if going:
            uv.run("uninstall", going, report, doing)
        if not removes:
            uv.run("install", how, report, doing)
        for path in owned:  # which two distributions shared
            if not os.path.lexists(path):
                change.put_back(str(path))
        _require_working(plan)
        with handled(signal.SIG_IGN, *ENDING):
            change.forget()
    except BaseException as error:
        with handled(signal.SIG_IGN, *ENDING):
            lost = change.back()
        if lost:
            what = "the environment could not be restored entirely"
            remedy = f"mend what is named, then {undo.remedy(environment.python)}"
            raise WorkError("I009", what, where=environment, faults=lost, remedy=remedy) from error
        raise


def _fetched(plan: InstallPlan, uv: Uv, how: Sequence[str], stage: Path) -> list[Path]:
    """Have uv install into a scratch folder, check what it holds, and give where it would go."""
    direct = [change.name for change in plan.changes if change.direct]
    afresh = [part for name in direct for part in ("--refresh-package", name)]
    prefix = ["--prefix", str(stage)]
    uv.run("install", [*prefix, *how, *afresh], lambda line: None, _named(plan))
    sites = sorted({info.parent for info in stage.glob("**/*.dist-info")})
    staged = [
        (canonicalize_name(each.metadata["Name"]), each, site)
        for site in sites
        for each in metadata.distributions(path=[str(site)])
    ]
    names = {change.name for change in plan.changes}
    files = [
        _File(name, path, recorded, digest)
        for name, distribution, site in staged
        if name in names
        for path, recorded, digest in _files(distribution, plan.environment.place_of(site, stage))
    ]
    touched = [change.name for change in plan.changes if change.before is not None]
    if faults := [*_taken(files, plan.environment, touched)]:
        what = "a wheel would overwrite files that are not its own"
        remedy = "do not install it; tell its authors what it brings; nothing was changed"
        raise InputError("I003", what, where=plan.environment, faults=faults, remedy=remedy)
    if faults := [*_misfits(plan, sites)]:
        raise misfit(faults, plan.environment)
    versions = {str(name): distribution.version for name, distribution, _ in staged}
    built = [replace(each, after=versions.get(each.name, each.after)) for each in plan.changes]
    require_kept(built, plan.environment)
    shutil.rmtree(stage)
    return [each.path for each in files]


class _File(NamedTuple):
    """A file that a distribution brings: where it goes, its path and digest in RECORD."""

    name: str
    path: Path
    recorded: str
    digest: str


def _taken(
    files: Sequence[_File], environment: Environment, touched: Collection[str]
) -> Iterator[str]:
    """Files of other distributions that would be overwritten, and additions to vox's own."""
    commands = environment.folders[-1].resolve()
    owned = _owned({each.path for each in files if os.path.lexists(each.path)}, environment)
    seen: dict[Path, _File] = {}
    for each in files:
        had = owned.get(each.path, {})
        losers = [
            name
            for name, digest in had.items()
            if name not in {*touched, each.name} and (not digest or digest != each.digest)
        ]
        other, loser = seen.setdefault(each.path, each), ""
        if each.path.is_dir():
            loser = "a folder"
        elif each.name != CORE and belongs_to_core(each.recorded):
            loser = CORE
        elif losers:
            loser = " and ".join(losers)
        elif not had and each.path.parent == commands and os.path.lexists(each.path):
            loser = "no package"
        elif other.digest != each.digest:
            loser = other.name
        if loser:
            yield f"{each.name} brings {each.path}, which belongs to {loser}"


def _owned(
    paths: Collection[Path], environment: Environment, but: Collection[str] = ()
) -> dict[Path, dict[str, str]]:
    """Path -> distributions that list it, with its digest in their RECORDs."""
    found: dict[Path, dict[str, str]] = {}
    for name, distribution in environment.installed.distributions.items() if paths else ():
        for path, _, digest in () if name in but else _files(distribution):
            if path in paths:
                found.setdefault(path, {})[name] = digest
    return found


def _files(
    distribution: metadata.Distribution, base: Path | None = None
) -> Iterator[tuple[Path, str, str]]:
    """Each row of RECORD: where it lies below `base`, its path, its digest; none if damaged."""
    base = (base or Path(str(distribution.locate_file("")))).resolve()
    try:
        rows = [*csv.reader((distribution.read_text("RECORD") or "").splitlines())]
    except (OSError, ValueError, csv.Error):
        return
    for row in filter(None, rows):
        path = Path(os.path.normpath(os.path.join(base, row[0])))  # noqa: PTH118 - thousands
        yield path, row[0], row[1] if len(row) > 1 else ""


def _misfits(plan: InstallPlan, sites: Sequence[Path]) -> Iterator[str]:
    """Faults of the staged plugins, apart from requirements on other distributions."""
    found = discover([str(site) for site in sites])
    changed = {change.name for change in plan.changes}
    machine = this_machine()
    for target in plan.targets:
        name = _distribution(target, plan)
        mine = [each for each in found if canonicalize_name(each.distribution) == name]
        if name in changed:
            yield from target.misnamed([each.id for each in mine])
            for version in {each.version for each in mine}:
                yield from target.mismatched(version)
        for plugin in mine:
            if plugin.fault:
                yield f"{plugin.id}: {on_one_line(plugin.fault)}"
            reasons = requirements(plugin.manifest, machine) if plugin.manifest else {}
            for kind, reason in reasons.items():
                if reason and kind != "distribution":
                    yield f"{plugin.id}: {kind}: {reason}"


def _distribution(target: Target, plan: InstallPlan) -> str | None:
    """Return a target's canonical name; for a folder without metadata, the name it was built as."""
    sources = {str(local_path(change.source)): change.name for change in plan.changes}
    return target.distribution or sources.get(target.requirement)


# --- checks ---------------------------------------------------------------------------------------


def _require_as_planned(plan: InstallPlan, environment: Environment) -> None:
    """Raises InputError I011 if other versions are installed than when the plan was made."""
    planned, now = plan.environment.installed.versions, environment.installed.versions
    if now != planned:
        moved = sorted({name for name, _ in {*now.items()} ^ {*planned.items()}})
        raise InputError(
            "I011",
            "the environment has changed since the plan was made",
            where=plan.environment,
            found=", ".join(f"{name} {now.get(name, 'not installed')}" for name in moved),
            expected=", ".join(f"{n} {planned.get(n, 'not installed')}" for n in moved),
            remedy="run again, for a plan of what is there now",
        )


def _require_working(plan: InstallPlan) -> None:
    """Raises WorkError I008 unless a fresh interpreter, which sees .pth files anew, finds the
    plugins."""
    changed = {change.name for change in plan.changes}
    try:
        # -P: a folder `vox_core` that happens to be the current one is not what is installed.
        output = output_of([str(plan.environment.python), "-P", "-c", _CHILD], _LIMIT_S)
        rows = json.loads(output.decode(errors="replace").rpartition(_TOKEN)[2].partition("\n")[0])
    except Failed as error:
        raise _failed(plan, f"the environment's Python fails: {error}") from error
    except ValueError as error:
        said = "the environment's Python fails: it ended without an answer"
        raise _failed(plan, said) from error
    staying = {row[0] for row in rows} & changed if plan.action == "remove" else ()
    faults = [f"{name} is still there" for name in staying]
    for target in plan.targets:
        mine = [row for row in rows if row[0] == _distribution(target, plan)]
        faults += target.misnamed([id for _, id, _ in mine])
        faults += [f"{id}: {fault}" for _, id, fault in mine if fault]
    if faults:
        raise _failed(plan, "; ".join(faults))


def _named(plan: InstallPlan) -> str:
    return f"{plan.action} {', '.join(change.name for change in plan.changes)}"


def _failed(plan: InstallPlan, found: str) -> WorkError:
    return failure(_named(plan), plan.environment, found)
