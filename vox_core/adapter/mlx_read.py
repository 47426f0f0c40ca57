"""Reading mlx-lm's adapter folder: one that vox wrote (mlx.py), or one of plain `mlx_lm.lora`.

The tensors in the file say which modules there are; the configuration says rank and scale, and has
to reach each of them, as mlx-lm asks. Without the `vox` entry the method is LoRA or DoRA, and alpha
is scale times rank. What vox cannot represent is refused, all of it at once: an adapter that loads
and does nothing is worse than one that does not load.

Shape legend: R rank of the file, I input features, O output features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vox_core import bounded_json, links
from vox_core.adapter.mlx import CONFIG, ENTRY, EXACT, VERSION, WEIGHTS, MlxBase, folded, unfolded
from vox_core.adapter.mlx_names import counterpart_fault, hf_path
from vox_core.adapter.mlx_reach import Reach, reached
from vox_core.contract import AdapterState, LowRank, Method
from vox_core.errors import AdapterError, command
from vox_core.weights import SafetensorsFile

if TYPE_CHECKING:
    from vox_core.contract import Floats

_HALVES = ("lora_a", "lora_b")
_LEAVES = (*_HALVES, "m")


@dataclass(frozen=True, slots=True)
class _Told:
    """What vox wrote of an adapter that mlx-lm's layout has no place for."""

    method: Method
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    saved: tuple[str, ...]

    def scale(self, path: str) -> float:
        rank = self.ranks[path]
        return self.alphas[path] / (math.sqrt(rank) if self.method == "rslora" else rank)


@dataclass(frozen=True, slots=True)
class _Config:
    """`adapter_config.json`, as far as it says what the tensors mean; `told` by vox, if it is."""

    kind: str
    reach: Reach
    rank: int
    scale: float
    dropout: float
    told: _Told | None


@dataclass(slots=True)
class _Found:
    """What is in the file: module -> leaf -> tensor, whole tensors, and all that is wrong."""

    parts: dict[str, dict[str, Floats]] = field(default_factory=dict)
    whole: dict[str, Floats] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def is_mlx_folder(folder: Path) -> bool:
    """Whether `folder` is an adapter of mlx-lm, and not of PEFT, which names its files alike."""
    try:
        config = bounded_json.read(folder / CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "peft_type" not in config and (folder / WEIGHTS).is_file()


def read_mlx_adapter(folder: Path, base: MlxBase, *, literal: bool = False) -> AdapterState:
    """Read an adapter of mlx-lm.

    Args:
        base: the model it was trained on; mlx-lm's files do not name its modules as Hugging Face.
        literal: what mlx-lm makes of the files: one scale, one rank, nothing that vox added.

    Raises:
        AdapterError: A001 if the configuration cannot be parsed; A003, listing everything that vox
            cannot represent, and everything about which file and configuration disagree.
        ModelError: M003, the safetensors file is corrupt.
    """
    config = _read_config(folder)
    if config.kind == "full" and config.told is None:
        raise _full(folder)
    found = _read_tensors(folder / WEIGHTS, base)
    faults = [*found.faults, *_faults(found, config, base)]
    if faults:
        raise AdapterError(
            "A003",
            "the adapter uses a feature that vox cannot represent, or is not whole",
            where=folder,
            expected="LoRA or DoRA on linear modules, as mlx-lm writes them",
            faults=faults,
            remedy="use the adapter with the tool that made it, or train it again without these",
        )
    exact = _read_exact(folder)
    if literal:
        config = replace(config, told=None)
    modules = {path: _module(path, part, config, exact) for path, part in found.parts.items()}
    method: Method = "dora" if config.kind == "dora" else "lora"
    return AdapterState(config.told.method if config.told else method, modules, found.whole)


def mlx_dropout(folder: Path) -> float:
    """The dropout that an adapter of mlx-lm was trained with."""
    return _read_config(folder).dropout


# --- the configuration ----------------------------------------------------------------------------


def _read_config(folder: Path) -> _Config:
    try:
        config = bounded_json.read(folder / CONFIG)
        if out := links.strays(folder):
            raise ValueError(f"{out[0]}, which vox does not follow out of the folder")
        numbers = config["lora_parameters"]
        keys = numbers.get("keys")
        return _Config(
            kind=_one_of(config.get("fine_tune_type", "lora"), ("lora", "dora", "full")),
            reach=Reach(int(config["num_layers"]), None if keys is None else tuple(keys)),
            rank=int(numbers["rank"]),
            scale=float(numbers["scale"]),
            dropout=float(numbers.get("dropout", 0.0)),
            told=_told(config[ENTRY]) if ENTRY in config else None,
        )
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise AdapterError(
            "A001",
            "the folder holds no adapter that vox can read",
            where=folder / CONFIG,
            found=f"{type(error).__name__}: {error}",
            expected="num_layers and lora_parameters with rank and scale, as mlx-lm writes them",
            remedy="name a folder saved by mlx-lm, or convert the source again",
        ) from error


def _told(entry: Mapping[str, Any]) -> _Told:
    if entry["version"] != VERSION:
        raise ValueError(f"{ENTRY}.version is {entry['version']!r}; this vox knows {VERSION}")
    modules = entry["modules"]
    return _Told(
        method=cast("Method", _one_of(entry["method"], ("lora", "rslora", "dora"))),
        ranks={path: int(module["rank"]) for path, module in modules.items()},
        alphas={path: float(module["alpha"]) for path, module in modules.items()},
        saved=tuple(entry["saved"]),
    )


def _one_of(value: object, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{value!r} is none of {', '.join(known)}")
    return str(value)


# --- the tensors ----------------------------------------------------------------------------------


def _read_tensors(path: Path, base: MlxBase) -> _Found:
    import numpy as np

    found, file = _Found(), SafetensorsFile(path)
    for name in file.tensors:
        if not file.tensors[name].dtype.startswith(("F", "BF")):
            found.faults.append(f"{name}: {file.tensors[name].dtype} is no floating-point tensor")
            continue
        value = np.array(file.read(name), np.float32)
        module, _, leaf = name.rpartition(".")
        if leaf in _LEAVES:
            found.parts.setdefault(hf_path(module, base.model_type), {})[leaf] = value
        else:
            parameter = hf_path(name, base.model_type)
            found.whole[parameter] = value.T if base.transposed(parameter) else value
    return found


def _read_exact(folder: Path) -> dict[str, Floats]:
    import numpy as np

    if not (folder / EXACT).is_file():
        return {}
    file = SafetensorsFile(folder / EXACT)
    return {name: np.array(file.read(name), np.float32) for name in file.tensors}


def _module(
    path: str, part: Mapping[str, Floats], config: _Config, exact: Mapping[str, Floats]
) -> LowRank:
    import numpy as np

    told = config.told
    rank = told.ranks[path] if told else config.rank
    A_RI = np.ascontiguousarray(part["lora_a"].T[:rank])
    B_OR = np.ascontiguousarray(part["lora_b"].T[:, :rank])
    if told is None:
        return LowRank(A_RI, B_OR, config.scale * rank, part.get("m"))
    ratio = told.scale(path) / config.scale if config.scale else 1.0
    kept = exact.get(f"{path}.lora_B.weight")
    # Whoever trained the adapter further left the exact values behind.
    current = kept is not None and folded(kept, ratio).tobytes() == B_OR.tobytes()
    B_OR = kept if kept is not None and current else unfolded(B_OR, ratio)
    return LowRank(A_RI, B_OR, told.alphas[path], part.get("m"))


# --- what is wrong --------------------------------------------------------------------------------


def _faults(found: _Found, config: _Config, base: MlxBase) -> list[str]:
    paths = base.mlx_paths()
    reach = {paths[path] for path in reached(config.reach, paths)}
    faults = []
    for path, part in found.parts.items():
        fault = (
            _part_fault(part, config)
            or _place_fault(path, reach, base)
            or _padding_fault(path, part, config.told)
        )
        faults += [f"{path}: {fault}"] if fault else []
    whole = config.told.saved if config.told else ()
    faults += [
        f"{name}: a whole tensor, not a part of an adapter"
        for name in found.whole
        if name not in whole
    ]
    if config.told:
        faults += _untold(found, config.told, config)
    return faults


def _part_fault(part: Mapping[str, Floats], config: _Config) -> str | None:
    """What is wrong with the tensors of one module, whatever the base is."""
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


def _padding_fault(path: str, part: Mapping[str, Floats], told: _Told | None) -> str | None:
    rank = told.ranks.get(path) if told else None
    if rank is None:
        return None
    if part["lora_a"][:, rank:].any() or part["lora_b"][rank:].any():
        return f"has values beyond rank {rank}, which is what {ENTRY}.modules says"
    return None


def _place_fault(path: str, reach: set[str], base: MlxBase) -> str | None:
    """What is wrong with where a module is."""
    if path not in base.modules:
        if len(base.parameters.get(f"{path}.weight", ())) == 2:
            return "LoRA on an embedding is no update of a linear module"
        return "the base has no such linear module; another base is named with --model"
    if fault := counterpart_fault(path, base.model_type):
        return fault
    if path not in reach:
        return f"num_layers and keys of {CONFIG} do not reach it, so mlx-lm would not load it"
    return None


def _untold(found: _Found, told: _Told, config: _Config) -> list[str]:
    """Where the file and what vox said of it differ."""
    faults = [
        f"{p}: in {WEIGHTS} but not in {ENTRY}.modules" for p in found.parts if p not in told.ranks
    ]
    faults += [
        f"{p}: in {ENTRY}.modules but not in {WEIGHTS}" for p in told.ranks if p not in found.parts
    ]
    faults += [
        f"{p}: in {ENTRY}.saved but not in {WEIGHTS}" for p in told.saved if p not in found.whole
    ]
    if config.kind != "full" and (config.kind == "dora") != (told.method == "dora"):
        faults.append(f"{CONFIG}: fine_tune_type is {config.kind}, {ENTRY}.method {told.method}")
    return faults


def _full(folder: Path) -> AdapterError:
    return AdapterError(
        "A003",
        "the folder holds whole weights of a full fine-tune, not an adapter",
        where=folder,
        found="fine_tune_type full",
        expected="fine_tune_type lora or dora",
        remedy="make a plain model of it, which vox takes as --model: "
        + command("mlx_lm.fuse", "--model", "BASE", "--adapter-path", folder, "--save-path", "OUT"),
    )
