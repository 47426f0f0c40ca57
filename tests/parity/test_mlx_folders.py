"""Quantised folders against mlx-lm: those it writes are read here, those written here it loads, and
computes what transformers computes of the same weights. Nothing of vox_mlx takes part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.parity import mlx_models
from tests.parity.tolerances import LOGITS
from vox_core.adapter.targets import quantised_modules
from vox_core.run.hf_checkpoint import plain_copy
from vox_core.weights import SAME_IN_MLX, WeightFolder, open_weights
from vox_export.requantise import requantise
from vox_formats.mlx_model import STACKED, mlx_config
from vox_formats.quant import MLX_FORMATS, named_format
from vox_mlx.base import read_config
from vox_testing.llama import write_llama
from vox_testing.tiny import write_tokenizer

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm import convert  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

WIDTHS = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 259,
    "eos_token_id": 258,
    "pad_token_id": 256,
}


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with mx.stream(mx.cpu):
        yield


def as_float32(array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


ALWAYS_TIED = {"gemma2"}


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        (f, tied)
        for f in sorted(SAME_IN_MLX)
        for tied in (True, False)
        if tied or f not in ALWAYS_TIED
    ],
)
def test_the_family_has_the_same_names_and_values_in_mlx(tmp_path, family, tied):
    config = CONFIG_MAPPING[family](**WIDTHS, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for parameter in model.parameters():  # norms are not all ones then
        parameter.data += 0.01 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    theirs = dict(tree_flatten(load_model(tmp_path, lazy=True)[0].parameters()))
    ours = WeightFolder(tmp_path)
    assert theirs.keys() == ours.tensors.keys()
    for name, array in theirs.items():
        assert np.array_equal(as_float32(array), ours.read(name).astype(np.float32)), name


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("quant", MLX_FORMATS)
def test_what_mlx_lm_converts_is_read_with_the_numbers_that_mlx_sees(tmp_path, quant, dtype):
    base, form = write_llama(tmp_path / "base", dtype=dtype), MLX_FORMATS[quant]
    folder = tmp_path / "converted"
    convert(str(base), str(folder), quantize=True, q_mode=form.mode, q_bits=form.bits)
    seen, plain = open_weights(folder), WeightFolder(base)
    assert seen.quant == quant
    assert set(seen.tensors) == set(plain.tensors)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= seen.quantised
    for name in plain.tensors:
        W = plain.read(name)
        expected = form.round_trip(W) if name in seen.quantised else W
        assert seen.tensors[name].shape == W.shape
        assert seen.read(name).tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("quant", MLX_FORMATS)
@pytest.mark.parametrize("family", sorted(STACKED))
def test_a_mixture_that_mlx_lm_converts_is_read_expert_by_expert(tmp_path, family, quant):
    """With routers in a format of their own, or none."""
    base, form = mlx_models.make(family, tmp_path / "base"), MLX_FORMATS[quant]
    write_tokenizer(base)
    rewrite(base, mlx_config(read_config(base)))  # settings as mlx-lm reads them
    folder, group = tmp_path / "converted", min(form.group_size, 32)
    convert(
        *(str(base), str(folder)),
        quantize=True,
        q_mode=form.mode,
        q_bits=form.bits,
        q_group_size=group,
        dtype="float32",
    )
    seen, plain = open_weights(folder), WeightFolder(base)
    assert seen.quant == quant
    assert set(seen.tensors) == set(plain.tensors)
    assert {name for name in plain.tensors if ".experts." in name} <= seen.quantised
    own = json.loads((folder / "config.json").read_text())["quantization"]
    for name in plain.tensors:
        W = expected = plain.read(name)
        if name in seen.quantised:
            _, each = named_format(own.get(name.removesuffix(".weight"), own))
            expected = each.round_trip(W)
        assert seen.tensors[name].shape == W.shape
        assert seen.read(name).tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("quant", MLX_FORMATS)
def test_mlx_lm_loads_what_is_written_here(tmp_path, quant):
    base, form = write_llama(tmp_path / "base", dtype="BF16"), MLX_FORMATS[quant]
    folder = tmp_path / "written"
    folder.mkdir()
    requantise(base, folder, quant)
    model, config = load_model(folder)
    assert config["quantization"] == form.describe()
    loaded = dict(tree_flatten(model.parameters()))
    modules = quantised_modules(WeightFolder(base).tensors, "llama", quant)
    reached = {module.tensor for module in modules.values()}
    for name in reached:
        path = name.removesuffix(".weight")
        parts = [loaded.get(f"{path}.{part}") for part in ("weight", "scales", "biases")]
        left = mx.dequantize(
            *parts,
            group_size=form.group_size,
            bits=form.bits,
            mode=form.mode,
            dtype=mx.bfloat16,
        )
        expected = form.round_trip(WeightFolder(base).read(name)).astype(np.float32)
        assert np.array_equal(as_float32(left), expected), name
    assert "lm_head.scales" not in loaded


# --- the model, as plain mlx-lm and as transformers compute it ------------------------------------

# Longer than any window below, and than the positions that the scaled ropes were made for.
TOKENS = np.random.default_rng(0).integers(0, 256, 96)
THETA = 5e5
# Weights that make a wrong angle a large error, where the default of 0.02 would hide it.
STEEP = {"initializer_range": 0.2, "max_position_embeddings": 512}
SCALED = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}
OWN = {
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 512},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {"rope_type": "default", "rope_theta": THETA},
        },
    },
    "mistral": {"sliding_window": None},
}


def write(folder: Path, family: str, **settings: Any) -> dict[str, Any]:
    """A float32 model folder with a rope_theta of `THETA`; gives its `config.json`."""
    rope = {"rope_type": "default", "rope_theta": THETA}
    config = CONFIG_MAPPING[family](
        **{**WIDTHS, **STEEP, "rope_parameters": rope, **OWN.get(family, {}), **settings}
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    written: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return written


def rewrite(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def quantised(base: Path) -> Path:
    folder = base.with_name("quantised")
    folder.mkdir()
    requantise(base, folder, "affine4")
    return folder


def distance_of_plain_mlx_lm(folder: Path) -> float:
    """Of mlx-lm's logits from transformers' on the dequantised weights: relative, (T, V)."""
    with plain_copy(open_weights(folder), folder) as plain:
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS[None])).logits[0].numpy()
    logits = as_float32(load_model(folder)[0](mx.array(TOKENS[None])))[0]
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("family", sorted(SAME_IN_MLX))
def test_plain_mlx_lm_computes_what_transformers_does(tmp_path, family):
    write(tmp_path / "base", family)
    assert distance_of_plain_mlx_lm(quantised(tmp_path / "base")) < LOGITS


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_plain_mlx_lm_scales_the_rope_as_transformers_does(tmp_path, family, kind):
    rope = {"rope_type": kind, "rope_theta": THETA, **SCALED[kind]}
    write(tmp_path / "base", family, rope_parameters=rope)
    assert distance_of_plain_mlx_lm(quantised(tmp_path / "base")) < LOGITS


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_the_words_of_transformers_4_are_kept(tmp_path, family):
    config = write(tmp_path / "base", family)
    del config["rope_parameters"]
    rewrite(tmp_path / "base", {**config, "rope_theta": THETA})
    assert distance_of_plain_mlx_lm(quantised(tmp_path / "base")) < LOGITS


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_what_the_configuration_leaves_to_transformers_is_no_default_of_mlx_lm(tmp_path, family):
    config = write(tmp_path / "base", family)
    for key in ("rope_parameters", "tie_word_embeddings"):
        config.pop(key, None)
    rewrite(tmp_path / "base", config)
    assert distance_of_plain_mlx_lm(quantised(tmp_path / "base")) < LOGITS


def read_by_transformers(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    del said["_name_or_path"]
    said["rope_parameters"].pop("type", None)  # mlx-lm's name of `rope_type`, which decides
    return said


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        *((family, {}) for family in sorted(SAME_IN_MLX)),
        *(("llama", {"rope_type": kind, "rope_theta": THETA, **SCALED[kind]}) for kind in SCALED),
    ],
)
def test_transformers_reads_what_it_read_before(tmp_path, family, rope):
    base = tmp_path / "base"
    write(base, family, **({"rope_parameters": rope} if rope else {}))
    before, after = (read_by_transformers(folder) for folder in (base, quantised(base)))
    assert {key: after[key] for key in before} == before
