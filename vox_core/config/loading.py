"""Read settings from `vox.toml`, the environment and flags; the later wins.

A section may extend another: `[train]` has the keys of `[data]` too. The home of a key is the
section that defines it first.

An unknown key is an error that names the nearest one. The names that TRL, transformers, PEFT,
Unsloth and mlx-lm give to settings (`PEERS`) are hints, not aliases: `--learning-rate` is an error
that names `--lr`. Where the meaning differs the hint says how, so that nobody copies a number that
means something else.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, get_args, get_origin

import click
from pydantic import BaseModel, ValidationError

from vox_core.config.sections import (
    SECTIONS,
    Section,
    homes,
    is_table,
    kebab,
    one_or_many,
    seen_from,
)
from vox_core.errors import SOURCES, ConfigError, VoxError
from vox_core.text import did_you_mean, hint, nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


CONFIG_FILE = "vox.toml"
_MODELS = ("model", "adapter", "teacher", "against")
"""Settings that may be a folder, an id or a name."""

_PAIR = r"[\w.]+=(?:'[^']*'|[^\s,;)]*[^\s,;).])"
_FLAGS = re.compile(
    r"`[^`]*`|\bvox [a-z][^,;]*|"  # a command stays as it is
    rf"(?<![\w/.'\"-])(?:(?P<table>--field|-O) (?P<pairs>{_PAIR}(?: (?P=table) {_PAIR})*)|"
    r"--(?P<flag>[a-z]+(?:-[a-z]+)*)|(?P<option>-O\b))|"
    r"^(?P<key>[a-z-]+)(?=[.\d]* = )"
)
_named_file: ContextVar[Path | None] = ContextVar("named_file", default=None)
S = TypeVar("S", bound=Section)
P = ParamSpec("P")
R = TypeVar("R")
Others: TypeAlias = Callable[[], Collection[str] | None] | None


def in_python(function: Callable[P, R]) -> Callable[P, R]:
    """Name settings in errors as keywords; `train` and `plan` refuse one without a name (C002)."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if args and function.__name__ in ("train", "plan"):
            where = f"vox.{function.__name__}"
            remedy = f"name it: {where}(model=..., data=...)"
            raise ConfigError("C002", "a setting has no name", where=where, remedy=remedy)
        with keywords_named(function.__qualname__):
            return function(*args, **kwargs)

    return called


@contextmanager
def keywords_named(function: str) -> Iterator[None]:
    """Name settings in errors as keywords (`lr` for --lr), unless a command of vox calls."""
    try:
        yield
    except VoxError as error:
        if re.fullmatch(r"vox [a-z]+|vox\.Model\.\w+", error.where or "") and not _commanded():
            error.where = f"vox.{function}"  # not the section's command
        error.name_sources()
        error.respell(as_keywords)
        raise


def as_keywords(text: str) -> str:
    """Name settings in a text as keywords, unless a command of vox calls."""
    return text if _commanded() else _FLAGS.sub(_keyword, text)


def _commanded() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.find_root().info_name == "vox"


def _keyword(found: re.Match[str]) -> str:
    known = {name for kind in SECTIONS for name in kind.model_fields} | {"config", "plan"}
    if found["pairs"]:
        table = "fields" if found["table"] == "--field" else "objective_options"
        pairs = {k: v.strip("'") for k, v in re.findall(r"([\w.]+)=('[^']*'|\S+)", found["pairs"])}
        return f"{table}={json.dumps(pairs, ensure_ascii=False)}"
    option = found["option"] and "objective_options"
    spelt = (found["flag"] or found["key"] or option or "").replace("-", "_")
    for name in known.intersection((spelt, f"{spelt}s")):  # --field belongs to the table `fields`
        return name if found["key"] else f"`{name}`"
    return found[0]


@contextmanager
def reading(file: str | os.PathLike[str] | None) -> Iterator[None]:
    """Use `file` as the `vox.toml` of every section within the block; None changes nothing.

    A command enters it for its `--config`, and a function of the Python API for its `config`, so
    that the catalogs and the blocked plugins come from the same file as the settings.
    """
    before = _named_file.set(_named_file.get() if file is None else Path(file))
    try:
        yield
    finally:
        _named_file.reset(before)


def named_file() -> Path | None:
    """Return the settings file that the command or call names, if it names one."""
    return _named_file.get()


def settings_file() -> Path:
    """Return the settings file of this command or call, which may not exist."""
    return named_file() or Path(CONFIG_FILE)


def load_settings(kind: type[S], flags: Mapping[str, Any], *, others: Others = None) -> S:
    """Load the settings of one section from all three sources.

    Args:
        kind: the section's model.
        flags: the values given on the command line or in a call, by field name.
        others: returns the names of plugins' sections, whose keys are checked when their plugins
            read them; None, or if it returns None: names beside the core's are not checked at all.

    Raises:
        ConfigError: C001 unknown keys, C002 bad values (all of them), C003 unreadable file.
    """
    tables, path = read_toml(), settings_file()
    _require_known(tables, path, kind, others)
    written: dict[str, Any] = {}
    variables: dict[str, tuple[str, Any]] = {}
    for home in homes(kind):
        written |= _fields(home, tables.get(home.section, {}), path.parent)
        variables |= _from_environment(home)
    values = {name: value for name, (_, value) in variables.items()}
    origins = dict.fromkeys(written, str(path)) | {n: said for n, (said, _) in variables.items()}
    kept = {name: said for name, said in SOURCES.get({}).items() if name not in kind.model_fields}
    origins = {name: said for name, said in origins.items() if name not in flags}
    SOURCES.set(kept | origins)
    return validate(kind, _over(written, values, flags), origins)


def _over(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sources of settings; `data` and `source` replace each other."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for one, other in (("data", "source"), ("source", "data")):
            if one in layer:
                merged.pop(other, None)
        merged |= layer
    return merged


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags on the command line, or the keywords of a call, that have a value."""
    return {k: v for k, v in flags.items() if not (v is None or (isinstance(v, tuple) and not v))}


def require_keywords(kind: type[Section], names: Collection[str], *, loaded: bool = False) -> None:
    """Refuse keywords that are no settings (C001), and those that a `loaded` model keeps (C002)."""
    known = [*map(kebab, kind.model_fields)]
    if unknown := [name for name in names if name not in kind.model_fields]:
        raise ConfigError(
            "C001",
            "unknown settings",
            where=f"vox {kind.section}",
            faults=[_unknown(it, it, known, lambda name: name.replace("-", "_")) for it in unknown],
            remedy=f"correct or remove them; `vox {kind.section} --help` shows every setting",
        )
    if loaded and (fixed := [it for it in ("backend", "adapter", "dtype", "quant") if it in names]):
        what = "a loaded model keeps what it was loaded with"
        remedy = f"load it again, with {fixed[0]}=..."
        raise ConfigError("C002", what, found=", ".join(fixed), remedy=remedy)


def read_toml() -> dict[str, dict[str, Any]]:
    """Return the tables of `vox.toml`, unchecked (C003)."""
    path = settings_file()
    if named_file() is None and not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "C003",
            f"{CONFIG_FILE} cannot be read",
            where=path,
            found=error.strerror if isinstance(error, OSError) else error,
            remedy="correct the file or its name, or name another one with --config",
        ) from error


def validate(kind: type[S], values: Mapping[str, Any], origins: Mapping[str, str] = {}) -> S:
    """Build a section from values.

    Raises:
        ConfigError: C001 or C002, naming every fault.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        faults = [_fault(kind, detail, origins) for detail in error.errors()]
    what = "the settings are not valid"
    remedy = f"correct them; `vox {kind.section} --help` shows what each setting takes"
    raise ConfigError("C002", what, where=f"vox {kind.section}", faults=faults, remedy=remedy)


def _require_known(table: dict[str, Any], path: Path, kind: type[Section], others: Others) -> None:
    kinds, faults = {each.section: each for each in (*SECTIONS, *homes(kind))}, []
    for section, keys in table.items():
        if not isinstance(keys, dict):
            home = _home(section, kinds.values())
            faults += [f"{section} stands outside all sections{home}"] if home or others else []
        elif section in kinds:
            known = {kebab(name) for name in kinds[section].own_fields()}
            for key in (key for key in keys if key not in known):
                home, shown = _home(key, homes(kinds[section])[:-1]), f"[{section}] {key}"
                faults.append(f"{shown} is unknown{home}" if home else _unknown(shown, key, known))
        elif others and (names := others()) is not None and section not in names:
            name = "train" if section in _TRAINING.split() else section
            faults.append(_unknown(f"[{section}]", name, {*kinds, *names}))
    if faults:
        what = f"unknown keys in {CONFIG_FILE}"
        remedy = "correct or remove them; `vox config schema` prints every key"
        raise ConfigError("C001", what, where=path, faults=faults, remedy=remedy)


def _home(key: str, kinds: Iterable[type[Section]]) -> str:
    """Return the section of a key that stands outside it."""
    name = key.replace("-", "_")
    home = next((kind.section for kind in kinds if name in kind.own_fields()), None)
    return f"; put {kebab(name)} under [{home}]" if home else ""


def _unknown(
    shown: str, key: str, known: Collection[str], spelt: Callable[[str], str] = str
) -> str:
    found = meant(key, known, spelt)
    return f"{shown} is unknown" + (f"; {found}" if found else "")


def _fields(kind: type[Section], keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Convert keys to field names, and resolve paths relative to the file's folder."""
    found = {key.replace("-", "_"): value for key, value in keys.items()}
    for name, value in found.items():
        annotation = str(kind.model_fields[name].annotation)
        # A keyword, such as `auto`, is no path.
        is_path = re.search("Path|DataSource", annotation) and f"'{value}'" not in annotation
        if is_path or (name in _MODELS and str(value).startswith(("./", "../"))):
            found[name] = seen_from(folder, value)
        elif name == "reward":
            found[name] = [seen_from(folder, x) if ":" in str(x) else x for x in one_or_many(value)]
    return found


def _from_environment(kind: type[Section]) -> dict[str, tuple[str, Any]]:
    """Read `VOX_TRAIN_LR=1e-4` as field -> variable and value; commas separate list elements;
    `VOX_BACKEND` serves every section."""
    prefix = f"VOX_{kind.section.upper()}_"

    def variable(setting: str) -> str:
        return prefix + setting.replace("-", "_").upper()

    fields = {name: field for name, field in kind.own_fields().items() if not is_table(field)}
    values: dict[str, tuple[str, Any]] = {}
    if "backend" in fields and os.environ.get("VOX_BACKEND"):
        values["backend"] = ("VOX_BACKEND", os.environ["VOX_BACKEND"])
    for name, text in os.environ.items():
        if not name.startswith(prefix) or not text:
            continue
        field = name.removeprefix(prefix).lower()
        if field not in fields:
            raise ConfigError(
                "C001",
                "unknown setting in the environment",
                where=name,
                faults=[_unknown(name, field, [*map(kebab, fields)], variable)],
                remedy="correct or unset it; `vox config schema` prints every key",
            )
        many = get_origin(fields[field].annotation) is tuple
        values[field] = (name, tuple(text.split(",")) if many else text)
    return values


def _fault(kind: type[Section], detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    if not detail["loc"] or detail["type"] == "extra_forbidden":
        return _table_fault(kind, detail)
    key = ".".join(str(part) for part in detail["loc"] if "[" not in str(part))  # of a union
    said = origins.get(str(detail["loc"][0]).replace("-", "_"))
    value = detail["input"]
    written = ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value)
    return f"{kebab(key)} = {written}: {_what(detail)}" + (f" (from {said})" if said else "")


def settings_faults(kind: type[BaseModel], error: ValidationError) -> list[str]:
    """Return every fault of a table of `kind`, one line each."""
    details = error.errors()
    within = {detail["loc"][:end] for detail in details for end in range(len(detail["loc"]))}
    return [_table_fault(kind, detail) for detail in details if not _follows(detail, within)]


def _follows(detail: ErrorDetails, within: Collection[tuple[int | str, ...]]) -> bool:
    """Whether a list is too short only because some of its items are faulty.

    Args:
        within: places within which there are faults.
    """
    if detail["type"] != "too_short" or detail["loc"] not in within:
        return False
    return bool(len(detail["input"]) >= detail["ctx"]["min_length"])


def _what(detail: ErrorDetails) -> str:
    what = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "literal_error":
        known = re.findall("'([^']*)'", detail["ctx"]["expected"])
        value = str(detail["input"]).lower().replace("_", "-").removeprefix("torch.")
        ours = [o for o, n in _VALUES.items() if value in n.split() and o.split()[0] in known]
        what += f" (did you mean {ours[0]}?)" if ours else hint(value, known)
    return f"{what[0].lower()}{what[1:]}"


def _table_fault(kind: type[BaseModel], detail: ErrorDetails) -> str:
    """Return one validation error as a line; an unknown key gets the nearest known one."""
    what = _what(detail)
    if not detail["loc"]:  # about the table as a whole
        return what
    place, key = _place(detail["loc"][:-1]), str(detail["loc"][-1])
    if detail["type"] == "extra_forbidden":
        near = did_you_mean(key, _keys_at(kind, detail["loc"][:-1]))
        return f"{place}{key} is unknown" + (f"; {near}" if near else "")
    if detail["type"] == "missing":
        field = None if place else kind.model_fields.get(key)
        tables = field and get_origin(field.annotation) is tuple and _table_in(field.annotation)
        return f"{place}{f'[[{key}]]' if tables else key} is missing"
    if isinstance(detail["loc"][-1], int):
        return f"{_place(detail['loc'])}{what}"
    return f"{place}{key} = {detail['input']!r}: {what}"


def _place(location: tuple[int | str, ...]) -> str:
    """Return `[[source]] 2: ` for the second table of an array, `[limits]: ` for a table."""
    words = list[str]()
    for part in location:
        words.append(f"[{words.pop()}] {part + 1}" if isinstance(part, int) else f"[{part}]")
    return f"{' '.join(words)}: " if words else ""


def _keys_at(kind: type[BaseModel], location: tuple[int | str, ...]) -> Iterator[str]:
    for part in location:
        if isinstance(part, str):
            field = next((f for n, f in kind.model_fields.items() if part in (n, f.alias)), None)
            inner = _table_in(field.annotation) if field else None
            if inner is None:
                return
            kind = inner
    yield from (field.alias or name for name, field in kind.model_fields.items())


def _table_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model class within an annotation, such as that of `tuple[Source, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_table_in, get_args(annotation))), None)


_TRAINING = "sft training trainer lora peft qlora model optimizer dpo grpo kto orpo"
"""Sections of peers' files whose settings `[train]` has."""

_BATCH = "it counts the examples of a whole optimizer step: per-device batch size x accumulation"

_RENAMED = {
    "lr": "learning-rate",
    "rank": "lora-r lora-rank r",
    "alpha": "lora-alpha",
    "dropout": "lora-dropout",
    "targets": "lora-target-modules target-modules lora-target",
    "method": "fine-tune-type finetuning-type",
    "objective": "stage",
    "dtype": "mixed-precision torch-dtype",
    "quant": "quantization quantization-bit quantization-config",
    "adapter": "resume-adapter-file lora-model-dir",
    "processes": "num-processes nproc-per-node",
    "modules-to-save": "lora-modules-to-save",
    "epochs": "num-train-epochs num-epochs",
    "max-steps": "iters",
    "seq-len": "max-seq-length max-seq-len max-length cutoff-len sequence-len",
    "valid-share": "val-size val-split valid-split validation-split val-set-size test-size",
    "schedule": "lr-scheduler-type lr-scheduler lr-schedule",
    "warmup": "warmup-ratio",
    "clip": "max-grad-norm gradient-clipping gradient-clip-val",
    "optimizer": "optim",
    "eval-every": "eval-steps steps-per-eval",
    "patience": "early-stopping-patience",
    "valid": "eval-dataset eval-file val-file validation-file eval-data",
    "save-every": "save-steps checkpoint-every checkpointing-steps save-interval",
    "keep": "save-total-limit",
    "out": "output-dir save-dir run-name",
    "model": "base-model model-name model-name-or-path",
    "data": "train-file train-dataset dataset datasets",
    "template": "chat-template",
    "max-tokens": "max-new-tokens",
    "rollouts": "num-generations",
    "updates": "num-iterations",
    "rollout-tokens": "max-completion-length",
    "rollout-temperature": "temperature",
    "reward": "reward-funcs",
    "teacher": "teacher-model-name-or-path",
}
"""Setting of vox -> its names in peers."""

_DIFFERENT = {
    ("batch-size", _BATCH): "per-device-train-batch-size train-batch-size micro-batch-size",
    (
        "batch-size",
        f"{_BATCH}; micro-batch-tokens then bounds memory, and never changes the loss",
    ): "gradient-accumulation-steps grad-accumulation-steps gradient-accumulation",
    (
        "",
        "nothing to set: examples are packed, and never attend to one another",
    ): "packing sample-packing",
    ("", "nothing to set: what the assistant says is trained, and nothing else"): (
        "assistant-only-loss completion-only-loss train-on-responses-only train-on-inputs "
        "mask-prompt"
    ),
    ("", "nothing to set: the backend chooses its kernels"): (
        "attn-implementation flash-attention flash-attn use-liger-kernel torch-compile"
    ),
    ("", "nothing to set: it is the model's own"): "processing-class",
    ("", "nothing to set: it is the model before training"): "ref-model",
    ("", "set rank, alpha, dropout, targets directly"): "lora peft lora-config peft-config",
    ("method", "dora"): "use-dora",
    ("method", "rslora"): "use-rslora",
    ("method", "full"): "full-finetuning full",
    ("method", "lora is the default"): "use-peft use-lora",
    ("", "map the column: --field text=NAME"): "dataset-text-field",
    ("backend", "a backend stands for its device"): "device",
    ("shard", "with --processes"): "deepspeed fsdp",
    ("save-every", "in steps; or --save-epochs, --save-minutes"): "save-strategy",
    ("eval-every", "in steps"): "eval-strategy",
    ("warmup", "it is a share of all steps: warm-up steps / steps"): "warmup-steps",
    ("resume", "it names the run folder"): "resume-from-checkpoint",
    ("adapter", "in training the one to start from; --out is for the result"): "adapter-path",
    ("", "after the run: vox push RUN OWNER/NAME"): "push-to-hub hub-model-id",
    ("quant", "nf4 is QLoRA's 4 bits"): "load-in-4bit",
    ("quant", "int8"): "load-in-8bit",
    ("dtype", "bf16 or fp16"): "bf16 fp16",
    ("data", "a data set of the hub is hf:owner/name"): "dataset-name",
    ("", 'the prompt has no flag: vox generate RUN "…"'): "prompt",
    ("", "the model has no flag: it is the first argument"): "model",
    (
        "",
        "trackers are plugins, and need no setting: vox plugin install wandb; "
        "telemetry.jsonl in the run folder has every step",
    ): "report-to wandb-project",
    ("", "events come to on_event, or to a tracker, which is a plugin"): "callbacks",
    ("suite", "heldout has the run's validation rows; a suite file names other rows"): "data",
    ("reward", "the weight stands behind the name: exact=0.5"): "reward-weights",
    ("seq-len", "the answer counts, too, unless the model samples it"): "max-prompt-length",
    ("", "every step is logged, to telemetry.jsonl in the run folder"): "logging-steps",
}
"""Setting of vox ("" for none), and what differs -> names in peers."""

_VALUES = {
    "lora with quant nf4": "qlora",
    "nf4": "4bit 4-bit bnb-4bit int4 qlora",
    "int8": "8bit 8-bit bnb-8bit",
    "fp16": "float16 half",
    "fp32": "float32 float no",
    "adamw": "adamw-torch adamw-torch-fused adamw-hf",
    "cosine": "cosine-with-restarts",
    "constant": "constant-with-warmup",
    "wsd": "warmup-stable-decay",
}
"""Value of vox -> peers' values that are not spelt like it."""

_OF_OBJECTIVES = (
    "beta loss-type label-smoothing simpo-gamma desirable-weight undesirable-weight epsilon "
    "epsilon-high scale-rewards importance-sampling-level"
)

PEERS: dict[str, tuple[str, str]] = {
    **{name: (setting, "") for setting, names in _RENAMED.items() for name in names.split()},
    **{name: meaning for meaning, names in _DIFFERENT.items() for name in names.split()},
    **{
        name: ("objective", f"an option of it: -O {name.replace('-', '_')}=VALUE")
        for name in _OF_OBJECTIVES.split()
    },
}
"""Name of a peer's -> setting of vox ("" for none), and what differs."""


def meant(name: str, known: Collection[str], shown: Callable[[str], str] = str) -> str:
    """Suggest the setting for an unknown one: by the peers' names, else by spelling.

    Args:
        known: existing settings, in kebab-case.
        shown: formats a setting for the message, such as with dashes before it.

    Returns:
        The hint, or "".
    """
    spelt = name.lower().replace("_", "-")
    setting, differs = PEERS.get(spelt, (spelt, ""))
    if not setting:
        return differs
    if setting in known:
        return f"did you mean {shown(setting)}?" + (f" ({differs})" if differs else "")
    near = nearest(spelt, known)
    return f"did you mean {shown(near)}?" if near else ""
