"""Compare a manifest's `requires` with this machine and its environment.

`this_machine` reads this process and installed metadata; the other functions only compare. Probes
(probe.py) find the hardware.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from vox_core.contract import API_VERSION
from vox_core.host.discover import Found, installed_versions
from vox_core.host.manifest import Manifest, api_order

_SYSTEMS = {"darwin": "macos", "win32": "windows"}
_ARCHITECTURES = {"aarch64": "arm64", "amd64": "x86_64"}


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that `requires` is compared with.

    Args:
        os: `linux`, `macos` or `windows`.
        arch: in a manifest's spelling: `x86_64`, `arm64`, …
        python: version.
        distributions: canonical name -> version, of those that a manifest requires.
    """

    os: str
    arch: str
    python: str
    distributions: Mapping[str, str] = field(default_factory=dict)


def this_machine(plugins: Iterable[Found]) -> Machine:
    """Return this machine's facts, with the distributions that `plugins` require."""
    architecture = platform.machine().lower()
    required = [
        Requirement(text).name
        for plugin in plugins
        if plugin.manifest
        for text in plugin.manifest.requires.distributions
    ]
    return Machine(
        os=_SYSTEMS.get(sys.platform, sys.platform),
        arch=_ARCHITECTURES.get(architecture, architecture),
        python=platform.python_version(),
        distributions=installed_versions(required),
    )


def unmet(manifest: Manifest, machine: Machine) -> tuple[str, str] | None:
    """Return the first unmet kind of requirement and the reason; None if all are met."""
    reasons = requirements(manifest, machine)
    return next(((kind, reason) for kind, reason in reasons.items() if reason), None)


def requirements(manifest: Manifest, machine: Machine) -> dict[str, str]:
    """Return each kind of requirement -> why it is not met, or ""."""
    needs = manifest.requires
    sides = ((machine.os, needs.os), (machine.arch, needs.arch))
    platforms = [
        f"{here} (needs: {', '.join(allowed)})"
        for here, allowed in sides
        if allowed and here not in allowed
    ]
    theirs, ours = api_order(manifest.api), api_order(API_VERSION)
    api = f"written for {manifest.api}, this vox speaks {API_VERSION}; {_api_remedy(manifest)}"
    python = SpecifierSet(needs.python).contains(machine.python, prereleases=True)
    return {
        "api": "" if theirs[0] == ours[0] and theirs <= ours else api,
        "platform": ", ".join(platforms),
        "python": "" if python else f"{machine.python} (needs: {needs.python})",
        "distribution": _unmet(map(Requirement, needs.distributions), machine.distributions),
    }


def requirement_remedy(manifest: Manifest, kind: str) -> str:
    """Return the remedy for an unmet kind of requirement."""
    return {
        "api": _api_remedy(manifest),
        "platform": "install a plugin for this machine: `vox plugin list` shows them",
        "python": "install vox and the plugin under a Python that it supports",
        "distribution": f"install its requirements: vox plugin upgrade {manifest.id}, or by hand",
    }[kind]


def _api_remedy(manifest: Manifest) -> str:
    newer = api_order(manifest.api) > api_order(API_VERSION)
    return "upgrade vox-ml" if newer else f"vox plugin upgrade {manifest.id}"


def missing_libraries(distribution: str) -> str:
    """Return which requirements in a distribution's own metadata are not met; "" if all are."""
    with suppress(metadata.PackageNotFoundError, InvalidRequirement):
        needs = [*map(Requirement, metadata.requires(distribution) or ())]
        needs = [each for each in needs if not each.marker or each.marker.evaluate({"extra": ""})]
        return _unmet(needs, installed_versions(each.name for each in needs))
    return ""


def _unmet(needs: Iterable[Requirement], versions: Mapping[str, str]) -> str:
    reasons = []
    for required in needs:
        version = versions.get(canonicalize_name(required.name))
        if version is None:
            reasons.append(f"{required} is not installed")
        elif not required.specifier.contains(version, prereleases=True):
            reasons.append(f"{required.name} is {version} (needs: {required.specifier})")
    return ", ".join(reasons)
