"""Models that plain PEFT and plain mlx-lm both load, adapters for them, and the logits of each.

Nothing of vox computes a logit here.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPTNeoXConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from vox_core.adapter.targets import linear_modules, parameter_names, select_targets
from vox_core.contract import AdapterState, LowRank
from vox_core.weights import WeightFolder
from vox_formats.mlx_adapter import MlxBase
from vox_testing import tiny

TEXT = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3", "gpt2")
FAMILIES = (*TEXT, "qwen3_5", "gemma3-nested", "gpt_neox")
# No longer than the tiny models' sliding window.
TOKENS = np.arange(40, 56)
VISION = {
    "gemma3-nested": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "qwen3_5": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
    },
}

NEOX = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "hidden_act": "gelu_new",  # mlx-lm knows no other here
}
# What older configurations say, and mlx-lm asks for.
TOLD = {
    "gpt2": {"n_ctx": 512},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gemma3-nested": {"vocab_size": tiny.VOCABULARY},
}


def make(family: str, folder: Path, layers: int | None = None) -> Path:
    """A tiny model, configured and named as the hub has those of its family, for mlx-lm reads that.

    Args:
        layers: how many, if not as many as the family needs to be itself.
    """
    torch.manual_seed(0)
    model = _build(family, {"num_hidden_layers": layers} if layers else {})
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    if family == "gpt2":
        _drop_prefix(folder / "model.safetensors")
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    told = {"rope_theta": theta} if theta else {}
    config_file.write_text(json.dumps({**config, **told, **TOLD.get(family, {})}))
    return folder


def _build(family: str, changes: dict[str, int]) -> PreTrainedModel:
    if family == "gpt_neox":
        return AutoModelForCausalLM.from_config(GPTNeoXConfig(**{**NEOX, **changes}))
    model_type, settings = tiny.FAMILIES[family.removesuffix("-nested")]
    # mlx-lm's gemma3 has one full layer in six, and no model without it. It rounds the square root
    # of the width to bfloat16, which costs nothing where that is 8.
    depth = {"num_hidden_layers": 6, "hidden_size": 64} if model_type == "gemma3_text" else {}
    text = {**settings, **depth, **changes}
    if depth or changes:
        text.pop("layer_types", None)  # made for the number of layers there
    if family == "gemma3-nested":
        vision = {"vision_config": VISION[family], "mm_tokens_per_image": 4}
        return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, **vision))
    if family == "qwen3_5":
        config = Qwen3_5Config(text_config=text, vision_config=VISION[family])
        return Qwen3_5ForConditionalGeneration(config)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**text))


def _drop_prefix(file: Path) -> None:
    tensors = {name.removeprefix("transformer."): v for name, v in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def base_of(folder: Path) -> MlxBase:
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    tensors = WeightFolder(folder).tensors
    return MlxBase(
        model_type,
        linear_modules(tensors, model_type),
        {name: tensors[t].shape for name, t in parameter_names(tensors, model_type).items()},
    )


def random_adapter(
    folder: Path,
    method: str = "lora",
    *,
    ranks: tuple[int, ...] = (4,),
    alphas: tuple[float, ...] = (8.0,),
    targets: tuple[str, ...] = ("all-linear",),
) -> AdapterState:
    """Random A and B; ranks and alphas go round by module."""
    read, modules = WeightFolder(folder).read, {}
    found = select_targets(base_of(folder).modules, targets)
    for number, (path, shape) in enumerate(found.items()):
        random = np.random.default_rng(zlib.crc32(path.encode()))
        rank = ranks[number % len(ranks)]
        W = np.asarray(read(shape.tensor), np.float32)
        norm_O = np.linalg.norm(W.T if shape.transposed else W, axis=1)
        modules[path] = LowRank(
            A_RI=random.standard_normal((rank, shape.in_features)).astype(np.float32) / 4,
            B_OR=random.standard_normal((shape.out_features, rank)).astype(np.float32) / 20,
            alpha=alphas[number % len(alphas)],
            magnitude_O=(norm_O * random.uniform(0.8, 1.2, norm_O.shape)).astype(np.float32)
            if method == "dora"
            else None,
        )
    return AdapterState(method, modules)


def peft_logits(folder: Path, adapter: Path | None) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(TOKENS)[None]).logits[0].float().numpy()


def mlx_logits(folder: Path, adapter: Path | None) -> np.ndarray:
    model, _ = load_model(folder)
    if adapter is not None:
        model = load_adapters(model, str(adapter))
    return mlx_forward(model)


def mlx_forward(model: object) -> np.ndarray:
    model.eval()
    return np.array(model(mx.array(TOKENS)[None])[0].astype(mx.float32))


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
