"""What is predicted of memory: every part against a count by hand, on small models."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.core.test_data_order import datasets, seeds

from vox_core.adapter.targets import linear_modules, select_targets
from vox_core.contract import DType, Packing, Quant
from vox_core.data.batching import cut, documents_in_step
from vox_core.data.dataset import Dataset, assumed_dataset
from vox_core.host.manifest import MemoryProfile
from vox_plan.activations import Elements, kept_beside, kept_by_layer, working_of_layer
from vox_plan.architecture import read_architecture
from vox_plan.memory import (
    BYTES,
    Demand,
    WorstCase,
    adapter_bytes,
    bytes_per_weight,
    predict,
    split_bytes,
    trained_tensors,
    weight_bytes,
    worst_case_batch,
)
from vox_plan.memory_forecast import MICRO_BATCH_TOKENS, options, suggest

H, WIDE, V, LAYERS = 32, 64, 260, 2
Q, KV = 32, 16
EXACT = MemoryProfile(
    runtime_bytes=1000, activations=1.0, working=1.0, logits_elements=10 * V, padded_rows=False
)
CONFIG = {
    "model_type": "llama",
    "hidden_size": H,
    "vocab_size": V,
    "num_attention_heads": 4,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class Shape:
    shape: tuple[int, ...]


def llama(**more: tuple[int, ...]) -> dict[str, Shape]:
    """Names and shapes as in the files of a Llama; `more` is in every layer."""
    layer = {
        "input_layernorm": (H,),
        "self_attn.q_proj": (Q, H),
        "self_attn.k_proj": (KV, H),
        "self_attn.v_proj": (KV, H),
        "self_attn.o_proj": (H, Q),
        "post_attention_layernorm": (H,),
        "mlp.gate_proj": (WIDE, H),
        "mlp.up_proj": (WIDE, H),
        "mlp.down_proj": (H, WIDE),
        **{name.replace("__", "."): shape for name, shape in more.items()},
    }
    layers = {
        f"model.layers.{number}.{name}.weight": Shape(shape)
        for number in range(LAYERS)
        for name, shape in layer.items()
    }
    ends = {"model.embed_tokens": (V, H), "model.norm": (H,), "lm_head": (V, H)}
    return {**layers, **{f"{name}.weight": Shape(shape) for name, shape in ends.items()}}


def gpt2() -> dict[str, Shape]:
    layer = {
        "ln_1": (H,),
        "attn.c_attn": (H, 3 * H),
        "attn.c_proj": (H, H),
        "ln_2": (H,),
        "mlp.c_fc": (H, 4 * H),
        "mlp.c_proj": (4 * H, H),
    }
    named = {"wte.weight": Shape((V, H)), "wpe.weight": Shape((64, H))}
    for name, shape in layer.items():
        named[f"h.0.{name}.weight"] = Shape(shape)
        named[f"h.0.{name}.bias"] = Shape((shape[-1],))
    return named


GPT2 = {"model_type": "gpt2", "n_embd": H, "n_head": 4, "activation_function": "gelu_new"}
LINEAR = 2 * H * Q + 2 * H * KV + 3 * H * WIDE  # of one layer


def demand(
    tensors: dict[str, Shape], *targets: str, model_type: str = "llama", **more: object
) -> Demand:
    modules = select_targets(linear_modules(tensors, model_type), targets or ("all-linear",))
    asked = Demand("bf16", "none", "lora", 2, modules, WorstCase(100, 120, 50, 40))
    return replace(asked, **more)


# --- the architecture -----------------------------------------------------------------------------


def test_a_llama_is_read_out_of_its_headers() -> None:
    model = read_architecture(llama(), CONFIG)
    assert (model.hidden, model.vocabulary, model.heads, len(model.layers)) == (H, V, 4, LAYERS)
    assert sum(model.elements.values()) == LAYERS * (LINEAR + 2 * H) + 2 * V * H + H
    assert sum(len(layer.norms) for layer in model.layers) == 2 * LAYERS
    assert model.head == {"lm_head.weight"}


def test_what_the_configuration_does_not_say_the_headers_do() -> None:
    model = read_architecture(llama(), {"model_type": "llama"})
    assert (model.hidden, model.vocabulary, model.heads) == (H, V, 0)


def test_a_stored_head_that_is_tied_counts_once() -> None:
    tied = read_architecture(llama(), {**CONFIG, "tie_word_embeddings": True})
    assert "lm_head.weight" not in tied.elements


def test_of_a_multimodal_model_the_text_decides_and_the_tower_is_loaded() -> None:
    nested = {"model.visual.layers.0.attn.qkv.weight": Shape((96, 32)), **llama()}
    model = read_architecture(nested, {"model_type": "x", "text_config": CONFIG})
    assert (model.hidden, len(model.layers)) == (H, LAYERS)
    assert "model.visual.layers.0.attn.qkv.weight" in model.elements
    assert "model.visual.layers.0.attn.qkv.weight" not in model.widths


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "dtype", "expected"),
    [
        ("none", "bf16", 2),
        ("none", "fp32", 4),
        ("nf4", "bf16", 0.5 + 1 / 64 + 4 / 16384),
        ("nf4-single", "bf16", 0.5 + 4 / 64),
        ("int8", "bf16", 1 + 4 / 1024),
        ("affine4", "bf16", 0.5 + 4 / 64),
        ("affine4", "fp32", 0.5 + 8 / 64),
        ("affine8", "bf16", 1 + 4 / 64),
        ("mxfp4", "bf16", 0.5 + 1 / 32),
        ("nvfp4", "bf16", 0.5 + 1 / 16),
    ],
)
def test_bytes_of_a_weight(quant: Quant, dtype: DType, expected: float) -> None:
    assert bytes_per_weight(quant, 1024, dtype) == expected


def test_a_quantisation_reaches_the_linear_layers_and_nothing_else() -> None:
    model = read_architecture(llama(), CONFIG)
    plain = LAYERS * 2 * H + 2 * V * H + H
    assert weight_bytes(model, "none", "bf16") == 2 * (LAYERS * LINEAR + plain)
    expected = LAYERS * LINEAR * (0.5 + 4 / 64) + 2 * plain
    assert weight_bytes(model, "nf4-single", "bf16") == expected


def test_with_embeddings_it_reaches_them_and_the_head_as_well() -> None:
    model = read_architecture(llama(), CONFIG)
    linear, embeddings = 0.5 + 1 / 64 + 4 / 16384, 1 + 4 / H
    expected = LAYERS * LINEAR * linear + 2 * V * H * embeddings + 2 * (LAYERS * 2 * H + H)
    assert weight_bytes(model, "nf4-embeddings", "bf16") == round(expected)


def test_what_the_files_hold_quantised_is_what_counts() -> None:
    stored = read_architecture(llama(), CONFIG, stored=["lm_head.weight"])
    everything = sum(stored.elements.values())
    expected = 2 * (everything - V * H) + V * H * (0.5 + 1 / 32)
    assert weight_bytes(stored, "mxfp4", "bf16") == expected


# --- the adapter ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "each"), [("bf16", 2 + 2 + 16), ("fp32", 4 + 4 + 16)])
def test_the_adapter_has_masters_gradients_and_moments(dtype: DType, each: int) -> None:
    tensors = llama()
    model, asked = read_architecture(tensors, CONFIG), demand(tensors, "q_proj", dtype=dtype)
    assert sum(trained_tensors(model, asked)) == LAYERS * 2 * (H + Q)
    assert adapter_bytes(model, asked) == LAYERS * 2 * (H + Q) * each
    beside = 4 + 8 + 2  # a checkpoint's masters and moments; A as it was, and no B
    assert adapter_bytes(model, asked, in_process=True) == LAYERS * 2 * (H + Q) * (each + beside)


@pytest.mark.parametrize(("dtype", "each"), [("bf16", 16), ("fp32", 12)])
def test_full_has_masters_gradients_and_moments_beside_the_weights(dtype: DType, each: int) -> None:
    """Float32 weights are their own masters, and no checkpoint is copied. A micro-batch has
    gradients in the compute dtype, or activations if they are more."""
    tensors = llama()
    model, every = read_architecture(tensors, CONFIG), tuple(tensors)
    asked = demand(tensors, dtype=dtype, method="full", modules={}, saved=every)
    count = sum(model.elements.values())
    assert adapter_bytes(model, asked, in_process=True) == each * count
    few = predict(model, replace(asked, batch=WorstCase(1, 1, 1, 1)), EXACT)
    assert few.activations + few.transients == BYTES[dtype] * (count + V * H)
    many = predict(model, replace(asked, batch=WorstCase(10**4, 10**4, 1, 40)), EXACT)
    assert many.activations > few.activations + few.transients


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_a_head_is_beside_all_activations(tied: bool) -> None:
    """Twice with `full`, and once with an adapter, which counts the other one itself. That of an
    embedding which is no head comes when activations are gone."""
    tensors, embedding = llama(), "model.embed_tokens.weight"
    model = read_architecture(tensors, {**CONFIG, "tie_word_embeddings": tied})
    asked = demand(tensors)
    for saved in ("lm_head.weight", embedding):
        times = 1 if tied == (saved == embedding) else 0
        for method, more in (("lora", times), ("full", 2 * times)):
            found = predict(model, replace(asked, method=method, saved=(saved,)), EXACT)
            assert found.transients == LOGITS + WORKING + more * 2 * V * H


def test_magnitudes_and_what_is_trained_whole_count_too() -> None:
    tensors = llama()
    model = read_architecture(tensors, CONFIG)
    asked = demand(tensors, "q_proj", method="dora", saved=("lm_head.weight",))
    assert sum(trained_tensors(model, asked)) == LAYERS * (2 * (H + Q) + Q) + V * H


def test_moments_in_8_bits_of_tensors_that_are_large_enough() -> None:
    """bitsandbytes keeps those below 4096 elements in float32."""
    tensors, rank = llama(), -(-4096 // WIDE)  # so that A of down_proj is large enough
    model, asked = read_architecture(tensors, CONFIG), demand(tensors, rank=rank)
    sizes = [
        rank * each
        for module in asked.modules.values()
        for each in (module.in_features, module.out_features)
    ]
    assert min(sizes) < 4096 <= max(sizes)
    whole = adapter_bytes(model, asked)
    spared = sum(2 * (3 * size - 4 * -(-size // 256)) for size in sizes if size >= 4096)
    assert adapter_bytes(model, replace(asked, optimizer="adamw-8bit")) == whole - spared


# --- activations ----------------------------------------------------------------------------------


def kept(tensors: dict[str, Shape], config: dict[str, object], *targets: str) -> Elements:
    model = read_architecture(tensors, config)
    modules = demand(tensors, *targets, model_type=str(config["model_type"])).modules
    return kept_by_layer(model, model.layers[0], modules)


def test_what_a_llama_keeps_of_a_token() -> None:
    attention = H + (Q + KV + KV) + 2 * Q  # input; q, k, v; what it gives, and that for o_proj
    feed_forward = H + 3 * WIDE + WIDE  # input; gate, its silu, up; what down_proj reads
    assert kept(llama(), CONFIG) == Elements(attention + feed_forward, float32=2 * H)


def test_inputs_are_kept_for_adapters_alone() -> None:
    feed_forward = 3 * WIDE  # the gate's product needs its factors, nobody its result
    attention = H + (Q + KV + KV) + Q  # no copy for o_proj
    assert kept(llama(), CONFIG, "q_proj") == Elements(attention + feed_forward, 2 * H)


def test_norms_of_heads_widen_queries_and_keys() -> None:
    with_norms = llama(self_attn__q_norm=(8,), self_attn__k_norm=(8,))
    plain = kept(llama(), CONFIG)
    assert kept(with_norms, CONFIG) == plain.plus(Elements(float32=Q + KV))


def test_more_norms_keep_more_of_the_stream() -> None:
    gemma = llama(pre_feedforward_layernorm=(H,), post_feedforward_layernorm=(H,))
    assert kept(gemma, CONFIG).float32 == 4 * H


def test_what_a_gpt2_keeps_of_a_token() -> None:
    norms = 2 * H  # LayerNorm keeps its input as it is
    attention = H + 3 * H + 2 * H
    feed_forward = H + 4 * H + 3 * 4 * H + 4 * H  # gelu_new is written out: three more
    assert kept(gpt2(), GPT2) == Elements(norms + attention + feed_forward)


def test_linear_attention_keeps_chunks_keys_and_values_of_its_heads() -> None:
    state = {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
    linear = llama(linear_attn__in_proj_qkv=(96, H), linear_attn__out_proj=(H, 64))
    without = kept(linear, CONFIG)
    found = kept(linear, {**CONFIG, **state, "layer_types": ["linear_attention"]})
    assert found.compute - without.compute == 3 * 96
    assert found.float32 - without.float32 == 4 * (5 * 64 + 7.5 * 8 + 4 * 16)


def test_of_experts_those_count_that_a_token_takes() -> None:
    shape = {"gate": (WIDE, H), "up": (WIDE, H), "down": (H, WIDE)}
    experts = {f"mlp__experts__{n}__{p}_proj": shape[p] for n in range(4) for p in shape}
    config = {**CONFIG, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": WIDE}
    model = read_architecture(llama(**experts), {**config, "hidden_size": H})
    dense = 3 * WIDE  # beside them, and as frozen
    assert model.layers[0].feed_forward == 2 * (3 * WIDE + H) + dense
    assert split_bytes(model, "bf16")[0] == 2 * (H * (2 * Q + 2 * KV) + 5 * 3 * H * WIDE)


def test_the_backward_of_a_layer_needs_the_gradients_of_its_widest_block() -> None:
    model = read_architecture(llama(), CONFIG)
    assert working_of_layer(model, model.layers[0]) == Elements(3 * WIDE + 2 * H)


def test_dropout_and_dora_keep_more() -> None:
    tensors = llama()
    model = read_architecture(tensors, CONFIG)
    modules = demand(tensors, "k_proj").modules
    assert kept_beside(model.layers[0], modules, dora=False, dropout=False) == 0
    assert kept_beside(model.layers[0], modules, dora=False, dropout=True) == 2 * H
    assert kept_beside(model.layers[0], modules, dora=True, dropout=False) == 2 * KV


# --- the whole ------------------------------------------------------------------------------------

A_LAYER = 100 * (2 * (H + Q + 2 * KV + 2 * Q + H + 4 * WIDE) + 4 * 2 * H)
ENDS = H * (100 * (4 + 2) + 50 * 2 * 2)
LOGITS = 10 * V * (2 + 4 + 4)
WORKING = 100 * 2 * (3 * WIDE + 2 * H)


def test_every_part_of_a_small_llama() -> None:
    tensors = llama()
    model, asked = read_architecture(tensors, CONFIG), demand(tensors)
    found = predict(model, asked, EXACT)
    assert asdict(found) == {
        "runtime": 1000,
        "weights": 2 * (LAYERS * (LINEAR + 2 * H) + 2 * V * H + H),
        "adapter": adapter_bytes(model, asked, in_process=True),
        "activations": LAYERS * A_LAYER + ENDS,
        "transients": LOGITS + WORKING,
        "caches": 0,
        "reference": 0,
        "kept": 0,
    }
    assert found.peak == sum(asdict(found).values())


def test_packed_weights_take_the_place_of_activations() -> None:
    tensors = llama()
    model = read_architecture(tensors, CONFIG)
    made = (plain := predict(model, demand(tensors), EXACT)).activations + plain.transients
    for copies, more in ((made - 1, 0), (made + 7, 7)):
        asked = demand(tensors, caches=5, copies=copies)
        assert predict(model, asked, EXACT).caches == 5 + more
        elsewhere = replace(EXACT, in_process=False)
        assert predict(model, asked, elsewhere).caches == 5


def test_checkpointing_keeps_inputs_and_has_one_layer_at_a_time() -> None:
    tensors = llama()
    asked = demand(tensors, gradient_checkpointing=True)
    found = predict(read_architecture(tensors, CONFIG), asked, EXACT)
    assert found.activations == LAYERS * 100 * H * 2 + ENDS
    assert found.transients == LOGITS + A_LAYER + WORKING


def test_logits_are_those_of_a_chunk_or_of_all_that_is_trained() -> None:
    tensors = llama()
    model = read_architecture(tensors, CONFIG)
    for elements, expected in ((50 * V, 50 * V * 10), (99 * V, 50 * V * 10), (1, V * 10)):
        found = predict(model, demand(tensors), replace(EXACT, logits_elements=elements))
        assert found.transients == expected + WORKING
    every = predict(model, demand(tensors), replace(EXACT, logits_elements=0))
    assert every.transients == 50 * V * (2 + 4 + 16) + WORKING
    wide = predict(model, demand(tensors, dtype="fp32"), replace(EXACT, logits_elements=1))
    assert wide.transients == V * (4 + 4) + 2 * WORKING


def test_a_backends_own_waste_is_a_multiple_of_what_layers_need() -> None:
    tensors = llama()
    found = predict(
        read_architecture(tensors, CONFIG),
        demand(tensors),
        replace(EXACT, activations=1.5, working=3.0),
    )
    assert found.activations == 1.5 * (LAYERS * A_LAYER + ENDS)
    assert found.transients == LOGITS + 3.0 * WORKING


def test_layers_below_the_first_adapter_keep_nothing() -> None:
    tensors = llama()
    model = read_architecture(tensors, CONFIG)
    asked = demand(tensors, "model.layers.1.mlp.gate_proj")
    layer = 100 * (2 * (Q + 2 * KV + Q + H + 3 * WIDE) + 4 * 2 * H)
    assert predict(model, asked, EXACT).activations == layer + ENDS
    head_only = replace(asked, modules={}, saved=("lm_head.weight",))
    assert predict(model, head_only, EXACT).activations == ENDS


def test_a_dequantised_weight_exists_while_it_is_used() -> None:
    tensors = llama()
    model = read_architecture(tensors, CONFIG)
    asked = demand(tensors, quant="nf4")
    assert predict(model, asked, EXACT).transients == LOGITS + WORKING + WIDE * H * (2 + 4 / 64)
    kernels = replace(EXACT, dequantises=False)
    assert predict(model, asked, kernels).transients == LOGITS + WORKING


def test_padded_rows_and_capped_scores_cost_more() -> None:
    tensors = llama()
    model = read_architecture(tensors, CONFIG)
    asked = demand(tensors)
    padded = predict(model, asked, replace(EXACT, padded_rows=True))
    assert padded.activations > predict(model, asked, EXACT).activations
    capped = read_architecture(tensors, {**CONFIG, "attn_logit_softcapping": 50.0})
    more = predict(capped, asked, EXACT).activations - predict(model, asked, EXACT).activations
    assert more == LAYERS * 100 * 4 * 40 * (2 * 2 + 4)
    recurrent = {**CONFIG, "layer_types": ["linear_attention", "full_attention"]}  # none in names
    state = predict(read_architecture(tensors, recurrent), asked, EXACT)
    assert state.activations == padded.activations


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({}, {"batch": WorstCase(200, 200, 50, 40)}),
        ({}, {"dtype": "fp32"}),
        ({}, {"rank": 4}),
        ({}, {"method": "dora"}),
        ({}, {"dropout": True}),
        ({"quant": "nf4"}, {"quant": "int8"}),
        ({"gradient_checkpointing": True}, {"gradient_checkpointing": False}),
    ],
)
def test_more_of_anything_needs_more(less: dict[str, object], more: dict[str, object]) -> None:
    tensors = llama()
    model = read_architecture(tensors, CONFIG)
    profile = replace(EXACT, logits_elements=V)
    low, high = (predict(model, demand(tensors, **each), profile) for each in (less, more))
    assert low.peak < high.peak


# --- what fits ------------------------------------------------------------------------------------


def test_the_suggestion_changes_numbers_last() -> None:
    tensors = llama()
    model, asked = read_architecture(tensors, CONFIG), demand(tensors)
    batches = {n: WorstCase(n, n, 50, 40) for n in MICRO_BATCH_TOKENS}
    grid = options(model, asked, EXACT, ("nf4", "none"), batches)
    assert [(o.quant, o.gradient_checkpointing) for o in grid[::5]] == [
        ("none", False),
        ("none", True),
        ("nf4", False),
        ("nf4", True),
    ]
    peaks = {(o.quant, o.gradient_checkpointing, o.micro_batch_tokens): o.peak for o in grid}
    for memory in (peaks["none", False, 1024], peaks["none", True, 512], peaks["nf4", True, 512]):
        found = suggest(grid, round(memory / 0.9) + 1)
        assert found is not None
        assert found.peak <= memory
        better = grid[: grid.index(found)]
        assert all(o.peak > memory or o.quant == found.quant for o in better)
    assert suggest(grid, min(peaks.values())) is None  # without a tenth to spare
    kept = suggest(grid, 10**12, "nf4")
    assert kept is not None
    assert (kept.quant, kept.gradient_checkpointing, kept.micro_batch_tokens) == (
        "nf4",
        False,
        8192,
    )
    short = {n: WorstCase(min(n, 700), 700, 50, 40) for n in MICRO_BATCH_TOKENS}
    same = options(model, asked, EXACT, ("none",), short)
    small = suggest(same, 10**12)
    assert small is not None
    assert small.micro_batch_tokens == 1024  # more at once would change nothing
    as_it_is = suggest(same, 10**12, tokens=2048)
    assert as_it_is is not None
    assert as_it_is.micro_batch_tokens == 2048
    generous = suggest(grid, 10**12)
    assert generous is not None
    assert generous.flags("none") == "--micro-batch-tokens 8192"
    assert grid[-1].flags("none") == (
        "--quant nf4 --gradient-checkpointing --micro-batch-tokens 8192"
    )


# --- the largest micro-batch ----------------------------------------------------------------------


def test_the_worst_case_batch_of_documents_alike() -> None:
    found = worst_case_batch(
        assumed_dataset(8, 100), steps=3, batch_size=8, micro_batch_tokens=350, seed=1
    )
    assert found == WorstCase(laid=300, padded=300, trained=297, longest=100)


def test_a_document_longer_than_the_budget_is_one_by_itself() -> None:
    found = worst_case_batch(
        assumed_dataset(8, 100), steps=3, batch_size=8, micro_batch_tokens=50, seed=1
    )
    assert found == WorstCase(100, 100, 99, 100)


def test_the_longest_document_counts_though_its_step_is_far_off() -> None:
    many, long = assumed_dataset(500, 10), assumed_dataset(1, 90)
    mixed = Dataset.of((*many, *long))
    seen = [
        worst_case_batch(mixed, steps=n, batch_size=1, micro_batch_tokens=50, seed=1).longest
        for n in (1, 400)
    ]
    assert seen == [90, 90]


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    datasets(),
    st.integers(1, 6),
    seeds,
    st.integers(1, 100),
    st.sampled_from(["rows", "end-to-end"]),
)
def test_the_worst_case_batch_is_that_of_the_steps(
    dataset: Dataset, batch_size: int, seed: int, budget: int, packing: Packing
) -> None:
    """What memory is predicted from."""
    steps = 5
    worst = worst_case_batch(
        dataset,
        steps=steps,
        batch_size=batch_size,
        micro_batch_tokens=budget,
        seed=seed,
        packing=packing,
    )
    made = [
        batch
        for step in range(1, steps + 1)
        for batch in cut(
            [dataset[index] for index in documents_in_step(dataset, batch_size, seed, step)],
            budget,
            packing,
        )[0]
    ]
    longest = dataset.longest
    laid = max(len(batch.tokens_T) for batch in made)
    assert worst.laid == max(laid, longest)
    assert worst.laid <= max(budget, longest)
    assert worst.padded <= max(budget, longest)
    assert worst.longest == longest
    trained = max(np.count_nonzero(batch.weights_T) for batch in made)
    assert worst.trained >= trained
