"""Which modules mlx-lm's `num_layers` and `keys` reach.

The files are tests/core/test_mlx_adapter.py's.
"""

from __future__ import annotations

import pytest

from vox_formats.mlx_adapter import Reach, reach_of, reached

MODULES = [f"model.layers.{n}.{m}" for n in range(6) for m in ("a.q", "b.up")] + ["lm_head"]


@pytest.mark.parametrize(
    ("trained", "reach"),
    [
        (MODULES[:-1], Reach(6, ("a.q", "b.up"))),
        (MODULES[8:], Reach(2, ("a.q", "b.up", "lm_head"))),
        (MODULES[4:8], Reach(4, tuple(MODULES[4:8]))),
        (["model.layers.5.a.q"], Reach(1, ("a.q",))),
        (["lm_head"], Reach(1, ("lm_head",))),
    ],
)
def test_reach_is_brief_where_that_is_exact(trained: list[str], reach: Reach) -> None:
    assert reach_of(trained, MODULES) == reach
    assert reached(reach, MODULES) == set(trained)


@pytest.mark.parametrize(
    ("reach", "count"),
    [(Reach(2, None), 4), (Reach(0, None), 12), (Reach(-1, None), 12), (Reach(9, ("a.q",)), 6)],
)
def test_reach_as_mlx_lm_takes_it(reach: Reach, count: int) -> None:
    assert len(reached(reach, MODULES)) == count
