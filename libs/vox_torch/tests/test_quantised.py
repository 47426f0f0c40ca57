"""Packed linear layers: the numbers of the formats, forward and backward, and what they weigh."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from libs.vox_torch.tests.jobs import batch, documents, losses, plan, start, step, train

from vox_core.contract import LoadJob
from vox_core.errors import ModelError
from vox_core.run.hf_checkpoint import as_trained, plain_copy
from vox_core.weights import WeightFolder, numpy_dtype
from vox_formats.quant import CODECS, LEVELS
from vox_testing.tiny import FAMILIES, MIXTURES, VOCABULARY, make_model
from vox_torch.arrays import as_tensor
from vox_torch.base import load_base
from vox_torch.inject import attach
from vox_torch.load import load
from vox_torch.lora import fuse
from vox_torch.prepacked import PrepackedLinear
from vox_torch.profile import DeviceProfile
from vox_torch.quantised import QuantisedHead, QuantisedLinear, pack
from vox_torch.trial import loss_of

CPU = DeviceProfile("cpu")
QUANTS = ["nf4", "nf4-single", "int8"]
DTYPES = {"bf16": ("BF16", torch.bfloat16), "fp32": ("F32", torch.float32)}


def weight(shape: tuple[int, int], stored: str) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, shape).astype(numpy_dtype(stored))


# Widths of whole blocks, of parts of blocks (where bitsandbytes' own kernel would go wrong), odd.
@pytest.mark.parametrize("shape", [(3, 128), (5, 96), (6, 32), (4, 100), (3, 27)])
@pytest.mark.parametrize("stored", ["F32", "BF16"])
@pytest.mark.parametrize("quant", QUANTS)
def test_packed_weights_are_the_references_to_the_bit(quant, stored, shape):
    W_OI = weight(shape, stored)
    for name, dtype in DTYPES.values():
        packed = pack(as_tensor(W_OI), quant, dtype, "cpu")
        expected = CODECS[quant].round_trip(W_OI, numpy_dtype(name))
        assert torch.equal(packed.weight(), as_tensor(expected))


@pytest.mark.parametrize("shape", [(5, 128), (3, 100), (5, 27)])
def test_a_weight_larger_than_is_packed_at_once_is_packed_as_one(shape, monkeypatch):
    monkeypatch.setattr("vox_torch.quantised.PACKED_ELEMENTS", 128)  # the last part is short or odd
    W_OI = weight(shape, "BF16")
    for quant in ("nf4", "int8"):
        packed = pack(as_tensor(W_OI), quant, torch.float32, "cpu")
        expected = CODECS[quant].round_trip(W_OI, np.dtype("float32"))
        assert torch.equal(packed.weight(), torch.from_numpy(expected))


def test_packing_has_few_weights_in_float32_at_once(monkeypatch):
    monkeypatch.setattr("vox_torch.quantised.PACKED_ELEMENTS", 128)
    sizes, wide = [], torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda W: sizes.append(W.numel()) or wide(W))
    for quant in QUANTS:
        pack(as_tensor(weight((9, 64), "BF16")), quant, torch.float32, "cpu")
    assert max(sizes) == 128


def test_values_between_two_levels_get_the_references_code():
    """Of whole blocks, and of a short one, which is scaled in another way."""
    ends_N = np.append((LEVELS[:-1] + LEVELS[1:]) / 2, np.float32(1))
    blocks = (np.pad(ends_N * size, (0, 48)) for size in (1, 0.3, 0.3))
    W_OI = np.concatenate([*blocks]).astype(np.float32)[None, :-48]
    found = pack(as_tensor(W_OI), "nf4-single", torch.float32, "cpu").weight()
    assert torch.equal(found, as_tensor(CODECS["nf4-single"].round_trip(W_OI)))


@pytest.mark.parametrize("quant", QUANTS)
def test_a_layer_is_dequantise_and_multiply_forward_and_backward(quant):
    W_OI = weight((64, 128), "BF16")
    layer = QuantisedLinear(pack(as_tensor(W_OI), quant, torch.bfloat16, "cpu"), 64, 128)
    left = torch.from_numpy(CODECS[quant].round_trip(W_OI, np.dtype("float32")))
    torch.manual_seed(0)
    x = torch.randn(10, 128).bfloat16().requires_grad_()
    gradient = torch.randn(10, 64).bfloat16()
    y = layer(x)
    y.backward(gradient)
    # A product of bfloat16 factors, summed in float32 and rounded once: 2^-9 of the largest, and as
    # much again for the weight that was rounded to bfloat16 before.
    for found, expected in [(y, x.float() @ left.T), (x.grad, gradient.float() @ left)]:
        assert (found.float() - expected).abs().max() < 2**-8 * expected.abs().max()


def test_rows_are_those_of_the_weight_to_the_bit():
    for _, dtype in DTYPES.values():
        packed = pack(as_tensor(weight((40, 96), "BF16")), "int8", dtype, "cpu")
        for chosen in (slice(3, 9), torch.tensor([5]), torch.tensor([0, 3, 3, 5, 1])):
            assert torch.equal(packed.rows(chosen), packed.weight()[chosen])


def test_a_head_is_a_linear_layer_by_blocks(monkeypatch):
    monkeypatch.setattr("vox_torch.quantised.BLOCK_ELEMENTS", 30 * 128)  # the last one is smaller
    packed = pack(as_tensor(weight((100, 128), "F32")), "int8", torch.float32, "cpu")
    torch.manual_seed(0)
    x, gradient, bias = torch.randn(2, 10, 128), torch.randn(2, 10, 100), torch.randn(100)
    made = []
    for kind in (QuantisedHead, QuantisedLinear):
        layer, given = kind(packed, 100, 128), x.clone().requires_grad_()
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
        y = layer(given)
        y.backward(gradient)
        made.append((y.detach(), given.grad))
    # float32 sums of 128 and of 100 products, in another order.
    for found, expected in zip(*made, strict=True):
        assert (found - expected).norm() < 1e-6 * expected.norm()


def test_nothing_is_ever_as_large_as_a_quantised_embedding(tmp_path, monkeypatch):
    """Neither where tokens are looked up nor where the head is computed, forward and backward."""
    kind, settings = FAMILIES["qwen2"]  # tied
    monkeypatch.setitem(FAMILIES, "wide", (kind, {**settings, "hidden_size": 64}))
    folder = make_model("wide", tmp_path)
    monkeypatch.setattr("vox_torch.quantised.BLOCK_ELEMENTS", 64 * 32)
    model = load_base(folder, "fp32", "cpu", "nf4-embeddings")
    embedding = model.get_input_embeddings()
    assert model.get_output_embeddings().packed is embedding.packed
    monkeypatch.setattr(embedding.packed, "weight", lambda: pytest.fail("dequantised as a whole"))
    adapted = attach(model, start(folder, plan(folder)).adapter)
    assert not any(fuse(adapted.model).values())
    loss_of(adapted.model, "cpu")[0](batch(documents(2)))[0].backward()


def test_a_layer_keeps_neither_input_nor_weight_for_the_backward():
    packed = pack(as_tensor(weight((64, 128), "BF16")), "nf4", torch.bfloat16, "cpu")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        QuantisedLinear(packed, 64, 128)(torch.randn(10, 128).bfloat16().requires_grad_())
    assert kept == []


@pytest.mark.parametrize(("quant", "bits"), [("nf4", 4.127), ("nf4-single", 4.5), ("int8", 8.125)])
def test_what_a_packed_weight_takes(quant, bits):
    packed = pack(as_tensor(weight((256, 256), "BF16")), quant, torch.bfloat16, "cpu")
    # 4 bits and 8 of scale for 64, and 32 more for 256 of those; 32 for 64; 32 for a row of 256.
    assert packed.nbytes * 8 / 256**2 == pytest.approx(bits, abs=1e-3)


# One format with one level of scales is nf4 to the modules that hold it: one family says so.
@pytest.mark.parametrize(
    ("family", "quant"),
    [
        pytest.param(family, quant, marks=[pytest.mark.long] * (family != "llama"))
        if quant == "nf4-single"
        else (family, quant)
        for family in (*FAMILIES, *MIXTURES)
        for quant in (*QUANTS, "nf4-embeddings")
    ],
)
def test_every_family_trains_on_the_very_weights_of_the_reference(tiny, tmp_path, family, quant):
    """Against a plain model whose weights are what the format leaves of them."""
    folder = tiny(family)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    with plain_copy(
        as_trained(WeightFolder(folder), quant, kind, "fp32"), tmp_path / "model"
    ) as copy:
        plain = load_base(copy, "fp32", "cpu")
    found, expected = [], []
    for model, into in ((load_base(folder, "fp32", "cpu", quant), found), (plain, expected)):
        adapted = attach(model, start(folder, plan(folder)).adapter)
        assert not any(fuse(adapted.model).values())
        value, _ = loss_of(adapted.model, "cpu")[0](batch(documents(3)))
        gradients = torch.autograd.grad(value, list(adapted.parameters.values()))
        into.extend([value.item(), torch.cat([g.flatten() for g in gradients])])
    # The same float32 products, in another order.
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert (found[1] - expected[1]).norm() < 5e-6 * expected[1].norm()


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
def test_a_quantised_base_learns_with_every_method(tiny, method):
    folder, some = tiny("llama"), documents(4)
    made = plan(folder, method=method, quant="nf4", dtype="bf16", total_steps=12)
    _, events = train(folder, [step(n, [some], lr=1e-2) for n in range(1, 13)], made)
    assert losses(events)[-1] < 0.9 * losses(events)[0]


def test_a_loaded_model_is_quantised_as_asked(tiny):
    tokens = np.arange(1, 20)
    logits = {}
    for quant in ("none", "nf4", "int8"):
        model = load(LoadJob(tiny("llama"), "fp32", quant=quant), CPU)
        logits[quant] = model.logits(tokens)
        model.close()
    distance = {
        quant: np.linalg.norm(found - logits["none"]) / np.linalg.norm(logits["none"])
        for quant, found in logits.items()
    }
    # A four-bit weight is off by a tenth, an eight-bit one by half a hundredth.
    assert 0 < distance["int8"] < 0.1 * distance["nf4"] < 0.1


@pytest.mark.parametrize(("dtype", "quant"), [("fp32", "nf4"), ("fp32", "int8"), ("bf16", "none")])
def test_an_adapter_is_added_without_unpacking_the_base(tiny, monkeypatch, dtype, quant):
    folder, unpacked = tiny("llama"), []
    adapter = start(folder, plan(folder, quant=quant)).adapter
    model = load(LoadJob(folder, dtype, quant=quant), CPU)
    for kind in (QuantisedLinear, PrepackedLinear):
        read = kind.weight.fget
        counted = property(lambda layer, read=read: unpacked.append(layer) or read(layer))
        monkeypatch.setattr(kind, "weight", counted)
    model.add_adapter("first", adapter)  # PEFT reads the weights when it wraps their layers
    unpacked.clear()
    model.add_adapter("second", adapter)
    by_second = len(unpacked)
    unpacked.clear()
    model.add_adapter("third", adapter)
    model.remove_adapter("first")
    assert len(unpacked) <= by_second, "no more with each adapter"
    model.close()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_a_model_loaded_on_its_device_is_the_same(tiny, family, dtype):
    """As on an accelerator: by transformers' `device_map`."""
    here, there = (load_base(tiny(family), dtype, device) for device in ("cpu", "cpu:0"))
    for kind in ("named_parameters", "named_buffers"):
        one, other = (dict(getattr(model, kind)()) for model in (here, there))
        assert one.keys() == other.keys()  # a tied weight is there once
        for name, value in one.items():
            assert value.dtype == other[name].dtype and torch.equal(value, other[name])
    assert not any(parameter.requires_grad for parameter in there.parameters())


@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_stored_buffers_are_loaded_too(tmp_path, quant, monkeypatch):
    """Gemma 4 has a scale per layer that is no parameter."""
    from safetensors.numpy import load_file, save_file

    settings = {
        **FAMILIES["gemma3"][1],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
        "global_head_dim": 16,
    }
    monkeypatch.setitem(FAMILIES, "gemma4", ("gemma4_text", settings))
    folder = make_model("gemma4", tmp_path / "gemma4")
    tensors = load_file(folder / "model.safetensors")
    scales = [name for name in tensors if name.endswith("layer_scalar")]
    assert len(scales) == settings["num_hidden_layers"]
    changed = {name: np.full_like(tensors[name], 0.25) for name in scales}
    save_file({**tensors, **changed}, folder / "model.safetensors", {"format": "pt"})
    streamed = load(LoadJob(folder, "fp32", streamed=True), CPU)
    for model in (load_base(folder, "fp32", "cpu", quant), streamed._adapters.base):
        found = [buffer for name, buffer in model.named_buffers() if "layer_scalar" in name]
        assert [float(buffer) for buffer in found] == [0.25] * len(scales)
    save_file({n: t for n, t in tensors.items() if n != scales[0]}, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_base(folder, "fp32", "cpu", "nf4")
    assert scales[0] in caught.value.faults


def test_parameters_of_the_wrong_shape_are_told(tiny, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "cut"
    folder.mkdir()
    for file in tiny("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("q_proj.weight"))
    save_file({**tensors, name: tensors[name][:, :-1]}, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_base(folder, "fp32", "cpu", "nf4")
    assert caught.value.code == "VOX-M002"
    assert any("q_proj" in fault for fault in caught.value.faults)
