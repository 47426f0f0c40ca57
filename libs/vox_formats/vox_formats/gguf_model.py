"""Convert a GGUF file to the files and tensors of a Hugging Face folder, in bfloat16.

`GgufModel` reads the metadata and reports all obstacles to a conversion together: an unknown
architecture, missing metadata, tensors too few, too many or of other shapes than the metadata's,
types that cannot be dequantised.
Tensors are dequantised one by one, in numpy, when the caller writes them. See
docs/adr/0001-gguf-in-numpy.md.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package reads it,
but trusts every length in the file and loops past its end. Here a length that leads outside the
file is an error, and so is every exception of the package.

llama.cpp renames modules and changes some tensors; `FAMILIES` undoes both. llama: the rows of Q and
K are reordered for its rotary embedding, which turns neighbouring pairs where Hugging Face's turns
halves. gemma3: every norm is stored as 1 + w. What a GGUF leaves out, because llama.cpp derives it
from the family, is filled in. Config keys are those of the models' own `config.json`, which
transformers and mlx-lm both read.

Shape legend: H heads, D half a head, I input features.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import gguf
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

from vox_formats import DamagedFile, FormatError
from vox_formats.gguf_tokenizer import build_tokenizer, tokenizer_config, tokenizer_kind

Array: TypeAlias = NDArray[Any]

CHUNK = 16 << 20
"""Elements dequantised at a time: 64 MB of float32."""

_REFUSED = "the GGUF file cannot be converted"
_REQUIRED = (
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
)
_OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.dimension_count")


class GgufModel:
    """A causal language model in a GGUF file.

    Attributes:
        files: name -> text of config, tokenizer, chat template and model card.
        shapes: tensor of the Hugging Face model -> shape.

    Raises:
        DamagedFile: the file is not a whole GGUF file.
        FormatError: with every reason why the model cannot be converted.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._source = source = GgufSource(path)
        self._family = family = _family(source)
        self._config, self._names = config, names = _plan(source, family)
        self.shapes = {ours: source.shapes[theirs] for ours, theirs in names.items()}
        max_length = config["max_position_embeddings"]
        self.files = {
            "config.json": _json(config),
            "generation_config.json": _json(_generation_config(source, config)),
            "tokenizer.json": build_tokenizer(source.metadata).to_str(),
            "tokenizer_config.json": _json(tokenizer_config(source.metadata, max_length)),
            "README.md": _card(source),
        }
        if template := source.value("tokenizer.chat_template"):
            self.files["chat_template.jinja"] = template

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield each tensor of `shapes` in order, dequantised to bfloat16."""
        for ours, theirs in self._names.items():
            yield ours, self._family.read(self._source, theirs, self._config)


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


# --- the file -------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """Location of a stored tensor; `shape` and `dtype` are those of its blocks."""

    kind: gguf.GGMLQuantizationType
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class GgufSource:
    """The metadata and the tensors of one file.

    Attributes:
        metadata: key -> a number, a text, a bool or a list of one of them.
        shapes: tensor -> shape, outermost dimension first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _whole():
            reader = _Bounded(path)
            # The reader keeps an array for each number in the file; the values are far smaller.
            self.metadata = {key: _value(field) for key, field in reader.fields.items()}
        self.shapes: dict[str, tuple[int, ...]] = {
            tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors
        }
        self._stored = {
            tensor.name: Stored(
                tensor.tensor_type, tensor.data_offset, tensor.data.shape, tensor.data.dtype
            )
            for tensor in reader.tensors
        }

    def value(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    def read(self, name: str, offset: float = 0.0) -> Array:
        """Return the tensor in bfloat16, after adding `offset` in float32."""
        out = np.empty(self.shapes[name], ml_dtypes.bfloat16)
        blocks, kind = self.blocks(name)
        step = max(1, CHUNK // max(1, math.prod(out.shape[1:])))
        for start in range(0, out.shape[0], step):
            rows = slice(start, start + step)
            out[rows] = dequantize(blocks[rows], kind) + np.float32(offset)
        return out

    def blocks(self, name: str) -> tuple[Array, gguf.GGMLQuantizationType]:
        """Return the tensor's blocks as stored, memory-mapped, and their type."""
        stored = self._stored[name]
        # One mapping per tensor, so that its pages are freed with it.
        blocks: np.memmap[Any, Any] = np.memmap(
            self.path, dtype=stored.dtype, mode="r", offset=stored.offset, shape=stored.shape
        )
        return blocks, stored.kind

    def unreadable(self) -> list[str]:
        """Return a fault for each tensor of a type that `gguf` cannot dequantise."""
        kinds = {stored.kind for stored in self._stored.values()}
        refused = {kind for kind in kinds if not _can_dequantize(kind)}
        return [
            f"tensor {name}: its type {stored.kind.name} cannot be dequantised"
            for name, stored in self._stored.items()
            if stored.kind in refused
        ]


class _Bounded(gguf.GGUFReader):
    """A reader that stops at the end of the file."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError(f"the file ends before what should be at byte {offset}")
        return super()._get(offset, dtype, count, override_order)


@contextmanager
def _whole() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise DamagedFile(
            _REFUSED,
            found=f"{type(error).__name__}: {error}",
            expected="a whole GGUF file of version 2 or 3",
        ) from error


def _value(field: gguf.ReaderField) -> Any:
    value = field.contents()
    # 1e-5 was written as the nearest float32; 1e-5 is what was meant.
    is_float32 = field.types == [gguf.GGUFValueType.FLOAT32]
    return float(str(np.float32(value))) if is_float32 else value


def _can_dequantize(kind: gguf.GGMLQuantizationType) -> bool:
    one_block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)
    try:
        dequantize(one_block, kind)
    except NotImplementedError:
        return False
    return True


# --- what can be converted ------------------------------------------------------------------------


def _family(source: GgufSource) -> Family:
    arch = source.value("general.architecture")
    if (family := FAMILIES.get(str(arch))) is None:
        raise FormatError(
            _REFUSED, found=f"architecture {arch}", expected=f"one of {', '.join(FAMILIES)}"
        )
    return family


def _plan(source: GgufSource, family: Family) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config, and the tensors: name in transformers -> name in GGUF."""
    faults = _metadata_faults(source, family) + source.unreadable()
    if not faults:
        config = family.config(source)
        names = family.names(source, config["num_hidden_layers"])
        faults = _rotary_faults(source, config) + _tensor_faults(source, names, config)
        if not faults:
            return config, names
    raise FormatError(_REFUSED, faults=faults)


def _metadata_faults(source: GgufSource, family: Family) -> list[str]:
    arch = source.value("general.architecture")
    given = [key for key in _OPTIONAL if f"{arch}.{key}" in source.metadata]
    faults = [
        f"metadata {arch}.{key}: found {value!r}, expected a number above 0"
        for key in (*_REQUIRED, *family.required, *given)
        if not isinstance(value := source.value(f"{arch}.{key}"), int | float) or value <= 0
    ]
    if not isinstance(source.value("tokenizer.ggml.tokens"), list):
        faults.append("metadata tokenizer.ggml.tokens: missing")
    if (kind := tokenizer_kind(source.metadata)) not in family.tokenizers:
        supported = ", ".join("/".join(pair) for pair in sorted(family.tokenizers))
        faults.append(f"tokenizer: found {'/'.join(kind)}, expected one of {supported}")
    scaling = f"{arch}.rope.scaling.type"
    if (found := source.value(scaling, "none")) not in ("none", "linear"):
        faults.append(f"metadata {scaling}: found {found}, expected none or linear")
    if "token_embd.weight" not in source.shapes:
        faults.append("tensor token_embd.weight: missing")
    return faults


def _rotary_faults(source: GgufSource, config: Mapping[str, Any]) -> list[str]:
    key, width = f"{source.value('general.architecture')}.rope.dimension_count", config["head_dim"]
    if (found := source.value(key, width)) == width:
        return []
    return [f"metadata {key}: found {found}, expected the width of a head, {width}"]


def _tensor_faults(
    source: GgufSource, names: Mapping[str, str], config: Mapping[str, Any]
) -> list[str]:
    theirs = set(names.values())
    missing = [f"tensor {name}: missing" for name in names.values() if name not in source.shapes]
    surplus = [f"tensor {name}: not supported" for name in source.shapes if name not in theirs]
    shapes, norm = _shapes(config), (config["hidden_size"],)
    expected = {theirs: shapes.get(ours.split(".")[-2], norm) for ours, theirs in names.items()}
    other = [
        f"tensor {name}: found {list(found)}, expected {list(shape)} by the metadata"
        for name, shape in expected.items()
        if (found := source.shapes.get(name, shape)) != shape
    ]
    return missing + surplus + other


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's modules; the other ones are norms of its hidden states."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    return {
        **dict.fromkeys(("embed_tokens", "lm_head"), (config["vocab_size"], hidden)),
        **dict.fromkeys(("k_proj", "v_proj"), (keys, hidden)),
        **dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden)),
        **dict.fromkeys(("q_norm", "k_norm"), (width,)),
        "q_proj": (queries, hidden),
        "o_proj": (hidden, queries),
        "down_proj": (hidden, inner),
    }


def _generation_config(source: GgufSource, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special ids; end of turn and end of text, if different, both end the answer."""
    ids = {key: config[key] for key in config if key.endswith("_token_id")}
    turn = source.value("tokenizer.ggml.eot_token_id")
    if turn is not None and turn != ids.get("eos_token_id"):
        ids["eos_token_id"] = [ids["eos_token_id"], turn] if "eos_token_id" in ids else turn
    return ids


def _card(source: GgufSource) -> str:
    licence = source.value("general.license")
    front = f"---\nlicense: {licence}\n---\n\n" if licence else ""
    name = source.value("general.name", source.path.stem)
    return f"{front}# {name}\n\nConverted to bfloat16 by vox from `{source.path.name}`.\n"


# --- families -------------------------------------------------------------------------------------

_ALL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of llama.cpp: names of its tensors and metadata.

    Args:
        layer: module of a layer in transformers -> tensor of a layer in GGUF.
        config: metadata -> `config.json`.
        read: source, name in GGUF, config -> the tensor in bfloat16, as transformers has it.
        tokenizers: pairs (tokenizer.ggml.model, tokenizer.ggml.pre) that belong to it.
        required: metadata of its own that it must have.
    """

    layer: Mapping[str, str]
    config: Callable[[GgufSource], dict[str, Any]]
    read: Callable[[GgufSource, str, Mapping[str, Any]], Array]
    tokenizers: frozenset[tuple[str, str]]
    required: tuple[str, ...] = ()

    def names(self, source: GgufSource, layers: int) -> dict[str, str]:
        """Tensor in transformers -> tensor in GGUF: exactly those that the file must have."""
        names = dict(_ALL)
        if "output.weight" in source.shapes:
            names["lm_head.weight"] = "output.weight"
        for layer in range(layers):
            for ours, theirs in self.layer.items():
                names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
        return names


def _common(source: GgufSource, arch: str) -> dict[str, Any]:
    """Return the keys of `config.json` that every family has."""
    heads = source.value(f"{arch}.attention.head_count")
    hidden = source.value(f"{arch}.embedding_length")
    ids = {
        f"{name}_token_id": source.value(f"tokenizer.ggml.{theirs}_token_id")
        for name, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        **{key: value for key, value in ids.items() if value is not None},
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": source.value(f"{arch}.feed_forward_length"),
        "max_position_embeddings": source.value(f"{arch}.context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": source.value(f"{arch}.block_count"),
        "num_key_value_heads": source.value(f"{arch}.attention.head_count_kv", heads),
        "head_dim": source.value(f"{arch}.attention.key_length", hidden // heads),
        "rms_norm_eps": source.value(f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in source.shapes,
        "vocab_size": source.shapes["token_embd.weight"][0],
    }
    if (factor := _linear_factor(source, arch)) not in (0.0, 1.0):
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return config


def _linear_factor(source: GgufSource, arch: str) -> float:
    """Return the factor of linear rope scaling, llama.cpp's default; older files use another
    key."""
    if source.value(f"{arch}.rope.scaling.type", "linear") != "linear":
        return 1.0
    older = source.value(f"{arch}.rope.scale_linear", 1.0)
    return float(source.value(f"{arch}.rope.scaling.factor", older))


def _llama_config(source: GgufSource) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_common(source, "llama"),
        "attention_bias": False,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_theta": source.value("llama.rope.freq_base", 10000.0),
    }


def _llama_read(source: GgufSource, name: str, config: Mapping[str, Any]) -> Array:
    tensor = source.read(name)
    if name.endswith(".attn_q.weight"):
        return _halves_from_pairs(tensor, config["num_attention_heads"])
    if name.endswith(".attn_k.weight"):
        return _halves_from_pairs(tensor, config["num_key_value_heads"])
    return tensor


def _halves_from_pairs(rows: Array, heads: int) -> Array:
    """Reorder each head's rows from llama.cpp's (a0 b0 a1 b1 …) to (a0 a1 … b0 b1 …)."""
    pairs_HD2I = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs_HD2I.swapaxes(1, 2).reshape(rows.shape)


def _gemma3_config(source: GgufSource) -> dict[str, Any]:
    config = _common(source, "gemma3")
    # The file does not say; llama.cpp, too, tells the 27B model by its 62 layers.
    is_27b = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **config,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scalar if is_27b else config["head_dim"]),
        "rope_local_base_freq": 10000.0,
        "rope_theta": source.value("gemma3.rope.freq_base", 1000000.0),
        "sliding_window": source.value("gemma3.attention.sliding_window"),
        "sliding_window_pattern": 6,
    }


def _gemma3_read(source: GgufSource, name: str, config: Mapping[str, Any]) -> Array:
    return source.read(name, offset=-1.0 if name.endswith("_norm.weight") else 0.0)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        layer={**_LAYER, "post_attention_layernorm": "ffn_norm"},
        config=_llama_config,
        read=_llama_read,
        tokenizers=frozenset({("gpt2", "smollm"), ("gpt2", "gpt-2")}),
    ),
    "gemma3": Family(
        layer={
            **_LAYER,
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        config=_gemma3_config,
        read=_gemma3_read,
        tokenizers=frozenset({("llama", "default")}),
        required=("attention.sliding_window",),
    ),
}
