"""Choose the remedy for each fault of a plugin; it repairs the part that is at fault.

    its installation        install it again
    its own code            upgrade it, or report it; reinstalling the same version would not help
    the plugin API          upgrade the older of the two
    a requirement           install it
    the hardware            check the hardware and its driver
    the user's own list     enable it

discover.py, judge.py and doctor.py find the causes; this module has only the texts.
"""

from __future__ import annotations

from vox_core.host.blocked import unblock
from vox_core.host.discover import Found, reinstall, upgrade_or_report
from vox_core.host.manifest import api_remedy

_LOOK_AT = {
    "nvidia": "check that `nvidia-smi` lists the GPU; a container needs access to both",
    "apple": "check that macOS offers the GPU to Metal; a virtual machine may have none",
}


def authors(found: Found) -> str:
    """Return the remedy for code that fails in every installation."""
    homepage = found.manifest.homepage if found.manifest else None
    return upgrade_or_report(found.id, found.distribution, homepage)


def hardware(tag: str | None) -> str:
    """Return the remedy for hardware that is not found."""
    return _LOOK_AT.get(tag or "", "see that the hardware is connected and its driver works")


def probe(found: Found, reason: str) -> str:
    """Return the remedy for a probe that failed for `reason`."""
    requires = found.manifest.requires if found.manifest else None
    missing = [name for name in requires.native_libs if name in reason] if requires else []
    if missing:
        return f"install what brings {', '.join(missing)}, and see that it is on the library path"
    if requires and requires.hardware_tag:  # a hanging driver hangs the probe
        return f"{hardware(requires.hardware_tag)}; or {authors(found)}"
    return authors(found)


def requirement(found: Found, kind: str) -> str:
    """Return the remedy for an unmet requirement of the manifest (machine.requirements)."""
    assert found.manifest is not None, found.id
    return {
        "api": api_remedy(found.manifest.api, found.id),
        "platform": "install a plugin for this machine: `vox plugin list` shows them",
        "python": "install vox and the plugin under a Python that it supports",
        "distribution": f"install its requirements: vox plugin upgrade {found.id}, or by hand",
    }[kind]


def versions(found: Found) -> str:
    """Return the remedy for different versions of manifest and distribution."""
    return (
        f"as its user: vox plugin upgrade {found.id}, or install a changed checkout again; "
        f"as its author: give vox_plugin.toml and {found.distribution} the same version"
    )


def repair(found: Found, kind: str, reason: str, blocked_by: str = "") -> str:
    """Return the remedy for a plugin that was refused for `kind` (judge.Refusal)."""
    if found.fault:
        return found.fault.remedy
    if kind == "blocked":
        return unblock(found.id, blocked_by)
    if kind == "probe":
        return probe(found, reason)
    if kind == "hardware":
        return hardware(found.manifest.requires.hardware_tag if found.manifest else None)
    return requirement(found, kind) if kind in _REQUIREMENTS else reinstall(found.id)


_REQUIREMENTS = ("api", "platform", "python", "distribution")
