"""Merging, streaming and loading, held against PEFT and against float64."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from libs.vox_torch.tests import jobs
from libs.vox_torch.tests.jobs import documents, plan, start, step, train
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

from vox_core.adapter.peft import peft_config
from vox_core.adapter.targets import linear_modules
from vox_core.contract import LoadJob, MergeJob, MergeTarget
from vox_core.weights import WeightFolder
from vox_testing.tiny import FAMILIES
from vox_torch import lora_rows, prepacked
from vox_torch.base import load_base, torch_dtype
from vox_torch.load import load
from vox_torch.merge import merged_tensor
from vox_torch.prepacked import PrepackedLinear, faster, prepack
from vox_torch.profile import DeviceProfile

# One float32 forward against another of the same formula, summed in another order: the largest
# relative difference of logits seen over families and methods is 2e-6.
LOGITS = 2e-5

ROUNDING = 2.0**-8
"""One rounding to bfloat16, of every logit."""
TOKENS = np.arange(5, 37, dtype=np.int64)


CPU = DeviceProfile("cpu")


def trained(tiny, family, method, **options):
    folder = tiny(family, **options)
    made = plan(folder, method=method, total_steps=3)
    steps = [step(n, [documents(3, seed=n)], lr=1e-2) for n in range(1, 4)]
    state, _ = train(folder, steps, made)
    return folder, state.adapter


def relative(a, b) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor(TOKENS)[None]).logits[0].float().numpy()


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_logits_and_merged_weights_are_pefts(tiny, family, method):
    folder, adapter = trained(tiny, family, method)
    base = load_base(folder, "fp32", "cpu")
    plain = logits(base)
    config = LoraConfig(**peft_config(adapter, base="", modules={}, dropout=0))
    config.fan_in_fan_out = family == "gpt2"
    peft = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    tensors = {name: torch.tensor(value) for name, value in adapter.tensors().items()}
    set_peft_model_state_dict(peft, {f"base_model.model.{n}": t for n, t in tensors.items()})
    with_adapter = logits(peft)
    streamed = load(LoadJob(folder, "fp32", streamed=True), CPU)
    assert relative(streamed.logits(TOKENS), plain) < LOGITS
    streamed.add_adapter("a", adapter)
    assert relative(streamed.logits(TOKENS, "a"), with_adapter) < LOGITS
    assert relative(streamed.logits(TOKENS), plain) < LOGITS
    assert relative(with_adapter, plain) > 100 * LOGITS
    merged = peft.merge_and_unload().state_dict()
    weights = WeightFolder(folder)
    model_type = plan(folder).contract.model.model_type
    for path, shape in linear_modules(weights.tensors, model_type).items():
        if path in adapter.modules:
            target = MergeTarget(path, shape)
            ours = merged_tensor(MergeJob(adapter, (target,), weights.read), target)
            assert relative(ours, merged[f"{path}.weight"].numpy()) < 1e-6, path


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_merge_rounds_once_to_the_stored_dtype(tiny, method):
    folder, adapter = trained(tiny, "llama", method, dtype="bfloat16")
    weights = WeightFolder(folder)
    path, module = next(iter(adapter.modules.items()))
    shape = linear_modules(weights.tensors, "llama")[path]
    W = weights.read(shape.tensor)
    target = MergeTarget(path, shape)
    merged = merged_tensor(MergeJob(adapter, (target,), weights.read), target)
    exact = W.astype(np.float64) + adapter.scale(path) * (
        module.B_OR.astype(np.float64) @ module.A_RI.astype(np.float64)
    )
    if module.magnitude_O is not None:
        exact *= (module.magnitude_O / np.linalg.norm(exact, axis=1))[:, None]
    assert merged.dtype == W.dtype
    # The unit roundoff of bfloat16 (8 significant bits), and 1e-6 for the arithmetic before it.
    assert np.all(np.abs(merged.astype(np.float64) - exact) <= np.abs(exact) * 2.0**-8 + 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_is_transformers_own(tiny, family):
    folder = tiny(family)
    model = load(LoadJob(folder, "fp32"), CPU)
    model.insert(0, TOKENS)
    mine = [int(model.advance({})[0].argmax())]
    while len(mine) < 12:
        mine.append(int(model.advance({0: mine[-1]})[0].argmax()))
    reference = load_base(folder, "fp32", "cpu").generate(
        torch.tensor(TOKENS)[None], max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert mine == reference[0, len(TOKENS) :].tolist()


def one_by_one(model) -> np.ndarray:
    """Logits of decoding steps, each of one token."""
    model.insert(0, TOKENS[:1], "a")
    first = model.advance({})[0]
    return np.stack([first, *(model.advance({0: token})[0] for token in TOKENS[1:])])


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_decoding_step_computes_what_training_did(tiny, family, method, monkeypatch):
    """With biases (qwen2, gpt2) and transposed weights (gpt2); PEFT's own layers are not called."""
    folder, adapter = trained(tiny, family, method)
    model = load(LoadJob(folder, "fp32"), CPU)
    model.add_adapter("a", adapter)
    together = model.logits(TOKENS, "a")
    model.insert(0, TOKENS)  # the trial, with the base alone
    model.remove(0)
    from peft.tuners.lora import Linear

    def called(*_):
        raise AssertionError("a single row went through PEFT")

    monkeypatch.setattr(Linear, "forward", called)
    monkeypatch.setattr("vox_torch.functions.LoraLinear.apply", called)
    assert relative(one_by_one(model), together) < LOGITS


def test_an_adapter_that_starts_at_zero_changes_nothing(tiny):
    folder = tiny("llama")
    adapter = start(folder, plan(folder)).adapter
    model = load(LoadJob(folder, "fp32"), CPU)
    plain = model.logits(TOKENS)
    model.add_adapter("a", adapter)
    assert np.array_equal(model.logits(TOKENS, "a"), plain)


@pytest.fixture
def plain(monkeypatch):
    """Load without prepacked weights."""

    def loaded(folder, adapter, dtype, name="a"):
        with monkeypatch.context() as patch:
            patch.setattr("vox_torch.load.prepack", lambda _model: None)
            model = load(LoadJob(folder, dtype), CPU)
        model.add_adapter(name, adapter)
        return model

    return loaded


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_prepacked_weights_change_no_number_but_the_order_of_sums(
    tiny, family, method, dtype, plain
):
    folder, adapter = trained(tiny, family, method, away=True)  # biases are not zero
    torch_own = plain(folder, adapter, dtype)
    model = load(LoadJob(folder, dtype), CPU)
    model.add_adapter("a", adapter)
    batch = jobs.batch(documents(2, seed=1))

    def same(found, expected):  # in bfloat16 both are oneDNN's, in float32 one is MKL's
        assert (
            np.array_equal(found, expected)
            if dtype == "bf16"
            else relative(found, expected) < LOGITS
        )

    def close(found, expected):  # adapters' sums, in float32, have another order
        assert relative(found, expected) < (ROUNDING if dtype == "bf16" else LOGITS)

    for name in (None, "a"):
        same(model.logits(TOKENS, name), torch_own.logits(TOKENS, name))
        same(model.log_probs(batch, name), torch_own.log_probs(batch, name))
        model.insert(0, TOKENS, name)
        torch_own.insert(0, TOKENS, name)
        (close if name else same)(model.advance({})[0], torch_own.advance({})[0])
        model.remove(0)
        torch_own.remove(0)


@pytest.mark.parametrize("names", ["abcd", "c"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_layers_of_one_product_have_adapters_of_their_own(tiny, dtype, names, plain):
    """Query, key and value are one product; adapters are on all, some, others or none of them."""
    folder, whole = trained(tiny, "qwen2", "lora", away=True)  # biases are not zero
    dora = trained(tiny, "qwen2", "dora", away=True)[1]

    def only(state, *paths: str):
        kept = {path: each for path, each in state.modules.items() if path.endswith(paths)}
        return replace(state, modules=kept)

    adapters = {
        "a": whole,
        "b": only(whole, "q_proj", "up_proj"),
        "c": only(dora, "k_proj", "v_proj", "gate_proj", "down_proj"),
        "d": only(whole, "o_proj"),
    }
    models = [plain(folder, adapters[names[0]], dtype, names[0]), load(LoadJob(folder, dtype), CPU)]
    models[1].add_adapter(names[0], adapters[names[0]])
    batch, rows, scores = jobs.batch(documents(2, seed=1)), [], []
    for model in models:
        for name in names[1:]:
            model.add_adapter(name, adapters[name])
        for row, name in enumerate((None, *names, *names)):
            model.insert(row, TOKENS[row:], name)
        steps = [model.advance({}), model.advance(dict.fromkeys(range(2 * len(names) + 1), 5))]
        rows.append(np.concatenate([*steps[0].values(), *steps[1].values()]))
        before = [model.log_probs(batch, name) for name in (None, *names, names[0])]
        model.remove_adapter(names[0])
        after = [model.log_probs(batch, name) for name in (None, *names[1:])]
        scores.append(np.concatenate([*before, *after]))
    assert np.array_equal(*scores) if dtype == "bf16" else relative(*scores) < LOGITS
    # Adapters' sums, in float32, have another order, and seldom another rounding.
    assert relative(*rows) < (ROUNDING if dtype == "bf16" else LOGITS)


def test_no_parts_are_kept_after_a_pass(tiny):
    """An adapter on the value alone: the query's part, computed without it, is never taken."""
    folder, whole = trained(tiny, "llama", "lora")
    model = load(LoadJob(folder, "fp32"), CPU)
    kept = {path: each for path, each in whole.modules.items() if path.endswith("v_proj")}
    model.add_adapter("a", replace(whole, modules=kept))
    packed = [each for each in model._adapters.base.modules() if isinstance(each, PrepackedLinear)]

    def kept_parts() -> bool:
        return any(each.product._latest.parts for each in packed)

    model.log_probs(jobs.batch(documents(2, seed=1)), "a")
    assert not kept_parts()
    for row, name in enumerate(("a", None)):
        model.insert(row, TOKENS, name)
    model.advance({})
    model.advance({0: 5, 1: 6})
    assert not kept_parts()


@pytest.mark.parametrize("family", ["llama", "gemma3"])  # with a head of its own, and a tied one
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_models_that_do_not_train_have_prepacked_weights(tiny, family, dtype):
    if torch_dtype(dtype) not in faster():
        pytest.skip(f"needs a processor on which oneDNN multiplies {dtype}")
    base = load_base(tiny(family), dtype, "cpu")
    before = {path: layer.weight for path, layer in base.named_modules() if is_linear(layer)}
    prepack(base)
    for path, weight in before.items():
        layer = base.get_submodule(path)
        tied = weight is base.get_input_embeddings().weight
        assert isinstance(layer, PrepackedLinear) is not tied
        assert torch.equal(layer.weight, weight)
        copied = copy.deepcopy(layer)
        assert type(copied) is torch.nn.Linear
        assert torch.equal(copied.weight, weight) and copied.weight.data_ptr() != weight.data_ptr()
    assert sum(isinstance(each, PrepackedLinear) for each in base.modules()) >= 14


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_product_at_a_time_is_held_twice(tiny, monkeypatch, dtype):
    base = load_base(tiny("llama"), dtype, "cpu")
    linear = [layer for layer in base.modules() if is_linear(layer)]
    before = [weakref.ref(layer.weight) for layer in linear]
    del linear
    kept, packed = [], []

    class Counted(prepacked.Product):
        def __init__(self, layers, *given):
            packed.extend(layers)
            kept.append(sum(each() is not None for each in before) + len(packed))
            super().__init__(layers, *given)

    monkeypatch.setattr(prepacked, "Product", Counted)
    prepack(base)
    assert {*kept} == ({len(before)} if torch_dtype(dtype) in faster() else set())


@pytest.mark.parametrize("prepacks", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_plain_weights_are_multiplied_alike_in_a_running_batch(tiny, monkeypatch, family, prepacks):
    if torch.float32 not in faster():
        pytest.skip("needs a processor on which oneDNN multiplies fp32")
    folder, adapter = trained(tiny, family, "lora")
    if not prepacks:
        monkeypatch.setattr("vox_torch.load.prepack", lambda _model: None)
    calls = []
    own = prepacked._product
    monkeypatch.setattr(prepacked, "_product", lambda *given: calls.append(given) or own(*given))

    def next_logits() -> np.ndarray:
        model = load(LoadJob(folder, "fp32"), CPU)
        model.add_adapter("a", adapter)
        for row, name in enumerate((None, "a")):
            model.insert(row, TOKENS, name)
        found = model.advance({})
        return np.stack([found[0], found[1]])

    quick, quickly = next_logits(), len(calls)
    monkeypatch.setattr(lora_rows, "quick_forwards", lambda _model: {})
    assert relative(quick, next_logits()) < LOGITS
    assert quickly == len(calls) and quickly >= (1 if prepacks else 15)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_removed_adapter_is_freed(tiny, family):
    folder, adapter = trained(tiny, family, "lora")
    model = load(LoadJob(folder, "fp32"), CPU)
    for name in "ab":
        model.add_adapter(name, adapter)
    model.insert(0, TOKENS, "a")
    model.insert(1, TOKENS, "b")
    model.advance({})
    parts = [
        weakref.ref(module)
        for path, module in model._adapters.base.named_modules()
        if path.endswith(
            (f"lora_A.{model._adapters.key('a')}", f"lora_B.{model._adapters.key('a')}")
        )
    ]
    assert parts
    model.remove(0)
    model.remove_adapter("a")
    gc.collect()
    assert not [each for each in parts if each() is not None]


def test_a_quick_forward_loses_no_gradient(tiny):
    layer = torch.nn.Linear(8, 4)
    (forward,) = prepacked.quick_forwards(torch.nn.Sequential(layer)).values() or (layer,)
    forward(torch.ones(2, 8)).sum().backward()
    assert layer.weight.grad is not None


def test_other_dtypes_keep_plain_weights(tiny):
    base = load_base(tiny("llama"), "fp32", "cpu").double()
    prepack(base)
    assert not any(isinstance(each, PrepackedLinear) for each in base.modules())


def is_linear(module) -> bool:
    return isinstance(module, torch.nn.Linear)
