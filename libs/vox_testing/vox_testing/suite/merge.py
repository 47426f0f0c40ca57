"""Test merging: W + scale * B A in float32, rounded once to the base's dtype, in its layout."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vox_core.contract import AdapterState, MergeJob, MergeTarget, Method
from vox_core.weights import WEIGHTS, WeightFolder, numpy_dtype, write_safetensors
from vox_testing.jobs import stirred
from vox_testing.reference import merged_weight
from vox_testing.subject import Recorder, Subject
from vox_testing.suite.load import EFFECT, TOKENS, relative
from vox_testing.suite.requirements import each_method, loads, merges

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


@loads
@merges
@each_method
def test_a_merged_model_answers_like_base_and_adapter(
    vox_subject: Subject, method: Method, tmp_path: Path
) -> None:
    adapter, targets, weights = material(vox_subject, method)
    changed = dict(vox_subject.merge(adapter, targets, weights.read))
    _write_model(vox_subject.model, tmp_path, changed)
    apart = vox_subject.load(adapter).logits(TOKENS)
    merged = vox_subject.load(model=tmp_path).logits(TOKENS)
    assert relative(merged, apart) < vox_subject.tolerance.logits
    assert relative(merged, vox_subject.load().logits(TOKENS)) > EFFECT


def material(
    subject: Subject, method: Method
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


def _write_model(base: Path, folder: Path, changed: dict[str, NDArray[Any]]) -> None:
    """Write the model of `base` with some tensors changed."""
    weights = WeightFolder(base)
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    specs = {name: (info.dtype, info.shape) for name, info in weights.tensors.items()}
    tensors = ((name, changed.get(name, weights.read(name))) for name in specs)
    write_safetensors(folder / WEIGHTS, specs, tensors)


@merges
def test_a_merge_wants_one_tensor_at_a_time(vox_subject: Subject) -> None:
    """Merged tensors are computed lazily, so that memory for one suffices."""
    method = vox_subject.declared.manifest.capabilities.methods[0]
    adapter, targets, weights = material(vox_subject, method)
    read: list[str] = []

    def noting(name: str) -> NDArray[Any]:
        read.append(name)
        return weights.read(name)

    job = MergeJob(adapter, tuple(targets), noting)
    result = vox_subject.backend.merge(job, Recorder(0, vox_subject.scratch))
    first, _ = next(result.tensors)
    assert set(read) == {first}
