"""Ranks of a launcher; libs/vox_torch/tests/test_ranks.py has them train."""

from __future__ import annotations

import pytest

from vox_core.contract import LaunchJob
from vox_core.errors import DataError
from vox_plan.launch import launch


@pytest.mark.parametrize("launcher", ["torchrun", "mlx"])
def test_a_launched_command_ends_with_its_exit_code(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert launch(LaunchJob(("--version",), 2, launcher)).exit_code == 0
    assert not [*tmp_path.iterdir()]


def test_an_error_that_every_rank_finds_is_the_run_s(tmp_path):
    missing = str(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="data file") as raised:
        launch(LaunchJob(("train", "--data", missing), 2, "torchrun"))
    assert str(raised.value.where).startswith(missing)
