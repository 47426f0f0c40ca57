"""What the wheels of a bundle require, and which of them nobody requires.

The catalog knows the parts of a bundle (parts.py). Whatever else is in it has to be there because a
part, or something that a part requires, asks for it by name: a label that says `dependencies =
true` is no ticket for any other wheel. Which platform asks is not looked at: a bundle may be
verified on another one.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vox_core.catalog import Catalog
from vox_core.host.bundle.archive import Bundle, Wheel
from vox_core.host.bundle.members import Unreadable, archive_in, text
from vox_core.host.bundle.parts import parts_of
from vox_core.host.bundle.read import invalid

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_METADATA = ".dist-info/METADATA"


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a distribution of a bundle requires."""

    owner: str
    requirement: Requirement

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    def unmet(self, versions: Mapping[str, str]) -> str | None:
        """What is against it among these distributions; None if it is met."""
        found = versions.get(self.name)
        if found is None:
            return f"{self.owner} needs {self.requirement}, which is not here"
        if not allows(self.requirement.specifier, found):
            return f"{self.owner} needs {self.requirement}, here it is {found}"
        return None


def needs_of(archive: zipfile.ZipFile, bundle: Bundle, catalog: Catalog) -> tuple[Need, ...]:
    """What the distributions that make the bundle require, whatever the environment.

    Raises:
        BackendError: B008, the metadata of one of them cannot be read.
    """
    own = parts_of(bundle.about.id, catalog)
    faults: list[str] = []
    needs = [
        need
        for wheel in bundle.wheels
        if wheel.name in own
        for need in _needs(archive, wheel, faults)
    ]
    if faults:
        raise invalid(bundle.file, faults)
    return tuple(needs)


def strangers(
    archive: zipfile.ZipFile, wheels: Iterable[Wheel], parts: Collection[str], faults: list[str]
) -> list[Wheel]:
    """The sound wheels that neither are parts nor are required, directly or not, by one.

    Args:
        parts: canonical names.
        faults: takes what is wrong with metadata that has to be read for it.
    """
    held = {wheel.name: wheel for wheel in wheels}
    wanted: dict[str, set[str]] = {name: set() for name in parts if name in held}
    waiting = [*wanted]
    needs: dict[str, list[Need]] = {}
    while waiting:
        name = waiting.pop()
        if name not in needs:
            needs[name] = list(_needs(archive, held[name], faults))
        for need in needs[name]:
            if need.name not in held or not _is_asked(need.requirement, wanted[name]):
                continue
            extras = {canonicalize_name(each) for each in need.requirement.extras}
            if need.name not in wanted or extras - wanted[need.name]:
                wanted.setdefault(need.name, set()).update(extras)
                waiting.append(need.name)
    return [wheel for name, wheel in held.items() if name not in wanted]


def beyond_parts(bundle: Bundle, catalog: Catalog) -> tuple[Wheel, ...]:
    """The wheels that the catalog does not vouch for: they are there because others need them."""
    parts = parts_of(bundle.about.id, catalog)
    return tuple(wheel for wheel in bundle.wheels if wheel.name not in parts)


def allows(specifier: SpecifierSet, version: str) -> bool:
    """Whether a version that is installed will do; one that is no version at all will not."""
    try:
        return specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _needs(archive: zipfile.ZipFile, wheel: Wheel, faults: list[str]) -> Iterator[Need]:
    try:
        told = _metadata(archive, wheel)
    except Unreadable as error:
        faults.append(f"{wheel.file}: METADATA cannot be read: {error}")
        return
    for line in parse_email(told)[0].get("requires_dist", ()):
        with suppress(ValueError):  # as installers do with what is no requirement
            yield Need(wheel.name, Requirement(line))


def _metadata(archive: zipfile.ZipFile, wheel: Wheel) -> str:
    with archive_in(archive, wheel.member) as unpacked:
        names = [name for name in unpacked.namelist() if name.count("/") == 1]
        found = [name for name in names if name.endswith(_METADATA)]
        if len(found) != 1:
            raise Unreadable(f"expected one, found {len(found)}")
        return text(unpacked, found[0])


def _is_asked(requirement: Requirement, extras: Collection[str]) -> bool:
    """Whether a requirement counts: one of an extra does if somebody asked for that extra."""
    marker = str(requirement.marker or "")
    if "extra" not in marker:
        return True
    return any(f'"{extra}"' in marker.replace("_", "-").lower() for extra in extras)
