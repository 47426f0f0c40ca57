"""Read the weights of a model folder, dequantised if needed, and write safetensors.

    file.py       one safetensors file: `SafetensorsFile`, `write_safetensors`
    folder.py     the file or the shards of a model: `WeightFolder`
    quantised.py  a folder quantised by MLX, read dequantised: `open_weights`

`vox_formats.quant` implements the quantisations.
"""

from __future__ import annotations

from vox_core.contract import DType
from vox_core.weights.file import (
    SafetensorsFile,
    Spec,
    TensorInfo,
    numpy_dtype,
    stored_bytes,
    write_safetensors,
)
from vox_core.weights.folder import INDEX, WEIGHTS, WeightFolder, Weights
from vox_core.weights.quantised import open_weights

STORED_AS: dict[DType, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""The name in safetensors files of a dtype of the contract."""

__all__ = [
    "INDEX",
    "STORED_AS",
    "WEIGHTS",
    "SafetensorsFile",
    "Spec",
    "TensorInfo",
    "WeightFolder",
    "Weights",
    "numpy_dtype",
    "open_weights",
    "stored_bytes",
    "write_safetensors",
]
