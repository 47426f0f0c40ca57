"""Documents end to end: the loss and the gradients of padded rows, or else padded rows."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from libs.vox_torch.tests.jobs import batch, documents, losses, plan, start, step, train
from transformers import AutoConfig, AutoModelForCausalLM

from vox_core.contract import AdapterState, Batch, Notice
from vox_core.weights import WeightFolder
from vox_testing.suite.gradients import several_targets
from vox_testing.tiny import FAMILIES, make_model
from vox_torch import attention, forward, layout, loss, trial
from vox_torch.base import load_base
from vox_torch.forward import Padded, Together
from vox_torch.inject import Adapted, attach
from vox_torch.lora import fuse
from vox_torch.trial import loss_of

# Two orders of the same float32 sums: the largest seen over the families are 2e-7 and 6e-7.
LOSS, GRADIENT = 2e-6, 5e-6
END_TO_END = sorted(set(FAMILIES) - {"qwen3_5"})


def adapted(folder, saved=(), **settings) -> Adapted:
    """A model with an adapter that has an effect, and parameters that are trained whole."""
    state = start(folder, plan(folder, **settings)).adapter
    read = WeightFolder(folder).read
    state = AdapterState(state.method, state.modules, {name: read(name) for name in saved})
    model = attach(load_base(folder, "fp32", "cpu"), state)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def gradients(model: Adapted, value: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(value, list(model.parameters.values()))
    return torch.cat([gradient.flatten() for gradient in found])


def assert_same(model: Adapted, one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.item() == pytest.approx(other.item(), rel=LOSS)
    expected = gradients(model, other)
    assert (gradients(model, one) - expected).norm() < GRADIENT * expected.norm()


def padded(model: Adapted) -> Padded:
    base = model.model
    base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
    return Padded(model.model, "cpu")


@pytest.mark.parametrize("family", END_TO_END)
def test_loss_and_gradients_are_those_of_padded_rows(tiny, family, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ON_CPU", 7 * 300)  # several chunks, and a last short one
    model = adapted(tiny(family))
    together, fault = loss_of(model.model, "cpu")
    assert (type(together), fault) == (Together, None)
    # Longer than the sliding windows of 16.
    some = batch(documents(5))
    found, _ = together(some)
    assert_same(model, found, padded(model)(some)[0])


@pytest.mark.parametrize("family", END_TO_END)
def test_tokens_that_documents_begin_with_are_computed_once(tiny, family):
    """Log-probabilities of branches are those of padded rows; longer than the windows of 16."""
    model = adapted(tiny(family))
    together, _ = loss_of(model.model, "cpu")
    rng = np.random.default_rng(0)
    first, other = rng.integers(5, 90, (2, 30))
    ends = [rng.integers(5, 90, count) for count in (9, 1, 20, 0)]
    some = [np.concatenate([first, end]) for end in ends]
    some[1:1] = [other, first[:20], first[:3]]  # another one, a part, and too short to share
    some.append(np.concatenate([first[:20], rng.integers(5, 90, 21)]))  # less than half in common
    lengths = [len(each) for each in some]
    tokens_T = np.concatenate(some)
    nothing_T, starts_D = np.zeros(len(tokens_T), np.float32), np.cumsum([0, *lengths[:-1]])
    every = np.ones(len(tokens_T), bool)
    rows = Batch(tokens_T, np.roll(tokens_T, -1), nothing_T, starts_D, every)
    laid = layout.begun_alike(rows, "cpu")
    assert laid.tokens_1T.shape[1] == 39 + 30 + 3 + 1 + 20 + 41
    with torch.no_grad():
        found = together.log_probs(rows, once=True).spread(len(tokens_T))
        expected = padded(model).log_probs(rows).spread(len(tokens_T))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


def test_a_family_has_at_most_four_times_the_scores_of_its_documents():
    """Of 20 to 20 + 20 tokens: (20 + 20 n)^2 <= 4 * 40^2 n up to n = 13."""
    rng, first = np.random.default_rng(0), np.arange(20)
    some = [np.concatenate([first, rng.integers(50, 90, 20)]) for _ in range(30)]
    tokens_T = np.concatenate(some)
    nothing_T, starts_D = np.zeros(len(tokens_T), np.float32), np.arange(0, 1200, 40)
    rows = Batch(tokens_T, tokens_T, nothing_T, starts_D, nothing_T > 0)
    bounds = layout.begun_alike(rows, "cpu").extents.bounds
    assert np.diff(bounds).tolist() == [20 + 20 * 13, 20 + 20 * 13, 20 + 20 * 4]


@pytest.mark.parametrize("settings", [{}, {"saved": ("model.norm.weight", "lm_head.weight")}])
def test_several_targets_of_a_position_are_those_of_padded_rows(tiny, settings, monkeypatch):
    """In several chunks, weighed before and in one pass; with a trained head, too."""
    monkeypatch.setattr(loss, "CHUNK_ON_CPU", 7 * 300)
    model = adapted(tiny("llama"), **settings)
    together, _ = loss_of(model.model, "cpu")
    some = several_targets()
    found, scores = together(some)
    expected, others = padded(model)(some)
    assert_same(model, found, expected)
    length = len(some.tokens_T)
    assert scores.spread(length) == pytest.approx(others.spread(length), abs=1e-5)
    once, _ = together(some, 1.0, lambda log_probs_TM: some.weights_T)
    assert_same(model, once, padded(model)(some)[0])


def test_documents_without_scored_positions_have_no_log_probs(tiny):
    model = adapted(tiny("llama"))
    together, _ = loss_of(model.model, "cpu")
    for some in (batch(documents(2)), several_targets()):
        idle = Batch(some.tokens_T, some.targets_T, 0 * some.weights_T, some.starts_D)
        for kind in (together, padded(model)):
            found = kind.log_probs(idle).spread(len(idle.tokens_T))
            assert found.shape == idle.targets_T.shape
            assert not found.any()


LOGITS = {
    "gemma2": {"final_logit_softcapping": 0.5, "head_dim": 8, "sliding_window": 16},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0},
}
"""Families that cap, multiply or divide their logits."""


@pytest.mark.parametrize("family", LOGITS)
def test_what_a_family_does_to_its_logits_stays_in_force(family, tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ON_CPU", 7 * 300)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 300, "pad_token_id": 0}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(family, **sizes, **heads, **LOGITS[family])
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        base.get_output_embeddings().weight.mul_(30)  # logits that a cap or a scale changes
    base.save_pretrained(tmp_path)
    model = adapted(tmp_path, targets=("q_proj",))
    together, fault = loss_of(model.model, "cpu")
    assert (type(together), fault) == (Together, None)
    some = batch(documents(3))
    body = model.model.base_model
    assert_same(model, together(some)[0], padded(model)(some)[0])
    assert model.model.base_model is body


def test_a_head_that_reads_more_of_the_body_gets_rows(tiny, monkeypatch):
    """As Falcon H1's, whose head multiplies by a number that the body has."""
    from transformers import LlamaForCausalLM

    def reading(self, *args, **named):
        return self.model.embed_tokens and own(self, *args, **named)

    own = LlamaForCausalLM.forward
    monkeypatch.setattr(LlamaForCausalLM, "forward", reading)
    kind, fault = loss_of(adapted(tiny("llama")).model, "cpu")
    assert isinstance(kind, Padded)
    assert "AttributeError" in fault


@pytest.mark.parametrize(
    "what",
    [{"targets": ("lm_head", "q_proj")}, {"targets": ("q_proj",), "saved": ("lm_head.weight",)}],
)
def test_what_is_trained_in_the_head_gets_its_gradient(tiny, what, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ON_CPU", 7 * 300)
    model = adapted(tiny("llama"), **what)
    assert any("lm_head" in name for name in model.parameters)
    some = batch(documents(3))
    found, _ = loss_of(model.model, "cpu")[0](some)
    assert_same(model, found, padded(model)(some)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_adapter_is_pefts(tiny, family):
    model = adapted(tiny(family))
    some = batch(documents(3))
    by_peft, _ = Padded(model.model, "cpu")(some)
    expected = gradients(model, by_peft)
    assert not any(fuse(model.model).values())
    fused, _ = Padded(model.model, "cpu")(some)
    assert fused.item() == pytest.approx(by_peft.item(), rel=LOSS)
    assert (gradients(model, fused) - expected).norm() < GRADIENT * expected.norm()


def test_layers_that_do_more_keep_pefts_own_path(tiny):
    folder = tiny("llama")
    made = plan(folder, method="dora")
    dora = attach(load_base(folder, "fp32", "cpu"), start(folder, made).adapter)
    assert list(fuse(dora.model).values()) == ["DoRA"] * len(made.modules)
    dropping = attach(load_base(folder, "fp32", "cpu"), start(folder, plan(folder)).adapter, 0.5)
    assert list(fuse(dropping.model).values()) == ["dropout"] * len(made.modules)


def test_recurrent_layers_get_rows_and_the_run_says_so(tiny):
    _, events = train(tiny("qwen3_5"), [step(1, [documents(3)])])
    told = [event.message for event in events if isinstance(event, Notice)]
    assert any("padded rows" in text and "linear_attention" in text for text in told)


@pytest.fixture(params=["fp32", "bf16"])
def deep(request, tmp_path, monkeypatch):
    """`deep(family)`: an adapted model of 24 layers, over which roundoff adds up."""

    def make(family: str) -> Adapted:
        kind, settings = FAMILIES[family]
        settings = {**settings, "num_hidden_layers": 24, "n_layer": 24, "layer_types": None}
        monkeypatch.setitem(FAMILIES, family, (kind, settings))
        folder = make_model(family, tmp_path / family)
        return attach(load_base(folder, request.param, "cpu"), start(folder, plan(folder)).adapter)

    return make


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_deep_model_is_not_taken_for_a_leaking_one(deep, family):
    assert loss_of(deep(family).model, "cpu")[1] is None


def test_a_state_that_leaks_is_found_without_being_named(deep, monkeypatch):
    monkeypatch.setattr(trial, "recurrent", lambda _base: None)
    kind, fault = loss_of(deep("qwen3_5").model, "cpu")
    assert isinstance(kind, Padded)
    assert "changes the next" in fault


def test_attention_that_leaks_is_found(deep, monkeypatch):
    whole = attention.attend

    def leaking(*args, documents, **named):
        length = documents.bounds[-1]
        return whole(*args, documents=replace(documents, bounds=(0, length)), **named)

    monkeypatch.setattr(attention, "attend", leaking)
    kind, fault = loss_of(deep("llama").model, "cpu")
    assert isinstance(kind, Padded)
    assert "changes the next" in fault


def test_another_computation_is_found_though_documents_are_apart(deep, monkeypatch):
    """A window that nobody asked for."""
    whole = attention.attend

    def windowed(*args, sliding_window=None, **named):
        return whole(*args, sliding_window=2, **named)

    monkeypatch.setattr(attention, "attend", windowed)
    kind, fault = loss_of(deep("llama").model, "cpu")
    assert isinstance(kind, Padded)
    assert "from those of padded rows" in fault


def test_a_window_that_attention_is_not_told_of_is_found(tiny, monkeypatch):
    """No two short documents would show it."""
    whole = attention.attend

    def untold(*args, sliding_window=None, **named):
        return whole(*args, **named)

    monkeypatch.setattr(attention, "attend", untold)
    kind, fault = loss_of(adapted(tiny("mistral")).model, "cpu")
    assert isinstance(kind, Padded)
    assert "a window of 16 tokens" in fault


def test_a_body_that_is_passed_by_gets_rows(tiny, monkeypatch):
    """As OPT's, whose head asks its decoder."""
    model = adapted(tiny("llama"))
    monkeypatch.setattr(forward, "_watched", lambda *_, **__: contextlib.nullcontext([]))
    together = Together(model.model, "cpu")
    with pytest.raises(NotImplementedError):
        together.hidden(batch(documents(2)))


def test_memory_that_runs_short_in_the_trial_is_no_reason_for_rows(tiny, monkeypatch):
    def short(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(forward, "end_to_end", short)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(adapted(tiny("llama")).model, "cpu")


def test_attention_that_asks_for_more_gets_rows(tiny, monkeypatch):
    monkeypatch.setattr(attention, "_KNOWN", set())
    kind, fault = loss_of(adapted(tiny("llama")).model, "cpu")
    assert isinstance(kind, Padded)
    assert "NotImplementedError" in fault


def test_capped_attention_with_and_without_a_window():
    """Gemma 2's, against its formula in float64."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 4) for heads in (4, 2, 2))
    extents = attention.Extents((0, 9), torch.tensor([0, 9]), 9)
    for window in (None, 3):
        found, _ = attention.attend(
            torch.nn.Module(),
            query,
            key,
            value,
            None,
            documents=extents,
            scaling=0.7,
            softcap=2.0,
            sliding_window=window,
        )
        wide_q, wide_k, wide_v = (t.double() for t in (query, key, value))
        for head in range(4):
            scores = np.tanh((wide_q[0, head] @ wide_k[0, head // 2].T).numpy() * 0.7 / 2) * 2
            rows, columns = np.indices((9, 9))
            seen = (columns <= rows) & (rows - columns < (window or 9))
            weights = np.where(seen, np.exp(scores), 0)
            expected = weights / weights.sum(1, keepdims=True) @ wide_v[0, head // 2].numpy()
            # Float32 arithmetic on sums of nine terms.
            assert found[0, :, head].numpy() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", END_TO_END)
def test_the_head_sees_the_trained_positions_and_no_others(tiny, family):
    """One more row in the pass of the body cost 0.1 s of a micro-batch of SmolLM2 on a CPU, and a
    copy of the head."""
    model = adapted(tiny(family))
    seen: list[int] = []
    head = model.model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., 0].numel()))
    some = batch(documents(3))
    Together(model.model, "cpu")(some)
    assert sum(seen) == int((some.weights_T > 0).sum())


def test_a_batch_without_trained_positions_adds_nothing(tiny):
    model = adapted(tiny("llama"))
    some = batch([(tokens, np.zeros_like(weights)) for tokens, weights in documents(2)])
    together, _ = loss_of(model.model, "cpu")
    found, _ = together(some)
    assert found.item() == 0
    assert not gradients(model, found).any()


def test_training_is_the_same_end_to_end_and_in_rows(tiny, monkeypatch):
    folder, steps = tiny("llama"), [step(n, [documents(3, seed=n)]) for n in range(1, 6)]
    _, together = train(folder, steps)
    monkeypatch.setattr(trial, "recurrent", lambda _base: "told so")
    _, rows = train(folder, steps)
    # DESIGN.md: two right float32 implementations.
    assert losses(together) == pytest.approx(losses(rows), rel=1e-5)
