"""Flags, variables and vox.toml: who wins, and what reaches the service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.services import Training
from vox_core.cli.options import options_of
from vox_core.config import SECTIONS, TrainSettings, is_table


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    service = Training()
    monkeypatch.setattr("vox_core.run.train.train", service)
    return service


@pytest.fixture
def toml() -> Path:
    file = Path("vox.toml")
    file.write_text('[train]\nlr = 1e-3\nrank = 4\nbackend = "written"\n')
    return file


@pytest.mark.parametrize("kind", SECTIONS)
def test_every_setting_is_a_flag_with_its_description(kind) -> None:
    flags = {option.name: option for option in options_of(kind)}
    fields = {name: f for name, f in kind.model_fields.items() if not is_table(f)}
    assert {*flags} == {*fields, "config_file"}
    for name, field in fields.items():
        assert flags[name].opts == [f"--{name.replace('_', '-')}"]
        assert field.description in flags[name].help


def test_only_what_was_typed_is_given(vox, training: Training) -> None:
    vox("train", "--rank", 8, "--allow-cpu", "--data", "a", "--data", "b")
    settings = training.calls[0]["settings"]
    assert settings.model_fields_set == {"rank", "allow_cpu", "data"}
    assert (settings.rank, settings.allow_cpu) == (8, True)
    assert settings.data == (Path("a"), Path("b"))


def test_a_flag_wins_over_a_variable_over_the_file(vox, training, toml, monkeypatch) -> None:
    monkeypatch.setenv("VOX_TRAIN_RANK", "5")
    vox("train", "--alpha", "7")
    monkeypatch.setenv("VOX_TRAIN_ALPHA", "6")
    vox("train", "--alpha", "7", "--rank", "6")
    first, second = (call["settings"] for call in training.calls)
    assert (first.lr, first.rank, first.alpha) == (1e-3, 5, 7)
    assert (second.lr, second.rank, second.alpha) == (1e-3, 6, 7)


def test_another_file_can_be_named(vox, training: Training, toml: Path) -> None:
    Path("other.toml").write_text("[train]\nrank = 32\n")
    vox("train", "--config", "other.toml")
    assert training.calls[0]["settings"] == TrainSettings(rank=32)


def test_a_file_that_is_not_there_is_an_error(vox, training: Training) -> None:
    done = vox("train", "--config", "nowhere.toml")
    assert (done.code, training.calls) == (2, [])
    assert "VOX-C003" in done.err


@pytest.mark.parametrize(
    ("arguments", "variables", "written", "origin"),
    [
        (["--backend", "b"], {"VOX_BACKEND": "c"}, True, "--backend"),
        ([], {"VOX_BACKEND": "c"}, True, "VOX_BACKEND"),
        ([], {"VOX_TRAIN_BACKEND": "c"}, False, "VOX_BACKEND"),
        ([], {}, True, "vox.toml"),
        ([], {}, False, None),
    ],
)
def test_the_service_is_told_who_asked_for_the_backend(
    vox, training, toml, monkeypatch, arguments, variables, written, origin
) -> None:
    if not written:
        toml.unlink()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    vox("train", *arguments)
    assert training.calls[0]["backend_origin"] == origin


def test_config_show_says_what_is_in_force_and_why(vox, toml: Path, monkeypatch) -> None:
    monkeypatch.setenv("VOX_TRAIN_SEED", "7")
    monkeypatch.setenv("VOX_BACKEND", "c")
    lines = [line.split() for line in vox("config", "show").out.splitlines()]
    assert ["lr", "=", "0.001", "#", "vox.toml"] in lines
    assert ["seed", "=", "7", "#", "VOX_TRAIN_SEED"] in lines
    assert ["backend", "=", '"c"', "#", "VOX_BACKEND"] in lines
    assert ["alpha", "=", "32.0", "#", "default"] in lines


def test_config_show_can_be_used_as_a_file(vox, toml: Path) -> None:
    shown = vox("config", "show")
    Path("again.toml").write_text(shown.out)
    again = vox("config", "show", "--config", "again.toml", "--json")
    assert json.loads(again.out) == json.loads(vox("config", "show", "--json").out)


def test_config_schema_knows_every_section(vox) -> None:
    schema = json.loads(vox("config", "schema").out)
    assert [*schema["properties"]] == [kind.section for kind in SECTIONS]
    assert "micro-batch-tokens" in schema["$defs"]["TrainSettings"]["properties"]
