"""Whether a bundle fits the environment that it is to be applied to.

The installer is told to take the bundle's wheels and to look for nothing else, so it does not look
at what they require. That is done here, from the metadata of the bundle's own distributions. What
they need of vox-ml and torch decides, as it does for `vox plugin install`; what else is lacking is
told, for it can still be brought.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vox_core.catalog import Catalog
from vox_core.catalog.entries import objections
from vox_core.errors import BackendError
from vox_core.host.bundle.archive import ANY, Bundle, Wheel
from vox_core.host.bundle.interpreter import Interpreter
from vox_core.host.bundle.members import Unreadable, archive_in, text
from vox_core.host.bundle.parts import parts_of
from vox_core.host.bundle.read import invalid
from vox_core.host.guards import CORE, KEPT

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
    needs: list[Need] = []
    faults = []
    for wheel in bundle.wheels:
        if wheel.name in own:
            try:
                needs += _needs(archive, wheel)
            except Unreadable as error:
                faults.append(f"{wheel.file}: METADATA cannot be read: {error}")
    if faults:
        raise invalid(bundle.file, faults)
    return tuple(needs)


def require_fit(
    bundle: Bundle, catalog: Catalog, needs: Iterable[Need], place: Interpreter
) -> None:
    """Raises BackendError B009, with every reason, if the bundle is not for this environment."""
    if faults := [
        *_faults_of_place(bundle, catalog, place),
        *_faults_of_core(bundle, needs, place),
    ]:
        raise BackendError(
            "B009",
            "the bundle is not for this environment",
            where=place.environment,
            faults=faults,
            remedy="make one for it: vox bundle build; or name another one: --target-python",
        )


def notes(bundle: Bundle, needs: Iterable[Need], place: Interpreter) -> Iterator[str]:
    """What a person should know before the bundle is applied."""
    about, versions = bundle.about, _afterwards(bundle, place)
    yield f"bundle {about.id}: {about.description}; plugins: {', '.join(about.plugins) or 'none'}"
    if (core := versions[CORE]) != about.vox:
        yield f"made with {CORE} {about.vox}, here it is {core}"
    lacking = (need.unmet(versions) for need in _here(needs, place))
    yield from (f"{text}; the bundle does not bring it" for text in lacking if text)


def allows(specifier: SpecifierSet, version: str) -> bool:
    """Whether a version that is installed will do; one that is no version at all will not."""
    try:
        return specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _needs(archive: zipfile.ZipFile, wheel: Wheel) -> Iterator[Need]:
    with archive_in(archive, wheel.member) as unpacked:
        names = [name for name in unpacked.namelist() if name.count("/") == 1]
        found = [name for name in names if name.endswith(_METADATA)]
        if len(found) != 1:
            raise Unreadable(f"expected one, found {len(found)}")
        told = text(unpacked, found[0])
    for line in parse_email(told)[0].get("requires_dist", ()):
        with suppress(ValueError):  # as installers do with what is no requirement
            yield Need(wheel.name, Requirement(line))


def _faults_of_place(bundle: Bundle, catalog: Catalog, place: Interpreter) -> Iterator[str]:
    from vox_core.host.probe import accelerators

    about, tags = bundle.about, {"cpu", *(each.tag for each in accelerators())}
    if about.python not in (ANY, place.version):
        yield f"made for Python {about.python}, this is {place.version}"
    if about.platform not in (ANY, place.platform):
        yield f"made for {about.platform}, this is {place.platform}"
    for plugin in catalog.resolve(about.id):
        yield from objections(plugin, tags, _markers(place))


def _faults_of_core(bundle: Bundle, needs: Iterable[Need], place: Interpreter) -> Iterator[str]:
    """Without vox-ml nothing can be looked at afterwards, and without torch nothing trains."""
    versions = _afterwards(bundle, place)
    if CORE not in versions:
        yield f"{CORE} is not here, and the bundle does not bring it"
    asked = (need for need in _here(needs, place) if need.name in KEPT)
    yield from (text for need in asked if (text := need.unmet(versions)))


def _afterwards(bundle: Bundle, place: Interpreter) -> dict[str, str]:
    """Canonical name -> version, once the bundle is applied."""
    return {**place.installed, **{wheel.name: wheel.version for wheel in bundle.wheels}}


def _here(needs: Iterable[Need], place: Interpreter) -> Sequence[Need]:
    """Those whose markers hold for this environment."""
    given = {"extra": "", **_markers(place)}
    return [
        need
        for need in needs
        if need.requirement.marker is None or need.requirement.marker.evaluate(given)
    ]


def _markers(place: Interpreter) -> dict[str, str]:
    return {"python_version": place.version}
