"""Ten steps on one backend and ten on the other are twenty on either: the state that crosses the
seam (adapter, moments, step) is enough.

It is the checkpoint of the run whose twenty steps they are held against."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import held, tolerances

HALF = held.STEPS // 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("first", "second"), [("cpu", "mlx"), ("mlx", "cpu")])
@pytest.mark.parametrize(
    ("family", "method"), [("llama", "dora"), ("llama", "full"), ("qwen3_5", "lora")]
)
def test_half_on_one_and_half_on_the_other(root, family, method, first, second):
    folder = held.model(root, family)
    start = held.jobs.start(folder, held.jobs.plan(folder, method=method))
    curve = held.jobs.curve(held.STEPS, groups=2)
    whole = held.go_on(first, folder, start, curve, method=method, keep_every=HALF)
    begun = whole.checkpoints[0]
    assert begun.step == HALF
    ended = held.go_on(second, folder, begun, curve[HALF:], method=method)
    assert ended.state.step == held.STEPS
    assert ended.losses == pytest.approx(whole.losses[HALF:], rel=tolerances.LOSS)
    mine, other = ended.state.adapter.tensors(), whole.state.adapter.tensors()
    assert held.distance(mine, other) < tolerances.ADAPTER


def test_without_the_moments_it_would_show(root):
    """The same, had the second backend begun with empty moments."""
    from dataclasses import replace

    folder = held.model(root, "llama")
    start = held.jobs.start(folder, held.jobs.plan(folder))
    curve = held.jobs.curve(held.STEPS, groups=2)
    whole = held.go_on("cpu", folder, start, curve, keep_every=HALF)
    ended = held.go_on("mlx", folder, replace(whole.checkpoints[0], moments={}), curve[HALF:])
    assert ended.losses != pytest.approx(whole.losses[HALF:], rel=100 * tolerances.LOSS)
