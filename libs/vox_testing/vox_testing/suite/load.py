"""Test loading: logits with and without an adapter, and independence of loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vox_core.contract import DType, Method
from vox_testing.jobs import stirred
from vox_testing.reference import Reference
from vox_testing.subject import Subject
from vox_testing.suite.requirements import each_method, each_short_dtype, loads, needs
from vox_testing.tiny import FAMILIES, make_model
from vox_testing.tolerance import tolerance

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What an adapter of `stirred` does to the logits, relative, with each method: 0.33 to 0.58 seen.
EFFECT = 2e-1
TOKENS = np.arange(5, 37, dtype=np.int64)

each_family = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=needs(family=kind)) for name, (kind, _) in FAMILIES.items()],
)


@loads
def test_logits_are_float32_of_each_position(vox_subject: Subject) -> None:
    vocabulary = Reference.of(vox_subject.model).logits(TOKENS).shape[1]
    model = vox_subject.load()
    for length in (1, 2, len(TOKENS)):
        found = model.logits(TOKENS[:length])
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (np.dtype("float32"), (length, vocabulary))
        assert np.isfinite(found).all()


@loads
def test_logits_are_the_references(vox_subject: Subject) -> None:
    """Logits of short texts and of one of 300 tokens equal the reference."""
    model, reference = vox_subject.load(), Reference.of(vox_subject.model)
    for tokens_T in (TOKENS[:1], TOKENS, np.resize(TOKENS, 300)):
        assert (
            relative(model.logits(tokens_T), reference.logits(tokens_T))
            < vox_subject.tolerance.logits
        )


@loads
@each_method
def test_logits_with_an_adapter_are_the_references(vox_subject: Subject, method: Method) -> None:
    adapter = stirred(vox_subject.start(vox_subject.plan(method=method))).adapter
    expected = Reference.of(vox_subject.model).logits(TOKENS, adapter)
    assert (
        relative(vox_subject.load(adapter).logits(TOKENS), expected) < vox_subject.tolerance.logits
    )


@loads
@each_method
def test_an_adapter_that_starts_at_zero_changes_nothing(
    vox_subject: Subject, method: Method
) -> None:
    adapter = vox_subject.start(vox_subject.plan(method=method)).adapter
    found, base = vox_subject.load(adapter).logits(TOKENS), vox_subject.load().logits(TOKENS)
    assert relative(found, base) < vox_subject.tolerance.logits


@loads
@each_family
def test_logits_of_each_family_are_the_references(
    vox_subject: Subject, family: str, tmp_path: Path
) -> None:
    """Weights in several shards; transformers in float64 is the reference."""
    pytest.importorskip("torch", reason="tiny models of other families are made with torch")
    folder = make_model(family, tmp_path, shard="40KB")
    found = vox_subject.load(model=folder).logits(TOKENS)
    assert relative(found, Reference.of(folder).logits(TOKENS)) < vox_subject.tolerance.families


@needs(operation="load")
@each_short_dtype
def test_logits_in_a_short_dtype_are_near(vox_subject: Subject, dtype: DType) -> None:
    found = vox_subject.load(dtype=dtype).logits(TOKENS)
    assert found.dtype == np.float32
    assert (
        relative(found, Reference.of(vox_subject.model).logits(TOKENS))
        < tolerance(dtype, on_cpu=vox_subject.on_cpu).logits
    )


@loads
@needs(streamed=True)
@each_method
def test_streamed_logits_are_the_references(vox_subject: Subject, method: Method) -> None:
    adapter = stirred(vox_subject.start(vox_subject.plan(method=method))).adapter
    found = vox_subject.load(adapter, streamed=True).logits(TOKENS)
    assert (
        relative(found, Reference.of(vox_subject.model).logits(TOKENS, adapter))
        < vox_subject.tolerance.logits
    )


@loads
def test_one_load_leaves_nothing_for_the_next(vox_subject: Subject) -> None:
    """An adapter does not stay in a cached base, and `close` may be called twice."""
    method = vox_subject.declared.manifest.capabilities.methods[0]
    adapter = stirred(vox_subject.start(vox_subject.plan(method=method))).adapter
    base = vox_subject.load()
    before = base.logits(TOKENS)
    adapted = vox_subject.load(adapter)
    assert relative(adapted.logits(TOKENS), before) > EFFECT
    adapted.close()
    adapted.close()
    assert np.array_equal(base.logits(TOKENS), before)
    assert np.array_equal(vox_subject.load().logits(TOKENS), before)


def relative(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the relative distance in the Frobenius norm."""
    difference = found.astype(np.float64) - expected.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.astype(np.float64)))
