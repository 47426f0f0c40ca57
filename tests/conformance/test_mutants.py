"""Each seeded fault of a backend is caught by the test of the suite that it is meant for.

The suite runs as an author's does: a folder with one file of one import, collected by pytest. It
runs in this process, so that torch is imported once and the fault can be put where it belongs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import vox_core.testing.plugin  # noqa: F401 - before the suite, whose asserts it has rewritten
import vox_cpu
from tests.conformance.mutants import MUTANTS, Mutant, Mutated


class Failures:
    """A pytest plugin that keeps the names of the tests that ran, and of those that failed."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.when == "call" and not report.skipped:
            self.ran.add(name)
            if report.failed:
                self.failed.add(name)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_conformance.py").write_text("from vox_core.testing.suite import *\n")
    (folder / "pytest.ini").write_text("[pytest]\nvox_backend = cpu\n")
    return folder


def run(project: Path, names: set[str], monkeypatch: pytest.MonkeyPatch) -> Failures:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    failures = Failures()
    quiet = ["-q", "-x", "--no-header", "--no-summary", "--tb=no", "-p", "no:cacheprovider"]
    tests = [f"{project / 'test_conformance.py'}::{name}" for name in sorted(names)]
    arguments = [*quiet, "-c", str(project / "pytest.ini"), "-p", "vox_core.testing.plugin"]
    pytest.main([*arguments, *tests], plugins=[failures])
    return failures


def test_there_are_at_least_twenty() -> None:
    assert len(MUTANTS) >= 20


def test_the_right_backend_is_not_caught(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapped as the mutants are, so that it is not the wrapping that is caught."""
    expected = {mutant.caught_by for mutant in MUTANTS.values()}
    monkeypatch.setattr(vox_cpu, "backend", Mutated(vox_cpu.backend, Mutant("")))
    failures = run(project, expected, monkeypatch)
    assert (failures.ran, failures.failed) == (expected, set())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(vox_cpu, "backend", Mutated(vox_cpu.backend, mutant))
    if mutant.patch:
        monkeypatch.setattr(*mutant.patch)
    assert run(project, {mutant.caught_by}, monkeypatch).failed == {mutant.caught_by}
