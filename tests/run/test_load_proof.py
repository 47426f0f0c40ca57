"""`probe.json`: what an adapter computes wherever it is loaded, and faults that it finds."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from vox_core.config import LoadSettings, TrainSettings, validate
from vox_core.contract import AdapterState
from vox_core.errors import AdapterError, ProofError
from vox_core.run.folder import MANIFEST, PROBE
from vox_core.run.load import open_base
from vox_core.run.load_proof import check_probe, read_probe
from vox_core.run.reference import resolve_reference
from vox_core.run.train import train


@pytest.fixture
def run(tiny, settings):
    return train(settings(tiny("llama"), lr=5e-3)).run


def checked(run, adapter: AdapterState | None = None, *, backend="cpu", dtype="fp32"):
    source = resolve_reference(str(run))
    adapter = adapter or source.adapter
    probe = read_probe(source)
    settings = LoadSettings(backend=backend, dtype=dtype)
    with open_base(source, {"one": adapter}, settings) as opened:
        return check_probe(opened.model, "one", probe, dtype, run)


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "fp32"), ("mlx", "fp32"), ("cpu", "bf16")])
def test_a_loaded_adapter_computes_what_was_trained(run, backend, dtype):
    result = checked(run, backend=backend, dtype=dtype)
    assert result.adapter <= result.tolerance
    if dtype == "fp32":
        assert result.tolerance == 1e-4
        assert result.decisive


def negated(adapter: AdapterState, path: str) -> AdapterState:
    module = adapter.modules[path]
    return replace(adapter, modules={**adapter.modules, path: replace(module, B_OR=-module.B_OR)})


def test_adapters_with_faults_are_refused_with_numbers(run):
    adapter = resolve_reference(str(run)).adapter
    zeroed = {p: replace(m, B_OR=np.zeros_like(m.B_OR)) for p, m in adapter.modules.items()}
    louder = {p: replace(m, B_OR=m.B_OR * np.float32(1.1)) for p, m in adapter.modules.items()}
    swapped = dict(zip(adapter.modules, list(adapter.modules.values())[::-1], strict=True))
    shapes = {p: m.A_RI.shape + m.B_OR.shape for p, m in adapter.modules.items()}
    renamed = {
        p: m if m.A_RI.shape + m.B_OR.shape == shapes[p] else adapter.modules[p]
        for p, m in swapped.items()
    }
    first = next(iter(adapter.modules))
    for wrong in (
        replace(adapter, modules=zeroed),
        replace(adapter, modules=louder),
        replace(adapter, modules=renamed),
        negated(adapter, first),
    ):
        with pytest.raises(ProofError, match="does not compute what was trained") as caught:
            checked(run, wrong)
        assert caught.value.code == "VOX-V004"
        assert "whole effect" in str(caught.value.found)


def test_the_files_of_another_adapter_are_refused_in_every_dtype(run, tmp_path):
    source = resolve_reference(str(run))
    other = negated(source.adapter, next(iter(source.adapter.modules)))
    with pytest.raises(ProofError, match="not the one that training wrote"):
        read_probe(replace(source, adapter=other))


def test_another_base_is_refused(run, tiny):
    source = resolve_reference(str(run))
    probe = read_probe(source)
    shifted = tuple(
        d.model_copy(update={"base": tuple(each - 1.5 for each in d.base)}) for d in probe.documents
    )
    with (
        open_base(source, {"one": source.adapter}, LoadSettings(backend="cpu")) as opened,
        pytest.raises(ProofError, match="the base is not the one"),
    ):
        check_probe(
            opened.model, "one", probe.model_copy(update={"documents": shifted}), "fp32", run
        )


def test_the_probe_is_of_the_adapter_that_was_written(tiny, settings):
    """Of the best step, and of one that is written by the process after the last step's."""
    made = settings(
        tiny("llama"),
        lr=0.1,
        schedule="constant",
        dropout=0.1,
        max_steps=40,
        patience=3,
        micro_batch_tokens=96,
        eval_every=1,
        save_every=1,
        load_best_at_end=True,
    )
    report = train(made)
    assert report.adapter_step < report.steps
    before = (report.run / PROBE).read_text()
    assert checked(report.run).decisive
    for name in (MANIFEST, PROBE):
        (report.run / name).unlink()
    again = train(validate(TrainSettings, {"resume": report.run}))
    assert again.adapter_step == report.adapter_step
    was, now = (json.loads(each) for each in (before, (report.run / PROBE).read_text()))
    assert was["digest"] == now["digest"]
    checked(report.run)


def test_a_probe_that_says_something_else(run):
    source, whole = resolve_reference(str(run)), json.loads((run / PROBE).read_text())
    assert len(whole["documents"]) == 2  # the validation's rows
    first = whole["documents"][0]
    scores = [-1.0] * (len(first["tokens"]) - 1)

    def with_tokens(*tokens):
        made = {"tokens": tokens, "base": [-1.0] * (len(tokens) - 1)}
        return {**whole, "documents": [{**made, "adapter": made["base"]}]}

    for broken, said in (
        ([], "document: "),
        ({**whole, "documents": []}, "at least 1 item"),
        ({**whole, "documents": [first] * 5}, "at most 4 items"),
        ({**whole, "dtype": "int3"}, "dtype: "),
        ({**whole, "documents": [{**first, "base": [0.0]}]}, "do not match"),
        ({**whole, "documents": [{**first, "base": [*scores[1:], float("inf")]}]}, "finite"),
        (with_tokens(1, -1, 2), "documents.0.tokens.1: "),
        (with_tokens(1, 2**70), "ids up to 1180591620717411303424; the base"),
        (with_tokens(1, 260), "ids up to 260; the base reads"),
        (with_tokens(*[1] * 129), "at most 128 items"),
    ):
        (run / PROBE).write_text(json.dumps(broken))
        with pytest.raises(AdapterError, match="probe cannot be used") as caught:
            read_probe(source)
        assert said in str(caught.value.found)


def test_a_probe_fits_the_base_or_is_not_there(run, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("vox_core.run.load_proof.positions", lambda config: 3)
        with pytest.raises(AdapterError, match="the base reads 3 "):
            read_probe(resolve_reference(str(run)))
    (run / PROBE).unlink()
    source = resolve_reference(str(run))
    assert read_probe(source) is None
    assert read_probe(replace(source, adapter=None)) is None
