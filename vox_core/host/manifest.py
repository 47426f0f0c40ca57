"""Parse `vox_plugin.toml`: a plugin's identity, commands, capabilities and requirements.

Every plugin ships one inside its package. It is data, so vox can list, explain, refuse or remove a
plugin without running its code.

    id = "cpu"                              # the name that --backend takes, and the entry point's
    name = "CPU (PyTorch)"
    version = "0.1.0"
    api = "1.0"                             # plugin API version, major.minor
    licence = "Apache-2.0"
    priority = 10                           # breaks ties in automatic selection, higher wins
    automatic = true                        # false: chosen by name only

    [[commands]]                            # shown by `vox --help` without an import
    name = "data stats"                     # a path in the tree of commands
    help = "Rows, lengths, duplicates, languages."
    entry = "vox_data.cli:stats"            # a click command, imported when it runs

    [provides]                              # extension point -> names (load.py)
    hooks = ["vox_event"]                   # hooks that vox calls in every installed plugin
    row-sources = { suffixes = [".parquet"], schemes = ["hf"] }

    [capabilities]                          # makes the plugin a backend
    devices = ["cpu"]
    quantisations = ["none"]
    dtypes = ["bf16", "fp32"]
    methods = ["lora", "rslora", "dora"]
    families = "*"                          # or a list of `model_type`s
    optimizers = ["adamw"]                  # optional; this is the default

    [requires]
    python = ">=3.11"
    distributions = ["torch"]

    [probe]
    file = "probe.py"                       # standard library only, run in a child process

    [memory]                                # optional: constants for predicting memory
    runtime-bytes = 600000000               # the process and its libraries, without a model

    [tuning]                                # optional: knobs that change speed, not results,
    threads = ["default", "half"]           # with their values, the default first

All faults of a manifest are reported together. discover.py finds the files; probe.py compares
them with the machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from vox_core.catalog import checked_by
from vox_core.contract import API_VERSION, DType, Method, Optimizer, Quant
from vox_core.errors import BackendError
from vox_core.text import hint

FILE_NAME = "vox_plugin.toml"

OperatingSystem: TypeAlias = Literal["linux", "macos", "windows"]
Architecture: TypeAlias = Literal["x86_64", "arm64", "ppc64le", "riscv64", "s390x"]

Item = TypeVar("Item")


def _plain_requirement(text: str) -> None:
    requirement = Requirement(text)
    if requirement.marker or requirement.url or requirement.extras:
        raise ValueError("give a distribution and a version range, nothing else")


def _file_inside(text: str) -> None:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py":
        raise ValueError("give a .py file inside the package")


def _at_least_one(items: tuple[object, ...]) -> None:
    if not items:
        raise ValueError("name at least one")


def _listed(families: object) -> object:
    return [families] if families == "*" else families


def _flat(names: object) -> object:
    """Flatten `{suffixes = [".x"], schemes = ["y"]}` to the names `.x` and `y:`."""
    if not isinstance(names, Mapping):
        return names
    if unknown := set(names) - {"suffixes", "schemes"}:
        raise ValueError(f"unknown key {min(unknown)}; give suffixes, schemes, or a list of names")
    suffixes, schemes = names.get("suffixes", []), names.get("schemes", [])
    if not isinstance(suffixes, list) or not isinstance(schemes, list):
        raise ValueError("suffixes and schemes take lists of texts")
    if odd := [s for s in map(str, suffixes) if s != f".{s.removeprefix('.').lower()}"]:
        raise ValueError(f"a suffix has a dot and lower case: .{odd[0].removeprefix('.').lower()}")
    if odd := [scheme for scheme in map(str, schemes) if ":" in scheme]:
        raise ValueError(f"a scheme is named without its colon: {odd[0].partition(':')[0]}")
    return [*suffixes, *(f"{scheme}:" for scheme in schemes)]


def _knob(values: tuple[str, ...]) -> None:
    if len(values) < 2 or len(set(values)) < len(values):
        raise ValueError("give two or more different values, what it is if untouched first")


Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
ID = "[a-z][a-z0-9_-]*"
Name: TypeAlias = Annotated[str, StringConstraints(pattern=f"^{ID}$")]
Some: TypeAlias = Annotated[tuple[Item, ...], checked_by(_at_least_one)]
Knob: TypeAlias = Annotated[tuple[Text, ...], checked_by(_knob)]

Names: TypeAlias = Annotated[tuple[Text, ...], BeforeValidator(_flat)]

_CONFIG = ConfigDict(extra="forbid", alias_generator=lambda name: name.replace("_", "-"))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of a backend. `families` holds `model_type`s, or the one entry `*` for any;
    `distributed` names launchers; `streamed_load` means that `LoadJob.streamed` is honoured,
    `learners` that a `Trainer` has several at a time, `one_pass` that `accumulate` takes `weigh`,
    `several_targets` that a `Batch` may have several targets at each position, and `sharding` that
    `TrainJob.shard` is honoured."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    devices: Some[Name]
    quantisations: Some[Quant]
    dtypes: Some[DType]
    methods: Some[Method]
    families: Annotated[Some[Text], BeforeValidator(_listed)]
    distributed: tuple[Name, ...] = ()
    streamed_load: StrictBool = False
    learners: StrictBool = False
    one_pass: StrictBool = False
    several_targets: StrictBool = False
    sharding: StrictBool = False
    optimizers: Some[Optimizer] = ("adamw",)


@dataclass(frozen=True, slots=True)
class Requires:
    """Requirements checked before a plugin is probed; an empty tuple or None requires nothing.

    `native_libs` are loaded in the probe's process before the probe; if one is missing, the plugin
    is broken. The probe itself looks for the driver: without one, there is no such hardware.
    `hardware_tag` must be among the tags of the devices that the probe finds.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    os: tuple[OperatingSystem, ...] = ()
    arch: tuple[Architecture, ...] = ()
    python: Annotated[str, checked_by(SpecifierSet)] = ""
    distributions: tuple[Annotated[str, checked_by(_plain_requirement)], ...] = ()
    native_libs: tuple[Text, ...] = ()
    hardware_tag: Name | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """A script that uses the standard library only; `file` is relative to the manifest's folder."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    file: Annotated[str, checked_by(_file_inside)]


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Constants of a backend for predicting memory; the defaults tend to overestimate.

    Args:
        runtime_bytes: on the training device without a model: the process and its libraries, or on
            a device with its own memory the driver's context.
        activations: memory kept for the backward pass, as a multiple of the computed amount.
        working: working memory of one layer's backward pass, likewise.
        logits_elements: logits held at the same time; 0: those of all trained positions.
        padded_rows: the documents of a micro-batch are padded to the longest.
        dequantises: matrix products dequantise a quantised weight first.
        fused: model types whose RMS norms save only their input for the backward pass, and whose
            gated feed-forwards save only gate and up.
        in_process: training shares the memory of the process with the initial adapter and the copy
            that a checkpoint is written from.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    runtime_bytes: Annotated[StrictInt, Field(ge=0)] = 1_000_000_000
    activations: Annotated[float, Field(gt=0)] = 1.5
    working: Annotated[float, Field(gt=0)] = 1.5
    logits_elements: Annotated[StrictInt, Field(ge=0)] = 0
    padded_rows: StrictBool = True
    dequantises: StrictBool = True
    fused: tuple[str, ...] = ()
    in_process: StrictBool = True


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command: its path below `vox`, its help line, and the click command as `module:attribute`.
    A path of more than one word adds a command to a group."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*( [a-z][a-z0-9-]*)*$")]
    help: Text
    entry: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A valid manifest. A backend's has `[capabilities]` and `[probe]`.

    A backend that is not `automatic` is chosen by name only.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    id: Name
    name: Text
    version: Annotated[str, checked_by(Version)]
    api: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$")]
    licence: Text
    homepage: Annotated[str, StringConstraints(pattern=r"^https?://")] | None = None
    priority: StrictInt = 0
    automatic: StrictBool = True
    commands: tuple[CommandEntry, ...] = ()
    provides: Mapping[Name, Names] = field(default_factory=dict)
    capabilities: Capabilities = Capabilities((), (), (), (), ())
    requires: Requires = Requires()
    probe: Probe | None = None
    memory: MemoryProfile = MemoryProfile()
    tuning: Mapping[Name, Knob] = field(default_factory=dict)

    @property
    def is_backend(self) -> bool:
        return bool(self.capabilities.devices)

    @property
    def provided(self) -> dict[str, tuple[str, ...]]:
        """Extension point -> names, including commands; the catalog holds the same table."""
        commands = tuple(each.name for each in self.commands)
        return {**({"commands": commands} if commands else {}), **self.provides}


_TABLES: dict[str, type] = {
    "capabilities": Capabilities,
    "commands": CommandEntry,
    "requires": Requires,
    "probe": Probe,
    "memory": MemoryProfile,
}


def parse_manifest(text: str, where: object) -> Manifest:
    """Parse a manifest (B006, with every fault)."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(where, [f"not TOML: {error}"]) from error
    faults = _missing_tables(document)
    try:
        manifest = _schema().validate_python(document)
    except ValidationError as error:
        faults += [_describe(detail) for detail in error.errors()]
        raise _invalid(where, faults, document.get("api")) from error
    if faults:
        raise _invalid(where, faults, manifest.api)
    return manifest


@cache
def _schema() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _missing_tables(document: dict[str, Any]) -> list[str]:
    if "capabilities" in document and "probe" not in document:
        return ["[probe]: missing (a plugin with [capabilities] is a backend, and has a probe)"]
    if not document.keys() & {"capabilities", "probe", "commands", "provides"}:
        return ["[capabilities], [[commands]] or [provides]: missing; the plugin offers nothing"]
    return []


def _describe(detail: Mapping[str, Any]) -> str:
    """Describe one of pydantic's errors in terms of the file."""
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{key}: missing"
    if detail["type"] == "unexpected_keyword_argument":
        return f"{key}: unknown key{_nearest(detail['loc'])}"
    message = " ".join(str(detail["msg"]).removeprefix("Value error, ").split())
    message = message.replace("tuple", "list")  # TOML's word
    return f"{key}: {message[0].lower()}{message[1:]} (found: {detail['input']!r})"


def _nearest(location: tuple[int | str, ...]) -> str:
    table = Manifest if len(location) == 1 else _TABLES[str(location[0])]
    return hint(str(location[-1]), (field.name.replace("_", "-") for field in fields(table)))


def _invalid(where: object, faults: list[str], api: object = None) -> BackendError:
    what = "a plugin's manifest is invalid"
    remedy = "upgrade the plugin; if that does not help, its author has to mend the file"
    if _is_newer(api):  # a newer API may allow what is an error here
        what = f"a plugin's manifest is written for API {api}, this vox speaks {API_VERSION}"
        remedy = "upgrade vox-ml"
    return BackendError("B006", what, where=where, faults=faults, remedy=remedy)


def _is_newer(api: object) -> bool:
    try:
        return Version(str(api)) > Version(API_VERSION)
    except InvalidVersion:
        return False
