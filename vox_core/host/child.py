"""What runs in the child process of doctor.py: one plugin imported, and asked how it is.

The answer is one JSON list of checks on stdout, which the plugin itself cannot write to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from vox_core.contract import Check
from vox_core.errors import BackendError
from vox_core.host.discover import Found, discover, reinstall
from vox_core.host.load import load_plugin, told


def answer(request: dict[str, Any]) -> None:
    """Check the plugin with the id in `request`, and print what was found."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    (found,) = (plugin for plugin in discover() if plugin.id == request["id"])
    checks = [asdict(check) for check in _checks(found)]
    with os.fdopen(stdout, "w", encoding="utf-8") as file:
        json.dump(checks, file)


def _checks(found: Found) -> list[Check]:
    try:
        hooks = load_plugin(found).hook
    except BackendError as fault:
        return [Check("code", False, fault.found or fault.what, reinstall(found.id))]
    implemented = [name for name in vars(hooks) if getattr(hooks, name).get_hookimpls()]
    loaded = Check("code", True, f"loads; has {', '.join(sorted(implemented)) or 'no hooks'}")
    try:
        own = [check for result in hooks.vox_doctor() for check in _checked(result)]
    except BaseException as error:  # noqa: BLE001 - a plugin may raise anything at all
        own = [Check("vox_doctor", False, told(error), "report it to the plugin's authors")]
    return [loaded, *own]


def _checked(result: Iterable[object]) -> Iterable[Check]:
    for check in result:
        if not isinstance(check, Check):
            raise TypeError(f"vox_doctor gave {type(check).__name__}, expected Check")
        yield check
