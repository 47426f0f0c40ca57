"""Read mlx-lm's adapter folder; `vox_formats.mlx_adapter` has the layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vox_core import bounded_json
from vox_core.adapter.peft import config_errors
from vox_core.contract import AdapterState, LowRank, Method
from vox_core.errors import AdapterError, command
from vox_core.weights import SafetensorsFile
from vox_formats import FormatError
from vox_formats import mlx_adapter as mlx
from vox_formats.mlx_adapter import MlxBase

if TYPE_CHECKING:
    from numpy.typing import NDArray


def is_mlx_folder(folder: Path) -> bool:
    """Whether `folder` is an adapter of mlx-lm; PEFT's has the same file names."""
    try:
        config = bounded_json.read(folder / mlx.CONFIG)
    except (OSError, ValueError):
        return False
    has_weights = (folder / mlx.WEIGHTS).is_file()
    return isinstance(config, dict) and "peft_type" not in config and has_weights


def read_mlx_adapter(folder: Path, base: MlxBase, *, literal: bool = False) -> AdapterState:
    """Read an adapter of mlx-lm.

    Args:
        base: the base model, whose Hugging Face module names mlx-lm's files lack.
        literal: read as mlx-lm does: one scale, one rank, without vox's extensions.

    Raises:
        AdapterError: A001 if the configuration cannot be parsed; A003, listing every unsupported
            feature and every disagreement of file and configuration.
        ModelError: M003, the safetensors file is corrupt.
    """
    with config_errors(folder, "num_layers and lora_parameters with rank and scale, as in mlx-lm"):
        config = mlx.parse_config(bounded_json.read(folder / mlx.CONFIG))
    if config.is_whole_model:
        fuse = ("--model", "BASE", "--adapter-path", folder, "--save-path", "OUT")
        raise AdapterError(
            "A003",
            "the folder holds whole weights of a full fine-tune, not an adapter",
            where=folder,
            found="fine_tune_type full",
            expected="fine_tune_type lora or dora",
            remedy="make a plain model of it, which vox takes as --model: "
            + command("mlx_lm.fuse", *fuse),
        )
    tensors = _read_tensors(folder / mlx.WEIGHTS)
    exact = _read_tensors(folder / mlx.EXACT) if (folder / mlx.EXACT).is_file() else {}
    try:
        method, updates, saved = mlx.from_mlx(config, tensors, exact, base, literal=literal)
    except FormatError as error:
        raise AdapterError(
            "A003",
            where=folder,
            **error.facts,
            remedy="use the adapter with the tool that made it, or train it again without these",
        ) from error
    modules = {path: LowRank(*update) for path, update in updates.items()}
    return AdapterState(cast("Method", method), modules, saved)


def _read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.tensors}
