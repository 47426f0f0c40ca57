"""The distributions that a bundle of the catalog is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from vox_core.catalog import BundleEntry, Catalog, PluginEntry, Source
from vox_core.host.bundle.archive import Wheel


@dataclass(frozen=True, slots=True)
class Part:
    """A distribution that belongs to a bundle, and what the catalog asks of it."""

    distribution: str
    source: Source
    specifier: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)

    def faults(self, wheel: Wheel) -> list[str]:
        """What the catalog has against a wheel."""
        faults = []
        if not SpecifierSet(self.specifier).contains(wheel.version, prereleases=True):
            faults.append(f"{wheel.file}: the catalog wants {self.specifier}")
        if self.sha256 and wheel.file not in self.sha256:
            faults.append(f"{wheel.file}: not one of the files that the catalog pins")
        elif self.sha256 and (pinned := self.sha256[wheel.file]) != wheel.sha256:
            faults.append(f"{wheel.file}: SHA-256 {wheel.sha256}, the catalog has {pinned}")
        return faults


def parts_of(bundle_id: str, catalog: Catalog) -> dict[str, Part]:
    """Canonical name -> part: the libraries of the bundles, then plugins behind their libraries.

    Raises:
        ConfigError: C007, there is no such bundle.
    """
    parts = [part for bundle in catalog.lineage(bundle_id) for part in _libraries(bundle)]
    for plugin in catalog.resolve(bundle_id):
        parts += _libraries(plugin)
        parts.append(Part(plugin.distribution, plugin.source, plugin.specifier, plugin.sha256))
    return {canonicalize_name(part.distribution): part for part in parts}


def _libraries(owner: BundleEntry | PluginEntry) -> list[Part]:
    base = owner.catalog.parent
    return [Part(name, Source.parse(text, base)) for name, text in owner.libraries.items()]
