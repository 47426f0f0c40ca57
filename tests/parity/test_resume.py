"""Ten steps on one backend and ten on the other are twenty on either: the state that crosses the
seam (adapter, moments, step) is enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import held, tolerances

HALF = held.STEPS // 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("first", "second"), [("cpu", "mlx"), ("mlx", "cpu")])
@pytest.mark.parametrize(("family", "method"), [("llama", "dora"), ("qwen3_5", "lora")])
def test_half_on_one_and_half_on_the_other(root, family, method, first, second):
    folder = held.model(root, family)
    start = held.jobs.start(folder, held.jobs.plan(folder, method=method))
    curve = held.jobs.curve(held.STEPS, groups=2)
    whole = held.go_on(first, folder, start, curve, method=method)
    begun = held.go_on(first, folder, start, curve[:HALF], method=method)
    ended = held.go_on(second, folder, begun.state, curve[HALF:], method=method)
    assert ended.state.step == held.STEPS
    assert begun.losses + ended.losses == pytest.approx(whole.losses, rel=tolerances.LOSS)
    mine, other = ended.state.adapter.tensors(), whole.state.adapter.tensors()
    assert held.distance(mine, other) < tolerances.ADAPTER


def test_without_the_moments_it_would_show(root):
    """The same, had the second backend begun with empty moments."""
    from dataclasses import replace

    folder = held.model(root, "llama")
    start = held.jobs.start(folder, held.jobs.plan(folder))
    curve = held.jobs.curve(held.STEPS, groups=2)
    whole = held.go_on("cpu", folder, start, curve)
    begun = held.go_on("cpu", folder, start, curve[:HALF]).state
    ended = held.go_on("mlx", folder, replace(begun, moments={}), curve[HALF:])
    assert ended.losses != pytest.approx(whole.losses[HALF:], rel=100 * tolerances.LOSS)
