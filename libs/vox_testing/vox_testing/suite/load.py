"""Test loading: logits with and without adapters, and that a streamed load streams."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vox_core.contract import AdapterState, DType, Method
from vox_core.weights import WEIGHTS, SafetensorsFile, write_safetensors
from vox_testing.jobs import stirred
from vox_testing.llama import write_llama
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
    "family", [pytest.param(name, marks=needs(family=kind)) for name, (kind, _) in FAMILIES.items()]
)


@loads
def test_logits_are_float32_of_each_position(vox_subject: Subject) -> None:
    vocabulary = Reference.of(vox_subject.model).logits(TOKENS).shape[1]
    with vox_subject.loaded() as model:
        for length in (1, 2, len(TOKENS)):
            found = model.logits(TOKENS[:length])
            assert isinstance(found, np.ndarray)
            assert (found.dtype, found.shape) == (np.dtype("float32"), (length, vocabulary))
            assert np.isfinite(found).all()


@loads
def test_logits_of_the_last_positions_are_those_of_all(vox_subject: Subject) -> None:
    with vox_subject.loaded() as model:
        whole_TV = model.logits(TOKENS)
        for first in (1, len(TOKENS) - 1):
            found = model.logits(TOKENS, first=first)
            assert found.shape == whole_TV[first:].shape
            require_near(vox_subject, found, whole_TV[first:])


@loads
def test_logits_of_several_documents_are_those_of_each(vox_subject: Subject) -> None:
    adapter = effective(vox_subject)
    documents = [(TOKENS[:9], 0), (TOKENS, 20), (TOKENS[5:6], 0), (TOKENS[::-1].copy(), 31)]
    with vox_subject.loaded(adapter) as model:
        for name in ("a", None):
            found = model.logits_all(documents, name)
            for logits_KV, (tokens_T, first) in zip(found, documents, strict=True):
                expected = model.logits(tokens_T, name)[first:]
                assert logits_KV.shape == expected.shape
                require_near(vox_subject, logits_KV, expected)


@loads
def test_logits_are_the_references(vox_subject: Subject) -> None:
    """Logits of short texts and of one of 300 tokens equal the reference."""
    reference = Reference.of(vox_subject.model)
    with vox_subject.loaded() as model:
        for tokens_T in (TOKENS[:1], TOKENS, np.resize(TOKENS, 300)):
            require_near(vox_subject, model.logits(tokens_T), reference.logits(tokens_T))


@loads
@each_method
def test_logits_with_an_adapter_are_the_references(vox_subject: Subject, method: Method) -> None:
    adapter = effective(vox_subject, method)
    expected = Reference.of(vox_subject.model).logits(TOKENS, adapter)
    with vox_subject.loaded(adapter) as model:
        require_near(vox_subject, model.logits(TOKENS, "a"), expected)


@loads
def test_each_adapter_answers_under_its_name(vox_subject: Subject) -> None:
    """Adapters of different ranks and modules share a base, which stays what it is."""
    reference = Reference.of(vox_subject.model)
    (leaf,) = {path.rpartition(".")[2] for path in [*vox_subject.plan().modules][:1]}
    adapters = (
        effective(vox_subject, seed=1),
        effective(vox_subject, seed=2, rank=8, targets=(leaf,)),
    )
    with vox_subject.loaded(*adapters) as model:
        for name, adapter in (("b", adapters[1]), ("a", adapters[0]), (None, None)):
            expected = reference.logits(TOKENS, adapter)
            found = relative(model.logits(TOKENS, name), expected)
            assert found < vox_subject.tolerance.logits, name
        model.remove_adapter("a")
        require_near(vox_subject, model.logits(TOKENS), reference.logits(TOKENS))
        expected = reference.logits(TOKENS, adapters[1])
        require_near(vox_subject, model.logits(TOKENS, "b"), expected)
        model.add_adapter("a", adapters[1])
        require_near(vox_subject, model.logits(TOKENS, "a"), expected)


@loads
@each_family
def test_logits_of_each_family_are_the_references(
    vox_subject: Subject, family: str, tmp_path: Path
) -> None:
    """Weights in several shards, settings and norms away from the defaults; transformers in float64
    is the reference."""
    pytest.importorskip("torch", reason="tiny models of other families are made with torch")
    folder = make_model(family, tmp_path, shard="40KB", away=True)
    with vox_subject.loaded(model=folder) as model:
        apart = relative(model.logits(TOKENS), Reference.of(folder).logits(TOKENS))
        assert apart < vox_subject.tolerance.families


@needs(operation="load")
@each_short_dtype
def test_logits_in_a_short_dtype_are_near(vox_subject: Subject, dtype: DType) -> None:
    with vox_subject.loaded(dtype=dtype) as model:
        found = model.logits(TOKENS)
    assert found.dtype == np.float32
    apart = relative(found, Reference.of(vox_subject.model).logits(TOKENS))
    assert apart < tolerance(dtype, on_cpu=vox_subject.on_cpu).logits


@loads
@needs(streamed_load=True)
@each_method
def test_streamed_logits_are_the_references(vox_subject: Subject, method: Method) -> None:
    adapter = effective(vox_subject, method)
    with vox_subject.loaded(adapter, streamed=True) as model:
        found = model.logits(TOKENS, "a")
    expected = Reference.of(vox_subject.model).logits(TOKENS, adapter)
    require_near(vox_subject, found, expected)


@loads
@needs(streamed_load=True, family="llama")
def test_a_streamed_load_reads_weights_when_they_are_used(
    vox_subject: Subject, tmp_path: Path
) -> None:
    """A matrix that is overwritten in its file after the load, and again after a forward, is seen
    by the next forward; one that was converted and kept is not."""
    folder = write_llama(tmp_path, dtype="BF16", config={"num_hidden_layers": 4})
    name = "model.layers.3.mlp.down_proj.weight"
    with vox_subject.loaded(model=folder, streamed=True) as model:
        for factor in (-1.0, 3.0):
            _overwrite(folder, name, factor)
            expected = Reference.of(folder).logits(TOKENS)
            apart = relative(model.logits(TOKENS), expected)
            assert apart < vox_subject.tolerance.logits, f"{name} was kept in memory"


def _overwrite(folder: Path, name: str, factor: float) -> None:
    """Multiply a tensor in its file, in place."""
    file = SafetensorsFile(folder / WEIGHTS)
    tensors = {key: np.array(file.read(key)) for key in file.tensors}
    specs = {key: ("BF16", value.shape) for key, value in tensors.items()}
    tensors[name] *= tensors[name].dtype.type(factor)
    write_safetensors(folder / "changed", specs, tensors.items())
    with (folder / WEIGHTS).open("r+b") as there:
        there.write((folder / "changed").read_bytes())


@loads
def test_one_load_leaves_nothing_for_the_next(vox_subject: Subject) -> None:
    """An adapter does not stay in a cached base, and `close` may be called twice."""
    with vox_subject.loaded() as base:
        before = base.logits(TOKENS)
        with vox_subject.loaded(effective(vox_subject)) as adapted:
            assert relative(adapted.logits(TOKENS, "a"), before) > EFFECT
            adapted.close()
        assert np.array_equal(base.logits(TOKENS), before)
    with vox_subject.loaded() as again:
        assert np.array_equal(again.logits(TOKENS), before)


def effective(
    subject: Subject, method: Method | None = None, *, seed: int = 0, **options: Any
) -> AdapterState:
    """Return an adapter that changes the logits, of the first adapter method by default."""
    plan = subject.plan(method=method, **options)
    return stirred(subject.start(plan), seed=seed).adapter


def relative(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the relative distance in the Frobenius norm."""
    difference = found.astype(np.float64) - expected.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.astype(np.float64)))


def require_near(subject: Subject, found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Require logits, or log-probabilities, within the tolerance of the subject's dtype."""
    assert relative(found, expected) < subject.tolerance.logits
