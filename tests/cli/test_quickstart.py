"""The tour: ordinary commands in order, their results in the summary, nothing left on refusal."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click
import pytest

from tests.cli.services import Merging, Training, Voice
from vox_core.cli import root
from vox_core.cli.quickstart import DATA, FILES, QUESTION
from vox_core.config import TrainSettings
from vox_core.errors import BackendError


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    service = Training()
    monkeypatch.setattr("vox_core.run.train.train", service)
    monkeypatch.setattr("vox_core.run.merge.merge", Merging())
    monkeypatch.setattr("vox_core.run.load.open_model", Voice())
    return service


def questions(name: str) -> list[str]:
    rows = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(row)["messages"][0]["content"] for row in rows]


def commands(out: str) -> list[list[str]]:
    return [shlex.split(line[2:]) for line in out.splitlines() if line.startswith("$ ")]


def test_the_question_is_held_out() -> None:
    assert QUESTION in questions("valid.jsonl")
    assert QUESTION not in questions("train.jsonl")


def test_it_runs_four_commands_in_order(vox, training: Training) -> None:
    done = vox("quickstart")
    assert done.code == 0, done.err
    ran = commands(done.out)
    assert [command[1] for command in ran] == ["generate", "train", "generate", "merge"]
    assert ran[0][2:4] == ["smollm2-135m", QUESTION]
    assert ran[2][2:4] == ["vox-quickstart/run", QUESTION]
    assert ran[3][2] == "vox-quickstart/run"


def test_what_it_prints_can_be_typed(vox, training: Training) -> None:
    """Training by hand gets the same settings as on the tour."""
    for command in commands(vox("quickstart").out):
        assert vox(*command[1:]).code == 0
    toured, typed = (call["settings"] for call in training.calls)
    assert isinstance(toured, TrainSettings)
    assert toured == typed


def test_it_ends_with_a_summary_and_what_to_do_next(vox, training: Training) -> None:
    out = vox("quickstart", "--out", "here").out
    summary, _, following = out.partition("What to do next")
    assert "validation loss  4.0000 -> 1.0000 (75 % lower)" in summary
    assert f"before           1:{QUESTION.upper()}" in summary
    assert f"after            1:{QUESTION.upper()}" in summary
    assert "vox chat here/run " in following


def test_its_data_can_be_looked_at(vox, training: Training) -> None:
    vox("quickstart", "--out", "here")
    for name in FILES:
        assert (Path("here/data") / name).read_bytes() == (DATA / name).read_bytes()


def test_an_existing_folder_is_refused_before_any_work(vox, training: Training) -> None:
    Path("vox-quickstart").mkdir()
    done = vox("quickstart")
    assert (done.code, done.out, training.calls) == (2, "", [])
    assert "VOX-O001" in done.err


def test_without_a_backend_nothing_is_left(vox, training: Training, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BackendError("B001", "no backend is installed", remedy="pip install vox-ml-cpu")

    monkeypatch.setattr("vox_core.run.load.open_model", refuse)
    assert vox("quickstart").code == 2
    assert not Path("vox-quickstart").exists()


def test_a_stopped_training_ends_the_tour(vox, training: Training) -> None:
    training.stopped = True
    done = vox("quickstart")
    assert done.code == 130
    assert [command[1] for command in commands(done.out)] == ["generate", "train"]
    assert "vox train --resume vox-quickstart/run" in done.err


def test_it_is_an_ordinary_command() -> None:
    command = root.get_command(click.Context(root), "quickstart")
    assert command is not None
    assert [option.name for option in command.params] == ["out", "debug"]


def test_an_interrupted_tour_is_resumed(vox, training: Training) -> None:
    training.stopped = True
    vox("quickstart")  # has written its data, and no plan
    training.stopped = False
    done = vox("quickstart")
    assert done.code == 0, done.err
    assert commands(done.out)[1][-2:] == ["--resume", "auto"]
    assert [command[1] for command in commands(done.out)][2:] == ["generate", "merge"]
