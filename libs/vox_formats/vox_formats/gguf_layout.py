"""The layout of a family in llama.cpp: tensors of a GGUF file from parameters of a model.

Names of tensors are those of the `gguf` package. A tensor is a parameter of the Hugging Face model,
a part of one, or a stack of one for each expert. Settings that llama.cpp's graph has built in are
refused where the model has others. The families are in `gguf_families.py`.

Shape legend: E experts, O output features, I input features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import gguf
from gguf import MODEL_ARCH, MODEL_TENSOR, GGUFWriter
from numpy.typing import NDArray

from vox_formats import FormatError

Array: TypeAlias = NDArray[Any]
Config: TypeAlias = Mapping[str, Any]

_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
LINEAR_ROPE = frozenset({"default", "linear", "yarn"})
SILU: Mapping[str, Any] = {"hidden_act": "silu"}
_FLOAT32 = ("_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight")


def _same(array: Array) -> Array:
    return array


@dataclass(frozen=True, slots=True)
class Change:
    """Layout of a tensor in GGUF.

    Args:
        part: the view of a parameter (O, ...) that is in the tensor.
        apply: converts that view; `undo` is its inverse.
        rows: permutes the rows alone, which is all of it for B of a low-rank update.
    """

    part: Callable[[Array], Array] = _same
    apply: Callable[[Array], Array] = _same
    undo: Callable[[Array], Array] = _same
    rows: Callable[[Array], Array] = _same

    def of(self, parameter: Array) -> Array:
        return self.apply(self.part(parameter))


SAME = Change()


@dataclass(frozen=True, slots=True)
class Tensor:
    """Source of a tensor in a GGUF file.

    Args:
        parameters: of the Hugging Face model; of a stack (E, ...) one for each expert.
        change: how each of them differs.
        is_stack: the parameters lie one after another, along a dimension of their own.
    """

    parameters: tuple[str, ...]
    change: Change
    is_stack: bool = False


Parts: TypeAlias = Mapping[str, Mapping[str, Change]]
"""Pattern of a parameter -> what stands in its place, one or several names -> layout."""


FIRST = Change(part=lambda w: w[..., : w.shape[-2] // 2, :])
SECOND = Change(part=lambda w: w[..., w.shape[-2] // 2 :, :])

STACKED: Parts = {
    r"\.experts\.gate_up_proj$": {
        ".experts.gate_proj.weight": FIRST,
        ".experts.up_proj.weight": SECOND,
    },
    r"\.experts\.down_proj$": {".experts.down_proj.weight": SAME},
    r"\.e_score_correction_bias$": {".e_score_correction.bias": SAME},
}


@dataclass(frozen=True, slots=True)
class Layout:
    """One family in llama.cpp.

    Args:
        arch: llama.cpp's architecture.
        describe: writes the metadata that follow from the configuration.
        built_in: configuration -> values of settings that the graph has built in.
        change: parameter name, configuration -> how its tensor differs.
        rope: rotary scalings that the graph computes.
        factors: configuration -> tensors of rotary factors, by name in GGUF.
        parts: configuration -> parameters that have other names, or several tensors.
        windowed: the graph has the family's sliding window.
    """

    arch: MODEL_ARCH
    describe: Callable[[GGUFWriter, Config], None]
    built_in: Callable[[Config], Mapping[str, Any]] = lambda config: SILU
    change: Callable[[str, Config], Change] = lambda name, config: SAME
    rope: frozenset[str] = LINEAR_ROPE
    factors: Callable[[Config], Mapping[str, Array]] = lambda config: {}
    parts: Callable[[Config], Parts] = lambda config: STACKED
    windowed: bool = False

    def tensors(self, parameters: Iterable[str], config: Config) -> dict[str, Tensor]:
        """Return name in GGUF -> source of the tensor.

        Layers beyond those of the model, which predict further tokens, are left out.

        Raises:
            FormatError: llama.cpp has no such tensors, or experts are missing.
        """
        table = gguf.get_tensor_name_map(self.arch, layers(config))
        made: dict[str, dict[int, tuple[str, Change]]] = {}
        faults = []
        for parameter, name, change in self._named(parameters, config):
            number = _EXPERT.search(name)
            found = table.get_name(_EXPERT.sub("", name), try_suffixes=(".weight", ".bias"))
            if found is None:
                faults.append(f"tensor {parameter}: unknown to llama.cpp")
            else:
                made.setdefault(found, {})[int(number[1]) if number else -1] = parameter, change
        tensors = {name: _in_order(numbered) for name, numbered in made.items()}
        if faults := faults or list(_missing_experts(tensors, config)):
            raise FormatError("llama.cpp cannot load these tensors", faults=faults)
        return tensors

    def _named(
        self, parameters: Iterable[str], config: Config
    ) -> Iterator[tuple[str, str, Change]]:
        """Yield parameter, name of the parameter or of a part of it, and layout."""
        parts = self.parts(config)
        for parameter in parameters:
            if _is_left_out(parameter, config):
                continue
            pattern = next((each for each in parts if re.search(each, parameter)), None)
            if pattern is None:
                yield parameter, parameter, self.change(parameter, config)
                continue
            for name, change in parts[pattern].items():
                yield parameter, re.sub(pattern, name, parameter), change

    def refusals(self, config: Config) -> Iterator[str]:
        """List what llama.cpp cannot compute of this model."""
        if (kind := rope_of(config).get("rope_type", "default")) not in self.rope:
            yield f"rope_type {kind}, expected one of {', '.join(sorted(self.rope))}"
        if method := (config.get("quantization_config") or {}).get("quant_method"):
            yield f"quantization_config: weights in {method}, expected unquantised ones"
        for key, value in self.built_in(config).items():
            if (found := config.get(key, value)) != value:
                yield f"{key} {found}, expected {value}"

    def notes(self, config: Config) -> Iterator[str]:
        """List what llama.cpp computes otherwise."""
        size, longest = config.get("sliding_window"), config.get("max_position_embeddings")
        used = config.get("use_sliding_window", True) and not self.windowed
        if used and size is not None and (longest is None or size < longest):
            yield (
                f"llama.cpp leaves out this model's sliding window of {size} tokens: longer "
                "texts differ"
            )
        if rounds_yarn(config):
            yield (
                "llama.cpp rounds the bounds of YaRN's ramp, this model does not (truncate): its "
                "rotary frequencies differ"
            )

    def stays_float32(self, name: str, dimensions: int) -> bool:
        """Whether llama.cpp's kernels expect the tensor `name` in float32."""
        position = gguf.TENSOR_NAMES[MODEL_TENSOR.POS_EMBD]
        small = dimensions <= 1 or name.endswith(_FLOAT32)
        return small or not name.endswith(".weight") or name == f"{position}.weight"


def _is_left_out(parameter: str, config: Config) -> bool:
    layer = _LAYER.match(parameter)
    beyond = layer is not None and int(layer[1]) >= layers(config)
    head = parameter == "lm_head.weight" and tied(config)
    return beyond or head or parameter.endswith(_BUFFERS)


def _in_order(numbered: Mapping[int, tuple[str, Change]]) -> Tensor:
    parameters = tuple(numbered[number][0] for number in sorted(numbered))
    return Tensor(parameters, next(iter(numbered.values()))[1], -1 not in numbered)


def _missing_experts(tensors: Mapping[str, Tensor], config: Config) -> Iterator[str]:
    for name, tensor in tensors.items():
        if tensor.is_stack and (found := len(tensor.parameters)) != experts(config):
            yield f"tensor {name}: found {found} experts, expected {experts(config)}"


def rounds_yarn(config: Config) -> bool:
    """Whether llama.cpp rounds the bounds of YaRN's ramp, and the model does not."""
    rope = rope_of(config)
    return rope["rope_type"] == "yarn" and rope.get("truncate") is False


def experts(config: Config) -> int:
    """Return the number of a mixture's experts; 0 for a dense model."""
    keys = "num_local_experts", "num_experts", "n_routed_experts"
    return next((int(config[key]) for key in keys if config.get(key)), 0)


def layers(config: Config) -> int:
    return int(config.get("num_hidden_layers", config.get("n_layer", 0)))


def tied(config: Config) -> bool:
    return bool(config.get("tie_word_embeddings"))


def is_vocabulary(name: str) -> bool:
    """Whether the tensor `name` of a GGUF file is the embedding or the output head."""
    return name in ("token_embd.weight", "output.weight")


def rope_of(config: Config) -> Mapping[str, Any]:
    """Return the rotary settings of full attention, whichever release wrote them."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = dict(given.get("full_attention") or given)
    found.setdefault("rope_type", found.get("type", "default"))
    found.setdefault("rope_theta", config.get("rope_theta"))
    return found
