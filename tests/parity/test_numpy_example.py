"""`examples/vox_numpy`, a backend without a tensor library, as a third party's package.

It is installed into an environment of its own, and used through `vox` by its name. Its numbers are
tested where it stands, in `examples/vox_numpy/tests`, which run here, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.author_env import Environment
from tools.budgets import lines_of_code
from vox_testing.tiny import make_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/vox_numpy"
LIMIT = 500
STEPS = 20
LOSS = 1e-5  # of two right float32 implementations: DESIGN.md, "The seam"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("third"))
    made.install_editable(EXAMPLE)
    return made


@pytest.fixture(scope="module")
def vox(environment: Environment) -> Callable[..., str]:
    """`vox(...)` -> stdout, with the example installed."""

    def run(*arguments: str) -> str:
        done = environment.run("-m", "vox_core.cli", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def runs(vox: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Backend -> its run of the same contract."""
    folder = tmp_path_factory.mktemp("tiny")
    make_model("llama", folder / "base")
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n * n}."} for n in range(8)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ("--model", str(folder / "base"), "--data", str(folder / "train.jsonl"))
    numbers = ("--dtype", "fp32", "--max-steps", str(STEPS), "--batch-size", "2", "--lr", "1e-2")
    for backend in ("cpu", "numpy"):
        out = str(folder / backend)
        vox("train", *data, *numbers, "--rank", "4", "--backend", backend, "--out", out)
    return {backend: folder / backend for backend in ("cpu", "numpy")}


def test_it_is_never_chosen_unless_by_name(vox: Callable[..., str]) -> None:
    listed = {each["id"]: each for each in json.loads(vox("backend", "list", "--json"))}
    assert listed["numpy"]["status"] == "rejected"
    assert "--backend numpy" in listed["numpy"]["reason"]


def test_its_losses_are_those_of_the_cpu(runs: dict[str, Path]) -> None:
    found, expected = losses(runs["numpy"]), losses(runs["cpu"])
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=LOSS)
    assert found[-1] < 0.7 * found[0]


def test_it_merges_and_generates(vox: Callable[..., str], runs: dict[str, Path]) -> None:
    run, merged = runs["numpy"], runs["numpy"].with_name("merged")
    vox("merge", str(run), "--backend", "numpy", "--out", str(merged))
    prompt = ("What is 3?", "--max-tokens", "4")
    answer = vox("generate", str(run), *prompt, "--backend", "numpy")
    assert answer == vox("generate", str(merged), *prompt, "--backend", "numpy")
    assert answer == vox("generate", str(run), *prompt, "--backend", "cpu", "--dtype", "fp32")


def test_it_is_small() -> None:
    """DESIGN.md: a backend to read, in less than 500 lines of code."""
    assert sum(map(lines_of_code, (EXAMPLE / "vox_numpy").glob("*.py"))) < LIMIT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_own_tests_and_the_conformance_suite_pass(environment: Environment) -> None:
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=str(EXAMPLE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "telemetry.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]
