"""The power goes after each call to the disk: every state that may be left has an announced
checkpoint that loads. The model is in power.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.faulty import RUN, leftovers, made_up, same, saving
from tests.run.power import Recorded, Tree, lay, removed
from vox_core import files
from vox_core.contract import CheckpointWritten
from vox_core.errors import PlanError
from vox_core.run import checkpoint
from vox_core.run.checkpoint import CheckpointWriter, Origin


def run(root: Path, model: Recorded, kept: int) -> None:
    """A made-up run that prunes once; each step is announced as the training thread would."""

    def emit(event: object) -> None:
        assert isinstance(event, CheckpointWritten), event
        model.announced = event.step
        model.cut()

    writer = CheckpointWriter(root / "run", emit, saving(keep=kept), origin=Origin(**RUN))
    for step in range(1, kept + 2):
        writer.submit(made_up(step))
        writer.settle()
    writer.close()


def broken(tree: Tree, announced: int, folder: Path) -> str | None:
    """What does not hold of a disk in that state; None if all does."""
    lay(tree, folder)
    parent = folder / "run"
    try:
        files.remove_leftovers(parent)
        try:
            there = checkpoint.numbered(parent)
            if bad := [why for each in there if (why := checkpoint.fault(each))]:
                return f"damaged: {bad}"
            state, skipped = checkpoint.load_newest(parent)
        except PlanError:
            return f"step {announced} was announced and is gone" if announced else None
        if state.step < announced:
            return f"step {announced} was announced, and {state.step} is left: {skipped}"
        if not same(state, made_up(state.step)):
            return f"step {state.step} is not what was saved"
        return f"left over: {leftovers(folder)}" if leftovers(folder) else None
    finally:
        removed(folder)


def outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, **forgets: object):
    root = tmp_path / "disk"
    root.mkdir()
    model = Recorded(root, forgets)
    with monkeypatch.context() as patch:
        patch.setattr(files, "calls", model)
        run(root, model, kept)
    return model.outcomes


def all_broken(tmp_path: Path, found: dict[Tree, int]) -> list[str]:
    return [
        why
        for tree, announced in found.items()
        if (why := broken(tree, announced, tmp_path / "after"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1, 2])
def test_whatever_a_power_cut_leaves_an_announced_checkpoint_loads(kept, tmp_path, monkeypatch):
    found = outcomes(tmp_path, monkeypatch, kept)
    assert len(found) > 150
    assert all_broken(tmp_path, found) == []


@pytest.mark.parametrize(
    "forgotten",
    [".tmp-step-", "run", "adapter.safetensors", "moments.safetensors", "state", "MANIFEST"],
)
def test_the_model_catches_a_flush_that_is_left_out(forgotten, tmp_path, monkeypatch):
    found = outcomes(tmp_path, monkeypatch, 1, **{forgotten: True})
    assert any(broken(tree, least, tmp_path / "after") for tree, least in found.items())


def test_the_model_catches_an_announcement_before_the_rename(tmp_path, monkeypatch):
    root = tmp_path / "disk"
    root.mkdir()
    model = Recorded(root)
    fill = checkpoint._fill

    def hasty(folder, state, origin):
        fill(folder, state, origin)
        model.announced = state.step
        model.cut()

    monkeypatch.setattr(checkpoint, "_fill", hasty)
    with monkeypatch.context() as patch:
        patch.setattr(files, "calls", model)
        run(root, model, 2)
    assert all_broken(tmp_path, model.outcomes)


def test_the_model_catches_pruning_before_the_newer_one_is_there(tmp_path, monkeypatch):
    save = checkpoint.save

    def eager(parent, state, origin):
        if parent.exists():
            checkpoint.prune(parent, keep=0)
        return save(parent, state, origin)

    monkeypatch.setattr(checkpoint, "save", eager)
    assert all_broken(tmp_path, outcomes(tmp_path, monkeypatch, 1))
