"""Convert mlx-lm's adapter files to low-rank updates and back, without loss.

mlx-lm has one literal `scale` and one rank for all modules, stores `lora_a` (I, R), `lora_b` (R, O)
and DoRA's magnitude as `m` (O,), and counts layers from the last (mlx_lm/tuner). So `to_mlx`

- writes out the scale: alpha / r, or alpha / sqrt(r) for rsLoRA;
- folds the ratio into `lora_b` where a module has another scale;
- fills up a smaller rank with zeros;
- names modules by `num_layers` and `keys` (`reach_of`), and no others.

Each module's alpha and rank and the method, for which this layout has no key, are stored in the
configuration under `vox`, which mlx-lm ignores. If folding a ratio rounds, the exact B is stored in
a separate tensor, so that `from_mlx` returns the same bits.

`from_mlx` reads plain adapters of `mlx_lm.lora` too. Without the `vox` entry the method is LoRA or
DoRA, and alpha is scale times rank. All features that a low-rank update cannot
represent are refused together: an adapter that loads but computes something else is worse than an
error.

The caller reads and writes the files.

Shape legend: R rank of the file, I input features, O output features.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vox_formats import FormatError
from vox_formats.mlx_model import counterpart_fault, hf_path, mlx_path

Floats: TypeAlias = NDArray[np.float32]

WEIGHTS = "adapters.safetensors"
CONFIG = "adapter_config.json"
EXACT = "vox_exact.safetensors"
ENTRY, VERSION = "vox", 1
_HALVES = ("lora_a", "lora_b")
_LEAVES = (*_HALVES, "m")


class Linear(Protocol):
    """A linear module of the Hugging Face model; `transposed` if stored (I, O), not (O, I)."""

    @property
    def transposed(self) -> bool: ...


class Update(NamedTuple):
    """The update of one module: `scale * B_OR @ A_RI`, float32, and with DoRA its magnitude."""

    A_RI: Floats
    B_OR: Floats
    alpha: float
    magnitude_O: Floats | None = None


class Adapter(NamedTuple):
    """An adapter by the paths and names of the Hugging Face model.

    Attributes:
        method: `lora`, `rslora` or `dora`.
        saved: parameter -> whole float32 tensor.
    """

    method: str
    modules: Mapping[str, Update]
    saved: Mapping[str, Floats]

    def scale(self, path: str) -> float:
        return _scale(self.method, self.modules[path].alpha, len(self.modules[path].A_RI))


def _scale(method: str, alpha: float, rank: int) -> float:
    return alpha / (math.sqrt(rank) if method == "rslora" else rank)


@dataclass(frozen=True, slots=True)
class MlxBase:
    """The facts about the base model that its adapters' files depend on.

    Args:
        modules: every linear module, by its path in the Hugging Face model.
        parameters: parameter of the Hugging Face model -> shape as stored.
    """

    model_type: str
    modules: Mapping[str, Linear]
    parameters: Mapping[str, tuple[int, ...]]

    def mlx_paths(self) -> dict[str, str]:
        """Paths of the linear modules in mlx-lm's model -> those in the Hugging Face model."""
        return {
            mlx_path(path, self.model_type): path
            for path in self.modules
            if counterpart_fault(path, self.model_type) is None
        }

    def transposed(self, parameter: str) -> bool:
        """Whether the Hugging Face model stores a parameter as (I, O); mlx-lm never does."""
        module = self.modules.get(parameter.removesuffix(".weight"))
        return parameter.endswith(".weight") and module is not None and module.transposed


# --- which modules --------------------------------------------------------------------------------

_IN_LAYER = re.compile(r"^(?:.*?\.)?(?:layers|h)\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class Reach:
    """The configuration by which mlx-lm selects modules to adapt, before it reads any tensor.

    These are modules of the last `num_layers` layers whose path within the layer is one of `keys`,
    and modules anywhere whose whole path is one of `keys`. `num_layers` of 0 or less means every
    layer, and `keys` of None every linear module of a layer (mlx_lm/tuner/utils.py,
    `linear_to_lora_layers`). Whole paths select layers 2 to 5 without the others.
    """

    num_layers: int
    keys: tuple[str, ...] | None


def reach_of(trained: Collection[str], modules: Iterable[str]) -> Reach:
    """Return the configuration that selects `trained` and no other module.

    Args:
        trained, modules: paths in mlx-lm's model; `modules` are all of its linear modules.
    """
    modules = tuple(modules)
    places = {path: place for path in trained if (place := _place(path))}
    lowest = min((layer for layer, _ in places.values()), default=_layers(modules) - 1)
    outside = sorted(set(trained) - set(places))
    brief = Reach(
        max(_layers(modules) - lowest, 1),
        (*sorted({within for _, within in places.values()}), *outside),
    )
    if reached(brief, modules) == set(trained):
        return brief
    return Reach(brief.num_layers, tuple(sorted(trained)))


def reached(reach: Reach, modules: Iterable[str]) -> set[str]:
    """Return the modules that mlx-lm would adapt."""
    modules = tuple(modules)
    first = _layers(modules) - reach.num_layers if reach.num_layers > 0 else 0
    found = {path for path in modules if reach.keys is not None and path in reach.keys}
    for path in modules:
        place = _place(path)
        if place and place[0] >= first and (reach.keys is None or place[1] in reach.keys):
            found.add(path)
    return found


def _layers(modules: Iterable[str]) -> int:
    return max((place[0] + 1 for path in modules if (place := _place(path))), default=0)


def _place(path: str) -> tuple[int, str] | None:
    """Return a module's layer, and its path within the layer."""
    found = _IN_LAYER.match(path)
    return (int(found[1]), found[2]) if found else None


# --- writing --------------------------------------------------------------------------------------


class MlxFiles(NamedTuple):
    """The content of `CONFIG`, `WEIGHTS` and, if not empty, `EXACT`."""

    config: dict[str, Any]
    tensors: dict[str, Floats]
    exact: dict[str, Floats]


def to_mlx(adapter: Adapter, base: MlxBase, *, model: str, dropout: float = 0.0) -> MlxFiles:
    """Return the files of a folder for `mlx_lm.load(..., adapter_path=folder)`.

    Whole tensors (`saved`) get mlx-lm's names; mlx-lm 0.32 refuses a folder that has them beside
    low-rank modules, and names them.

    Args:
        model: the value of `model` in the configuration.

    Raises:
        FormatError: with every module and tensor that mlx-lm's model does not have.
    """
    faults = [
        f"{name}: {fault}"
        for name in (*adapter.modules, *adapter.saved)
        if (fault := counterpart_fault(name, base.model_type))
    ]
    if faults:
        raise FormatError(
            "the adapter has parts for which mlx-lm has no equal",
            expected="modules and whole tensors that mlx-lm's model has too",
            faults=faults,
        )
    common = common_scale(adapter)
    ratios = {path: adapter.scale(path) / common if common else 1.0 for path in adapter.modules}
    exact = {
        f"{path}.lora_B.weight": module.B_OR
        for path, module in adapter.modules.items()
        if not _same_bits(_unfolded(_folded(module.B_OR, ratios[path]), ratios[path]), module.B_OR)
    }
    config = _config(adapter, base, model, dropout)
    return MlxFiles(config, dict(_tensors(adapter, base, ratios)), exact)


def common_scale(adapter: Adapter) -> float:
    """Return the scale that most modules have; never 0 if any has another."""
    scales = Counter(scale for path in adapter.modules if (scale := adapter.scale(path)))
    return max(sorted(scales), key=scales.__getitem__, default=0.0)


def _folded(B_OR: Floats, ratio: float) -> Floats:
    """Return B times a ratio of scales, rounded to float32 once."""
    return B_OR if ratio == 1 else (B_OR.astype(np.float64) * ratio).astype(np.float32)


def _unfolded(B_OR: Floats, ratio: float) -> Floats:
    """Invert `_folded`, up to rounding; impossible for a ratio of 0."""
    return B_OR if ratio in (0, 1) else (B_OR.astype(np.float64) / ratio).astype(np.float32)


def _same_bits(one: Floats, other: Floats) -> bool:
    return one.tobytes() == other.tobytes()


def _tensors(
    adapter: Adapter, base: MlxBase, ratios: Mapping[str, float]
) -> Iterator[tuple[str, Floats]]:
    rank = _largest_rank(adapter)
    for path, module in adapter.modules.items():
        name, missing = mlx_path(path, base.model_type), rank - len(module.A_RI)
        B_OR = _folded(module.B_OR, ratios[path])
        yield f"{name}.lora_a", np.pad(module.A_RI, ((0, missing), (0, 0))).T
        yield f"{name}.lora_b", np.pad(B_OR, ((0, 0), (0, missing))).T
        if module.magnitude_O is not None:
            yield f"{name}.m", module.magnitude_O
    for name, value in adapter.saved.items():
        yield mlx_path(name, base.model_type), value.T if base.transposed(name) else value


def _config(adapter: Adapter, base: MlxBase, model: str, dropout: float) -> dict[str, Any]:
    trained = [mlx_path(path, base.model_type) for path in adapter.modules]
    reach = reach_of(trained, base.mlx_paths())
    kind = "dora" if adapter.method == "dora" else "lora"
    return {
        "fine_tune_type": kind if adapter.modules else "full",
        "model": model,
        "num_layers": reach.num_layers,
        "lora_parameters": {
            "rank": _largest_rank(adapter),
            "scale": common_scale(adapter),
            "dropout": dropout,
            "keys": list(reach.keys or ()),
        },
        ENTRY: {
            "version": VERSION,
            "method": adapter.method,
            "modules": {
                path: {"rank": len(module.A_RI), "alpha": module.alpha}
                for path, module in adapter.modules.items()
            },
            "saved": list(adapter.saved),
        },
    }


def _largest_rank(adapter: Adapter) -> int:
    return max((len(module.A_RI) for module in adapter.modules.values()), default=0)


# --- the configuration ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """Facts about an adapter that only vox's entry in the configuration can store."""

    method: str
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    saved: tuple[str, ...]

    def scale(self, path: str) -> float:
        return _scale(self.method, self.alphas[path], self.ranks[path])


@dataclass(frozen=True, slots=True)
class Config:
    """The part of `adapter_config.json` that defines the meaning of the tensors.

    Args:
        kind: `lora`, `dora` or `full`.
        entry: vox's entry, if vox wrote the folder.
    """

    kind: str
    reach: Reach
    rank: int
    scale: float
    dropout: float
    entry: Entry | None

    @property
    def is_whole_model(self) -> bool:
        """Whether the tensors are a full fine-tune rather than an adapter."""
        return self.kind == "full" and self.entry is None


def parse_config(document: Any) -> Config:
    """Validate a parsed `adapter_config.json`.

    Raises:
        FormatError: a key is missing, or its value is of the wrong type.
    """
    try:
        kind = _one_of(document.get("fine_tune_type", "lora"), ("lora", "dora", "full"))
        none: Any = {"rank": 0, "scale": 0.0} if kind == "full" else {}  # mlx-lm writes null
        numbers = document["lora_parameters"] or none
        keys = numbers.get("keys")
        return Config(
            kind=kind,
            reach=Reach(int(document["num_layers"]), None if keys is None else tuple(keys)),
            rank=int(numbers["rank"]),
            scale=float(numbers["scale"]),
            dropout=float(numbers.get("dropout", 0.0)),
            entry=_entry(document[ENTRY]) if ENTRY in document else None,
        )
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise FormatError(f"{type(error).__name__}: {error}") from error


def _entry(entry: Mapping[str, Any]) -> Entry:
    if entry["version"] != VERSION:
        raise ValueError(f"{ENTRY}.version is {entry['version']!r}; this vox reads {VERSION}")
    modules = entry["modules"]
    return Entry(
        method=_one_of(entry["method"], ("lora", "rslora", "dora")),
        ranks={path: int(module["rank"]) for path, module in modules.items()},
        alphas={path: float(module["alpha"]) for path, module in modules.items()},
        saved=tuple(entry["saved"]),
    )


def _one_of(value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{value!r} is none of {', '.join(choices)}")
    return str(value)


# --- reading --------------------------------------------------------------------------------------


def from_mlx(
    config: Config,
    tensors: Mapping[str, NDArray[Any]],
    exact: Mapping[str, NDArray[Any]],
    base: MlxBase,
    *,
    literal: bool = False,
) -> Adapter:
    """Build the adapter from the content of mlx-lm's files.

    Args:
        tensors, exact: the content of `WEIGHTS` and, if it exists, of `EXACT`.
        base: the base model, whose Hugging Face module names mlx-lm's files lack.
        literal: read as mlx-lm does: one scale, one rank, and nothing from `EXACT` or vox's entry.

    Raises:
        FormatError: with every unsupported feature and every disagreement of file and
            configuration.
    """
    parts, saved, faults = _grouped(tensors, base)
    faults += _faults(parts, saved, config, base)
    if faults:
        raise FormatError(
            "the adapter uses a feature that vox cannot represent, or is not whole",
            expected="LoRA or DoRA on linear modules, as mlx-lm writes them",
            faults=faults,
        )
    if literal:
        config = replace(config, entry=None)
    modules = {path: _update(path, part, config, exact) for path, part in parts.items()}
    method = "dora" if config.kind == "dora" else "lora"
    return Adapter(config.entry.method if config.entry else method, modules, saved)


Parts: TypeAlias = dict[str, dict[str, Floats]]
"""Module -> leaf -> tensor."""


def _grouped(
    tensors: Mapping[str, NDArray[Any]], base: MlxBase
) -> tuple[Parts, dict[str, Floats], list[str]]:
    """Group tensors into low-rank parts, whole tensors and others."""
    parts: Parts = {}
    whole: dict[str, Floats] = {}
    faults: list[str] = []
    for name, stored in tensors.items():
        if stored.dtype.kind not in "fV":  # bfloat16 and the 8-bit floats of ml_dtypes are V
            faults.append(f"{name}: {stored.dtype} is no floating-point tensor")
            continue
        value = np.array(stored, np.float32)
        module, _, leaf = name.rpartition(".")
        if leaf in _LEAVES:
            parts.setdefault(hf_path(module, base.model_type), {})[leaf] = value
        else:
            parameter = hf_path(name, base.model_type)
            whole[parameter] = value.T if base.transposed(parameter) else value
    return parts, whole, faults


def _update(
    path: str,
    part: Mapping[str, Floats],
    config: Config,
    exact: Mapping[str, NDArray[Any]],
) -> Update:
    entry = config.entry
    rank = entry.ranks[path] if entry else config.rank
    A_RI = np.ascontiguousarray(part["lora_a"].T[:rank])
    B_OR = np.ascontiguousarray(part["lora_b"].T[:, :rank])
    if entry is None:
        return Update(A_RI, B_OR, config.scale * rank, part.get("m"))
    ratio = entry.scale(path) / config.scale if config.scale else 1.0
    name = f"{path}.lora_B.weight"
    kept = np.array(exact[name], np.float32) if name in exact else None
    # Further training in mlx-lm made the exact values stale.
    current = kept is not None and _same_bits(_folded(kept, ratio), B_OR)
    B_OR = kept if kept is not None and current else _unfolded(B_OR, ratio)
    return Update(A_RI, B_OR, entry.alphas[path], part.get("m"))


def _faults(
    parts: Parts, saved: Mapping[str, Floats], config: Config, base: MlxBase
) -> Iterator[str]:
    paths = base.mlx_paths()
    reach = {paths[path] for path in reached(config.reach, paths)}
    for path, part in parts.items():
        fault = (
            _part_fault(part, config)
            or _place_fault(path, reach, base)
            or _padding_fault(path, part, config.entry)
        )
        if fault:
            yield f"{path}: {fault}"
    listed = config.entry.saved if config.entry else ()
    for name in saved:
        if name not in listed:
            yield f"{name}: a whole tensor, not a part of an adapter"
    if config.entry:
        yield from _entry_faults(parts, saved, config.entry, config.kind)


def _part_fault(part: Mapping[str, Floats], config: Config) -> str | None:
    """Return a fault of one module's tensors that does not depend on the base."""
    if missing := [half for half in _HALVES if half not in part]:
        return f"{' and '.join(missing)} missing"
    if (config.kind == "dora") != ("m" in part):
        return f"fine_tune_type is {config.kind}, but m is {'there' if 'm' in part else 'missing'}"
    a, b = part["lora_a"].shape, part["lora_b"].shape
    if len(a) == 3:
        return "LoRA on experts (a switch layer) is no update of one linear module"
    if len(a) != 2 or len(b) != 2 or a[1] != config.rank or b[0] != config.rank:
        return f"lora_a is {a} and lora_b {b}, expected (I, {config.rank}) and ({config.rank}, O)"
    if "m" in part and part["m"].shape != b[1:]:
        return f"m is {part['m'].shape}, expected {b[1:]}"
    return None


def _padding_fault(path: str, part: Mapping[str, Floats], entry: Entry | None) -> str | None:
    rank = entry.ranks.get(path) if entry else None
    if rank is None:
        return None
    if part["lora_a"][:, rank:].any() or part["lora_b"][rank:].any():
        return f"has values beyond rank {rank}, which is that of {ENTRY}.modules"
    return None


def _place_fault(path: str, reach: set[str], base: MlxBase) -> str | None:
    """Return a fault of a module's position in the base."""
    if path not in base.modules:
        if len(base.parameters.get(f"{path}.weight", ())) == 2:
            return "LoRA on an embedding is no update of a linear module"
        return "the base has no such linear module; the adapter may belong to another base"
    if fault := counterpart_fault(path, base.model_type):
        return fault
    if path not in reach:
        return f"num_layers and keys of {CONFIG} do not reach it, so mlx-lm would not load it"
    return None


def _entry_faults(
    parts: Parts, saved: Mapping[str, Floats], entry: Entry, kind: str
) -> Iterator[str]:
    """Return the differences between the file and vox's entry."""
    for path in sorted(parts.keys() - entry.ranks.keys()):
        yield f"{path}: in {WEIGHTS} but not in {ENTRY}.modules"
    absent = (entry.ranks.keys() - parts.keys()) | (set(entry.saved) - saved.keys())
    for name in sorted(absent):
        yield f"{name}: in {ENTRY} of {CONFIG} but not in {WEIGHTS}"
    if kind != "full" and (kind == "dora") != (entry.method == "dora"):
        yield f"{CONFIG}: fine_tune_type is {kind}, {ENTRY}.method {entry.method}"
