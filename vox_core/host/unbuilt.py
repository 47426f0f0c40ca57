"""pip kept from building while it is only asked.

    ask([*guarded(environment.installer("install")), "--dry-run", …], environment, log=log)

`--only-binary` holds for what an index has, and not for what a package requires by address
(`x @ https://host/x.tar.gz`): that pip builds in a dry run as well. It builds in a process of its
own interpreter, whatever the backend, and it starts such processes for nothing else. So an audit
hook in pip refuses to start them, at every depth and for every version that is tried on the way.

uv needs none of this: it means all sources when it is told to take wheels alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from vox_core.host.contents import project_table
from vox_core.host.origin import file_name

_REFUSED = "vox: nothing is built to make a plan"
_GUARD = f"""
import runpy, sys
def guard(event, arguments):
    if event == "subprocess.Popen":
        command = arguments[1]
        # packaging asks a fresh interpreter which macOS this is: with -sS, and no code of others.
        if command[0] == sys.executable and command[1] != "-sS":
            raise RuntimeError({_REFUSED!r})
sys.addaudithook(guard)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_ADDED = re.compile(r"  Added (?P<what>.+?) from \S+ .*to build tracker")


def guarded(command: Sequence[str]) -> list[str]:
    """The command `PYTHON … -m pip …`, of a pip that builds nothing."""
    place = command.index("-m")
    return [*command[:place], "-c", _GUARD, *command[place + 2 :]]


def stopped_at(log: str) -> str | None:
    """What pip was about to build when the guard stopped it; None if it did not."""
    if _REFUSED not in log:
        return None
    added = _ADDED.findall(log.partition(_REFUSED)[0])
    return str(added[-1]) if added else "something that it does not name"


def static_needs(folder: Path) -> list[str] | None:
    """What the project in a folder requires; None where only a build tells."""
    project = project_table(folder)
    if "name" not in project or "dependencies" in project.get("dynamic", ()):
        return None
    needs: Any = project.get("dependencies", [])
    return [text for text in needs if isinstance(text, str)] if isinstance(needs, list) else None


def sources_among(needs: Iterable[str]) -> Iterator[str]:
    """Those of the requirements here that name a source by its address."""
    for text in needs:
        with suppress(InvalidRequirement):  # the installer has its own words for it
            need = Requirement(text)
            here = need.marker is None or need.marker.evaluate({"extra": ""})
            if need.url and here and not file_name(need.url).endswith(".whl"):
                yield text
