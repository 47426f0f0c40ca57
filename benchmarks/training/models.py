"""Model folders with random weights of a real shape, and the start of their adapters.

    python -m benchmarks.training.models SHAPE FOLDER DEVICE

Random weights as transformers draws them would make a blind gate: every token would cost the
logarithm of the vocabulary, whatever the trainer does with padding, weights and means. Here the
residual stream is mostly the token's own embedding, and the head reads it back, so a token that
repeats the one before costs about 0.5 and another one about 12; documents.py mixes the two in
shares of each document's own, and a wrong mean shows at once.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import vox_core
from benchmarks.training.shapes import SHAPES, Shape
from vox_core import models
from vox_core.adapter.initial import initial_adapter
from vox_core.adapter.peft import write_adapter
from vox_core.adapter.targets import linear_modules, select_targets
from vox_core.contract import AdapterSpec
from vox_core.weights import WeightFolder
from vox_testing.tiny import write_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

REAL = "-real"
"""The ending of a model's name that asks for the catalog's weights instead of random ones."""

_EMBEDDING, _GAIN, _OWN_LOGIT = 0.5, 0.5, 16.0
"""Standard deviation of the embedding; how a linear module changes the size of what it is given;
the logit of the token itself, if no layer did anything."""


def model_folder(name: str, cache: Path, device: str) -> Path:
    """The folder of a model, made or fetched if it is not there yet."""
    if name.endswith(REAL):
        return models.resolve(name.removesuffix(REAL)).path
    folder = cache / name
    if not (folder / "tokenizer.json").is_file():
        # In a process of its own: the one that measures stays small and never holds a GPU.
        module = [sys.executable, "-m", "benchmarks.training.models"]
        subprocess.run([*module, name, str(folder), device], check=True)
    return folder


def shape_of(name: str) -> Shape:
    return SHAPES[name.removesuffix(REAL)]


def write_start(folder: Path, model: Path, spec: AdapterSpec, seed: int) -> None:
    """The core's seeded start (A random, B zero) as a folder that PEFT loads."""
    weights = WeightFolder(model)
    linear = linear_modules(weights.tensors, model_type(model))
    state = initial_adapter(select_targets(linear, spec.targets), spec, seed, weights.read)
    folder.mkdir(parents=True, exist_ok=True)
    write_adapter(folder, state, base=str(model), modules=linear)


def text(name: str, model: Path) -> NDArray[np.int64] | None:
    """The conversations of the quick start as one row of tokens, for a model with real weights."""
    if not name.endswith(REAL):
        return None
    from tokenizers import Tokenizer

    rows = (Path(vox_core.__file__).parent / "quickstart/data/train.jsonl").read_text().splitlines()
    said = [each["content"] for row in rows for each in json.loads(row)["messages"]]
    encoded = Tokenizer.from_file(str(model / "tokenizer.json")).encode("\n\n".join(said))
    return np.array(encoded.ids)


def model_type(model: Path) -> str:
    return str(json.loads((model / "config.json").read_text())["model_type"])


def make(shape: Shape, folder: Path, device: str) -> None:
    """Write a model folder in bfloat16, so that float32 and bfloat16 read the same numbers."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        config = CONFIG_MAPPING[shape.model_type](**_config(shape))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        embedding.normal_(0, _EMBEDDING)
        head.copy_(embedding)
        model.model.norm.weight.fill_(_OWN_LOGIT / _EMBEDDING / shape.hidden)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
        "initializer_range": _GAIN / math.sqrt(shape.hidden),
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        # Those of the byte-level tokenizer that is written beside the weights.
        "bos_token_id": 259,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }


if __name__ == "__main__":
    make(SHAPES[sys.argv[1]], Path(sys.argv[2]), sys.argv[3])
