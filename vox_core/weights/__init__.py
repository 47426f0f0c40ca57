"""Safetensors: read with every claim checked, written whole.

A file opens with eight bytes that give the length of a JSON header, then the header, then one
block of data which the tensors divide between them without gap or overlap
(https://github.com/huggingface/safetensors#format).

    file.py      one file: `SafetensorsFile`, `TensorInfo`, dtypes
    folder.py    the file or the shards of a model: `WeightFolder`
    write.py     `write_safetensors`, one tensor at a time

Nothing here knows what a tensor is for.
"""

from __future__ import annotations

from vox_core.contract import DType
from vox_core.weights.file import SafetensorsFile, TensorInfo, numpy_dtype
from vox_core.weights.folder import INDEX, WEIGHTS, WeightFolder
from vox_core.weights.write import Spec, write_safetensors

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
    "numpy_dtype",
    "write_safetensors",
]
