"""The next step for each thing that may be wrong with a plugin: what is at fault is to be mended.

    its installation        install it again
    its own code            upgrade it, or tell its authors; the same again would fail again
    the seam                upgrade the older of the two
    what it needs           bring that in
    the hardware            look at the hardware and its driver
    the user's own list     take it off

The causes are found elsewhere (discover.py, judge.py, doctor.py); here are words alone.
"""

from __future__ import annotations

from vox_core.host.blocked import unblock
from vox_core.host.discover import Found, reinstall, upgrade_or_report
from vox_core.host.manifest import api_remedy

_LOOK_AT = {
    "nvidia": "see that `nvidia-smi` lists the GPU; a container has to be given it and its driver",
    "apple": "see that macOS offers the GPU to Metal; a virtual machine may have none",
}


def authors(found: Found) -> str:
    """What to do about code that fails wherever it is installed."""
    homepage = found.manifest.homepage if found.manifest else None
    return upgrade_or_report(found.id, found.distribution, homepage)


def hardware(tag: str | None) -> str:
    """What to look at where hardware is not found."""
    return _LOOK_AT.get(tag or "", "see that the hardware is connected and its driver works")


def probe(found: Found, reason: str) -> str:
    """What to do about a probe that gave no answer, for `reason`."""
    requires = found.manifest.requires if found.manifest else None
    missing = [name for name in requires.native_libs if name in reason] if requires else []
    if missing:
        return f"install what brings {', '.join(missing)}, and see that it is on the library path"
    if requires and requires.hardware_tag:  # a driver that hangs takes the probe with it
        return f"{hardware(requires.hardware_tag)}; or {authors(found)}"
    return authors(found)


def requirement(found: Found, kind: str) -> str:
    """What to do about an unmet requirement of the manifest (machine.requirements)."""
    assert found.manifest is not None, found.id
    return {
        "api": api_remedy(found.manifest.api, found.id),
        "platform": "install a plugin for this machine: `vox plugin list` shows them",
        "python": "install vox and the plugin under a Python that it takes",
        "distribution": f"bring in what it needs: vox plugin upgrade {found.id}, or by hand",
    }[kind]


def versions(found: Found) -> str:
    """What to do about a manifest and a distribution of different versions."""
    return (
        f"as its user: vox plugin upgrade {found.id}, or install a changed checkout again; "
        f"as its author: give vox_plugin.toml and {found.distribution} the same version"
    )


def repair(found: Found, kind: str, reason: str, blocked_by: str = "") -> str:
    """What to do about a plugin that was refused for `kind` (judge.Refusal)."""
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
