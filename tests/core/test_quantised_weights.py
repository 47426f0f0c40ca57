"""Folders in MLX's format: what is seen of them, and every fault named."""

from __future__ import annotations

import json
from typing import get_args

import ml_dtypes
import numpy as np
import pytest

from vox_core.adapter.targets import format_of, quantised_modules
from vox_core.contract import Quant
from vox_core.errors import ModelError
from vox_core.weights import INDEX, WeightFolder, open_weights, plain_config, write_safetensors
from vox_formats.quant import CODECS, MLX_FORMATS, MlxFormat

BF16 = np.dtype(ml_dtypes.bfloat16)
NAMES = {"uint32": "U32", "uint8": "U8", "bfloat16": "BF16", "float32": "F32"}
UP, NORM = "model.layers.0.mlp.up_proj", "model.norm.weight"


def weight(rows: int = 8, width: int = 128) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, width)).astype(BF16)


def packed(path: str, form: MlxFormat, W: np.ndarray) -> dict[str, np.ndarray]:
    parts = zip(("weight", "scales", "biases"), form.quantise(W), strict=True)
    return {f"{path}.{part}": array for part, array in parts if array is not None}


def write(folder, tensors, quantization, model_type="llama", files=("model.safetensors",)):
    """A folder with its tensors dealt out to `files`."""
    folder.mkdir()
    where = {name: files[i % len(files)] for i, name in enumerate(tensors)}
    for file in files:
        own = {name: array for name, array in tensors.items() if where[name] == file}
        specs = {name: (NAMES[a.dtype.name], a.shape) for name, a in own.items()}
        write_safetensors(folder / file, specs, own.items())
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = {"model_type": model_type, "quantization": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def affine(bits: int = 4, group: int = 64) -> dict[str, object]:
    return {"group_size": group, "bits": bits}


@pytest.mark.parametrize("quant", MLX_FORMATS)
def test_tensors_are_seen_as_what_they_stand_for(tmp_path, quant):
    form, W, norm = MLX_FORMATS[quant], weight(), np.ones(128, BF16)
    tensors = {**packed(UP, form, W), NORM: norm}
    seen = open_weights(write(tmp_path / "m", tensors, form.describe()))
    assert seen.quant == quant
    assert seen.quantised == {f"{UP}.weight"}
    assert list(seen.tensors) == [f"{UP}.weight", NORM]
    info = seen.tensors[f"{UP}.weight"]
    assert (info.dtype, info.shape, info.nbytes) == ("BF16", (8, 128), 8 * 128 * 2)
    assert seen.read(f"{UP}.weight").tobytes() == form.round_trip(W).tobytes()
    assert seen.read(NORM).tobytes() == norm.tobytes()


def test_a_module_may_have_a_format_of_its_own(tmp_path):
    own, rest, W = MlxFormat("affine", 8, 32), MLX_FORMATS["affine4"], weight()
    down = UP.replace("up", "down")
    tensors = {**packed(UP, own, W), **packed(down, rest, W)}
    seen = open_weights(write(tmp_path / "m", tensors, {**affine(), UP: affine(8, 32)}))
    assert seen.quant == "affine4"
    assert seen.read(f"{UP}.weight").tobytes() == own.round_trip(W).tobytes()
    assert seen.read(f"{down}.weight").tobytes() == rest.round_trip(W).tobytes()


@pytest.mark.parametrize(
    ("family", "block", "matrix"),
    [("qwen3_moe", "mlp", "up_proj"), ("mixtral", "block_sparse_moe", "w3")],
)
def test_a_stack_of_experts_is_seen_as_its_experts(tmp_path, family, block, matrix):
    form = MLX_FORMATS["mxfp4"]
    experts = [weight(8, 128) + number for number in range(3)]
    each = [form.quantise(W) for W in experts]
    path = f"model.layers.0.{block}.switch_mlp.up_proj"
    tensors = {
        f"{path}.weight": np.stack([one.weight for one in each]),
        f"{path}.scales": np.stack([one.scales for one in each]),
    }
    seen = open_weights(write(tmp_path / "m", tensors, form.describe(), family))
    found = [f"model.layers.0.{block}.experts.{number}.{matrix}.weight" for number in range(3)]
    assert list(seen.tensors) == list(seen.where) == found
    assert seen.quantised == {*found}
    for name, W in zip(found, experts, strict=True):
        assert seen.tensors[name].shape == W.shape
        assert seen.read(name).tobytes() == form.round_trip(W).tobytes()


def test_shards_are_those_of_the_plain_copy(tmp_path):
    tensors = {**packed(UP, MLX_FORMATS["affine4"], weight()), NORM: np.ones(128, BF16)}
    shards = ("model-1.safetensors", "model-2.safetensors", "model-3.safetensors")
    seen = open_weights(write(tmp_path / "m", tensors, affine(), files=shards))
    assert seen.where == {f"{UP}.weight": shards[0], NORM: shards[0]}
    assert seen.nbytes == 8 * 128 * 2 + 128 * 2
    assert seen.files == shards[:1]


def test_a_plain_folder_is_what_it_was(tmp_path):
    write(tmp_path / "m", {NORM: np.ones(128, BF16)}, None)
    assert isinstance(open_weights(tmp_path / "m"), WeightFolder)


def without(part: str):
    tensors = packed(UP, MLX_FORMATS["affine4"], weight())
    return {name: array for name, array in tensors.items() if not name.endswith(part)}


@pytest.mark.parametrize(
    ("tensors", "said", "fault"),
    [
        (without("biases"), affine(), f"{UP}: it has no biases"),
        (without("scales"), affine(), f"{UP}.weight: it is packed, and has no scales"),
        (without("weight"), affine(), f"{UP}: it has no weight"),
        (
            without("nothing"),
            affine(8),
            f"{UP}.scales: found BF16 [8, 2], expected F32 or F16 or BF16 [8, 1]",
        ),
        (
            {**without("nothing"), f"{UP}.global_scale": np.ones(1, np.float32)},
            affine(),
            f"{UP}: it has a scale of the whole tensor, too",
        ),
        (
            packed(UP.replace("up", "switch_mlp.up"), MLX_FORMATS["affine4"], weight()),
            affine(),
            "model.layers.0.mlp.switch_mlp.up_proj.weight: found U32 [8, 16], expected U32, three "
            "axes",
        ),
        (without("nothing"), affine(3), f"{UP}: found mode None, bits 3, group_size 64"),
        (without("nothing"), affine(4, 48), f"{UP}: found mode None, bits 4, group_size 48"),
        (
            {**without("nothing"), f"{UP}.weight": weight()},
            affine(),
            f"{UP}.weight: found BF16 [8, 128], expected U32, two axes",
        ),
        (
            without("biases"),
            MLX_FORMATS["mxfp4"].describe(),
            f"{UP}.scales: found BF16 [8, 2], expected U8 [8, 4]",
        ),
    ],
)
def test_every_fault_of_a_quantised_folder_is_named(tmp_path, tensors, said, fault):
    with pytest.raises(ModelError) as caught:
        open_weights(write(tmp_path / "m", tensors, said))
    assert caught.value.code == "VOX-M002"
    assert caught.value.faults == (fault,)
    assert "--quant affine4" in caught.value.remedy


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_5", "gpt_neox"])
def test_a_family_that_mlx_changes_is_refused_by_name(tmp_path, model_type):
    tensors = packed(UP, MLX_FORMATS["affine4"], weight())
    with pytest.raises(ModelError, match="this family") as caught:
        open_weights(write(tmp_path / "m", tensors, affine(), model_type))
    assert model_type in caught.value.found


def test_the_plain_configuration_keeps_what_others_say_of_their_formats():
    mine = {"model_type": "llama", "quantization": affine(), "quantization_config": affine()}
    assert plain_config(mine) == {"model_type": "llama"}
    other = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    assert plain_config(other) == other


def test_every_quantisation_has_a_codec_for_all_that_it_reaches():
    every = set(get_args(Quant)) - {"none"}
    assert {format_of("model.layers.0.mlp.up_proj", quant) for quant in every} == set(CODECS)
    assert {format_of("model.embed_tokens", quant) for quant in every} == set(CODECS)


def test_with_embeddings_those_and_the_head_take_eight_bits():
    tensors = {
        "model.embed_tokens.weight": np.zeros((9, 8)),
        "model.layers.0.mlp.up_proj.weight": np.zeros((4, 8)),
        "model.norm.weight": np.zeros(8),
        "lm_head.weight": np.zeros((9, 8)),
    }
    reached = quantised_modules(tensors, "llama", "nf4-embeddings")
    assert {path: format_of(path, "nf4-embeddings") for path in reached} == {
        "model.embed_tokens": "int8",
        "model.layers.0.mlp.up_proj": "nf4",
        "lm_head": "int8",
    }
    assert quantised_modules(tensors, "llama", "nf4").keys() == {"model.layers.0.mlp.up_proj"}
