"""Whether a bundle fits the environment that it is to be applied to.

The installer is told to take the bundle's wheels and to look for nothing else, so it does not look
at what they require, nor, before it has begun, at what they are for. That is done here, from the
tags of the wheels and the metadata of the bundle's own distributions (needs.py). What they need of
vox-ml and torch decides, as it does for `vox plugin install`; what else is lacking is told, for it
can still be brought.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vox_core.catalog import Catalog, objections
from vox_core.errors import BackendError
from vox_core.host.bundle.archive import ANY, Bundle
from vox_core.host.bundle.interpreter import Interpreter
from vox_core.host.bundle.needs import Need, beyond_parts
from vox_core.host.guards import CORE, KEPT


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


def notes(
    bundle: Bundle, catalog: Catalog, needs: Iterable[Need], place: Interpreter
) -> Iterator[str]:
    """What a person should know before the bundle is applied."""
    about, versions = bundle.about, _afterwards(bundle, place)
    yield f"bundle {about.id}: {about.description}; plugins: {', '.join(about.plugins) or 'none'}"
    if (core := versions[CORE]) != about.vox:
        yield f"made with {CORE} {about.vox}, here it is {core}"
    if others := beyond_parts(bundle, catalog):
        told = ", ".join(f"{each.name} {each.version}" for each in others)
        yield f"the catalog does not vouch for what its own plugins need: {told}"
    lacking = (need.unmet(versions) for need in _here(needs, place))
    yield from (f"{text}; the bundle does not bring it" for text in lacking if text)


def _faults_of_place(bundle: Bundle, catalog: Catalog, place: Interpreter) -> Iterator[str]:
    from vox_core.host.probe import accelerators

    about, tags = bundle.about, {"cpu", *(each.tag for each in accelerators())}
    if about.python not in (ANY, place.version):
        yield f"made for Python {about.python}, this is {place.version}"
    if about.platform not in (ANY, place.platform):
        yield f"made for {about.platform}, this is {place.platform}"
    for wheel in bundle.wheels:
        if not {str(tag) for tag in wheel.tags} & place.tags:
            yield f"{wheel.file}: not for Python {place.full_version} on {place.platform}"
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
    return {"python_version": place.version, "python_full_version": place.full_version}
