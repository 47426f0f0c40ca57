"""`examples/vox_numpy`, a backend without a tensor library, as a third party's package.

It is installed into an environment of its own, and used through `vox` by its name. Its numbers are
tested where it stands, in `examples/vox_numpy/tests`, which run here, too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.core.author_env import Environment
from tests.parity.installed_example import Vox, installed, losses, runs_of, vox_in
from tools.budgets import lines_of_code

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/vox_numpy"
LIMIT = 500
STEPS = 20
LOSS = 1e-5  # of two right float32 implementations: DESIGN.md, "The seam"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return installed(EXAMPLE, tmp_path_factory.mktemp("third"))


@pytest.fixture(scope="module")
def vox(environment: Environment) -> Vox:
    return vox_in(environment)


@pytest.fixture(scope="module")
def runs(vox: Vox, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return runs_of(vox, tmp_path_factory.mktemp("tiny"), ("cpu", "numpy"), STEPS)


def test_it_is_never_chosen_unless_by_name(vox: Vox) -> None:
    (out,) = vox(("backend", "list", "--json"))
    listed = {each["id"]: each for each in json.loads(out)}
    assert listed["numpy"]["status"] == "rejected"
    assert "--backend numpy" in listed["numpy"]["reason"]


def test_its_losses_are_those_of_the_cpu(runs: dict[str, Path]) -> None:
    found, expected = losses(runs["numpy"]), losses(runs["cpu"])
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=LOSS)
    assert found[-1] < 0.7 * found[0]


def test_it_merges_and_generates(vox: Vox, runs: dict[str, Path]) -> None:
    run, merged = str(runs["numpy"]), str(runs["numpy"].with_name("merged"))
    prompt = ("What is 3?", "--max-tokens", "4")
    _, answer, of_merged, of_cpu = vox(
        ("merge", run, "--backend", "numpy", "--out", merged),
        ("generate", run, *prompt, "--backend", "numpy"),
        ("generate", merged, *prompt, "--backend", "numpy"),
        ("generate", run, *prompt, "--backend", "cpu", "--dtype", "fp32"),
    )
    assert answer.strip()
    assert answer == of_merged == of_cpu


def test_it_is_small() -> None:
    """DESIGN.md: a backend to read, in less than 500 lines of code."""
    assert sum(map(lines_of_code, (EXAMPLE / "vox_numpy").glob("*.py"))) < LIMIT


@pytest.mark.long  # as the backends' own
@pytest.mark.timeout(900)
def test_its_own_tests_and_the_conformance_suite_pass(environment: Environment) -> None:
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=str(EXAMPLE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
