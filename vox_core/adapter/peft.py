"""Read and write adapters in PEFT's layout, for `PeftModel.from_pretrained`.

`adapter_model.safetensors` holds float32 tensors named `base_model.model.<canonical name>`;
`adapter_config.json` is PEFT's `LoraConfig`. Reading accepts what PEFT writes for LoRA, rsLoRA
and DoRA on linear modules, rank and alpha patterns included, and refuses everything else by name:
an adapter that loads but computes something else is worse than an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

from vox_core import bounded_json, files
from vox_core.adapter.targets import BASE, leaf_names
from vox_core.contract import AdapterState, Floats, LowRank, Method, ModuleShape
from vox_core.errors import AdapterError
from vox_core.weights import SafetensorsFile, write_safetensors

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."

# Keys of PEFT's config that change what the adapter computes, with the one supported value.
_MUST_BE: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Others (PiSSA, OLoRA, LoftQ, …) train against a base that they changed first.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "megatron_config": (None,),
}
_MUST_BE_OF: dict[str, tuple[type, ...]] = {
    "r": (int,),
    "lora_alpha": (int, float),
    "rank_pattern": (dict, NoneType),
    "alpha_pattern": (dict, NoneType),
    "modules_to_save": (list, NoneType),
}


def write_adapter(
    folder: Path,
    state: AdapterState,
    *,
    base: str,
    modules: Mapping[str, ModuleShape],
    dropout: float = 0.0,
    revision: str | None = None,
) -> None:
    """Write the weights and the configuration into `folder`.

    Args:
        base: value of `base_model_name_or_path`.
        modules: every linear module of the base, so that targets get short names where unambiguous.
        revision: commit of the base on the hub.
    """
    tensors = {PREFIX + name: value for name, value in state.tensors().items()}
    write_tensors(folder / WEIGHTS, tensors, "pt")
    config = peft_config(state, base=base, modules=modules, dropout=dropout)
    files.write_json(folder / CONFIG, {**config, "revision": revision})


def write_tensors(path: Path, tensors: Mapping[str, Floats], format: str) -> None:
    """Write float32 tensors; `format` is of the file's metadata."""
    specs = {name: ("F32", value.shape) for name, value in tensors.items()}
    write_safetensors(path, specs, tensors.items(), {"format": format})


def peft_config(
    state: AdapterState, *, base: str, modules: Mapping[str, ModuleShape], dropout: float
) -> dict[str, Any]:
    """Return PEFT's `LoraConfig` for this adapter, as JSON types."""
    ranks = {path: module.rank for path, module in state.modules.items()}
    alphas = {path: module.alpha for path, module in state.modules.items()}
    rank, alpha = _commonest(ranks.values()), _commonest(alphas.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "rank_pattern": {path: r for path, r in ranks.items() if r != rank},
        "alpha_pattern": {path: a for path, a in alphas.items() if a != alpha},
        "target_modules": _brief_targets(state.modules, modules),
        "modules_to_save": sorted({n.rpartition(".")[0] for n in state.saved}) or None,
        "use_rslora": state.method == "rslora",
        "use_dora": state.method == "dora",
        "fan_in_fan_out": any(modules[p].transposed for p in state.modules if p in modules),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def read_adapter(folder: Path) -> AdapterState:
    """Read an adapter that vox or PEFT wrote.

    Raises:
        AdapterError: A001 if the files are missing or cannot be parsed; A003, listing every
            unsupported feature.
        ModelError: M003, the safetensors file is corrupt.
    """
    config = _read_config(folder)
    file = SafetensorsFile(folder / WEIGHTS)
    named = {name.removeprefix(PREFIX): file.read(name).astype("f4") for name in file.tensors}
    faults = [
        f"{CONFIG}: {key} is {config[key]!r}"
        for key, allowed in _MUST_BE.items()
        if key in config and config[key] not in allowed
    ]
    if config.get("use_rslora") and config.get("use_dora"):
        faults.append(f"{CONFIG}: use_rslora and use_dora together")
    modules, saved, strange = _group(named, config)
    faults += [f"{WEIGHTS}: {name}" for name in strange]
    if faults:
        raise AdapterError(
            "A003",
            "the adapter uses a feature that vox cannot represent",
            where=folder,
            expected="LoRA, rsLoRA or DoRA on linear modules, as PEFT writes them",
            faults=faults,
            remedy="use the adapter with the tool that made it, or train it again without these",
        )
    method: Method = "rslora" if config.get("use_rslora") else "lora"
    return AdapterState("dora" if config.get("use_dora") else method, modules, saved)


def _read_config(folder: Path) -> dict[str, Any]:
    with config_errors(folder, f"{CONFIG} and {WEIGHTS}, as PEFT and vox write them"):
        config = bounded_json.read(folder / CONFIG)
        if not (folder / WEIGHTS).is_file():
            beside = f"; {PICKLE} is a pickle, which vox never opens" * (folder / PICKLE).exists()
            raise FileNotFoundError(2, f"no such file{beside}", WEIGHTS)
        if wrong := [k for k, kinds in _MUST_BE_OF.items() if not isinstance(config.get(k), kinds)]:
            raise ValueError(f"{CONFIG}: {', '.join(wrong)} has a value of the wrong type")
        for pattern in config.get("alpha_pattern") or {}:
            _require_quick(pattern)
        return dict(config)


@contextmanager
def config_errors(folder: Path, expected: str) -> Iterator[None]:
    """Refuse links out of an adapter's folder, and faults of its configuration (A001)."""
    try:
        if out := files.strays(folder):
            raise ValueError(f"{out[0]}, which vox does not follow out of the folder")
        yield
    except (OSError, ValueError, AttributeError, TypeError, re.error) as error:
        raise AdapterError(
            "A001",
            "the folder holds no adapter that vox can read",
            where=folder,
            found=f"{type(error).__name__}: {error}",
            expected=expected,
            remedy="name a run folder of `vox train`, or a folder saved by PEFT or mlx-lm",
        ) from error


def _require_quick(pattern: str) -> None:
    """Refuse a pattern that could be slow to match. Raises ValueError or re.error."""
    re.compile(pattern)
    repeats = re.sub(r"\\.", "", pattern)  # escaped characters repeat nothing
    if len(pattern) > 500 or sum(map(repeats.count, "*+{")) > 2 or re.search(r"\)[*+{?]", repeats):
        raise ValueError(f"{CONFIG}: the alpha_pattern {pattern!r:.80} repeats too much")


def _group(
    named: Mapping[str, Floats], config: Mapping[str, Any]
) -> tuple[dict[str, LowRank], dict[str, Floats], list[str]]:
    """Return low-rank modules, whole tensors, and the names of other tensors."""
    rest, modules = dict(named), {}
    # PEFT's rule: a module is saved with all in it if its path ends so, after a dot or not.
    owners = "|".join(re.escape(f"{module}.") for module in config.get("modules_to_save") or ())
    saved = {n: rest.pop(n) for n in named if owners and re.match(f"(?!.*lora_).*({owners})", n)}
    for name in [n for n in rest if n.endswith(".lora_A.weight")]:
        path = name.removesuffix(".lora_A.weight")
        if f"{path}.lora_B.weight" in rest:
            if (base := f"{path}{BASE}.weight") in rest:
                saved[base] = rest.pop(base)
            modules[path] = LowRank(
                A_RI=rest.pop(name),
                B_OR=rest.pop(f"{path}.lora_B.weight"),
                alpha=float(_pattern(config.get("alpha_pattern"), path, config["lora_alpha"])),
                magnitude_O=rest.pop(f"{path}.lora_magnitude_vector", None),
            )
    return modules, saved, list(rest)


def _pattern(pattern: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    # PEFT's rule: a key matches a whole path, or the end of one after a dot; the first match wins.
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return default


def _brief_targets(trained: Collection[str], modules: Mapping[str, ModuleShape]) -> list[str]:
    leaves = leaf_names(trained)
    reached = {path for path in modules if path.rpartition(".")[2] in leaves}
    return leaves if reached == {*trained} else sorted(trained)


def _commonest(values: Iterable[Any]) -> Any:
    values = list(values)
    return max(sorted(set(values)), key=values.count, default=0)
