"""Training on a quantised base, on MLX, against training on what the quantisation left, on torch.

The dequantised weights are those of `vox_formats.quant.CODECS`, which is numpy; they lie in a plain
folder, and the CPU backend trains on that without knowing of a quantisation. So a quantised run has
an oracle: it equals a run in full precision, on other weights.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from tests.parity import held, tolerances
from tests.parity.held import Trained, apart, distance
from vox_core.contract import LoadJob, Quant
from vox_core.run.hf_checkpoint import as_trained, plain_copy
from vox_core.weights import WeightFolder
from vox_mlx import backend as mlx
from vox_testing import jobs
from vox_testing.llama import write_llama

STEPS = 10
quants = pytest.mark.parametrize("quant", ["affine4", "affine8", "mxfp4", "nvfp4"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("quantised") / "base")


@pytest.fixture
def dequantised(folder: Path, tmp_path: Path, quant: Quant):
    """A plain folder of the weights that the quantisation leaves."""
    weights = WeightFolder(folder)
    seen = as_trained(weights, quant, "llama", "fp32")
    with plain_copy(seen, tmp_path / "copy") as copy:
        yield copy


@functools.cache
def unquantised(folder: Path) -> Trained:
    return held.train("cpu", folder, STEPS)


@quants
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_ten_steps_are_those_on_the_dequantised_weights(folder, dequantised, quant, method):
    # From one start: DoRA's magnitudes are the norms of the weights that training sees.
    start = jobs.start(dequantised, jobs.plan(dequantised, method=method))
    steps = jobs.curve(STEPS, groups=2)
    mine = held.go_on("mlx", folder, start, steps, method=method, quant=quant)
    other = held.go_on("cpu", dequantised, start, steps, method=method)
    assert len(mine.losses) == STEPS
    assert mine.losses == pytest.approx(other.losses, rel=tolerances.LOSS)
    assert mine.norms == pytest.approx(other.norms, rel=tolerances.GRADIENT_NORM)
    ends = [state.adapter.tensors() for state in (mine.state, other.state)]
    assert distance(*ends) < tolerances.ADAPTER
    # Eight bits are the closest to none, and still move a loss by 3e-3.
    assert mine.losses != pytest.approx(unquantised(folder).losses, rel=1e-4)


@quants
def test_the_logits_are_those_of_the_dequantised_weights(folder, dequantised, quant):
    loaded = mlx.vox_load(LoadJob(folder, "fp32", quant=quant), None)
    logits = loaded.logits(held.PROMPT_T)
    assert np.isfinite(logits).all()
    assert apart(logits, held.logits("cpu", dequantised)) < tolerances.LOGITS
    assert apart(logits, held.logits("cpu", folder)) > 100 * tolerances.LOGITS
