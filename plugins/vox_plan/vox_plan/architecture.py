"""Read a model's dimensions from `config.json` and the headers of its weights.

Layers are read out of the names of tensors (`model.layers.3.…`, `transformer.h.3.…`), so that a
family needs no row of its own. Where the configuration is silent, the headers speak: the hidden
size is then the width that most linear modules read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vox_core.api.models import linear_modules, parameter_names, quantised_modules
from vox_core.api.plans import (
    HasShape,
    has_linear_attention,
    has_tied_head,
    text_config,
    vocabulary_size,
)
from vox_core.contract import ModuleShape, Quant

_LAYER = re.compile(r"^(.*?(?:^|\.)(?:layers|h|blocks)\.\d+)\.")
_NORM = re.compile(r"(norm|^ln)")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_ACTIVATION = ("hidden_act", "hidden_activation", "activation_function")
_EXPERTS = re.compile(r"\.(experts|router)\.")
_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
)
_EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")
_UP_PROJ = re.compile(r"\.(up_proj|w3)\.weight$")


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of a layer: how wide its weight is, and whether it has a bias (then it is a
    `LayerNorm`, else an RMS norm)."""

    width: int
    bias: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the language model.

    Args:
        linear: path of each linear module -> its shape.
        norms: path of each norm -> its width and kind.
        feed_forward: numbers a token that the frozen feed-forward of a mixture of experts keeps, in
            the compute dtype: of the experts that a token takes, of shared ones, of a dense layer.
        matrices: elements of all that `--shard` splits, experts included.
    """

    linear: Mapping[str, ModuleShape]
    norms: Mapping[str, Norm]
    feed_forward: int = 0
    matrices: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """State of a layer of linear attention, passed from token to token: a matrix per head."""

    heads: int
    key: int
    value: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as far as its memory is concerned.

    Args:
        model_type: of `config.json`.
        hidden: width of the residual stream.
        vocabulary: rows of the output head.
        heads: attention heads of a layer; 0 if unknown.
        layers: in the order of the model.
        elements: tensor name -> number of its elements, of all that a backend loads.
        head: tensor names of the output head, where it has its own.
        widths: tensor name -> row width, of the weights that every quantisation reaches.
        embedding_widths: the same of those that `nf4-embeddings` reaches besides.
        largest: elements of the largest matrix among `widths`; of a stack of experts, one's.
        activation: name of the feed-forward's non-linearity; empty if unknown.
        state: of layers that pass a state on instead of attending, so that documents lie in padded
            rows; None if there are none.
        softcap: scores of attention are soft-capped, so that they exist as a matrix.
        sinks: so they do beside attention sinks.
    """

    hidden: int
    vocabulary: int
    heads: int
    layers: tuple[Layer, ...]
    elements: Mapping[str, int]
    head: frozenset[str] = frozenset()
    widths: Mapping[str, int] = field(default_factory=dict)
    embedding_widths: Mapping[str, int] = field(default_factory=dict)
    largest: int = 0
    activation: str = ""
    state: State | None = None
    softcap: bool = False
    sinks: bool = False
    model_type: str = ""

    def packed(self, tensor: str, quant: Quant) -> tuple[Quant, int] | None:
        """The format and the row width of a weight that `quant` reaches; None if it does not."""
        whole = quant == "nf4-embeddings"
        if whole and tensor in self.embedding_widths:
            return "int8", self.embedding_widths[tensor]
        if quant == "none" or tensor not in self.widths:
            return None
        return "nf4" if whole else quant, self.widths[tensor]


def read_architecture(
    tensors: Mapping[str, HasShape], config: Mapping[str, Any], stored: Collection[str] = ()
) -> Architecture:
    """Read a model's architecture from its tensors and its config.json.

    Args:
        tensors: of the base's files, by name.
        config: the base's `config.json`.
        stored: names of the tensors that the files hold quantised already.
    """
    model_type, text = str(config.get("model_type")), text_config(config)
    names = _loaded(parameter_names(tensors, model_type), config)
    reached = quantised_modules(tensors, model_type, "nf4")
    whole = quantised_modules(tensors, model_type, "nf4-embeddings")
    widths, embedding_widths = _widths(reached), _widths(whole)
    linear = {
        path: reached[path] for path in linear_modules(tensors, model_type) if path in reached
    }
    if stored:
        widths, embedding_widths = {name: tensors[name].shape[-1] for name in stored}, {}
    return Architecture(
        model_type=model_type,
        hidden=_number(text, _HIDDEN) or _commonest_width(linear),
        vocabulary=vocabulary_size(config, tensors),
        heads=_number(text, _HEADS),
        layers=_layers(linear, names, tensors, text),
        elements={tensor: math.prod(tensors[tensor].shape) for tensor in names.values()},
        head=frozenset(t for n, t in names.items() if n.partition(".")[0] == "lm_head"),
        widths=widths,
        embedding_widths={t: w for t, w in embedding_widths.items() if t not in widths},
        largest=max((math.prod(tensors[name].shape[-2:]) for name in widths), default=0),
        activation=next((str(text[key]) for key in _ACTIVATION if text.get(key)), ""),
        state=_state(text),
        softcap=bool(text.get("attn_logit_softcapping")),
        sinks=any(name.endswith(".sinks") for name in names),
    )


def _loaded(names: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """Without a stored copy of the embedding that the model would tie."""
    heads = {"lm_head.weight"} if has_tied_head(config) else set()
    return {name: tensor for name, tensor in names.items() if name not in heads}


def _layers(
    linear: Mapping[str, ModuleShape],
    names: Mapping[str, str],
    tensors: Mapping[str, HasShape],
    text: Mapping[str, Any],
) -> tuple[Layer, ...]:
    modules: dict[str, dict[str, ModuleShape]] = {}
    for path, module in linear.items():
        if found := _LAYER.match(f"{path}."):
            modules.setdefault(found[1], {})[path] = module
    norms: dict[str, dict[str, Norm]] = {layer: {} for layer in modules}
    matrices = Counter[str]()
    for name, tensor in names.items():
        path, _, kind = name.rpartition(".")
        found, shape = _LAYER.match(name), tensors[tensor].shape
        if found and len(shape) > 1:
            matrices[found[1]] += math.prod(shape)
        if kind != "weight" or len(shape) != 1 or not found or found[1] not in modules:
            continue
        if _NORM.search(path.rpartition(".")[2]):
            norms[found[1]][path] = Norm(shape[0], f"{path}.bias" in names)
    ordered = sorted(modules, key=lambda layer: int(layer.rpartition(".")[2]))
    shapes = {name: tensors[tensor].shape for name, tensor in names.items()}
    frozen = _feed_forward(text, linear, shapes)
    return tuple(
        Layer(modules[layer], norms[layer], frozen.get(layer, 0), matrices[layer])
        for layer in ordered
    )


def _number(config: Mapping[str, Any], keys: Collection[str]) -> int:
    """The first of the keys that has a number; 0 if none has."""
    return next((config[key] for key in keys if isinstance(config.get(key), int)), 0)


def _widths(modules: Mapping[str, ModuleShape]) -> dict[str, int]:
    return {module.tensor: module.in_features for module in modules.values()}


def _commonest_width(linear: Mapping[str, ModuleShape]) -> int:
    widths = Counter(module.in_features for module in linear.values())
    return widths.most_common(1)[0][0] if widths else 0


def _state(config: Mapping[str, Any]) -> State | None:
    if not has_linear_attention(config):
        return None
    names = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    return State(*(_number(config, (name,)) for name in names))


def _feed_forward(
    text: Mapping[str, Any], linear: Collection[str], shapes: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Count what the feed-forward of each layer of a mixture of experts keeps; all of it is frozen.

    For each expert that a token takes, transformers keeps gate and up, the non-linearity of the
    gate, and the result before it is weighted.
    """
    hidden, width = _number(text, _HIDDEN), _number(text, _EXPERT_WIDTH)
    kept: dict[str, int] = {}
    has_experts = set[str]()
    for name, shape in shapes.items():
        if not (found := _LAYER.match(name)):
            continue
        if _EXPERTS.search(name):
            has_experts.add(found[1])
        elif _UP_PROJ.search(name) and name.removesuffix(".weight") not in linear:
            kept[found[1]] = kept.get(found[1], 0) + 3 * shape[0]
    for layer in has_experts:
        kept[layer] = kept.get(layer, 0) + _number(text, _PER_TOKEN) * (3 * width + hidden)
    return kept
