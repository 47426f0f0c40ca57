"""When checkpoints are written, by whom, what they cost and which are kept."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.run.faulty import RUN, Calls, Failing, leftovers, made_up, same, saving
from tests.run.lines import read
from vox_core import files
from vox_core.config import TrainSettings, validate
from vox_core.contract import CheckpointWritten, Notice, StepDone, Validation
from vox_core.data.batching import epochs_after
from vox_core.errors import StorageError
from vox_core.run import checkpoint, telemetry
from vox_core.run.checkpoint import CheckpointWriter, Origin
from vox_core.run.progress import Progress
from vox_core.run.train import train


@pytest.fixture
def parent(tmp_path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()
    return folder


def steps_of(parent: Path) -> list[int]:
    return [int(folder.name[5:]) for folder in checkpoint.numbered(parent)]


class Slow(Calls):
    """A disk that writes when it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.asked = threading.Event()

    def mkdir(self, path):
        if path.name.startswith(".tmp-"):
            self.asked.set()
            assert self.let.wait(30)
        super().mkdir(path)


def test_training_goes_on_while_a_checkpoint_is_written(parent, monkeypatch):
    slow, events = Slow(), []
    monkeypatch.setattr(files, "calls", slow)
    writer = CheckpointWriter(parent, events.append, saving(), origin=Origin(**RUN))
    state = made_up(1)
    writer.submit(state)
    assert slow.asked.wait(30)
    for array in state.adapter.tensors().values():  # the next step
        array[:] = 0
    for first, second in state.moments.values():
        first[:], second[:] = 0, 0
    writer.poll()
    assert events == []
    slow.let.set()
    writer.close()
    assert [event.step for event in events] == [1]
    assert same(checkpoint.load(parent / "step-1"), made_up(1))


def test_there_is_one_checkpoint_under_way_and_the_next_one_waits(parent, monkeypatch):
    slow, events = Slow(), []
    monkeypatch.setattr(files, "calls", slow)
    writer = CheckpointWriter(parent, events.append, saving(), origin=Origin(**RUN))
    writer.submit(made_up(1))
    assert slow.asked.wait(30)
    threading.Timer(0.3, slow.let.set).start()
    assert writer.due(2) is False
    writer.submit(made_up(2))
    assert [event.step for event in events] == [1]
    writer.close()
    first, second = events
    assert first.held_seconds < 0.2 < second.held_seconds
    assert second.held_seconds <= second.seconds
    assert first.seconds > 0.2


def test_it_is_announced_by_the_thread_that_trains_once_it_is_there(parent):
    threads, there = [], []

    def emit(event):
        threads.append(threading.current_thread())
        there.append(checkpoint.fault(Path(event.path)))

    writer = CheckpointWriter(parent, emit, saving(), origin=Origin(**RUN))
    writer.submit(made_up(1))
    writer.finish(made_up(2))
    assert threads == [threading.main_thread()] * 2
    assert there == [None, None]


def test_what_is_no_fault_of_the_disk_surfaces_at_the_next_step(parent, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(checkpoint, "save", broken)
    writer = CheckpointWriter(parent, lambda _event: None, saving())
    writer.submit(made_up(1))
    wait([writer._under_way.work])
    with pytest.raises(RuntimeError, match="a bug"):
        writer.due(2)
    writer.close()


def test_the_last_one_is_not_written_or_announced_twice(parent):
    events: list[object] = []
    writer = CheckpointWriter(parent, events.append, saving(), origin=Origin(**RUN))
    writer.submit(made_up(1))
    writer.finish(made_up(1))
    assert [event.step for event in events] == [1]


@pytest.mark.parametrize(
    ("given", "best", "kept"),
    [
        ({}, None, [9, 8]),
        ({"keep": 1}, None, [9]),
        ({"keep": 3}, None, [9, 8, 7]),
        ({"keep": 1, "keep_every": 4}, None, [9, 8, 4]),
        ({"keep": 2}, 3, [9, 8, 3]),
        ({"keep": 2}, 9, [9, 8]),
        ({"keep": 100}, None, [9, 8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_which_are_kept(given, best, kept, parent):
    progress = Progress()
    writer = CheckpointWriter(
        parent,
        lambda _event: None,
        saving(**given),
        origin=Origin(**RUN),
        progress=progress,
    )
    for step in range(1, 10):
        if step == best:
            progress(Validation(step, 1.0))
        writer.submit(made_up(step))
    writer.close()
    assert steps_of(parent) == kept
    assert not leftovers(parent)
    if best:
        assert checkpoint.origin(parent, 9).validations == ((best, 1.0),)


def test_the_best_there_is_stays_where_a_better_one_could_not_be_written(parent, monkeypatch):
    progress = Progress(validations=[(1, 2.0)])
    writer = CheckpointWriter(
        parent,
        lambda _event: None,
        saving(keep=1),
        origin=Origin(**RUN),
        progress=progress,
    )
    monkeypatch.setattr(files, "calls", filling(3))
    for step in range(1, 6):
        if step == 3:
            progress(Validation(3, 1.0))
        writer.submit(made_up(step))
    writer.close()
    assert steps_of(parent) == [5, 1]


def test_nothing_is_pruned_before_the_newer_one_verified(parent, monkeypatch):
    CheckpointWriter(parent, lambda _event: None, saving(), origin=Origin(**RUN)).finish(made_up(1))
    seen = []
    fault, prune = checkpoint.fault, checkpoint.prune

    def pruning(*given):
        seen.append((steps_of(parent), fault(parent / "step-2")))
        prune(*given)

    monkeypatch.setattr(checkpoint, "prune", pruning)
    writer = CheckpointWriter(parent, lambda _event: None, saving(keep=1), origin=Origin(**RUN))
    writer.finish(made_up(2))
    assert seen == [([2, 1], None)]
    assert steps_of(parent) == [2]


def test_when_one_is_due(parent):
    def steps(**given: object) -> list[int]:
        # 10 rows, 4 a step: epochs end within the steps 3, 5, 8 and 10.
        writer = CheckpointWriter(
            parent,
            lambda _event: None,
            saving(**given),
            epoch_of=lambda step: epochs_after(10, 4, step),
        )
        return [step for step in range(1, 13) if writer.due(step)]

    assert steps() == []
    assert steps(save_every=5) == [5, 10]
    assert steps(save_epochs=True) == [3, 5, 8, 10]
    assert steps(save_every=5, save_epochs=True) == [3, 5, 8, 10]


def test_minutes_are_counted_from_the_last_checkpoint(parent, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("vox_core.run.checkpoint.time", SimpleNamespace(monotonic=lambda: now[0]))
    writer = CheckpointWriter(parent, lambda _event: None, saving(save_minutes=1))
    found = []
    for step in range(1, 9):
        now[0] += 25
        if writer.due(step):
            found.append(step)
            writer.submit(made_up(step))
    writer.close()
    assert found == [3, 6]


def test_a_run_keeps_what_it_was_told_to(tiny, settings):
    given = {"save_every": 1, "keep": 1, "keep_every": 2, "save_epochs": True}
    run = train(settings(tiny("llama"), max_steps=5, **given)).run
    assert steps_of(run / "checkpoints") == [5, 4, 2]
    state = json.loads((run / "checkpoints/step-4/state.json").read_text())
    plan = json.loads((run / "plan.json").read_text())
    assert state["contract"] == plan["digest"]
    (used,) = state["backends"]
    assert (used["backend"], used["first_step"]) == ("cpu", 1)
    assert len(state["losses"]) == 4
    assert state["epoch"] == pytest.approx(4 * 2 / 6)
    assert state["seed"] == 42
    assert 0 < state["elapsed"] < 600
    (told, *_) = [e for e in read(run / "telemetry.jsonl") if e["event"] == "checkpoint"]
    assert 0 <= told["held_seconds"] <= told["seconds"]


def test_elapsed_goes_on_where_it_was(tiny, settings, monkeypatch):
    first = train(settings(tiny("llama"), max_steps=4, save_every=2)).run
    for name in ("vox_adapter.json", "adapter_config.json", "adapter_model.safetensors"):
        (first / name).unlink()
    before = checkpoint.origin(first / "checkpoints", 4).elapsed
    (first / "checkpoints" / "step-4").rename(first / "gone")
    middle = checkpoint.origin(first / "checkpoints", 2).elapsed
    (first / ".tmp-half-0123456789ab").write_text("left by a process that died")
    (first / "checkpoints" / ".tmp-step-4-0123456789ab").mkdir()
    train(validate(TrainSettings, {"resume": first}))
    assert middle < checkpoint.origin(first / "checkpoints", 4).elapsed
    assert 0 < middle < before
    assert not leftovers(first)


FILLING = """
import sys, time
from pathlib import Path
from vox_core import files
with files.atomic_folder(Path(sys.argv[1])) as folder, files.folder_beside(folder) as beside:
    (folder / "weights").write_text("x")
    (beside / "copy").write_text("x")
    print("filling", flush=True)
    time.sleep(600)
"""


def test_folders_of_a_killed_process_are_removed_and_those_of_a_living_one_stay(tmp_path):
    """Temporary ones of another name, or of another machine, are not looked at."""
    out, others = tmp_path / "o[u]t", (".tmp-o[u]t-2-0123456789ab", ".tmp-o[u]t-0123456789ab")
    for name in others:
        (tmp_path / name).mkdir()
    command = [sys.executable, "-c", FILLING, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "filling\n"
        there = {*leftovers(tmp_path)}
        files.remove_abandoned(out)
        assert len(there) == 4 and {*leftovers(tmp_path)} == there
        process.kill()
        process.wait()
    files.require_space(out, 0, "it")  # which they may take
    assert {*leftovers(tmp_path)} == {*others}
    with files.atomic_folder(out) as folder:
        assert {*leftovers(tmp_path)} == {*others, folder.name}
    assert {path.name for path in tmp_path.iterdir()} == {*others, out.name}


def test_a_temporary_folder_stays_while_the_folder_is_written(tmp_path):
    with files.folder_beside(tmp_path / "out") as scratch, files.atomic_folder(tmp_path / "out"):
        assert scratch.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    def lacking(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", lacking)
    left = files.temporary_beside(tmp_path / "out")
    left.mkdir()
    with files.atomic_folder(tmp_path / "out"):
        pass
    assert left.is_dir() and (tmp_path / "out").is_dir()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "tokenizer.json", "README.md"])
def test_a_run_that_dies_while_its_results_are_written_is_gone_on_with(
    name, tiny, settings, monkeypatch
):
    class Dying(Calls):
        def create(self, path):
            if name in path.name:
                raise KeyboardInterrupt
            return super().create(path)

    monkeypatch.setattr(files, "calls", Dying())
    made = settings(tiny("llama"), max_steps=2)
    with pytest.raises(KeyboardInterrupt):
        train(made)
    monkeypatch.setattr(files, "calls", Calls())
    train(validate(TrainSettings, {"resume": made.out}))
    assert (made.out / "README.md").exists() and (made.out / "vox_adapter.json").exists()
    assert not leftovers(made.out)


def filling(step: int, number: int = errno.ENOSPC):
    """A disk that is full for checkpoints of `step`."""

    class Full(Calls):
        def mkdir(self, path):
            if f"step-{step}-" in path.name:
                raise OSError(number, "No space left on device")
            super().mkdir(path)

    return Full()


def test_a_full_disk_on_the_way_costs_no_step(tiny, settings, monkeypatch):
    monkeypatch.setattr(files, "calls", filling(2))
    events: list[object] = []
    report = train(settings(tiny("llama"), max_steps=4, save_every=1), observe=events.append)
    assert report.steps == 4
    assert len([event for event in events if isinstance(event, StepDone)]) == 4
    told = [e.message for e in events if isinstance(e, Notice) and e.level == "warning"]
    (warning,) = [text for text in told if "checkpoint" in text]
    assert warning.startswith("the checkpoint after step 2 could not be written: the disk is full")
    assert "step-1" in warning
    written = [event.step for event in events if isinstance(event, CheckpointWritten)]
    assert written == [1, 3, 4]


def test_a_full_disk_at_the_end_keeps_the_adapter_where_it_can(tiny, settings, monkeypatch):
    monkeypatch.setattr(files, "calls", filling(4))
    made = settings(tiny("llama"), max_steps=4, save_every=2)
    with pytest.raises(StorageError) as caught:
        train(made)
    assert caught.value.code == "VOX-S001"
    good, kept = caught.value.faults
    assert good == f"the last good one is {made.out / 'checkpoints' / 'step-2'}"
    place = Path(kept.removeprefix("the adapter after step 4 is kept in "))
    assert place.parent == made.out
    monkeypatch.setattr(files, "calls", Calls())
    from vox_core.adapter.peft import read_adapter

    rescued = read_adapter(place).tensors()
    assert f"vox train --resume {made.out}" in caught.value.remedy
    train(validate(TrainSettings, {"resume": made.out}))
    for name, value in read_adapter(made.out).tensors().items():
        assert np.array_equal(rescued[name], value), name


def test_a_run_folder_that_takes_nothing_more(tiny, settings, tmp_path, monkeypatch):
    """The adapter goes where temporary files do, and lines of telemetry wait."""
    made, elsewhere = settings(tiny("llama"), max_steps=3), tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))

    class Full(Calls):
        def refuse(self, path: Path) -> None:
            if (made.out / "telemetry.jsonl").exists() and made.out in path.parents:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")

        def create(self, path):
            self.refuse(path)
            return super().create(path)

        def append(self, path):
            self.refuse(path)
            return super().append(path)

        def mkdir(self, path):
            self.refuse(path)
            super().mkdir(path)

    monkeypatch.setattr(files, "calls", Full())
    with pytest.raises(StorageError) as caught:
        train(made)
    assert caught.value.faults[0] == "there is none yet"
    assert str(elsewhere) in caught.value.faults[1]
    (kept,) = elsewhere.glob("vox-adapter-run-*")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {p.name for p in kept.iterdir()}


def test_lines_that_a_full_disk_would_not_take_come_later_in_order(tmp_path, monkeypatch):
    write = telemetry.Telemetry(tmp_path / "telemetry.jsonl")
    write(Notice("one"))
    monkeypatch.setattr(files, "calls", Failing(2, errno.ENOSPC))
    write(Notice("two"))
    assert [line["message"] for line in read(tmp_path / "telemetry.jsonl")] == ["one"]
    write(Notice("three"))
    told = [line["message"] for line in read(tmp_path / "telemetry.jsonl")]
    assert told == ["one", "two", "three"]
