"""mlx-lm's adapter folder: what is written, there and back as the identity, what is refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vox_core.adapter.mlx import is_mlx_folder, read_mlx_adapter
from vox_core.adapter.peft import read_adapter, write_adapter
from vox_core.contract import AdapterState, LowRank, ModuleShape
from vox_core.errors import AdapterError
from vox_core.weights import SafetensorsFile, write_safetensors
from vox_export.convert import write_mlx_adapter
from vox_export.equivalence import ROUNDING, require_same_state, require_same_update
from vox_formats.mlx_adapter import EXACT, MlxBase
from vox_formats.mlx_model import counterpart_fault

# Model type -> the path of one module, with a place for the layer.
PLACES = {
    "llama": "model.layers.{}.self_attn.q_proj",
    "qwen3_5": "model.layers.{}.linear_attn.out_proj",
    "gemma3": "model.language_model.layers.{}.mlp.up_proj",
    "gpt2": "transformer.h.{}.attn.c_attn",
    "gpt_neox": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
}
LAYERS, O, I = 4, 3, 5  # noqa: E741


def base(model_type: str = "llama") -> MlxBase:
    transposed = model_type == "gpt2"
    paths = [PLACES[model_type].format(layer) for layer in range(LAYERS)]
    modules = {path: ModuleShape(f"{path}.weight", O, I, transposed) for path in paths}
    if model_type != "gpt2":
        modules["lm_head"] = ModuleShape("lm_head.weight", 7, I)
    weights = {
        f"{path}.weight": (I, O) if shape.transposed else (shape.out_features, I)
        for path, shape in modules.items()
    }
    if model_type == "llama":
        weights["model.embed_tokens.weight"] = (7, I)
    return MlxBase(model_type, modules, weights)


def lowrank(rank: int = 2, alpha: float = 8.0, seed: int = 0, out: int = O) -> LowRank:
    random = np.random.default_rng(seed)
    return LowRank(
        random.standard_normal((rank, I)).astype(np.float32),
        random.standard_normal((out, rank)).astype(np.float32),
        alpha,
    )


def adapter(method: str = "lora", layers: tuple[int, ...] = (0, 1, 2, 3)) -> AdapterState:
    paths = [PLACES["llama"].format(layer) for layer in layers]
    return AdapterState(method, {path: lowrank(seed=n) for n, path in enumerate(paths)})


def written(folder: Path, state: AdapterState, of: MlxBase | None = None) -> dict[str, Any]:
    write_mlx_adapter(folder, state, of or base(), model="org/base", dropout=0.25)
    return json.loads((folder / "adapter_config.json").read_text())


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind", "scale"),
    [("lora", "lora", 4.0), ("rslora", "lora", 8 / np.sqrt(2)), ("dora", "dora", 4.0)],
)
def test_the_scale_is_written_out(tmp_path: Path, method: str, kind: str, scale: float) -> None:
    state = adapter(method)
    if method == "dora":
        whole = {
            p: replace(m, magnitude_O=np.ones(O, np.float32)) for p, m in state.modules.items()
        }
        state = replace(state, modules=whole)
    told = written(tmp_path, state)
    assert told["fine_tune_type"] == kind
    assert told["lora_parameters"] == {
        "rank": 2,
        "scale": scale,
        "dropout": 0.25,
        "keys": ["self_attn.q_proj"],
    }
    assert (told["model"], told["num_layers"]) == ("org/base", 4)
    assert told["lora_parameters"]["dropout"] == 0.25


def test_tensors_are_transposed_padded_and_folded(tmp_path: Path) -> None:
    (one, two) = (PLACES["llama"].format(n) for n in (0, 1))
    state = AdapterState("lora", {one: lowrank(4, 8.0), two: lowrank(2, 8.0)})  # scales 2 and 4
    assert written(tmp_path, state)["lora_parameters"]["scale"] == 2.0
    file = SafetensorsFile(tmp_path / "adapters.safetensors")
    small = state.modules[two]
    assert np.array_equal(file.read(f"{two}.lora_a")[:, :2], small.A_RI.T)
    assert np.array_equal(file.read(f"{two}.lora_b")[:2], 2 * small.B_OR.T)
    assert not file.read(f"{two}.lora_a")[:, 2:].any()
    assert not file.read(f"{two}.lora_b")[2:].any()
    assert not (tmp_path / EXACT).exists()  # a ratio of 2 loses nothing


# --- there and back -------------------------------------------------------------------------------

FINITE = st.floats(-(2.0**20), 2.0**20, width=32)  # subnormal numbers and minus zero among them


@st.composite
def adapters(draw: st.DrawFn) -> tuple[MlxBase, AdapterState]:
    of = base(draw(st.sampled_from(sorted(PLACES))))
    method = draw(st.sampled_from(["lora", "rslora", "dora"]))
    modules = {}
    for path in draw(st.permutations(sorted(of.modules)))[: draw(st.integers(1, 4))]:
        rank, shape = draw(st.integers(1, 4)), of.modules[path]
        out = shape.out_features
        modules[path] = LowRank(
            draw(arrays(np.float32, (rank, I), elements=FINITE)),
            draw(arrays(np.float32, (out, rank), elements=FINITE)),
            draw(st.sampled_from([0.0, 1.0, 7.0, 8.0, 16.0, 0.1]) | st.floats(0.01, 100)),
            draw(arrays(np.float32, out, elements=FINITE)) if method == "dora" else None,
        )
    whole = draw(st.lists(st.sampled_from(sorted(of.parameters)), unique=True, max_size=2))
    saved = {
        name: draw(arrays(np.float32, of.parameters[name], elements=FINITE))
        for name in whole
        if name.removesuffix(".weight") not in modules
        and counterpart_fault(name, of.model_type) is None
    }
    return of, AdapterState(method, modules, saved)


@settings(max_examples=60)
@given(adapters())
def test_peft_to_mlx_to_peft_is_the_identity(drawn: tuple[MlxBase, AdapterState]) -> None:
    of, state = drawn
    with tempfile.TemporaryDirectory() as name:
        peft, mlx, again = (Path(name) / part for part in ("peft", "mlx", "again"))
        for folder in (peft, mlx, again):
            folder.mkdir()
        write_adapter(peft, state, base="b", modules=of.modules)
        write_mlx_adapter(mlx, read_adapter(peft), of, model="b")
        back = read_mlx_adapter(mlx, of)
        require_same_state(state, back)
        assert list(back.modules) == list(state.modules)
        write_adapter(again, back, base="b", modules=of.modules)
        for file in peft.iterdir():
            assert file.read_bytes() == (again / file.name).read_bytes()


@settings(max_examples=40)
@given(adapters())
def test_what_mlx_lm_computes_is_the_source_but_for_one_rounding(
    drawn: tuple[MlxBase, AdapterState],
) -> None:
    of, state = drawn
    with tempfile.TemporaryDirectory() as name:
        written(Path(name), state, of)
        literal = read_mlx_adapter(Path(name), of, literal=True)
    assert {module.rank for module in literal.modules.values()} == {
        max(module.rank for module in state.modules.values())
    }
    for path, module in state.modules.items():
        one = state.scale(path) * module.B_OR.astype(float) @ module.A_RI.astype(float)
        two = literal.scale(path) * literal.modules[path].B_OR.astype(float)
        size = abs(state.scale(path)) * np.abs(module.B_OR).astype(float) @ np.abs(module.A_RI)
        # 2^-149: what a number too small for float32 loses, times scale and A.
        smallest = abs(literal.scale(path)) * 2.0**-149 * np.abs(module.A_RI).astype(float).sum(0)
        assert np.all(
            np.abs(two @ literal.modules[path].A_RI.astype(float) - one)
            <= ROUNDING * size + smallest
        )


def test_an_adapter_that_was_trained_further_is_not_taken_back(tmp_path: Path) -> None:
    (one, two) = (PLACES["llama"].format(n) for n in (0, 1))
    state = AdapterState("lora", {one: lowrank(2, 7.0), two: lowrank(2, 8.0, out=O)})
    state = replace(state, modules={**state.modules, PLACES["llama"].format(2): lowrank(2, 8.0)})
    written(tmp_path, state)
    assert (tmp_path / EXACT).exists()
    rewrite(
        tmp_path,
        lambda tensors: {n: v * 3 if n.endswith("lora_b") else v for n, v in tensors.items()},
    )
    again = read_mlx_adapter(tmp_path, base())
    assert np.allclose(again.modules[one].B_OR, 3 * state.modules[one].B_OR, rtol=1e-6)


def test_a_plain_folder_needs_nothing_of_vox(tmp_path: Path) -> None:
    state = adapter(layers=(2, 3))
    told = written(tmp_path, state)
    retell(tmp_path, vox=None, lora_parameters={**told["lora_parameters"], "keys": None})
    again = read_mlx_adapter(tmp_path, base())
    assert (again.method, list(again.modules)) == ("lora", list(state.modules))
    assert again.scale(PLACES["llama"].format(2)) == 4.0
    require_same_update(state, again)


def test_whole_tensors_alone_are_a_full_fine_tune_that_comes_back(tmp_path: Path) -> None:
    whole = {"lm_head.weight": np.ones((7, I), np.float32)}
    assert written(tmp_path, AdapterState("lora", {}, whole))["fine_tune_type"] == "full"
    require_same_state(AdapterState("lora", {}, whole), read_mlx_adapter(tmp_path, base()))


# --- what is refused ------------------------------------------------------------------------------


def rewrite(
    folder: Path, change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]
) -> None:
    path = folder / "adapters.safetensors"
    file = SafetensorsFile(path)
    tensors = {
        n: v.astype("<f4")
        for n, v in change({n: np.array(file.read(n)) for n in file.tensors}).items()
    }
    write_safetensors(path, {n: ("F32", v.shape) for n, v in tensors.items()}, tensors.items())


def retell(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    told = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))


Q0 = PLACES["llama"].format(0)
NEW = np.ones((I, 2), np.float32)
FAULTS = {
    "half": (lambda t: t.pop(f"{Q0}.lora_b"), f"{Q0}: lora_b missing"),
    "magnitude": (lambda t: t.update({f"{Q0}.m": np.ones(O)}), "but m is there"),
    "unknown": (lambda t: t.update({f"{Q0}.strange": NEW}), f"{Q0}.strange: a whole tensor"),
    "bias": (lambda t: t.update({f"{Q0}.linear.bias": np.ones(O)}), "linear.bias: a whole tensor"),
    "embedding": (
        lambda t: t.update(
            {
                "model.embed_tokens.lora_a": np.ones((7, 2)),
                "model.embed_tokens.lora_b": np.ones((2, I)),
            }
        ),
        "model.embed_tokens: LoRA on an embedding",
    ),
    "experts": (
        lambda t: t.update(
            {
                "model.layers.0.mlp.switch_mlp.up_proj.lora_a": np.ones((4, 2, I)),
                "model.layers.0.mlp.switch_mlp.up_proj.lora_b": np.ones((4, O, 2)),
            }
        ),
        "switch_mlp.up_proj: LoRA on experts",
    ),
    "stranger": (
        lambda t: t.update({"model.x.lora_a": np.ones((I, 2)), "model.x.lora_b": np.ones((2, O))}),
        "model.x: the base has no such linear module",
    ),
    "rank": (
        lambda t: t.update({f"{Q0}.lora_a": np.ones((I, 3)), f"{Q0}.lora_b": np.ones((3, O))}),
        f"{Q0}: lora_a is (5, 3)",
    ),
    "transposed": (
        lambda t: t.update({f"{Q0}.lora_a": np.ones((2, I))}),
        f"{Q0}: lora_a is (2, 5)",
    ),
}


@pytest.mark.parametrize("with_entry", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_has_no_equal_is_refused_by_name(tmp_path: Path, fault: str, with_entry: bool) -> None:
    written(tmp_path, adapter())
    if not with_entry:
        retell(tmp_path, vox=None)
    spoil, words = FAULTS[fault]

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        spoil(tensors)
        return tensors

    rewrite(tmp_path, change)
    with pytest.raises(AdapterError) as caught:
        read_mlx_adapter(tmp_path, base())
    assert caught.value.code == "VOX-A003"
    assert any(words in told for told in caught.value.faults), caught.value.faults


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    written(tmp_path, adapter())
    rewrite(
        tmp_path, lambda tensors: {n: v for n, v in tensors.items() if not n.endswith("lora_b")}
    )
    with pytest.raises(AdapterError) as caught:
        read_mlx_adapter(tmp_path, base())
    assert len(caught.value.faults) == LAYERS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 2}, "do not reach it"),
        ({"fine_tune_type": "dora"}, "but m is missing"),
    ],
)
def test_a_configuration_that_contradicts_the_file_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    written(tmp_path, adapter())
    retell(tmp_path, **changes)
    with pytest.raises(AdapterError, match=words):
        read_mlx_adapter(tmp_path, base())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": None},
        {"lora_parameters": {"rank": 2}},
        {"lora_parameters": [1]},
        {"fine_tune_type": "other"},
        {"vox": {"version": 2}},
    ],
)
def test_a_configuration_that_says_too_little_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    written(tmp_path, adapter())
    retell(tmp_path, **changes)
    with pytest.raises(AdapterError) as caught:
        read_mlx_adapter(tmp_path, base())
    assert caught.value.code == "VOX-A001"


def test_the_entry_and_the_file_must_agree(tmp_path: Path) -> None:
    told = written(tmp_path, adapter())
    del told["vox"]["modules"][Q0]
    retell(tmp_path, vox=told["vox"])
    with pytest.raises(AdapterError, match=rf"{Q0}: in adapters\.safetensors but not in"):
        read_mlx_adapter(tmp_path, base())


@pytest.mark.parametrize("numbers", [None, {"rank": 8, "scale": 20.0}])
def test_a_full_fine_tune_is_refused_with_the_way_out(tmp_path: Path, numbers: object) -> None:
    """mlx-lm 0.32 writes null for the numbers, earlier ones its defaults."""
    written(tmp_path, adapter())
    told = {"fine_tune_type": "full", "num_layers": 2, "lora_parameters": numbers}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    with pytest.raises(AdapterError) as caught:
        read_mlx_adapter(tmp_path, base())
    assert "mlx_lm.fuse" in caught.value.remedy


def test_parts_that_mlx_lm_lacks_are_not_written(tmp_path: Path) -> None:
    tower = "model.vision_tower.layers.0.fc1"
    of = base("gemma3")
    with pytest.raises(AdapterError) as caught:
        written(tmp_path, AdapterState("lora", {tower: lowrank()}), of)
    assert caught.value.faults == (f"{tower}: mlx-lm's model has no such module",)
    assert not list(tmp_path.iterdir())


def test_folders_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "peft").mkdir()
    (tmp_path / "mlx").mkdir()
    write_adapter(tmp_path / "peft", adapter(), base="b", modules=base().modules)
    written(tmp_path / "mlx", adapter())
    found = [is_mlx_folder(tmp_path / name) for name in ("peft", "mlx", "nothing")]
    assert found == [False, True, False]
