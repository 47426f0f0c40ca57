"""Tiny GGUF files, written the way llama.cpp's converter writes them.

Weights come from a real, randomly initialised transformers model, so that a conversion can be held
against the model it started from. Numbers that bfloat16 holds exactly, so that nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ Ġ"]

HEADS, KV_HEADS, HIDDEN, HEAD_DIM, LAYERS, FFN, CONTEXT = 4, 2, 32, 8, 2, 48, 64

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}


def byte_tokens() -> list[str]:
    """A byte-level vocabulary: special tokens, the 256 bytes, what the merges make."""
    from tokenizers.pre_tokenizers import ByteLevel

    made = ["".join(merge.split(" ")) for merge in MERGES]
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *made]


def sentencepiece_tokens() -> list[str]:
    """Gemma's kind: specials, runs of spaces stored as spaces, bytes, pieces in learned order."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "  ", "   "]
    return [*specials, *(f"<0x{n:02X}>" for n in range(256)), "he", "ll", "hell", "▁h", *"▁helo"]


def tiny_model(family: str, *, tied: bool = True, seed: int = 0) -> Any:
    """A randomly initialised model whose weights bfloat16 holds exactly, in float32."""
    import torch
    import transformers

    torch.manual_seed(seed)
    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
    }
    if family == "llama":
        config: Any = transformers.LlamaConfig(
            **shape, vocab_size=len(byte_tokens()), rms_norm_eps=1e-5, rope_theta=100000.0
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Gemma3TextConfig(
            **shape,
            vocab_size=len(sentencepiece_tokens()),
            query_pre_attn_scalar=HEAD_DIM,
            sliding_window=8,
        )
        model = transformers.Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # not all ones or zeros, or a lost offset would not show
                # Steps of 1/64 keep 1 + w exact in bfloat16, which is what the file stores it from.
                parameter.copy_(torch.randint(-16, 16, parameter.shape) / 64)
            parameter.copy_(parameter.bfloat16().float())
    return model.eval()


def gguf_tensors(model: Any, family: str) -> dict[str, np.ndarray]:
    """The model's tensors under llama.cpp's names, changed as its converter changes them."""
    names = {**_LAYER, **_NORMS[family]}
    out = {}
    for name, parameter in model.state_dict().items():
        array = parameter.float().numpy()
        if name == "lm_head.weight":
            if not model.config.tie_word_embeddings:
                out["output.weight"] = array
            continue
        if family == "gemma3" and "norm" in name:
            array = array + 1
        if name == "model.embed_tokens.weight":
            out["token_embd.weight"] = array
        elif name == "model.norm.weight":
            out["output_norm.weight"] = array
        else:
            _, _, layer, *rest = name.split(".")
            theirs = names[".".join(rest[:-1])]
            if family == "llama" and theirs in ("attn_q", "attn_k"):
                array = _permuted(array, HEADS if theirs == "attn_q" else KV_HEADS)
            out[f"blk.{layer}.{theirs}.weight"] = array
    return out


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    family: str = "llama",
    *,
    architecture: str | None = None,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    pre: str | None = None,
) -> Path:
    """Write `tensors` and the metadata of `family`.

    Args:
        architecture: what the file says it is, if not `family`.
        kinds: tensors to quantise.
        change: adds to, or takes from, the metadata before it is written.
        pre: `tokenizer.ggml.pre`, if not the family's.
    """
    writer = gguf.GGUFWriter(str(path), architecture or family)
    writer.add_name("Tiny")
    writer.add_license("mit")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    if family == "llama":
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(100000.0)
        _byte_tokenizer(writer, pre or "smollm")
    else:
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1000000.0)
        writer.add_sliding_window(8)
        _sentencepiece_tokenizer(writer, pre or "default")
    if change:
        change(writer)
    for name, array in tensors.items():
        kind = (kinds or {}).get(name)
        data = np.ascontiguousarray(array)
        if kind is None:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gguf(path: Path, family: str = "llama", **options: Any) -> Path:
    """A whole tiny model as a GGUF file."""
    return write_gguf(path, gguf_tensors(tiny_model(family), family), family, **options)


def _byte_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens = byte_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _sentencepiece_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens = sentencepiece_tokens()
    kinds = [1] * len(tokens)
    kinds[:7] = [3, 3, 3, 2, 3, 4, 4]
    kinds[7 : 7 + 256] = [6] * 256
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_scores([float(-n) for n in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_eot_token_id(4)
