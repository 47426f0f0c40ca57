"""Loading beside what the conformance suite asks of it: streamed layers, windows, sampling."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from vox_core.contract import AdapterState, Batch, LoadJob
from vox_core.errors import ModelError
from vox_mlx import backend
from vox_mlx.base import load_base, require_window
from vox_testing import jobs, tiny
from vox_testing.tiny import make_model

TOKENS = np.arange(20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


def adapter(model: Path) -> AdapterState:
    """LoRA everywhere and a whole tensor inside a layer."""
    state = jobs.stirred(jobs.start(model, jobs.plan(model))).adapter
    whole = np.full(32, 1.7, np.float32)
    return replace(state, saved={"model.layers.0.input_layernorm.weight": whole})


def test_a_streamed_model_gives_the_same_logits_every_time(model):
    state = adapter(model)
    plain, streamed = (
        backend.vox_load(LoadJob(model, "fp32", streamed=flag), None) for flag in (False, True)
    )
    for loaded in (plain, streamed):
        loaded.add_adapter("one", state)
    for name in ("one", None, "one"):
        assert np.array_equal(streamed.logits(TOKENS, name), plain.logits(TOKENS, name))


def test_a_streamed_model_holds_one_layer_at_a_time(tmp_path, monkeypatch):

    wide = {**tiny.FAMILIES["llama"][1], "hidden_size": 256, "num_hidden_layers": 12}
    monkeypatch.setitem(tiny.FAMILIES, "llama", ("llama", wide))
    model = make_model("llama", tmp_path / "deep")

    def peak(*, streamed: bool) -> int:
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        loaded = backend.vox_load(LoadJob(model, "fp32", streamed=streamed), None)
        loaded.logits(TOKENS)
        loaded.close()
        return mx.get_peak_memory() - before

    assert peak(streamed=True) < peak(streamed=False) / 3


def test_what_decides_between_experts_is_not_rounded(tmp_path):
    """A bias of the router, which has to tell apart scores that differ in the third digit."""
    model = load_base(make_model("glm4_moe", tmp_path), "bf16", "nvfp4")
    parameters = tree_flatten(model.parameters())
    dtypes = {name.rpartition(".")[2]: each.dtype for name, each in parameters}
    assert dtypes.pop("e_score_correction_bias") == mx.float32
    assert {d for d in dtypes.values() if mx.issubdtype(d, mx.floating)} == {mx.bfloat16}


def test_documents_and_answers_keep_within_a_window_that_mlx_lm_leaves_out(tmp_path, monkeypatch):
    from vox_testing import tiny

    windowed = {**tiny.FAMILIES["phi3"][1], "sliding_window": 24}
    monkeypatch.setitem(tiny.FAMILIES, "phi3", ("phi3", windowed))
    loaded = backend.vox_load(LoadJob(make_model("phi3", tmp_path / "phi3"), "fp32"), None)
    loaded.insert(0, TOKENS)
    logits_V = loaded.advance({})[0]
    for _ in range(24 - len(TOKENS)):
        logits_V = loaded.advance({0: int(logits_V.argmax())})[0]
    for beyond in (
        lambda: loaded.advance({0: 1}),
        lambda: loaded.insert(1, np.arange(25)),
        lambda: loaded.logits(np.arange(25)),
    ):
        with pytest.raises(ModelError):
            beyond()


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("quant", ["none", "mxfp4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_decoding_step_computes_what_training_did(tmp_path, family, quant, method, monkeypatch):
    """With biases (qwen2), packed weights and DoRA, whose gain is computed once."""
    from vox_mlx.lora import Lora

    model = make_model(family, tmp_path / family)
    state = jobs.stirred(jobs.start(model, jobs.plan(model, method=method))).adapter
    loaded = backend.vox_load(LoadJob(model, "fp32", quant), None)
    loaded.add_adapter("one", state)
    together = loaded.logits(TOKENS, "one")
    loaded.insert(0, TOKENS[:1], "one")
    found = [loaded.advance({})[0]]
    monkeypatch.setattr(Lora, "_gain", lambda *_: pytest.fail("a gain was computed anew"))
    found += [loaded.advance({0: int(token)})[0] for token in TOKENS[1:]]
    assert np.linalg.norm(np.stack(found) - together) < 2e-5 * np.linalg.norm(together)


@pytest.mark.parametrize(
    ("family", "key"),
    [("llama", "tie_word_embeddings"), ("qwen2", "rope_parameters"), ("mistral", "sliding_window")],
)
def test_what_a_configuration_leaves_out_is_as_transformers_has_it(tmp_path, family, key):
    """mlx-lm would tie the head, take another theta, and never have a window."""
    import json

    folder = make_model(family, tmp_path / family)
    said = backend.vox_load(LoadJob(folder, "fp32"), None).logits(TOKENS)
    config = json.loads((folder / "config.json").read_text())
    default = {"llama": False, "qwen2": config.get("rope_parameters"), "mistral": 4096}[family]
    config[key] = default
    (folder / "config.json").write_text(json.dumps(config))
    written = backend.vox_load(LoadJob(folder, "fp32"), None).logits(TOKENS)
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    left_out = backend.vox_load(LoadJob(folder, "fp32"), None).logits(TOKENS)
    assert np.array_equal(left_out, written)
    assert np.array_equal(written, said) == (family != "mistral")


def test_documents_beyond_a_window_that_mlx_lm_leaves_out_are_refused():
    config = {"model_type": "phi3", "sliding_window": 8}
    require_window(config, 8)
    with pytest.raises(ModelError, match="--seq-len 8"):
        require_window(config, 9)


@pytest.mark.parametrize(
    ("family", "method", "targets"),
    [("llama", "lora", 1), ("llama", "dora", 2), ("gemma3", "lora", 1), ("qwen3_5", "lora", 1)],
)
def test_tokens_before_several_answers_are_computed_once(
    tmp_path, family, method, targets, monkeypatch
):
    """Where a cache can be cut; the numbers are those of documents one by one."""
    rng = np.random.default_rng(0)
    first, other = rng.integers(5, 90, (2, 40))
    ends = [rng.integers(5, 90, count) for count in (2, 5, 3)]
    some = [*(np.concatenate([first, end]) for end in ends), other]
    wanted = [np.arange(len(each)) >= 39 for each in some]
    parts = [np.concatenate(each) for each in (some, wanted)]
    nothing_T, starts_D = np.zeros(len(parts[0]), np.float32), np.array([0, 42, 87, 130])
    if targets == 1:
        batch = Batch(parts[0], np.roll(parts[0], -1), nothing_T, starts_D, parts[1])
    else:
        several = (np.stack([each, each], 1) for each in (parts[0], nothing_T, parts[1]))
        targets_TM, nothing_TM, scored_TM = several
        batch = Batch(parts[0], np.roll(targets_TM, -1, 0), nothing_TM, starts_D, scored_TM)
    model = make_model(family, tmp_path / family)
    loaded = backend.vox_load(LoadJob(model, "fp32"), None)
    loaded.add_adapter(
        "one", jobs.stirred(jobs.start(model, jobs.plan(model, method=method))).adapter
    )
    counts, compute = [], type(loaded)._nll

    def counted(self, adapter, part, *others):
        counts.append(part.tokens_NL.size)
        return compute(self, adapter, part, *others)

    monkeypatch.setattr(type(loaded), "_nll", counted)
    found = loaded.log_probs(batch, "one")
    assert counts == ([3 * 6, 40] if family == "llama" else [4 * 45])
    monkeypatch.setattr("vox_mlx.loss.LEAST_SAVED", 1000)
    assert np.abs(found - loaded.log_probs(batch, "one")).max() < 2e-5
    assert (found[~parts[1]] == 0).all() and (found[parts[1]] < 0).all()
