"""Safetensors: read with every claim checked, written whole.

A file opens with eight bytes that give the length of a JSON header, then the header, then one
block of data which the tensors divide between them without gap or overlap
(https://github.com/huggingface/safetensors#format).

    file.py      one file: `SafetensorsFile`, `TensorInfo`, dtypes
    folder.py    the file or the shards of a model: `WeightFolder`
    write.py     `write_safetensors`, one tensor at a time
    quantised.py a folder that MLX has quantised, seen as a plain one; `open_weights`

Quantisations by the numbers, in numpy:

    codec.py        what every one has, and all of them by name: `Codec`, `CODECS`
    mlx_formats.py  MLX's formats, which can be written: `MLX_FORMATS`
    nf4.py          NF4 with its scales packed once more or not: `Nf4`, `pack_scales`
    int8.py         INT8 by rows: `Int8`
    chunks.py       how much is computed with at a time

Nothing here knows what a tensor is for.
"""

from __future__ import annotations

from vox_core.contract import DType
from vox_core.weights.codec import CODECS, Codec
from vox_core.weights.file import SafetensorsFile, TensorInfo, numpy_dtype
from vox_core.weights.folder import INDEX, WEIGHTS, WeightFolder, Weights
from vox_core.weights.int8 import Int8
from vox_core.weights.mlx_formats import MLX_FORMATS, MlxFormat
from vox_core.weights.nf4 import Nf4, PackedScales, pack_scales, scale_levels, unpack_scales
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
    "Int8",
    "MlxFormat",
    "Nf4",
    "PackedScales",
    "SafetensorsFile",
    "Spec",
    "TensorInfo",
    "WeightFolder",
    "Weights",
    "numpy_dtype",
    "open_weights",
    "pack_scales",
    "scale_levels",
    "unpack_scales",
    "write_safetensors",
]
