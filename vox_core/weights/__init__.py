"""Safetensors: read with every claim checked, written whole.

A file opens with eight bytes that give the length of a JSON header, then the header, then one
block of data which the tensors divide between them without gap or overlap
(https://github.com/huggingface/safetensors#format).

    file.py      one file: `SafetensorsFile`, `TensorInfo`, dtypes
    folder.py    the file or the shards of a model: `WeightFolder`
    write.py     `write_safetensors`, one tensor at a time
    codec.py     quantisations by the numbers, in numpy
    quantised.py a folder that MLX has quantised, seen as a plain one; `open_weights`

Nothing here knows what a tensor is for.
"""

from __future__ import annotations

from vox_core.contract import DType
from vox_core.weights.codec import CODECS, MLX_FORMATS, Codec, MlxFormat
from vox_core.weights.file import SafetensorsFile, TensorInfo, numpy_dtype
from vox_core.weights.folder import INDEX, WEIGHTS, WeightFolder, Weights
from vox_core.weights.quantised import open_weights
from vox_core.weights.write import Spec, write_safetensors

STORED_AS: dict[DType, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""The name in safetensors files of a dtype of the contract."""

__all__ = [
    "CODECS",
    "INDEX",
    "MLX_FORMATS",
    "STORED_AS",
    "WEIGHTS",
    "Codec",
    "MlxFormat",
    "SafetensorsFile",
    "Spec",
    "TensorInfo",
    "WeightFolder",
    "Weights",
    "numpy_dtype",
    "open_weights",
    "write_safetensors",
]
