"""What the torch engine's autograd keeps of a micro-batch, against what is counted from headers.

Kept is every storage that a backward function saves, once, but for parameters, buffers and logits.
Nothing is measured: no allocator and no library has a part in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import pytest
import torch

import vox_cpu
from vox_core.contract import Batch, DType, Method
from vox_core.host.manifest import MemoryProfile, parse_manifest
from vox_core.weights import open_weights
from vox_plan.architecture import read_architecture
from vox_plan.memory import Demand, WorstCase, predict
from vox_testing import jobs
from vox_testing.tiny import FAMILIES, MIXTURES, VOCABULARY, make_model
from vox_torch import attention
from vox_torch.base import load_base
from vox_torch.fused_modules import fuse_modules
from vox_torch.inject import attach, only_adapter_dropout
from vox_torch.lora import fuse
from vox_torch.trial import loss_of

if TYPE_CHECKING:
    from vox_core.contract import ExecutionPlan

TOKENS, DOCUMENTS = 128, 2
# Nothing but activations; logits all at once, so that none are kept in chunks.
MANIFEST = Path(vox_cpu.__file__).with_name("vox_plugin.toml")
PROFILE = MemoryProfile(
    runtime_bytes=0,
    activations=1.0,
    padded_rows=False,
    fused=parse_manifest(MANIFEST.read_text(), MANIFEST).memory.fused,
)


def kept(folder: Path, plan: ExecutionPlan) -> int:
    """Bytes that the graph of one micro-batch holds."""
    base = load_base(folder, plan.dtype, "cpu")
    state = jobs.start(folder, plan).adapter
    adapted = attach(base, state, plan.contract.adapter.dropout)
    fuse(adapted.model)
    fuse_modules(adapted.model)
    loss, _ = loss_of(adapted.model, "cpu")
    only_adapter_dropout(adapted.model)
    own = {t.untyped_storage().data_ptr() for t in (*base.parameters(), *base.buffers())}
    saved = WeakSet[Saved]()

    def pack(tensor: torch.Tensor) -> Saved:
        saved.add(given := Saved(tensor))
        return given

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda given: given.tensor):
        graph = loss(batch())
    # Logits, and the gradient of a head, are counted elsewhere.
    tensors = (each.tensor for each in saved if VOCABULARY not in each.tensor.shape[-2:])
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    del graph
    return sum(size for at, size in storages.items() if at not in own)


@dataclass(eq=False)
class Saved:
    """A tensor that a backward function saves; it goes with the graph."""

    tensor: torch.Tensor


def batch() -> Batch:
    tokens_T = np.arange(TOKENS) * 7919 % VOCABULARY
    starts_D = np.arange(DOCUMENTS) * (TOKENS // DOCUMENTS)
    return Batch(tokens_T, np.roll(tokens_T, -1), np.ones(TOKENS, np.float32), starts_D)


def counted(folder: Path, plan: ExecutionPlan) -> int:
    weights = open_weights(folder)
    config = json.loads((folder / "config.json").read_bytes())
    demand = Demand(
        dtype=plan.dtype,
        quant="none",
        method=plan.contract.adapter.method,
        rank=plan.contract.adapter.rank,
        modules=plan.modules,
        batch=WorstCase(TOKENS, TOKENS, TOKENS, TOKENS // DOCUMENTS),
        saved=tuple(plan.saved.values()),
        dropout=plan.contract.adapter.dropout > 0,
    )
    model = read_architecture(weights.tensors, config)
    return predict(model, demand, PROFILE).activations


@pytest.mark.parametrize(
    ("family", "dtype", "method", "dropout"),
    [
        *((family, "bf16", "lora", 0.0) for family in (*FAMILIES, *MIXTURES)),
        ("llama", "fp32", "lora", 0.0),
        ("llama", "bf16", "rslora", 0.0),
        ("llama", "bf16", "full", 0.0),
        *(("llama", "fp32", method, 0.1) for method in ("lora", "dora")),
        *((family, "bf16", "dora", 0.0) for family in ("llama", "gemma3")),
    ],
)
def test_of_each_family(
    family: str,
    dtype: DType,
    method: Method,
    dropout: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_bf16_without_amx", lambda: False)
    folder = make_model(family, tmp_path / "base")
    plan = replace(jobs.plan(folder, method=method, dropout=dropout), dtype=dtype)
    assert counted(folder, plan) == pytest.approx(kept(folder, plan), rel=0.1)


@pytest.mark.parametrize("by_products", [False, True])
def test_keys_wider_than_values_keep_no_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_products: bool
) -> None:
    """Values that get zeros, and copies of queries and keys, are not counted."""
    monkeypatch.setattr(attention, "_bf16_without_amx", lambda: by_products)
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    heads = {"qk_rope_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    settings = {**MIXTURES["glm4_moe"][1], **latent, **heads, **groups}
    monkeypatch.setitem(MIXTURES, "deepseek", ("deepseek_v3", settings))
    folder = make_model("deepseek", tmp_path / "base")
    plan = replace(jobs.plan(folder), dtype="bf16")
    assert counted(folder, plan) == pytest.approx(kept(folder, plan), rel=0.15)


def test_attention_by_products_keeps_a_little_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is that of the next module's input, which torch's kernel keeps twice."""
    monkeypatch.setattr(attention, "_bf16_without_amx", lambda: True)
    folder = make_model("llama", tmp_path / "base")
    plan = replace(jobs.plan(folder), dtype="bf16")
    assert 0.8 * counted(folder, plan) < kept(folder, plan) < counted(folder, plan)
