"""Read and write mlx-lm's adapter folder; `vox_formats.mlx_adapter` has the layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vox_core import bounded_json, files, links
from vox_core.contract import AdapterState, LowRank, Method
from vox_core.errors import AdapterError, command
from vox_core.weights import SafetensorsFile, write_safetensors
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


def write_mlx_adapter(
    folder: Path, state: AdapterState, base: MlxBase, *, model: str, dropout: float = 0.0
) -> None:
    """Write an adapter folder for `mlx_lm.load(..., adapter_path=folder)`.

    Args:
        model: the value of `model` in the configuration.

    Raises:
        AdapterError: A003, listing every module and tensor that mlx-lm's model does not have.
    """
    modules = {
        path: mlx.Update(module.A_RI, module.B_OR, module.alpha, module.magnitude_O)
        for path, module in state.modules.items()
    }
    adapter = mlx.Adapter(state.method, modules, state.saved)
    try:
        made = mlx.to_mlx(adapter, base, model=model, dropout=dropout)
    except FormatError as error:
        remedy = "train it again without these, or use it with PEFT; nothing was written"
        raise _refused(error, folder, remedy) from error
    _write_tensors(folder / mlx.WEIGHTS, made.tensors)
    if made.exact:
        _write_tensors(folder / mlx.EXACT, made.exact)
    files.write_json(folder / mlx.CONFIG, made.config)


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
    config = _read_config(folder)
    if config.is_whole_model:
        raise _whole_model(folder)
    tensors = _read_tensors(folder / mlx.WEIGHTS)
    exact = _read_tensors(folder / mlx.EXACT) if (folder / mlx.EXACT).is_file() else {}
    try:
        read = mlx.from_mlx(config, tensors, exact, base, literal=literal)
    except FormatError as error:
        remedy = "use the adapter with the tool that made it, or train it again without these"
        raise _refused(error, folder, remedy) from error
    modules = {path: LowRank(*update) for path, update in read.modules.items()}
    return AdapterState(cast("Method", read.method), modules, read.saved)


def mlx_dropout(folder: Path) -> float:
    """Return the dropout that an adapter of mlx-lm was trained with."""
    return _read_config(folder).dropout


def _read_config(folder: Path) -> mlx.Config:
    try:
        document = bounded_json.read(folder / mlx.CONFIG)
        if out := links.strays(folder):
            raise ValueError(f"{out[0]}, which vox does not follow out of the folder")
        return mlx.parse_config(document)
    except (OSError, ValueError) as error:
        is_ours = isinstance(error, FormatError)
        raise AdapterError(
            "A001",
            "the folder holds no adapter that vox can read",
            where=folder / mlx.CONFIG,
            found=error if is_ours else f"{type(error).__name__}: {error}",
            expected="num_layers and lora_parameters with rank and scale, as mlx-lm writes them",
            remedy="name a folder saved by mlx-lm, or convert the source again",
        ) from error


def _read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.tensors}


def _write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    specs = {name: ("F32", value.shape) for name, value in tensors.items()}
    write_safetensors(path, specs, tensors.items(), {"format": "mlx"})


def _refused(error: FormatError, folder: Path, remedy: str) -> AdapterError:
    return AdapterError(
        "A003",
        error.what,
        where=folder,
        expected=error.expected,
        faults=error.faults,
        remedy=remedy,
    )


def _whole_model(folder: Path) -> AdapterError:
    return AdapterError(
        "A003",
        "the folder holds whole weights of a full fine-tune, not an adapter",
        where=folder,
        found="fine_tune_type full",
        expected="fine_tune_type lora or dora",
        remedy="make a plain model of it, which vox takes as --model: "
        + command("mlx_lm.fuse", "--model", "BASE", "--adapter-path", folder, "--save-path", "OUT"),
    )
