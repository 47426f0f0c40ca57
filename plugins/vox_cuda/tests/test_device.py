"""GPU against CPU: packing, attention over documents, rows side by side."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from vox_core.contract import LoadJob
from vox_cuda import backend
from vox_testing.tiny import make_model
from vox_testing.tolerance import tolerance
from vox_torch.attention import has_varlen
from vox_torch.quantised import pack

pytestmark = pytest.mark.gpu

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("quant", ["nf4", "nf4-single", "int8"])
def test_weights_are_packed_as_on_the_cpu(quant, dtype):
    W_OI = torch.randn((300, 1000), generator=torch.Generator().manual_seed(0)).to(dtype)
    W_OI[7] = 0
    on_cpu, on_gpu = (pack(W_OI, quant, torch.float32, device) for device in ("cpu", "cuda"))
    assert torch.equal(on_gpu._data.cpu(), on_cpu._data)
    assert torch.equal(on_gpu.weight().cpu(), on_cpu.weight())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (9, 3)])
def test_one_kernel_computes_documents_of_any_length(dtype, heads, key_heads):
    """Its arguments differ between versions of torch. Without it each document takes kernels of its
    own, and a step of short ones ten times as long."""
    qkv = [torch.zeros((1, n, 5, 64), dtype=dtype, device="cuda") for n in (heads, key_heads)]
    assert has_varlen(*qkv)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rows_in_company_continue_as_the_whole_text_says(tmp_path, family, dtype):
    """Six rows: prompts by the kernel for documents, then in slots, beyond a window and over its
    end."""
    folder, allowed = make_model(family, tmp_path), tolerance(dtype, on_cpu=False).logits
    prompts = np.random.default_rng(0).integers(0, 256, (6, 40))
    texts = [prompts[row, : 5 + 7 * row].tolist() for row in range(6)]
    with closing(backend.vox_load(LoadJob(folder, dtype), None)) as model:
        for row, text in enumerate(texts):
            model.insert(row, np.array(text))
        tokens = {}
        for _ in range(24):
            found, tokens = model.advance(tokens), {}
            for row, logits_V in found.items():
                expected_V = model.logits(np.array(texts[row]), first=len(texts[row]) - 1)[0]
                apart = np.linalg.norm(logits_V - expected_V) / np.linalg.norm(expected_V)
                assert apart < allowed
                tokens[row] = (len(texts[row]) * 7 + row) % 250
                texts[row].append(tokens[row])
        assert model._batch.one_by_one is None
