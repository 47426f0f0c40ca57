"""The share of each rank, and what ranks compare before the first step."""

from __future__ import annotations

import numpy as np
import pytest

from vox_core.contract import World
from vox_core.data.batching import share_of
from vox_core.errors import ConfigError, PlanError
from vox_core.host.load import world_of
from vox_core.run.learner import require_same


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 8])
def test_shares_are_stretches_of_the_step(processes):
    rng = np.random.default_rng(processes)
    for count in (1, 2, 5, 40):
        sizes = rng.integers(1, 2048, count).tolist()
        shares = [share_of(sizes, World(rank, processes)) for rank in range(processes)]
        assert [n for share in shares for n in share] == [*range(count)]


def test_the_largest_share_is_smallest():
    shares = [share_of([4, 4, 2, 2, 2, 2], World(rank, 2)) for rank in range(2)]
    assert shares == [range(2), range(2, 6)]
    assert share_of([9], World(1, 2)) == range(1, 1)


@pytest.mark.parametrize("by", ["VOX_LAUNCHED", "TORCHELASTIC_RUN_ID"])
def test_ranks_come_from_torchrun_s_variables(by):
    assert world_of({}) == World(0, 1)
    assert world_of({by: "1", "RANK": "3", "WORLD_SIZE": "4"}) == World(3, 4)


def test_variables_that_no_launcher_has_set_are_ignored():
    assert world_of({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}) == World(0, 1)


@pytest.mark.parametrize("rank", ["4", "-1", "x", ""])
def test_a_rank_that_there_is_not(rank):
    with pytest.raises(ConfigError, match="variables that number") as raised:
        world_of({"VOX_LAUNCHED": "1", "RANK": rank, "WORLD_SIZE": "4"})
    assert f"RANK={rank}" in str(raised.value)


class _Other:
    """A trainer whose rank 1 has other data."""

    def share(self, values_N):
        rows_RB = values_N.reshape(2, -1).copy()
        rows_RB[1] = rows_RB[0]
        rows_RB[1, 32] = 255 - rows_RB[0, 32]
        return rows_RB.ravel()


def test_ranks_that_differ_are_named():
    with pytest.raises(PlanError, match="differ") as raised:
        require_same(_Other(), World(0, 2), lambda: {"model": "m", "data": "d"})
    assert raised.value.faults == ("data: rank 1 differs from rank 0",)
