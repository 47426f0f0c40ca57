"""Each seeded fault of a backend is caught by the test of the suite that it is meant for.

The suite runs as an author's does: a folder with one file of one import, collected by pytest. It
runs in this process, so that torch is imported once and the fault can be put where it belongs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from libs.vox_testing.tests.mutant import Mutant, Mutated
from libs.vox_testing.tests.mutants import MUTANTS
from libs.vox_testing.tests.quantising import Quantising

import vox_cpu
import vox_testing.plugin  # before the suite, whose asserts it has rewritten
import vox_testing.subject  # noqa: F401 - before `declare`, which would leave it changed
from vox_core.contract import Quant
from vox_core.host.discover import Found, discover

IN_BFLOAT16 = (
    "weights are taken for a mask",
    "training is unscaled",
    "A is not the one that was given",
    "no bias correction",
    "no clipping",
    "a load is unscaled",
    "bfloat16 is quietly float32",
    "the quantisation is ignored",
)


WITH = {
    "rsLoRA is scaled by alpha / r": "rslora",
    "beta1 is always 0.9": "others-lora",
    "beta2 is always 0.999": "others-lora",
    "eps is always 1e-08": "others-lora",
    "DoRA's magnitude does not decay": "defaults-dora",
    "a merge ignores DoRA's magnitude": "dora",
    "a load ignores DoRA's magnitude": "dora",
    "an update keeps its gradient": "update",
    "the head has no gradient of its own": "a tied head",
    "masters are in the dtype of the weights": "bf16",
    "an infinite norm with a finite loss is applied": "3e+38",
    "rope_parameters are ignored": "theta in rope_parameters",
    "rope_scaling is ignored": "linear rope_scaling",
    "every rope_scaling is linear": "llama3 rope_scaling",
    "rms_norm_eps is ignored": "rms_norm_eps",
    "hidden_act is ignored": "hidden_act",
    "biases are ignored": "attention_bias",
    "heads have another size": "head_dim",
    "attention biases are ignored in training": "attention_bias",
    "heads have another size in training": "head_dim",
    "an adapter on the head is not trained": "adapter on the head-lora",
    "a load ignores an adapter on the head": "adapter on the head",
    "a merge ignores an adapter on the head": "adapter on the head",
    "a merge rounds to the base's dtype first": "fp32-BF16",
    "rows are in the order of their numbers": "the other way round",
    "a prompt is cut to its last 200 tokens": "long",
}
"""Mutants that show with other parameters than the first of their test: a part of their id."""


LONG = pytest.mark.long
"""Of three in four mutants; `make test` has the others."""


class Failures:
    """A pytest plugin that keeps the names of the tests that ran, and of those that failed.

    Args:
        parameters: run a test with the first parameters whose id has this in it; None: with all.
    """

    def __init__(self, parameters: str | None) -> None:
        self.ran: set[str] = set()
        self.failed: set[str] = set()
        self._parameters = parameters

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        if self._parameters is not None:
            some = [item for item in items if self._parameters in item.name]
            items[:] = {item.originalname: item for item in reversed(some)}.values()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.when == "call" and not report.skipped:
            self.ran.add(name)
            if report.failed:
                self.failed.add(name)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_conformance.py").write_text("from vox_testing.suite import *\n")
    (folder / "pytest.ini").write_text("[pytest]\nvox_backend = cpu\n")
    return folder


def run(
    project: Path,
    names: set[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    parameters: str | None = None,
) -> Failures:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    failures = Failures(parameters)
    quiet = ["-q", "-x", "--no-header", "--no-summary", "--tb=no", "-p", "no:cacheprovider"]
    tests = [f"{project / 'test_conformance.py'}::{name}" for name in sorted(names)]
    # These collect all the garbage five times at the end of every run.
    unwatched = ["-p", "no:unraisableexception", "-p", "no:threadexception"]
    plugins = [*unwatched, "-p", "vox_testing.plugin"]
    arguments = [*quiet, "-c", str(project / "pytest.ini"), *plugins]
    with np.printoptions(threshold=8):  # a failed assertion writes its arrays, which nobody reads
        pytest.main([*arguments, *tests], plugins=[failures])
    return failures


def declare(monkeypatch: pytest.MonkeyPatch, **capabilities: object) -> None:
    """Have the manifest of the CPU backend say something else."""

    def changed(found: Found) -> Found:
        if found.id != "cpu" or found.manifest is None:
            return found
        declared = replace(found.manifest.capabilities, **capabilities)
        return replace(found, manifest=replace(found.manifest, capabilities=declared))

    plugins = tuple(changed(found) for found in discover())
    for module in ("vox_core.host.discover", "vox_testing.subject"):
        monkeypatch.setattr(f"{module}.discover", lambda: plugins)


def test_there_are_at_least_a_hundred() -> None:
    assert len(MUTANTS) >= 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtypes", "each_once"),
    [
        pytest.param(("bf16", "fp32"), True, id="each once"),
        pytest.param(("bf16", "fp32"), False, id="bf16, fp32", marks=pytest.mark.long),
        pytest.param(("bf16",), False, id="bf16", marks=pytest.mark.long),
        pytest.param(("fp16",), False, id="fp16", marks=pytest.mark.long),
    ],
)
def test_the_right_backend_is_not_caught(
    dtypes: tuple[str, ...], each_once: bool, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrapped as the mutants are, so that it is not the wrapping that is caught. Unwrapped it
    passes with every parameter: plugins/vox_cpu/tests."""
    expected = {mutant.caught_by for mutant in MUTANTS.values()}
    if "fp32" not in dtypes:  # which the probe of the CPU backend may call best
        expected -= {"test_the_dtype_that_auto_becomes_is_declared"}
    declare(monkeypatch, dtypes=dtypes, quantisations=get_args(Quant))
    backend = Quantising(vox_cpu.backend)
    monkeypatch.setattr(vox_cpu, "backend", Mutated(backend, Mutant("")))
    parameters = "" if each_once else None
    failures = run(project, expected, monkeypatch, parameters=parameters)
    assert (failures.ran, failures.failed) == (expected, set())


@pytest.mark.parametrize(("methods", "applies"), [(("full",), False), (("full", "lora"), True)])
def test_adapters_are_tested_with_a_method_that_has_them(
    methods: tuple[str, ...], applies: bool, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever comes first in the manifest; without one, these tests are skipped."""
    declare(monkeypatch, methods=methods)
    tests = {
        "test_a_merge_is_in_the_dtype_asked_for",
        "test_a_merge_wants_one_tensor_at_a_time",
        "test_a_row_that_leaves_does_not_disturb_the_others",
        "test_each_adapter_answers_under_its_name",
        "test_nothing_is_written_to_stdout_or_beside_the_weights",
        "test_whole_tensors_and_the_head_are_resumed",
    }
    failures = run(project, tests, monkeypatch, parameters="")
    assert (failures.ran, failures.failed) == (tests if applies else set(), set())


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=LONG if n % 4 else ()) for n, each in enumerate(MUTANTS)]
)
def test_a_mutant_is_caught(name: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the test with its first parameters, or those of `WITH`; the right backend is not caught
    with any."""
    mutant = MUTANTS[name]
    backend = vox_cpu.backend
    if mutant.quantises:
        declare(monkeypatch, quantisations=get_args(Quant))
        backend = Quantising(backend)
    monkeypatch.setattr(vox_cpu, "backend", Mutated(backend, mutant))
    if mutant.patch:
        monkeypatch.setattr(*mutant.patch)
    failures = run(project, {mutant.caught_by}, monkeypatch, parameters=WITH.get(name, ""))
    assert failures.failed == {mutant.caught_by}


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_a_mutant_is_caught_in_bfloat16_alone(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are held against float64 in whatever dtype there is."""
    declare(monkeypatch, dtypes=("bf16",), quantisations=get_args(Quant))
    backend = Quantising(vox_cpu.backend)
    monkeypatch.setattr(vox_cpu, "backend", Mutated(backend, MUTANTS[name]))
    caught_by = MUTANTS[name].caught_by
    assert run(project, {caught_by}, monkeypatch).failed == {caught_by}
