"""Quantised folders against mlx-lm: those it writes are read here, those written here it loads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from vox_core.adapter.targets import linear_modules, quantised_modules
from vox_core.run.requantise import requantise
from vox_core.testing.llama import write_llama
from vox_core.testing.tiny import write_tokenizer
from vox_core.weights import MLX_FORMATS, WeightFolder, open_weights
from vox_core.weights.quantised import SAME_IN_MLX

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


ALWAYS_TIED = {"gemma", "gemma2"}


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
def test_mlx_lm_loads_what_is_written_here(tmp_path, quant):
    base, form = write_llama(tmp_path / "base", dtype="BF16"), MLX_FORMATS[quant]
    folder = tmp_path / "written"
    folder.mkdir()
    modules = linear_modules(WeightFolder(base).tensors, "llama")
    requantise(base, folder, modules, quant)
    model, config = load_model(folder)
    assert config["quantization"] == form.describe()
    loaded = dict(tree_flatten(model.parameters()))
    reached = {module.tensor for module in quantised_modules(modules).values()}
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
    logits = model(mx.array([[1, 2, 3]]))
    assert np.isfinite(as_float32(logits)).all()
    write_tokenizer(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
