"""A merge holds one tensor at a time, its proof included, however large the model is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from vox_core.adapter.initial import initial_adapter
from vox_core.adapter.peft import write_adapter
from vox_core.adapter.targets import linear_modules, select_targets
from vox_core.contract import AdapterSpec
from vox_core.weights import INDEX, WeightFolder, write_safetensors
from vox_testing.tiny import write_tokenizer

HIDDEN, INNER, LAYERS, VOCABULARY = 1024, 4096, 10, 100_000
LARGEST = VOCABULARY * HIDDEN * 2
ALLOWED = 2 * LARGEST + 300 * 10**6

MERGE = """
import re, sys
from pathlib import Path
from vox_core.config import MergeSettings
from vox_core.run.merge import merge
merge(sys.argv[1], MergeSettings(out=Path(sys.argv[2])))
# Not getrusage: its maximum begins with that of the process that started this one.
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def shapes() -> dict[str, tuple[int, ...]]:
    named = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        named |= {f"{prefix}self_attn.{x}_proj.weight": (HIDDEN, HIDDEN) for x in "qkvo"}
        named |= {f"{prefix}mlp.{x}_proj.weight": (INNER, HIDDEN) for x in ("gate", "up")}
        named[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, INNER)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            named[f"{prefix}{norm}.weight"] = (HIDDEN,)
    return {**named, "lm_head.weight": (VOCABULARY, HIDDEN)}


def make_sharded_model(folder: Path) -> Path:
    """A llama of 0.75 GB, one shard a layer; the weights repeat one random block."""
    folder.mkdir()
    random = np.random.default_rng(0).normal(0, 0.03, 1 << 20).astype(ml_dtypes.bfloat16)
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes().items():
        part = name.split(".")[2] if ".layers." in name else name.split(".")[-2]
        shards.setdefault(f"model-{part}.safetensors", {})[name] = shape
    for file, named in shards.items():
        specs = {name: ("BF16", shape) for name, shape in named.items()}
        tensors = ((name, np.resize(random, shape)) for name, shape in named.items())
        write_safetensors(folder / file, specs, tensors)
    where = {name: file for file, named in shards.items() for name in named}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def make_adapter(folder: Path, base: Path) -> Path:
    folder.mkdir()
    weights = WeightFolder(base)
    modules = linear_modules(weights.tensors, "llama")
    spec = AdapterSpec("lora", 8, 16.0, 0.0, ("all-linear", "lm_head"))
    start = initial_adapter(select_targets(modules, spec.targets), spec, 0, weights.read)
    trained = {n: v + 0.01 * (".lora_B." in n) for n, v in start.tensors().items()}
    write_adapter(folder, start.with_tensors(trained), base=str(base), modules=modules)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads /proc/self/status")
def test_peak_memory_is_under_twice_the_largest_tensor_plus_300_mb(tmp_path):
    base = make_sharded_model(tmp_path / "base")
    total = sum((base / name).stat().st_size for name in WeightFolder(base).files)
    assert total > ALLOWED, "a model that fits whole would prove nothing"
    adapter = make_adapter(tmp_path / "adapter", base)
    command = [sys.executable, "-c", MERGE, adapter, tmp_path / "merged"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak = int(done.stdout.split()[-1]) * 1024
    assert peak < ALLOWED, f"{peak / 1e6:.0f} MB, allowed {ALLOWED / 1e6:.0f} MB"
