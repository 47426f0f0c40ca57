"""Test merging: W + scale * B A in float32, rounded once to the base's dtype, in its layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest

from vox_core.contract import AdapterState, DType, MergeJob, MergeTarget, Method
from vox_core.weights import STORED_AS, WeightFolder, numpy_dtype
from vox_testing.jobs import stirred
from vox_testing.reference import merged_weight
from vox_testing.subject import Recorder, Subject
from vox_testing.suite.load import relative
from vox_testing.suite.requirements import each_method, merges

if TYPE_CHECKING:
    from numpy.typing import NDArray

# float32 arithmetic of r + 1 terms: a few units of 2^-24. Seen with the CPU backend: 7e-8.
FLOAT32 = 1e-6


@merges
@each_method
def test_merged_weights_are_the_formula(vox_subject: Subject, method: Method) -> None:
    adapter, targets, weights = material(vox_subject, method)
    merged = vox_subject.merge(adapter, targets, weights.read)
    assert [name for name, _ in merged] == [target.shape.tensor for target in targets]
    for target, (name, found) in zip(targets, merged, strict=True):
        W = weights.read(name)
        assert (found.dtype, found.shape) == (W.dtype, W.shape), name
        assert relative(found, _expected(W, adapter, target)) < FLOAT32, name
        assert not relative(found, W) < 100 * FLOAT32, f"{name}: the adapter was left out"


@merges
@each_method
def test_a_merge_keeps_the_stored_layout(vox_subject: Subject, method: Method) -> None:
    """Weights stored (in, out), as in GPT-2, keep that layout."""
    adapter, targets, weights = material(vox_subject, method)
    turned = [replace(each, shape=replace(each.shape, transposed=True)) for each in targets]
    merged = vox_subject.merge(adapter, turned, lambda name: weights.read(name).T)
    for target, (name, found) in zip(targets, merged, strict=True):
        W = weights.read(name)
        assert found.shape == W.T.shape, name
        assert relative(found.T, _expected(W, adapter, target)) < FLOAT32, name


@merges
@each_method
def test_a_merge_rounds_once_to_the_bases_dtype(vox_subject: Subject, method: Method) -> None:
    """The result is at most half of bfloat16's spacing (2^-7 of a power of two) off."""
    adapter, targets, weights = material(vox_subject, method)
    short = numpy_dtype("BF16")
    merged = vox_subject.merge(adapter, targets, lambda name: weights.read(name).astype(short))
    for target, (name, found) in zip(targets, merged, strict=True):
        assert found.dtype == short, name
        expected = _expected(weights.read(name).astype(short), adapter, target)
        error = np.abs(found.astype(np.float64) - expected)
        spacing = 2.0 ** (np.floor(np.log2(np.abs(expected))) - 7)
        # 1e-6 for the float32 arithmetic before it, near a tie.
        assert np.all(error <= spacing / 2 + 1e-6), name


@merges
@pytest.mark.parametrize("base", ["F32", "BF16"])
@pytest.mark.parametrize("dtype", get_args(DType))
def test_a_merge_is_in_the_dtype_asked_for(vox_subject: Subject, dtype: DType, base: str) -> None:
    """For every dtype of the base's files, and of the backend's computation."""
    adapter, targets, weights = material(vox_subject)
    stored, wanted = numpy_dtype(base), numpy_dtype(STORED_AS[dtype])

    def read(name: str) -> NDArray[Any]:
        return weights.read(name).astype(stored)

    # Half of the spacing of 8, 11 and 24 bits, beside float32 arithmetic.
    allowed = FLOAT32 + {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 0.0}[dtype]
    merged = vox_subject.merge(adapter, targets, read, dtype)
    for target, (name, found) in zip(targets, merged, strict=True):
        assert found.dtype == wanted, name
        assert relative(found, _expected(read(name), adapter, target)) < allowed, name


def material(
    subject: Subject, method: Method | None = None
) -> tuple[AdapterState, list[MergeTarget], WeightFolder]:
    """Return an adapter with an effect, its targets out of order, and the files of the base."""
    plan = subject.plan(method=method)
    adapter = stirred(subject.start(plan)).adapter
    targets = [MergeTarget(path, shape) for path, shape in reversed([*plan.modules.items()])]
    return adapter, targets, WeightFolder(subject.model)


def _expected(stored: NDArray[Any], adapter: AdapterState, target: MergeTarget) -> NDArray[Any]:
    W = stored.astype(np.float64)
    if target.shape.transposed:
        return merged_weight(W.T, adapter, target.path).T
    return merged_weight(W, adapter, target.path)


@merges
def test_a_merge_wants_one_tensor_at_a_time(vox_subject: Subject) -> None:
    """Merged tensors are computed lazily, so that memory for one suffices."""
    adapter, targets, weights = material(vox_subject)
    read: list[str] = []

    def noting(name: str) -> NDArray[Any]:
        read.append(name)
        return weights.read(name)

    job = MergeJob(adapter, tuple(targets), noting)
    result = vox_subject.backend.merge(job, Recorder())
    first, _ = next(result.tensors)
    assert set(read) == {first}
