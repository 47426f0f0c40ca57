"""What the torch engine's autograd keeps of a micro-batch, against what is counted from headers.

Kept is every storage that a backward function saves, once, but for parameters, buffers and logits.
Nothing is measured: no allocator and no library has a part in it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
from vox_testing.tiny import FAMILIES, VOCABULARY, make_model
from vox_torch import attention
from vox_torch.base import load_base
from vox_torch.fused_modules import fuse_modules
from vox_torch.inject import attach
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
    own = {t.untyped_storage().data_ptr() for t in (*base.parameters(), *base.buffers())}
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if VOCABULARY not in tensor.shape[-2:]:  # logits, and the gradient of a head
            seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(batch())
    return sum(t.untyped_storage().nbytes() for at, t in seen.items() if at not in own)


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
    )
    model = read_architecture(weights.tensors, config)
    return predict(model, demand, PROFILE).activations


@pytest.mark.parametrize(
    ("family", "dtype", "method"),
    [
        *((family, "bf16", "lora") for family in FAMILIES),
        ("llama", "fp32", "lora"),
        ("llama", "bf16", "rslora"),
        ("llama", "bf16", "full"),
    ],
)
def test_of_each_family(
    family: str, dtype: DType, method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_bf16_without_amx", lambda: False)
    folder = make_model(family, tmp_path / "base")
    plan = replace(jobs.plan(folder, method=method), dtype=dtype)
    assert counted(folder, plan) == pytest.approx(kept(folder, plan), rel=0.1)


def test_attention_by_products_keeps_a_little_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is that of the next module's input, which torch's kernel keeps twice."""
    monkeypatch.setattr(attention, "_bf16_without_amx", lambda: True)
    folder = make_model("llama", tmp_path / "base")
    plan = replace(jobs.plan(folder), dtype="bf16")
    assert 0.8 * counted(folder, plan) < kept(folder, plan) < counted(folder, plan)
