"""A disk that fails at every call in turn, for a checkpoint on the way and for the last one."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.faulty import RUN, Calls, Counted, Failing, leftovers, made_up, same, saving
from vox_core import files
from vox_core.contract import CheckpointWritten, Notice
from vox_core.errors import StorageError
from vox_core.run import checkpoint
from vox_core.run.checkpoint import CheckpointWriter, Origin

FAULTS = {
    "full": errno.ENOSPC,
    "over quota": errno.EDQUOT,
    "broken": errno.EIO,
    "read-only": errno.EROFS,
}
CODES = {errno.ENOSPC: "VOX-S001", errno.EDQUOT: "VOX-S001"}


def writer_of(parent: Path, events: list[object]) -> CheckpointWriter:
    return CheckpointWriter(parent, events.append, saving(), origin=Origin(**RUN))


def begun(parent: Path) -> None:
    """A run with two checkpoints."""
    parent.mkdir(parents=True)
    for step in (1, 2):
        checkpoint.save(parent, made_up(step), Origin(**RUN))


@pytest.fixture(scope="module")
def calls_of_a_save(tmp_path_factory) -> list[str]:
    """The calls of one checkpoint and of pruning one, in order."""
    parent = tmp_path_factory.mktemp("run") / "checkpoints"
    begun(parent)
    counted, events = Counted(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "calls", counted)
        writer_of(parent, events).finish(made_up(3))
    assert [p.name for p in checkpoint.numbered(parent)] == ["step-3", "step-2"]
    return counted.made


@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_disk_costs_a_checkpoint_and_not_the_run(
    fault, stays, calls_of_a_save, tmp_path, monkeypatch
):
    for at in range(1, len(calls_of_a_save) + 1):
        parent, events = tmp_path / f"{at}" / "checkpoints", []
        begun(parent)
        writer = writer_of(parent, events)
        monkeypatch.setattr(files, "calls", Failing(at, FAULTS[fault], stays))
        writer.submit(made_up(3))
        writer.settle()
        monkeypatch.setattr(files, "calls", Calls())
        require_resumable(parent, events, f"{calls_of_a_save[at - 1]}, call {at}", stays)
        writer.finish(made_up(4))
        assert events[-1] == CheckpointWritten(
            4, str(parent / "step-4"), events[-1].seconds, events[-1].held_seconds
        )
        files.remove_leftovers(parent)
        assert not leftovers(parent)


def require_resumable(parent: Path, events: list[object], where: str, stays: bool) -> None:
    announced = [event.step for event in events if isinstance(event, CheckpointWritten)]
    warned = [event for event in events if isinstance(event, Notice)]
    assert len(events) == len(announced) + len(warned), where
    assert all(notice.level == "warning" for notice in warned), where
    newest = max(announced, default=2)
    if not announced:
        assert "could not be written" in warned[0].message, where
        assert f"the last good one is {parent / 'step-2'}" in warned[0].message, where
        assert not leftovers(parent) or "rmdir" in where or "unlink" in where, where
    state, skipped = checkpoint.load_newest(parent)
    # A rename that can be neither flushed nor undone has left a checkpoint that nobody announced.
    assert state.step == newest or stays, where
    assert all(checkpoint.fault(folder) is None for folder in checkpoint.numbered(parent)), where
    assert (state.step >= newest, skipped) == (True, []), where
    assert same(state, made_up(state.step)), where


@pytest.mark.parametrize("fault", FAULTS)
def test_a_last_checkpoint_that_fails_is_an_error_that_names_the_last_good_one(
    fault, calls_of_a_save, tmp_path, monkeypatch
):
    written = calls_of_a_save.index("rename") + 3  # and its folder opened and flushed
    for at in range(1, written + 1):
        parent, events = tmp_path / f"{at}" / "checkpoints", []
        begun(parent)
        monkeypatch.setattr(files, "calls", Failing(at, FAULTS[fault]))
        with pytest.raises(StorageError) as caught:
            writer_of(parent, events).finish(made_up(3))
        monkeypatch.setattr(files, "calls", Calls())
        assert caught.value.code == CODES.get(FAULTS[fault], "VOX-S002")
        assert caught.value.what.startswith("the last checkpoint could not be written")
        assert caught.value.faults == (f"the last good one is {parent / 'step-2'}",)
        assert not events
        assert not leftovers(parent)
        assert checkpoint.load_newest(parent)[0].step == 2


def test_a_short_write_is_gone_on_with(calls_of_a_save, tmp_path, monkeypatch):
    for at in [n for n, name in enumerate(calls_of_a_save, 1) if name == "write"]:
        parent, events = tmp_path / f"{at}" / "checkpoints", []
        begun(parent)
        monkeypatch.setattr(files, "calls", Failing(at, None))
        writer_of(parent, events).finish(made_up(3))
        assert [event.step for event in events] == [3]
        assert same(checkpoint.load_newest(parent)[0], made_up(3))


def test_what_is_on_the_disk_is_read_back_before_it_counts(tmp_path, monkeypatch):
    """A disk that says it wrote what it did not."""

    class Lying(Calls):
        def write(self, descriptor, data):
            return super().write(descriptor, bytes(len(bytes(data))))

    parent, events = tmp_path / "run" / "checkpoints", []
    begun(parent)
    writer = writer_of(parent, events)
    monkeypatch.setattr(files, "calls", Lying())
    writer.submit(made_up(3))
    writer.close()
    monkeypatch.setattr(files, "calls", Calls())
    assert [type(event) for event in events] == [Notice]
    assert "not on the disk as it was written" in events[0].message
    assert [p.name for p in checkpoint.numbered(parent)] == ["step-2", "step-1"]


def test_a_line_that_a_full_disk_would_not_take_is_not_there_in_part(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    files.append(path, b"first\n")
    monkeypatch.setattr(files, "calls", Failing(2, errno.ENOSPC))
    with pytest.raises(StorageError):
        files.append(path, b"a longer second\n")
    assert path.read_bytes() == b"first\n"
    files.append(path, b"third\n")
    assert path.read_bytes() == b"first\nthird\n"


ON_A_SMALL_DISK = """
import pathlib, sys
sys.path.insert(0, {root!r})
from tests.run.test_disk_faults import on_a_small_disk
on_a_small_disk(pathlib.Path({disk!r}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no tmpfs of our own here")
def test_a_disk_of_one_mebibyte(tmp_path):
    """A real full disk, in a name space of its own."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=1m vox {tmp_path}"
    if not shutil.which("unshare") or failed([*unshare, *mount.split()]):
        pytest.skip("this system lets no user mount a tmpfs")
    root = Path(__file__).resolve().parents[2]
    script = ON_A_SMALL_DISK.format(root=str(root), disk=str(tmp_path))
    command = [*unshare, "sh", "-c", f'{mount} && exec "$@"', "-", sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def failed(command: list[str]) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode != 0


def on_a_small_disk(root: Path) -> None:
    """A run whose checkpoints take a sixth of the disk, with other things on it."""
    parent, events = root / "run" / "checkpoints", []
    parent.parent.mkdir()
    writer = writer_of(parent, events)
    filler = root / "filler"
    for step in range(1, 8):
        if step == 3:
            filler.write_bytes(bytes(500_000))
        if step == 6:
            filler.unlink()
        writer.submit(made_up(step, wide=800))
        writer.settle()
    told = [getattr(event, "step", "full") for event in events]
    assert told == [1, 2, "full", "full", "full", 6, 7], events
    assert "the disk is full" in events[2].message
    filler.write_bytes(bytes(600_000))
    with pytest.raises(StorageError) as caught:
        writer.finish(made_up(8, wide=800))
    assert caught.value.code == "VOX-S001"
    assert "step-7" in caught.value.faults[0]
    assert not leftovers(root)
    assert same(checkpoint.load_newest(parent)[0], made_up(7, wide=800))
    os._exit(0)
