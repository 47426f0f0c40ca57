"""A plan carried out, whole or not at all.

    apply(plan)

Alone in the environment (alone.py), which has to be as it was when the plan was made (held.py).
The installer may change what belongs to the distributions of the plan and nothing else (owners.py).
After it a fresh interpreter (inspection.py) looks for the plugins' manifests. On any failure the
environment is put back (rollback.py).

Plans are made in install.py and bundle/apply.py. No plugin is imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from packaging.utils import canonicalize_name

from vox_core.errors import WorkError
from vox_core.host import offline
from vox_core.host.ask import last_lines
from vox_core.host.environment import Environment, installer_variables
from vox_core.host.guards import CORE, misfits
from vox_core.host.held import require_as_planned
from vox_core.host.inspection import ChildError, inspect
from vox_core.host.origin import local_path
from vox_core.host.owners import Owners, added_to_core, changed_of_others, owners
from vox_core.host.resolve import Change, pinned
from vox_core.host.rollback import Before, restored_on_failure
from vox_core.host.targets import Target

Report: TypeAlias = Callable[[str], None]
"""Called with each line that the installer prints."""


@dataclass(frozen=True, slots=True)
class InstallPlan:
    """What will be done, and where.

    Args:
        changes: nothing is to be done if there are none.
        targets: the plugins that will be there afterwards.
        notes: what a person should know, worded for them.
        unpack: puts the wheels of all changes into a folder; the installer then sees no others.
    """

    action: Literal["install", "upgrade", "remove"]
    environment: Environment
    changes: tuple[Change, ...]
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    unpack: Callable[[Path], None] | None = None


def apply(plan: InstallPlan, report: Report = lambda line: None) -> None:
    """Carry out a plan; if anything fails or is interrupted, the environment is as before.

    Raises:
        WorkError: I008, it failed; I009, and not everything could be put back.
        InputError: I011, another process is changing this environment, or has since the plan.
    """
    if not plan.changes:
        return
    names = [CORE, *(change.name for change in plan.changes)]
    with (
        restored_on_failure(plan.environment, names) as before,
        tempfile.TemporaryDirectory() as scratch,
    ):
        require_as_planned(plan.changes, plan.environment)
        had = owners(plan.environment)
        for command in _commands(plan, Path(scratch)):
            _run(command, plan, report)
        _require_others_kept(plan, before, had)
        _check(plan)


def _commands(plan: InstallPlan, scratch: Path) -> Iterator[list[str]]:
    if plan.action == "remove":
        names = [change.name for change in plan.changes]
        yield [*plan.environment.installer("uninstall"), *names]
        return
    only = []
    if plan.unpack is not None:
        plan.unpack(scratch)
        only = offline.options(scratch)
    for command in pinned(plan.environment, plan.changes, scratch / "requirements.txt"):
        yield [*command, *only]


def _run(command: Sequence[str], plan: InstallPlan, report: Report) -> None:
    """Run the installer to its end; it is gone before anything is put back."""
    said: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=offline.environ() if plan.unpack is not None else installer_variables(),
        start_new_session=True,
    ) as process:
        try:
            for line in process.stdout or ():
                said.append(line)
                report(line.rstrip())
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with the builds that it started
            raise
    if process.returncode:
        raise _failed(plan, f"the installer ended with {process.returncode}", "".join(said))


def _require_others_kept(plan: InstallPlan, before: Before, had: Owners) -> None:
    """Before anything of what was installed is run. What a removal took of others is put back."""
    touched = {change.name for change in plan.changes if change.before is not None}
    new = {change.name for change in plan.changes}
    found = before.difference()
    taken = [path for path in found.gone if had.losers(path, None, touched)]
    before.put_back(taken)
    lost = [path for path in taken if not os.path.lexists(path)]
    faults = [
        *changed_of_others(had, [*found.changed, *lost], touched),
        *added_to_core(had, found.added, new),
    ]
    if faults:
        raise _failed(plan, "; ".join(faults))


def _check(plan: InstallPlan) -> None:
    """The plugins are there, whole, and nobody else's; or, after a removal, gone."""
    try:
        rows, strangers = inspect(plan.environment)
    except ChildError as error:
        raise _failed(plan, f"the environment's Python fails: {error}") from error
    if plan.action == "remove":
        gone = {change.name for change in plan.changes}
        left = [row.distribution for row in rows if canonicalize_name(row.distribution) in gone]
        faults = [f"{name} is still there" for name in left]
    else:
        faults = [f"brings what belongs to {CORE}: {stranger}" for stranger in strangers]
        for target in plan.targets:
            name = target.distribution or _built_from(target, plan.changes)
            mine = [row for row in rows if canonicalize_name(row.distribution) == name]
            faults += misfits(target, mine)
    if faults:
        raise _failed(plan, "; ".join(faults))


def _built_from(target: Target, changes: Iterable[Change]) -> str | None:
    """The distribution that came from a folder."""
    folder = Path(target.requirement)
    return next((each.name for each in changes if local_path(each.source) == folder), None)


def _failed(plan: InstallPlan, found: str, said: str = "") -> WorkError:
    return WorkError(
        "I008",
        f"could not {plan.action} {', '.join(change.name for change in plan.changes)}; "
        "the environment is as it was",
        where=plan.environment,
        found=found,
        faults=last_lines(said),
        remedy="mend what is named, and run again",
    )
