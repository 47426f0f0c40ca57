"""An adapter as mlx-lm stores it: written here; read back by mlx_read.py.

mlx-lm has one literal `scale` and one rank for all modules, stores `lora_a` (I, R), `lora_b` (R, O)
and DoRA's magnitude as `m` (O,), and counts layers from the last (mlx_lm/tuner). So

- the scale is written out: alpha / r, or alpha / sqrt(r) for rsLoRA;
- a module with another scale has the ratio folded into `lora_b`;
- a smaller rank is filled up with zeros;
- modules are reached by `num_layers` and `keys` (mlx_reach.py), and no others.

What this layout has no place for, each module's alpha and rank and the method, stands in the
configuration under `vox`, which mlx-lm ignores. Where folding a ratio rounds, the exact B lies in a
file of its own beside, so that writing and reading is the identity, bit for bit.

Shape legend: R rank of the file, I input features, O output features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core.adapter.mlx_names import counterpart_fault, mlx_path
from vox_core.adapter.mlx_reach import reach_of
from vox_core.contract import AdapterState, ModuleShape
from vox_core.errors import AdapterError
from vox_core.files import write_json
from vox_core.weights import write_safetensors

if TYPE_CHECKING:
    from vox_core.contract import Floats

WEIGHTS = "adapters.safetensors"
CONFIG = "adapter_config.json"
EXACT = "vox_exact.safetensors"
ENTRY, VERSION = "vox", 1


@dataclass(frozen=True, slots=True)
class MlxBase:
    """The base model, as far as its adapters' files depend on it.

    Args:
        modules: every linear module, by its path in the Hugging Face model.
        parameters: parameter of the Hugging Face model -> shape as stored.
    """

    model_type: str
    modules: Mapping[str, ModuleShape]
    parameters: Mapping[str, tuple[int, ...]]

    def mlx_paths(self) -> dict[str, str]:
        """Linear modules that mlx-lm's model has too: its path -> the Hugging Face model's."""
        return {
            mlx_path(path, self.model_type): path
            for path in self.modules
            if counterpart_fault(path, self.model_type) is None
        }

    def transposed(self, parameter: str) -> bool:
        """Whether a parameter is stored (I, O) in the Hugging Face model; in mlx-lm's none is."""
        module = self.modules.get(parameter.removesuffix(".weight"))
        return parameter.endswith(".weight") and module is not None and module.transposed


def write_mlx_adapter(
    folder: Path, state: AdapterState, base: MlxBase, *, model: str, dropout: float = 0.0
) -> None:
    """Write an adapter folder that `mlx_lm.load(..., adapter_path=folder)` takes.

    Whole tensors (`saved`) are written under mlx-lm's names; mlx-lm 0.32 refuses a folder that has
    them beside low-rank modules, and names them.

    Args:
        model: what `model` in the configuration should say.

    Raises:
        AdapterError: A003, listing every module and tensor that mlx-lm's model does not have.
    """
    _require_counterparts(folder, state, base)
    tensors = dict(_tensors(state, base))
    specs = {name: ("F32", value.shape) for name, value in tensors.items()}
    write_safetensors(folder / WEIGHTS, specs, tensors.items(), {"format": "mlx"})
    if exact := _not_recoverable(state):
        specs = {name: ("F32", value.shape) for name, value in exact.items()}
        write_safetensors(folder / EXACT, specs, exact.items(), {"format": "mlx"})
    write_json(folder / CONFIG, _config(state, base, model, dropout))


def common_scale(state: AdapterState) -> float:
    """The scale that most modules have; never 0 if any has another."""
    scales = Counter(scale for path in state.modules if (scale := state.scale(path)))
    return max(sorted(scales), key=scales.__getitem__, default=0.0)


def folded(B_OR: Floats, ratio: float) -> Floats:
    """B times a ratio of scales, rounded to float32 once."""
    import numpy as np

    return B_OR if ratio == 1 else (B_OR.astype(np.float64) * ratio).astype(np.float32)


def unfolded(B_OR: Floats, ratio: float) -> Floats:
    """The inverse of `folded` but for rounding; with a ratio of 0 there is none."""
    import numpy as np

    return B_OR if ratio in (0, 1) else (B_OR.astype(np.float64) / ratio).astype(np.float32)


def _tensors(state: AdapterState, base: MlxBase) -> Iterator[tuple[str, Floats]]:
    import numpy as np

    rank = _rank(state)
    for path, module in state.modules.items():
        name, missing = mlx_path(path, base.model_type), rank - module.rank
        B_OR = folded(module.B_OR, _ratio(state, path))
        yield f"{name}.lora_a", np.pad(module.A_RI, ((0, missing), (0, 0))).T
        yield f"{name}.lora_b", np.pad(B_OR, ((0, 0), (0, missing))).T
        if module.magnitude_O is not None:
            yield f"{name}.m", module.magnitude_O
    for name, value in state.saved.items():
        yield mlx_path(name, base.model_type), value.T if base.transposed(name) else value


def _not_recoverable(state: AdapterState) -> dict[str, Floats]:
    """Every B that cannot be told from what is left of it once the ratio is folded in."""
    exact = {}
    for path, module in state.modules.items():
        ratio = _ratio(state, path)
        if unfolded(folded(module.B_OR, ratio), ratio).tobytes() != module.B_OR.tobytes():
            exact[f"{path}.lora_B.weight"] = module.B_OR
    return exact


def _config(state: AdapterState, base: MlxBase, model: str, dropout: float) -> dict[str, Any]:
    trained = [mlx_path(path, base.model_type) for path in state.modules]
    reach = reach_of(trained, base.mlx_paths())
    kind = "dora" if state.method == "dora" else "lora"
    return {
        "fine_tune_type": kind if state.modules else "full",
        "model": model,
        "num_layers": reach.num_layers,
        "lora_parameters": {
            "rank": _rank(state),
            "scale": common_scale(state),
            "dropout": dropout,
            "keys": list(reach.keys or ()),
        },
        ENTRY: {
            "version": VERSION,
            "method": state.method,
            "modules": {
                path: {"rank": module.rank, "alpha": module.alpha}
                for path, module in state.modules.items()
            },
            "saved": list(state.saved),
        },
    }


def _rank(state: AdapterState) -> int:
    return max((module.rank for module in state.modules.values()), default=0)


def _ratio(state: AdapterState, path: str) -> float:
    common = common_scale(state)
    return state.scale(path) / common if common else 1.0


def _require_counterparts(folder: Path, state: AdapterState, base: MlxBase) -> None:
    faults = [
        f"{name}: {fault}"
        for name in (*state.modules, *state.saved)
        if (fault := counterpart_fault(name, base.model_type))
    ]
    if faults:
        raise AdapterError(
            "A003",
            "the adapter has parts for which mlx-lm has no equal",
            where=folder,
            expected="modules and whole tensors that mlx-lm's model has too",
            faults=faults,
            remedy="train it again without these, or use it with PEFT; nothing was written",
        )
