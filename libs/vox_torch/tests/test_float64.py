"""A profile that computes in float64: all of a forward, the step, and what crosses the seam."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from libs.vox_torch.tests import jobs
from torch.utils._python_dispatch import TorchDispatchMode

from vox_core.contract import LoadJob
from vox_testing.float64 import compute_in_float64
from vox_testing.tiny import FAMILIES
from vox_torch.base import load_base
from vox_torch.engine import Engine
from vox_torch.layout import rows
from vox_torch.loss import weighted_nll
from vox_torch.profile import DeviceProfile

PROFILE = DeviceProfile("cpu", prepare=compute_in_float64)
WIDE = Engine(PROFILE)
TOKENS = np.arange(40, 72, dtype=np.int64)


class Narrowed(TorchDispatchMode):
    """Operations that make a float32 tensor out of a float64 one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [a.dtype for a in args if isinstance(a, torch.Tensor)]
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and torch.float64 in given:
            self.seen.append(str(func))
        return out


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_a_forward_is_float32(tiny, family):
    model = load_base(tiny(family), "fp32", "cpu")
    compute_in_float64(model)
    batch = rows(jobs.batch(jobs.documents(3)), "cpu")
    with Narrowed() as narrowed:
        loss = weighted_nll(model, model.get_output_embeddings(), batch)
    assert (loss.dtype, narrowed.seen) == (torch.float64, [])


def run(folder, steps, state=None):
    return jobs.train(folder, steps, state=state, profile=PROFILE)


def test_the_state_is_float32_and_resuming_loses_nothing(tiny):
    folder = tiny("llama")
    steps = [jobs.step(n, [jobs.documents(2, seed=n)]) for n in range(1, 7)]
    whole, _ = run(folder, steps)
    half, _ = run(folder, steps[:3])
    resumed, _ = run(folder, steps[3:], half)
    for name, value in whole.adapter.tensors().items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, resumed.adapter.tensors()[name])
        np.testing.assert_array_equal(whole.moments[name], resumed.moments[name])


def test_losses_are_float32s_to_its_precision_and_no_more(tiny):
    folder = tiny("qwen3")
    steps = [jobs.step(n, [jobs.documents(3, seed=n)]) for n in range(1, 21)]
    _, narrow = jobs.train(folder, steps)
    _, wide = run(folder, steps)
    # DESIGN: two right float32 implementations agree to 1e-5 over 20 steps.
    assert jobs.losses(wide) == pytest.approx(jobs.losses(narrow), rel=1e-5)
    assert jobs.losses(wide) != jobs.losses(narrow)


def test_logits_are_those_of_float64_rounded_once(tiny):
    job = LoadJob(tiny("llama"), "fp32")
    wide = WIDE.load(job).logits(TOKENS)
    narrow = Engine(DeviceProfile("cpu")).load(job).logits(TOKENS)
    assert wide.dtype == np.float32
    np.testing.assert_allclose(wide, narrow, rtol=0, atol=1e-5 * np.abs(narrow).max())
    assert (wide != narrow).any()
    streamed = WIDE.load(replace(job, streamed=True)).logits(TOKENS)
    np.testing.assert_allclose(streamed, narrow, rtol=0, atol=1e-5 * np.abs(narrow).max())
