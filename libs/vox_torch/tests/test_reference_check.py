"""The fast path held against transformers on a document, before the first step."""

from __future__ import annotations

import shutil
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from libs.vox_torch.tests.jobs import batch, documents, losses, plan, start, step, train
from safetensors.torch import load_file, save_file

from vox_core.contract import FastPaths, Notice, probe_document
from vox_core.errors import TrainingError
from vox_testing.tiny import FAMILIES
from vox_torch import functions, loss, reference_check
from vox_torch import train as train_module
from vox_torch.base import load_base
from vox_torch.forward import Padded
from vox_torch.fused_modules import FusedNorm, fuse_modules
from vox_torch.inject import attach
from vox_torch.lora import fuse
from vox_torch.reference_check import Reference, computed_in_float32
from vox_torch.trial import loss_of

CASES = [("fp32", "none"), ("bf16", "none"), ("bf16", "nf4"), ("bf16", "int8")]


def adapted_of(folder, dtype, quant="none"):
    """With a fresh adapter, whose B is zero."""
    state = start(folder, plan(folder, quant=quant)).adapter
    return attach(load_base(folder, dtype, "cpu", quant), state)


@pytest.mark.parametrize(("dtype", "quant"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_right_passes(tiny, family, dtype, quant):
    adapted = adapted_of(tiny(family), dtype, quant)
    document = probe_document([batch(documents(2))])
    reference = Reference(adapted.model, document, adapted.parameters, "cpu")
    fuse(adapted.model)
    fuse_modules(adapted.model)
    assert reference.fault(loss_of(adapted.model, "cpu")[0]) is None
    assert not any(p.any() for name, p in adapted.parameters.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("positions", "nats", "wrong"),
    [(2, 0.5, True), (2, 0.1, False), (64, 0.1, True), (64, 0.02, False)],
)
def test_errors_of_few_positions_may_be_larger(tiny, positions, nats, wrong):
    """In bfloat16, where those of a text that repeats itself are so; 64 are scored."""
    adapted = adapted_of(tiny("llama"), "bf16")
    document = probe_document([batch(documents(1, longest=121, shortest=100))])
    reference = Reference(adapted.model, document, adapted.parameters, "cpu")
    exact_K = reference._exact_K.double()
    sign_K = torch.tensor([1.0, -1.0]).repeat(32)
    reference._plain_K = exact_K + 0.02 * sign_K
    found_K = exact_K + 0.02 * sign_K
    found_K[:positions] += nats * sign_K[:positions]

    def fast(_):
        return -found_K.sum(), SimpleNamespace(log_probs_K=found_K)

    assert (reference.fault(fast) is not None) == wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computed_in_float32_is_the_model_in_float32(tiny, family):
    """The weights are those rounded to bfloat16, and stay as they are."""
    model, document = adapted_of(tiny(family), "bf16").model, batch(documents(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), computed_in_float32(model):
        found_K = Padded(model, "cpu").log_probs(document).log_probs_K
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        expected_K = Padded(model.float(), "cpu").log_probs(document).log_probs_K
    torch.testing.assert_close(found_K, expected_K, rtol=0, atol=2e-3)


def norm_scaled(patch):
    own = FusedNorm.forward
    patch.setattr(FusedNorm, "forward", lambda self, x: own(self, x) * 1.05)


def adapter_scaled(patch):
    own = functions.LoraLinear.apply
    patch.setattr(
        functions.LoraLinear,
        "apply",
        lambda *given: own(*given[:5], -7 * given[5], *given[6:]),
    )


def loss_scaled(patch):
    own = loss.HeadLoss._of
    patch.setattr(
        loss.HeadLoss, "_of", lambda self, *given: (own(self, *given)[0] * 3, own(self, *given)[1])
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("wrong", [norm_scaled, adapter_scaled, loss_scaled])
def test_a_wrong_function_is_left_out_and_the_run_is_right(tiny, monkeypatch, wrong, dtype):
    """Also one of the adapter, which is fresh and changes nothing yet."""
    folder, steps = tiny("gemma3"), [step(1, [documents(4)]), step(2, [documents(4, seed=1)])]
    made = plan(folder, total_steps=2, dtype=dtype)
    _, right = train(folder, steps, made)
    bases, own = [], train_module.load_base
    monkeypatch.setattr(train_module, "load_base", lambda *given: _noted(bases, own(*given)))
    wrong(monkeypatch)
    _, events = train(folder, steps, made)
    (warning,) = [event for event in events if isinstance(event, Notice)]
    assert warning.level == "warning" and "as transformers does" in warning.message
    assert not any(isinstance(event, FastPaths) for event in events)
    assert losses(events) == pytest.approx(losses(right), rel=1e-5 if dtype == "fp32" else 2e-2)
    assert len(bases) == 2 and bases[0]() is None, "two base models in memory"


def test_a_whole_model_that_is_loaded_again_is_in_memory_once(tiny, monkeypatch):
    weights, own, folder = [], train_module.load_base, tiny("llama")

    def load(*given):
        base = own(*given)
        _noted(weights, base.lm_head.weight)
        return base

    monkeypatch.setattr(train_module, "load_base", load)
    norm_scaled(monkeypatch)
    train(folder, [step(1, [documents(4)])], plan(folder, total_steps=1, method="full"))
    assert len(weights) == 2


def _noted(bases, model):
    assert all(base() is None for base in bases), "two base models in memory"
    bases.append(weakref.ref(model))
    return model


def test_a_model_that_overflows_is_refused_before_the_first_step(tiny, tmp_path):
    shutil.copytree(tiny("llama"), tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["model.norm.weight"] *= 1e38
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(TrainingError, match="not finite in float32") as caught:
        train(tmp_path / "base", [step(1, [documents(4)])])
    assert caught.value.code == "VOX-T001"


def test_a_model_without_a_reference_trains_unchecked(tiny, monkeypatch):
    def no_memory(model):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(reference_check, "computed_in_float32", no_memory)
    folder = tiny("llama")
    _, events = train(folder, [step(1, [documents(4)])], plan(folder, total_steps=1, dtype="bf16"))
    (warning,) = [event for event in events if isinstance(event, Notice)]
    assert "are not checked" in warning.message and "can't allocate memory" in warning.message
    assert len(losses(events)) == 1


def test_a_function_that_raises_is_left_out(tiny, monkeypatch):
    def raises(self, x):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(FusedNorm, "forward", raises)
    _, events = train(tiny("llama"), [step(1, [documents(4)])])
    assert any("no kernel for this" in e.message for e in events if isinstance(e, Notice))
    assert len(losses(events)) == 1


@pytest.mark.parametrize(
    ("length", "kept", "last"), [(20, 20, 18), (512, 512, 510), (700, 512, 511)]
)
def test_the_longest_document_is_scored_evenly(length, kept, last):
    """At no more than 64 positions; the last of a whole document has no target."""
    some = [(np.arange(n) % 256, np.ones(n, np.float32)) for n in (7, length, 9)]
    probe = probe_document([batch(some[:1]), batch(some[1:])])
    assert (probe.tokens_T == some[1][0][:kept]).all() and len(list(probe.documents())) == 1
    scored = np.flatnonzero(probe.weights_T)
    assert (scored[0], scored[-1]) == (0, last) and len(scored) == min(64, last + 1)
    assert (probe.targets_T[scored] == some[1][0][scored + 1]).all()
