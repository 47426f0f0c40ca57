"""Read a model folder quantised by MLX as if it were not quantised.

`mlx_lm.convert -q` writes `X.weight` as packed uint32, with `X.scales` and `X.biases` beside it,
and says in `config.json` how: `quantization` has the group size, bits and mode, and entries by
module for those that differ. `open_weights` shows each such tensor with the shape and the dtype it
has when dequantised, and dequantises it when it is read.

Only families whose tensors mlx-lm stores with Hugging Face's names and layout are supported. For
others (moved axes, norms stored as 1 + w, other prefixes) the conversion would have to be inverted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from vox_core import bounded_json
from vox_core.contract import Quant
from vox_core.errors import ModelError
from vox_core.weights.file import TensorInfo, numpy_dtype
from vox_core.weights.folder import WeightFolder, Weights
from vox_formats.quant import MLX_FORMATS, MlxFormat, Packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

SAME_IN_MLX = frozenset({"gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Families whose tensors mlx-lm neither renames nor changes, and of which it computes what
transformers does (tests/parity/test_mlx_folders.py). The first gemma has another gelu there."""

FULL_PRECISION = "name the full-precision model, and quantise it with --quant affine4"
_KEY = "quantization"
_PARTS = (".scales", ".biases")
_FLOATS = ("F32", "F16", "BF16")


def open_weights(folder: Path) -> Weights:
    """Open the weights of a model folder, dequantised if MLX quantised them.

    Raises:
        ModelError: as `WeightFolder`; M002 for a quantised folder that cannot be read.
    """
    stored, config = WeightFolder(folder), bounded_json.read(folder / "config.json")
    if not isinstance(config.get(_KEY), dict):
        return stored
    require_same_in_mlx(str(config.get("model_type")), folder)
    return _dequantised(stored, config[_KEY])


def _dequantised(stored: Weights, said: Mapping[str, Any]) -> Weights:
    formats, known = _formats(said, stored), _format(said)
    parts = {name.removesuffix(".weight") + part for name in formats for part in _PARTS}
    # The scales of the fp4 formats lack the dtype; the unquantised tensors have it.
    plain = (info.dtype for info in stored.tensors.values() if info.dtype in _FLOATS)
    usual = next(plain, "BF16")

    def dequantised(name: str, info: TensorInfo) -> TensorInfo:
        if name not in formats:
            return info
        scales = stored.tensors[f"{name.removesuffix('.weight')}.scales"].dtype
        shape = (info.shape[0], info.shape[1] * 32 // formats[name].bits)
        return TensorInfo(scales if scales in _FLOATS else usual, shape)

    tensors = {n: dequantised(n, info) for n, info in stored.tensors.items() if n not in parts}

    def read(name: str) -> Array:
        if name not in formats:
            return stored.read(name)
        path = name.removesuffix(".weight")
        biases = f"{path}.biases"
        packed = Packed(
            stored.read(name),
            stored.read(f"{path}.scales"),
            stored.read(biases) if biases in stored.tensors else None,
        )
        return formats[name].dequantise(packed, numpy_dtype(tensors[name].dtype))

    where = {name: stored.where[name] for name in tensors}
    quant = known[0] if known else "none"
    return Weights(stored.folder, tensors, where, read, quant, frozenset(formats))


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a dequantised copy, without MLX's keys."""
    if not isinstance(config.get(_KEY), dict):
        return dict(config)
    return {key: v for key, v in config.items() if key not in (_KEY, "quantization_config")}


def require_same_in_mlx(model_type: str, folder: Path) -> None:
    """Refuse a family that mlx-lm stores in another layout.

    Raises:
        ModelError: M002.
    """
    if model_type in SAME_IN_MLX:
        return
    raise ModelError(
        "M002",
        "weights of this family cannot be read or written in MLX's quantised format",
        where=folder,
        found=f"model_type {model_type}, which mlx-lm stores or computes otherwise",
        expected=f"one of {', '.join(sorted(SAME_IN_MLX))}",
        remedy=FULL_PRECISION,
    )


def _formats(said: Mapping[str, Any], stored: Weights) -> dict[str, MlxFormat]:
    """Return tensor name -> format for every tensor with scales."""
    faults: list[str] = []
    found: dict[str, MlxFormat] = {}
    for path in (n.removesuffix(".scales") for n in stored.tensors if n.endswith(".scales")):
        own = said[path] if isinstance(said.get(path), dict) else said
        if (known := _format(own)) is None:
            faults.append(f"{path}: found {_words(own)}")
        elif wrong := _shape_fault(path, known[1], stored.tensors):
            faults.append(wrong)
        else:
            found[f"{path}.weight"] = known[1]
    packed = {name for name, info in stored.tensors.items() if info.dtype == "U32"}
    faults = faults or [
        f"{n}: it is packed, and has no scales" for n in sorted(packed - set(found))
    ]
    if faults or _format(said) is None:
        raise ModelError(
            "M002",
            "the weights are quantised in a way that vox does not read",
            where=stored.folder,
            found=None if faults else _words(said),
            expected="MLX's affine with 4 or 8 bits, mxfp4 or nvfp4",
            faults=faults,
            remedy=FULL_PRECISION,
        )
    return found


def _format(said: Mapping[str, Any]) -> tuple[Quant, MlxFormat] | None:
    """Return vox's name of a format, and the format with the group size that `said` has."""
    group = said.get("group_size")
    for name, form in MLX_FORMATS.items():
        sizes = (32, 64, 128) if form.mode == "affine" else (form.group_size,)
        alike = (said.get("mode", "affine"), said.get("bits")) == (form.mode, form.bits)
        if alike and group in sizes:
            return cast("Quant", name), MlxFormat(form.mode, form.bits, int(str(group)))
    return None


def _words(said: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {said.get(key)}" for key in ("mode", "bits", "group_size"))


def _shape_fault(path: str, form: MlxFormat, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return the inconsistency in one module's tensors, or ""."""
    parts = [".weight", *(_PARTS if form.mode == "affine" else _PARTS[:1])]
    if missing := [part for part in parts if f"{path}{part}" not in tensors]:
        return f"{path}: it has no {', '.join(part[1:] for part in missing)}"
    weight, *rest = (tensors[f"{path}{part}"] for part in parts)
    if weight.dtype != "U32" or len(weight.shape) != 2:
        return f"{path}.weight: found {weight.dtype} {list(weight.shape)}, expected U32, two axes"
    shape = (weight.shape[0], weight.shape[1] * 32 // form.bits // form.group_size)
    dtypes = _FLOATS if form.mode == "affine" else ("U8",)
    for part, info in zip(parts[1:], rest, strict=True):
        if info.shape != shape or info.dtype not in dtypes:
            return (
                f"{path}{part}: found {info.dtype} {list(info.shape)}, "
                f"expected {' or '.join(dtypes)} {list(shape)}"
            )
    return None
