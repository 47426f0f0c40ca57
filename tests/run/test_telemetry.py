"""`telemetry.jsonl`: what its lines are, and what crashes, full disks and strangers leave of it."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from pathlib import Path

import pytest

from tests.run.lines import read
from vox_core.config import TrainSettings, validate
from vox_core.contract import (
    CheckpointWritten,
    Evaluation,
    Event,
    FastPaths,
    Notice,
    ObjectiveMetrics,
    Resumed,
    RunEnd,
    RunStart,
    StepDone,
    StepSkipped,
    Validation,
)
from vox_core.errors import AdapterError, StorageError
from vox_core.run import telemetry
from vox_core.run.progress import StepMetrics, peak_resident
from vox_core.run.telemetry import Tail, Telemetry
from vox_core.run.train import train

STEP = StepDone(3, 2.5, 1e-4, 0.5, 100, 40, 0.5, memory=7, seconds_left=1.5)
START = RunStart("r", "m", "cpu", "a CPU", "fp32", "0" * 64, 1, 9, 8, 99, 40, "nf4")
EVENTS = [
    START,
    STEP,
    FastPaths({"adapters": 14}, {"adapters with DoRA": 2}),
    StepSkipped(3, 2.5, 1e9),
    Validation(3, 2.25),
    Evaluation(3, {"eval/sums": 0.75}, "r/evaluations/step-3"),
    CheckpointWritten(3, "r/checkpoints/step-3", 0.125),
    Notice("hello"),
    Notice("careful", "warning"),
    Resumed(3, "r/checkpoints/step-3", ("step-4: torn",)),
    StepSkipped(4, None, 2.5),
    FastPaths({"norm": 3}, {"of another kind": 1}),
    ObjectiveMetrics(4, {"rewards/margins": 0.5}),
    RunEnd(3, "stopped", 2.5),
]


def as_read(event: Event) -> dict[str, object]:
    line: dict[str, object] = json.loads(json.dumps(telemetry.line_of(event, 1.0)))
    return line


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_an_event_is_the_same_after_it_was_written_and_read(event: Event, told_well) -> None:
    line = as_read(event)
    assert told_well(line) == []
    assert telemetry.event_of(line) == event
    assert line["time"] == 1.0


def test_every_event_of_the_contract_is_covered() -> None:
    assert {as_read(event)["event"] for event in EVENTS} == telemetry.kinds().keys()


def test_a_metric_that_is_not_finite_is_null() -> None:
    assert as_read(ObjectiveMetrics(4, {"kl": math.nan}))["metrics"] == {"kl": None}


def test_the_names_of_the_design(told_well) -> None:
    line = as_read(STEP)
    named = {"step", "loss", "lr", "grad_norm", "tokens", "trained_tokens", "tokens_per_second"}
    assert named < line.keys()
    assert line["tokens_per_second"] == 200.0
    assert as_read(Notice("x", "warning")) == {"event": "warning", "time": 1.0, "message": "x"}
    for name in named:
        assert told_well({key: value for key, value in line.items() if key != name})
        assert told_well({**line, name: "2"})


def test_what_is_not_finite_is_null_and_read_as_nan(told_well) -> None:
    line = as_read(dataclasses.replace(STEP, loss=math.inf, grad_norm=math.nan))
    assert told_well(line) == []
    assert (line["loss"], line["grad_norm"]) == (None, None)
    event = telemetry.event_of(line)
    assert isinstance(event, StepDone) and math.isnan(event.loss)


def test_a_field_that_older_files_lack_has_its_default() -> None:
    line = as_read(dataclasses.replace(START, quant="none"))
    del line["quant"]
    assert telemetry.event_of(line) == dataclasses.replace(START, quant="none")


WRONG = {
    "nothing": b"\n",
    "no JSON": b"mine\n",
    "no object": b'["step"]\n',
    "no event": b'{"time": 1.0}\n',
    "an event that is no text": b'{"event": ["step"]}\n',
    "missing fields": b'{"event": "step", "time": 1.0, "step": 3}\n',
    "a wrong type": b'{"event": "validation", "step": true, "loss": 1.0}\n',
    "a negative step": b'{"event": "validation", "step": -1, "loss": 1.0}\n',
    "a number of many digits": b'{"event": "validation", "step": '
    + b"9" * 5000
    + b', "loss": 1}\n',
    "a text for a loss": b'{"event": "validation", "step": 1, "loss": "\\u001b[2J"}\n',
    "an unknown choice": b'{"event": "run_end", "step": 1, "outcome": "won", "seconds": 1}\n',
    "bytes that are no text": b'{"event": "\xff\xfe"}\n',
    "brackets without end": b"[" * 200_000 + b"\n",
    "zeros": b"\0" * 4096 + b"\n",
}


@pytest.mark.foreign_telemetry
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_is_passed_over_and_counted(case: str, tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    good = json.dumps(telemetry.line_of(STEP, 2.0)).encode() + b"\n"
    path.write_bytes(good + WRONG[case] + good)
    found = Tail(path)
    assert [(told.time, told.event) for told in found.new()] == [(2.0, STEP)] * 2
    assert found.skipped == (case != "nothing")


@pytest.mark.foreign_telemetry
def test_numbers_that_json_has_not_are_read_as_nan(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    path.write_text(
        '{"event": "validation", "time": NaN, "step": 1, "loss": NaN}\n'
        '{"event": "validation", "time": 1e999, "step": 2, "loss": -Infinity}\n'
    )
    told = list(Tail(path).new())
    assert [each.time for each in told] == [0.0] * 2
    assert [str(each.event.loss) for each in told] == ["nan", "-inf"]  # type: ignore[attr-defined]


def test_a_line_costs_no_look_at_type_hints(tmp_path: Path, monkeypatch) -> None:
    """They took nine tenths of the time of `vox runs list`."""
    models = telemetry.models()
    monkeypatch.delattr(telemetry, "get_type_hints")
    (path := tmp_path / "t.jsonl").write_text('{"event": "validation", "step": 1, "loss": null}\n')
    ((_, event),) = Tail(path).new()
    assert "validation" in models and math.isnan(event.loss)


def test_lines_come_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    found = Tail(path)
    assert list(found.new()) == []
    line = json.dumps(telemetry.line_of(STEP, 2.0)) + "\n"
    with path.open("a") as file:
        file.write(line + line[:20])
        file.flush()
        assert len(list(found.new())) == 1
        assert list(found.new()) == []
        file.write(line[20:])
        file.flush()
        assert len(list(found.new())) == 1
    path.write_text(line)
    assert len(list(found.new())) == 1, "a file that is shorter than before is a new one"
    assert found.skipped == 0


@pytest.mark.parametrize("made", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_waited_for(made, tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    made(path)
    with pytest.raises(AdapterError) as caught:
        list(Tail(path).new())
    assert caught.value.code == "VOX-A001"


TORN = {
    "half a line": b'{"event": "st',
    "zeros, as a power cut leaves them": b"\0" * 5000,
    "more than a block": b"x" * 200_000,
    "nothing": b"",
}


@pytest.mark.parametrize("case", TORN)
def test_what_a_crash_left_is_cut_off_before_the_next_line(case: str, tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    Telemetry(path)(STEP)
    whole = path.read_bytes()
    path.write_bytes(whole + TORN[case])
    Telemetry(path)(STEP)
    assert path.read_bytes().startswith(whole)
    assert [line["step"] for line in map(json.loads, path.read_text().splitlines())] == [3, 3]


def test_a_file_that_is_one_torn_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    path.write_bytes(b'{"event"')
    Telemetry(path)(STEP)
    assert len(path.read_text().splitlines()) == 1


class Disk:
    """`os.write` on a disk with so many bytes left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 10**9
        self._write = os.write
        monkeypatch.setattr(telemetry.os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(file, data[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 1, 50])
def test_lines_wait_while_the_disk_is_full(room: int, tmp_path: Path, monkeypatch) -> None:
    """No half line is left, it is said once, and nothing is lost or out of order."""
    path, disk = tmp_path / "telemetry.jsonl", Disk(monkeypatch)
    tell = Telemetry(path)
    assert tell(Validation(0, 1.0)) == []
    before = path.read_bytes()
    disk.room = room
    (said,) = tell(Validation(1, 1.0))
    assert "No space left" in said.message
    assert tell(Validation(2, 1.0)) == []
    assert path.read_bytes() == before
    disk.room = 10**9
    assert tell(Validation(3, 1.0)) == []
    assert [line["step"] for line in read(path)] == [0, 1, 2, 3]
    disk.room = 0
    assert len(tell(Validation(4, 1.0))) == 1, "said again when it comes again"


def test_a_first_line_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch) -> None:
    Disk(monkeypatch).room = 0
    with pytest.raises(StorageError) as caught:
        Telemetry(tmp_path / "telemetry.jsonl")(STEP)
    assert caught.value.code == "VOX-S001"


def test_a_name_that_is_not_unicode_does_not_end_a_run(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    Telemetry(path)(Notice("r\udce9sum\udce9"))
    assert [line["message"] for line in read(path)] == ["r\udce9sum\udce9"]


def test_time_left_counts_what_lies_between_steps() -> None:
    now = [100.0]
    metrics = StepMetrics(10, 80.0, clock=lambda: now[0])
    metrics.begin()
    left = []
    for number, waited in enumerate([6.0, 2.0, 4.0], start=1):
        now[0] += waited
        step = dataclasses.replace(STEP, step=number, memory=None)
        left.append(metrics.measured(step).seconds_left)
    assert left == [6.0 * 9, (6 + 2) / 2 * 8, (6 + 2 + 4) / 3 * 7]
    assert metrics.startup_seconds == 26
    assert metrics.measured(dataclasses.replace(STEP, step=11)).seconds_left == 0


def test_memory_is_the_backends_own_or_the_most_that_was_resident() -> None:
    metrics = StepMetrics(10, 0.0)
    assert metrics.measured(dataclasses.replace(STEP, memory=5)).memory == 5
    own = metrics.measured(dataclasses.replace(STEP, memory=None)).memory
    assert own is not None and 10**7 < own < 10**11
    before = peak_resident()
    held = bytearray(300_000_000)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    del held
    after = peak_resident()
    assert before and after
    assert after - before > 200_000_000 or after > 500_000_000


def test_a_resume_is_told_with_what_was_skipped(tiny, settings) -> None:
    run = train(settings(tiny("llama"), save_every=2)).run
    for name in ("vox_adapter.json", "adapter_config.json", "adapter_model.safetensors"):
        (run / name).unlink()
    damaged = run / "checkpoints" / "step-5" / "adapter.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\0\0\0\0")
    train(validate(TrainSettings, {"resume": run}))
    told = list(read(run / "telemetry.jsonl"))
    (ended,) = [at for at, line in enumerate(told) if line["event"] == "run_end"][:-1]
    resumed = told[ended + 1]
    assert resumed["event"] == "resume", "the first line of the process that goes on"
    assert resumed["step"] == 4
    assert resumed["path"].endswith("step-4")
    (skipped,) = resumed["skipped"]
    assert skipped.startswith("step-5")
    warned = [line["message"] for line in told if line["event"] == "warning"]
    assert any(skipped in message for message in warned)
    steps = [line for line in told if line["event"] == "step"]
    assert all(line["memory"] > 10**7 and line["seconds_left"] >= 0 for line in steps)
    assert steps[-1]["seconds_left"] == 0


def test_what_a_caller_returns_is_no_event(tiny, settings) -> None:
    told: list[Event] = []

    def observe(event: Event) -> list[Event]:
        told.append(event)
        return [Notice("an echo")]

    run = train(settings(tiny("llama"), max_steps=1), observe=observe).run
    assert Notice("an echo") not in told
    assert "an echo" not in (run / "telemetry.jsonl").read_text()
