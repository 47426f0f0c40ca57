"""Adapters that vox writes, in plain PEFT and plain mlx-lm; and adapters of plain mlx-lm in PEFT.

Models, adapters and logits come from interchange.py. The traps at the end put the usual mistakes of
such converters into ours, and show that these tests and `vox export` itself see them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load, load_model, save_config

from tests.parity.interchange import (
    FAMILIES,
    TOKENS,
    base_of,
    make,
    mlx_forward,
    mlx_logits,
    peft_logits,
    random_adapter,
    relative,
)
from vox_core.adapter.peft import write_adapter
from vox_core.adapter.targets import parameter_names
from vox_core.api.models import plain_copy
from vox_core.api.tokenizers import load_tokenizer
from vox_core.config import validate
from vox_core.contract import AdapterState
from vox_core.errors import ProofError
from vox_core.weights import WeightFolder, open_weights
from vox_export.convert import ConvertReport, convert, write_mlx_adapter
from vox_export.export import export
from vox_export.settings import ExportSettings
from vox_formats import mlx_adapter as writer
from vox_formats.mlx_model import counterpart_fault, hf_path, mlx_path
from vox_testing.llama import write_llama

# Two float32 forwards of one formula, summed in another order, by two libraries: without an adapter
# these models differ by 1e-6 at most, with one by 2e-6.
FLOAT32 = 2e-5
# What an adapter here changes the logits by, at the least: 0.3.
EFFECT = 0.1

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`tiny(family, layers)` -> model folder, made once."""
    made: dict[tuple[str, int | None], Path] = {}

    def folder(family: str, layers: int | None = None) -> Path:
        if (family, layers) not in made:
            made[family, layers] = make(family, tmp_path_factory.mktemp(family) / "base", layers)
        return made[family, layers]

    return folder


def as_peft(folder: Path, adapter: AdapterState, out: Path) -> Path:
    out.mkdir()
    write_adapter(out, adapter, base=str(folder), modules=base_of(folder).modules)
    return out


def as_mlx(folder: Path, adapter: AdapterState, out: Path) -> Path:
    out.mkdir()
    write_mlx_adapter(out, adapter, base_of(folder), model=str(folder))
    return out


def run_convert(source: Path, to: str, out: Path, **given: object) -> ConvertReport:
    to = {"mlx": "mlx-lora"}.get(to, to)
    return convert(str(source), validate(ExportSettings, {"to": to, "out": out, **given}))


def require_same_logits(folder: Path, peft: Path, mlx: Path) -> None:
    expected = peft_logits(folder, peft)
    assert relative(peft_logits(folder, None), expected) > EFFECT
    assert relative(mlx_logits(folder, mlx), expected) < FLOAT32


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_module_has_its_counterpart(tiny: Tiny, family: str) -> None:
    base = base_of(tiny(family))
    model, _ = load_model(tiny(family))
    linear = {n: m.weight.shape for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    expected = {
        mlx_path(path, base.model_type): (shape.out_features, shape.in_features)
        for path, shape in base.modules.items()
        if counterpart_fault(path, base.model_type) is None
    }
    assert linear == expected
    for path in base.modules:
        if counterpart_fault(path, base.model_type) is None:
            assert hf_path(mlx_path(path, base.model_type), base.model_type) == path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_that_may_be_saved_has_the_same_values(tiny: Tiny, family: str) -> None:
    base, weights = base_of(tiny(family)), WeightFolder(tiny(family))
    model, _ = load_model(tiny(family))
    there = dict(tree_flatten(model.parameters()))
    for name, tensor in parameter_names(weights.tensors, base.model_type).items():
        if counterpart_fault(name, base.model_type) is None:
            value = np.asarray(weights.read(tensor))
            expected = value.T if base.transposed(name) else value
            assert np.array_equal(np.array(there[mlx_path(name, base.model_type)]), expected), name


# --- PEFT to mlx-lm -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_gives_the_logits_of_peft(
    tiny: Tiny, tmp_path: Path, family: str, method: str
) -> None:
    folder = tiny(family)
    # Ranks and alphas by module, so that scales differ by ratios that are no powers of two.
    adapter = random_adapter(folder, method, ranks=(4, 2, 3), alphas=(8.0, 16.0, 5.0, 7.0))
    peft = as_peft(folder, adapter, tmp_path / "peft")
    require_same_logits(folder, peft, as_mlx(folder, adapter, tmp_path / "mlx"))


def test_mlx_lms_own_load_takes_the_folder(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("llama")
    adapter = random_adapter(folder)
    mlx = as_mlx(folder, adapter, tmp_path / "mlx")
    model, *_ = load(str(folder), adapter_path=str(mlx))
    expected = peft_logits(folder, as_peft(folder, adapter, tmp_path / "peft"))
    assert relative(mlx_forward(model), expected) < FLOAT32


# --- the merged model -----------------------------------------------------------------------------


def exported(folder: Path, adapter: AdapterState, place: Path, **given: object) -> Path:
    source, out = as_peft(folder, adapter, place / "peft"), place / "out"
    export(str(source), validate(ExportSettings, {"out": out, "backend": "cpu", **given}))
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_loads_the_exported_model(tiny: Tiny, tmp_path: Path, family: str) -> None:
    folder = shutil.copytree(tiny(family), tmp_path / "base")
    if family == "mistral":  # a window that mlx-lm leaves out is refused
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    adapter = random_adapter(folder, ranks=(4, 2), alphas=(8.0, 5.0))
    out = exported(folder, adapter, tmp_path, to="mlx")
    model, tokenizer, *_ = load(str(out))
    expected = peft_logits(folder, tmp_path / "peft")
    assert relative(peft_logits(folder, None), expected) > EFFECT
    assert relative(mlx_forward(model), expected) < FLOAT32
    assert tokenizer.encode("Hello there") == load_tokenizer(folder).encode("Hello there")


def test_mlx_lm_loads_the_exported_adapter(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("qwen2")
    adapter = random_adapter(folder, "rslora", ranks=(4, 2), alphas=(8.0, 5.0))
    out = exported(folder, adapter, tmp_path, to="mlx-lora")
    model, *_ = load(str(folder), adapter_path=str(out))
    assert relative(mlx_forward(model), peft_logits(folder, tmp_path / "peft")) < FLOAT32


@pytest.mark.parametrize("quant", ["affine8", "mxfp4"])
def test_mlx_lm_computes_the_exported_model_with_the_quantised_weights(
    tmp_path: Path, quant: str
) -> None:
    folder = write_llama(tmp_path / "base", dtype="F32")
    adapter = random_adapter(folder)
    out = exported(folder, adapter, tmp_path, to="mlx", quant=quant)
    model, *_ = load(str(out))
    assert any(isinstance(module, nn.QuantizedLinear) for module in model.modules())
    with plain_copy(open_weights(out), tmp_path / "plain") as plain:
        expected = peft_logits(plain, None)
    assert relative(peft_logits(folder, tmp_path / "peft"), expected) > 10 * FLOAT32
    assert relative(mlx_forward(model), expected) < FLOAT32


# --- layers and modules ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "keys"),
    [
        ((4, 5), ["mlp.up_proj", "self_attn.q_proj"]),
        (
            (2, 3),
            [f"model.layers.{n}.{m}" for n in (2, 3) for m in ("mlp.up_proj", "self_attn.q_proj")],
        ),
        ((0,), ["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"]),
    ],
)
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_layers_without_an_adapter_are_left_alone(
    tiny: Tiny, tmp_path: Path, layers: tuple[int, ...], keys: list[str], method: str
) -> None:
    folder = tiny("llama", 6)
    names = [f"model.layers.{n}.{m}" for n in layers for m in ("self_attn.q_proj", "mlp.up_proj")]
    adapter = random_adapter(folder, method, targets=tuple(names), alphas=(64.0,))
    mlx = as_mlx(folder, adapter, tmp_path / "mlx")
    told = json.loads((mlx / "adapter_config.json").read_text())
    assert told["lora_parameters"]["keys"] == keys
    assert told["num_layers"] == 6 - min(layers)
    model = load_adapters(load_model(folder)[0], str(mlx))
    adapted = [n for n, m in model.named_modules() if hasattr(m, "lora_a")]
    assert sorted(adapted) == sorted(names)
    require_same_logits(folder, as_peft(folder, adapter, tmp_path / "peft"), mlx)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gpt_neox"])
def test_the_head_can_have_an_adapter(tiny: Tiny, tmp_path: Path, family: str) -> None:
    folder = tiny(family)
    adapter = random_adapter(
        folder, targets=("lm_head", "dense_4h_to_h" if family == "gpt_neox" else "down_proj")
    )
    assert "lm_head" in adapter.modules
    peft = as_peft(folder, adapter, tmp_path / "peft")
    require_same_logits(folder, peft, as_mlx(folder, adapter, tmp_path / "mlx"))


@pytest.mark.parametrize(
    ("family", "saved"),
    [("llama", ["lm_head.weight"]), ("gpt2", ["weight", "bias"])],
)
def test_whole_tensors_have_mlx_lms_names_and_layout(
    tiny: Tiny, tmp_path: Path, family: str, saved: list[str]
) -> None:
    folder = tiny(family)
    base = base_of(folder)
    names = saved if family == "llama" else [f"transformer.h.0.mlp.c_fc.{n}" for n in saved]
    random = np.random.default_rng(0)
    whole = {n: random.standard_normal(base.parameters[n]).astype(np.float32) / 8 for n in names}
    target = "self_attn.q_proj" if family == "llama" else "c_attn"
    adapter = replace(random_adapter(folder, targets=(target,)), saved=whole)
    expected = peft_logits(folder, as_peft(folder, adapter, tmp_path / "peft"))
    mlx = as_mlx(folder, adapter, tmp_path / "mlx")

    model, _ = load_model(folder)
    # mlx-lm 0.32 refuses what it would have loaded before, and never drops it.
    with pytest.raises(ValueError, match=mlx_path(names[0], base.model_type)):
        load_adapters(model, str(mlx))
    model.load_weights(str(mlx / "adapters.safetensors"), strict=False)
    assert relative(mlx_forward(model), expected) < FLOAT32

    alone = as_mlx(folder, AdapterState("lora", {}, whole), tmp_path / "alone")
    mlx_logits(folder, alone)  # as a full fine-tune mlx-lm takes them


# --- mlx-lm to PEFT -------------------------------------------------------------------------------


def train_with_mlx_lm(folder: Path, out: Path, kind: str, layers: int, keys: object) -> np.ndarray:
    """Two steps in mlx-lm's own layers, saved as its trainer saves; the logits after them."""
    mx.random.seed(0)
    model, _ = load_model(folder)
    model.freeze()
    numbers = {"rank": 4, "scale": 20.0, "dropout": 0.0, **({"keys": keys} if keys else {})}
    linear_to_lora_layers(model, layers, numbers, use_dora=kind == "dora")
    tokens = mx.array(TOKENS)[None]

    def loss(model: nn.Module) -> mx.array:
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

    optimizer = optim.Adam(learning_rate=5e-2)
    model.train()
    for _ in range(2):
        _, gradients = nn.value_and_grad(model, loss)(model)
        optimizer.update(model, gradients)
        mx.eval(model.parameters())
    out.mkdir()
    weights = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(out / "adapters.safetensors"), weights)
    told = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": numbers}
    save_config({**told, "model": str(folder)}, out / "adapter_config.json")
    return mlx_forward(model)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_gives_the_logits_of_mlx_lms_own_training(
    tiny: Tiny, tmp_path: Path, family: str, kind: str
) -> None:
    folder, mlx = tiny(family), tmp_path / "mlx"
    expected = train_with_mlx_lm(folder, mlx, kind, 1, None)
    report = run_convert(mlx, "peft", tmp_path / "peft")
    assert report.source_format == "mlx"
    assert relative(peft_logits(folder, None), expected) > EFFECT / 10
    assert relative(peft_logits(folder, tmp_path / "peft"), expected) < FLOAT32


@pytest.mark.parametrize("layers", [2, 0, -1])
def test_num_layers_counts_from_the_end_and_nothing_is_all(
    tiny: Tiny, tmp_path: Path, layers: int
) -> None:
    folder, mlx = tiny("llama", 6), tmp_path / "mlx"
    expected = train_with_mlx_lm(folder, mlx, "lora", layers, ["self_attn.v_proj", "lm_head"])
    run_convert(mlx, "peft", tmp_path / "peft", model=str(folder))
    assert relative(peft_logits(folder, tmp_path / "peft"), expected) < FLOAT32
    back = tmp_path / "back"
    run_convert(tmp_path / "peft", "mlx", back)
    assert relative(mlx_logits(folder, back), expected) < FLOAT32


# --- traps ----------------------------------------------------------------------------------------


right_config, right_tensors = writer._config, writer._tensors


def alpha_for_a_scale(adapter: AdapterState, *rest: Any) -> dict[str, Any]:
    config = right_config(adapter, *rest)
    config["lora_parameters"]["scale"] = next(iter(adapter.modules.values())).alpha
    return config


def not_transposed(*given: Any) -> list[tuple[str, np.ndarray]]:
    return [(name, value.T) for name, value in right_tensors(*given)]


def from_the_wrong_end(*given: Any) -> list[tuple[str, np.ndarray]]:
    def mirrored(name: str) -> str:
        return re.sub(r"(?<=layers\.)\d+", lambda found: str(5 - int(found[0])), name)

    return [(mirrored(name), value) for name, value in right_tensors(*given)]


TRAPS = {
    "scale not converted": ("_config", alpha_for_a_scale),
    "transposition forgotten": ("_tensors", not_transposed),
    "layers from the wrong end": ("_tensors", from_the_wrong_end),
}


@pytest.fixture(params=TRAPS)
def trap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Puts the trap in when called."""
    name, mistake = TRAPS[request.param]
    return lambda: monkeypatch.setattr(writer, name, mistake)


@pytest.fixture
def square(tiny: Tiny) -> tuple[Path, AdapterState]:
    """An adapter of full rank on square matrices of all layers: no shape gives a mistake away."""
    folder = tiny("llama", 6)
    return folder, random_adapter(folder, ranks=(32,), targets=("self_attn.q_proj",))


def test_a_trap_gives_other_logits(
    square: tuple[Path, AdapterState], tmp_path: Path, trap: Callable[[], None]
) -> None:
    folder, adapter = square
    expected = peft_logits(folder, as_peft(folder, adapter, tmp_path / "peft"))
    assert (
        relative(mlx_logits(folder, as_mlx(folder, adapter, tmp_path / "right")), expected)
        < FLOAT32
    )
    trap()
    wrong = mlx_logits(folder, as_mlx(folder, adapter, tmp_path / "wrong"))
    assert relative(wrong, expected) > 100 * FLOAT32


def test_convert_sees_a_trap_and_leaves_nothing(
    square: tuple[Path, AdapterState], tmp_path: Path, trap: Callable[[], None]
) -> None:
    folder, adapter = square
    peft = as_peft(folder, adapter, tmp_path / "peft")
    trap()
    with pytest.raises(ProofError) as caught:
        run_convert(peft, "mlx", tmp_path / "mlx")
    assert caught.value.code == "VOX-V003"
    assert [each.name for each in tmp_path.iterdir()] == ["peft"]


def test_layers_counted_from_the_front_do_not_load(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("llama", 6)
    names = tuple(f"model.layers.{n}.self_attn.q_proj" for n in (0, 1))
    mlx = as_mlx(folder, random_adapter(folder, targets=names), tmp_path / "mlx")
    told = json.loads((mlx / "adapter_config.json").read_text())
    told["num_layers"], told["lora_parameters"]["keys"] = 2, ["self_attn.q_proj"]
    (mlx / "adapter_config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        mlx_logits(folder, mlx)
