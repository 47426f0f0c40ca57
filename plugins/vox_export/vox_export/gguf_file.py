"""Write a model, or an adapter alone, as a GGUF file: tensor by tensor, from weights on the disk.

A merged model is never stored: each tensor is read from the base, the adapter is added in float32,
and the sum is rounded once, to the format of the file, while it is written. Memory holds one tensor
of the base, or of the sum in float32, and a few times 1 MB. The experts of a stack are read one
after another, where the base's files have them so.

`FORMATS` are those that the `gguf` package computes in numpy. The embedding and the output head
are Q8_0 in formats of fewer bits, and norms are float32, as `llama-quantize` has them.

Shape legend: R rank, I input features, O output features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, LlamaFileType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize

from vox_core.api.files import read_json
from vox_core.api.models import ModelReference
from vox_core.errors import AdapterError, ModelError
from vox_export.child import full_config
from vox_export.vocabulary import Vocabulary
from vox_formats import FormatError
from vox_formats.gguf_families import LAYOUTS
from vox_formats.gguf_layout import (
    Array,
    Change,
    Config,
    Layout,
    Tensor,
    is_vocabulary,
)

if TYPE_CHECKING:
    from vox_core.contract import AdapterState, LowRank

CHUNK = 1 << 18
"""Elements computed at a time: 1 MB of float32, which stays in a processor's cache."""

FORMATS: Mapping[str, tuple[Kind, LlamaFileType]] = {
    "f32": (Kind.F32, LlamaFileType.ALL_F32),
    "f16": (Kind.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (Kind.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Kind.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q5_1": (Kind.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    "q5_0": (Kind.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q4_1": (Kind.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (Kind.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "mxfp4": (Kind.MXFP4, LlamaFileType.MOSTLY_MXFP4_MOE),
}
"""Name -> type of the tensors, type of the file; the largest first."""

UNQUANTISED = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the file.

    Args:
        source: parameters of the Hugging Face model; None for a tensor that the layout computes.
        shape: in the file, outermost dimension first.
    """

    name: str
    source: Tensor | None
    shape: tuple[int, ...]
    kind: Kind

    @property
    def nbytes(self) -> int:
        return _nbytes(math.prod(self.shape), self.kind)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the number format of the file, which a `GGUFWriter` writes like an array.

    It is computed `CHUNK` elements at a time, as it is written.

    Args:
        arrays: follow one another in the file.
    """

    arrays: Iterable[Array]
    kind: Kind
    nbytes: int

    def tofile(self, file: IO[bytes]) -> None:
        for array in self.arrays:
            for matrix in array if array.ndim == 3 else (np.atleast_2d(array),):
                step = max(1, CHUNK // matrix.shape[1])
                for start in range(0, len(matrix), step):
                    part = np.ascontiguousarray(matrix[start : start + step])
                    file.write(_rounded(part, self.kind).data)


class ModelFile:
    """A model as a GGUF file, before it is written.

    Attributes:
        targets: the tensors, in the order of the base's files.
        coarse: names of tensors whose rows do not fit the format, stored in F16.

    Raises:
        ModelError: M002, the model is not one that is written as GGUF.
    """

    def __init__(self, source: ModelReference, quant: str) -> None:
        self.source, self.quant = source, quant
        self._number_format, self._file_type = FORMATS[quant]
        self.config = full_config(source.base.path)
        self.layout = require_layout(source, self.config)
        self._factors = self.layout.factors(self.config)
        self.targets = {target.name: target for target in self._plan()}
        halved = [t.name for t in self.targets.values() if t.kind is Kind.F16]
        self.coarse = halved if self._number_format not in (Kind.F16, Kind.F32) else []

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets.values())

    def write(
        self,
        path: Path,
        vocabulary: Vocabulary,
        name: str,
        report: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write the file.

        Args:
            name: `general.name`, as far as llama.cpp takes nothing from it.
            report: called with bytes written, and bytes in all.
        """
        writer = _writer(path, self.layout)
        for target in self.targets.values():
            writer.add_tensor_info(
                target.name, target.shape, np.dtype(np.float32), target.nbytes, target.kind
            )
        self._describe(writer, vocabulary.model_name(name))
        vocabulary.write(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for target in self.targets.values():
            writer.write_tensor_data(cast("Array", self.tensor(target)))
            done += target.nbytes
            if report:
                report(done, self.nbytes)
        writer.close()

    def tensor(self, target: Target) -> Stored:
        """Return a tensor as the file stores it."""
        if (source := target.source) is None:
            return Stored([self._factors[target.name]], target.kind, target.nbytes)
        arrays = (source.change.of(self.merged(name)) for name in source.parameters)
        return Stored(arrays, target.kind, target.nbytes)

    def merged(self, parameter: str) -> Array:
        """Return a parameter of base + adapter: as stored, or float32 where the adapter counts."""
        weight = self.source.weights.read(self.source.parameters[parameter])
        adapter = self.source.adapter
        if adapter is None:
            return weight
        if (saved := adapter.saved.get(parameter)) is not None:
            return saved
        path = parameter.removesuffix(".weight")
        if parameter == path or path not in adapter.modules:
            return weight
        shape = self.source.modules[path]
        merged_OI = _added(weight.T if shape.transposed else weight, adapter, path)
        return merged_OI.T if shape.transposed else merged_OI

    def _plan(self) -> list[Target]:
        parameters, stored = self.source.parameters, self.source.weights.tensors
        targets = []
        for name, tensor in _tensors(self.source, self.layout, parameters, self.config).items():
            first = stored[parameters[tensor.parameters[0]]].shape
            shape = tensor.change.of(np.broadcast_to(np.float32(0), first)).shape
            if tensor.is_stack:
                shape = (len(tensor.parameters), *shape)
            targets.append(Target(name, tensor, shape, self._kind(name, shape)))
        targets += [
            Target(name, None, values.shape, Kind.F32) for name, values in self._factors.items()
        ]
        return targets

    def _kind(self, name: str, shape: tuple[int, ...]) -> Kind:
        kind = self._number_format
        if self.layout.stays_float32(name, len(shape)):
            return Kind.F32
        if is_vocabulary(name) and self.quant not in UNQUANTISED:
            kind = Kind.Q8_0
        return Kind.F16 if shape[-1] % GGML_QUANT_SIZES[kind][0] else kind

    def _describe(self, writer: GGUFWriter, name: str) -> None:
        writer.add_type(gguf.GGUFType.MODEL)
        _describe_sampling(writer, self.source.base.path)
        writer.add_name(name)
        writer.add_size_label(gguf.size_label(*writer.get_total_parameter_count()))
        if licence := self.source.base.licence:
            writer.add_license(licence.lower())
        self.layout.describe(writer, self.config)
        writer.add_file_type(self._file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def write_lora(path: Path, source: ModelReference, name: str) -> None:
    """Write the adapter of `source` alone, in float32.

    llama.cpp multiplies every update by one alpha / rank: where modules differ, and with rsLoRA,
    the ratio goes into B.

    Raises:
        AdapterError: A003, llama.cpp cannot apply it to the base.
        ModelError: M002, llama.cpp cannot compute the base.
    """
    layout, adapter = require_lora(source), source.adapter
    assert adapter is not None
    tensors = adapted_tensors(source, layout)
    alpha = next(iter(adapter.modules.values())).alpha
    writer = _writer(path, layout)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_name(name)
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for module, low_rank in adapter.modules.items():
        ((stored, change),) = tensors[module]
        writer.add_tensor(f"{stored}.lora_a", np.ascontiguousarray(low_rank.A_RI))
        B_OR = change.rows(_scaled(low_rank, adapter.scale(module), alpha))
        writer.add_tensor(f"{stored}.lora_b", np.ascontiguousarray(B_OR))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def adapted_tensors(source: ModelReference, layout: Layout) -> dict[str, list[tuple[str, Change]]]:
    """Return module of the adapter -> tensors with its rows, by name in GGUF, and their layout."""
    assert source.adapter is not None
    names = {f"{module}.weight": module for module in source.adapter.modules}
    adapted: dict[str, list[tuple[str, Change]]] = {}
    for name, tensor in _tensors(source, layout, names, full_config(source.base.path)).items():
        module = names[tensor.parameters[0]]
        adapted.setdefault(module, []).append((name, tensor.change))
    return adapted


def _tensors(
    source: ModelReference, layout: Layout, parameters: Iterable[str], config: Config
) -> dict[str, Tensor]:
    try:
        return layout.tensors(parameters, config)
    except FormatError as error:
        raise _refused(source, list(error.faults)) from error


def require_layout(source: ModelReference, config: Config) -> Layout:
    """Return the layout of the base's family.

    Raises:
        ModelError: M002, llama.cpp cannot compute the model.
    """
    kind = source.base.model_type
    if (layout := LAYOUTS.get(kind)) is None:
        raise _refused(source, [f"family {kind}, expected one of {', '.join(LAYOUTS)}"])
    if faults := list(layout.refusals(config)):
        raise _refused(source, faults)
    return layout


# --- numbers --------------------------------------------------------------------------------------


def _added(W_OI: Array, adapter: AdapterState, path: str) -> Array:
    """Return base + update in float32; with DoRA its rows have the norms of `magnitude_O`."""
    module = adapter.modules[path]
    merged_OI = W_OI.astype(np.float32)
    merged_OI += np.float32(adapter.scale(path)) * (module.B_OR @ module.A_RI)
    if module.magnitude_O is not None:
        merged_OI *= (module.magnitude_O / np.linalg.norm(merged_OI, axis=1))[:, None]
    return merged_OI


def _nbytes(elements: int, kind: Kind) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    return elements // block * size


def _rounded(rows: Array, kind: Kind) -> Array:
    if kind is Kind.BF16:  # the same rounding as that of `gguf`, and several times faster
        return rows.astype(ml_dtypes.bfloat16, copy=False).view(np.uint8)
    if kind in (Kind.F32, Kind.F16):
        return rows.astype(np.float16 if kind is Kind.F16 else np.float32, copy=False)
    return quantize(rows.astype(np.float32, copy=False), kind)


def _scaled(low_rank: LowRank, scale: float, alpha: float) -> Array:
    """Return B such that alpha / rank * B is what scale * B was."""
    ratio = scale * low_rank.rank / alpha
    return low_rank.B_OR if ratio == 1.0 else low_rank.B_OR * np.float32(ratio)


# --- the file -------------------------------------------------------------------------------------


def _writer(path: Path, layout: Layout) -> GGUFWriter:
    return GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[layout.arch])


def _describe_sampling(writer: GGUFWriter, folder: Path) -> None:
    """Write the sampling that `generation_config.json` recommends, llama.cpp's default."""
    path = folder / "generation_config.json"
    given: dict[str, Any] = read_json(path) if path.is_file() else {}
    for key, add in (
        ("top_k", writer.add_sampling_top_k),
        ("top_p", writer.add_sampling_top_p),
        ("min_p", writer.add_sampling_min_p),
        ("temperature", writer.add_sampling_temp),
    ):
        if given.get(key) is not None:
            add(given[key])


def require_lora(source: ModelReference) -> Layout:
    """Return the base's layout, if llama.cpp can apply the adapter of `source` to it.

    Raises:
        AdapterError: A003, it cannot.
        ModelError: M002, llama.cpp cannot compute the base.
    """
    layout, adapter = require_layout(source, full_config(source.base.path)), source.adapter
    assert adapter is not None
    faults = [f"whole tensor {name}" for name in adapter.saved]
    faults += [f"{p}: DoRA" for p, m in adapter.modules.items() if m.magnitude_O is not None]
    faults += ["no module"] * (not adapter.modules)
    for path, tensors in adapted_tensors(source, layout).items():
        names = [name for name, _ in tensors]
        faults += [f"{path}: llama.cpp splits it into {' and '.join(names)}"] * (len(names) > 1)
    if faults:
        raise AdapterError(
            "A003",
            "llama.cpp cannot apply this adapter by itself",
            where=source.base.id,
            faults=faults,
            remedy="export the merged model, with --to gguf",
        )
    return layout


def _refused(source: ModelReference, faults: list[str]) -> ModelError:
    return ModelError(
        "M002",
        "vox cannot write this model as GGUF",
        where=source.base.id,
        faults=faults,
        remedy="serve it with `vox serve`, or export the adapter with --to peft",
    )
