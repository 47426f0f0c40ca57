"""`--source` and `[[data.source]]`: data with a weight, from whichever place says it last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from vox_core.config import DataSource, TrainSettings, load_settings, reading, validate
from vox_core.errors import ConfigError
from vox_core.run import resume

TOML = '[data]\ncurriculum = "difficulty"\n[[data.source]]\npath = "a.jsonl"\nweight = 2\n'


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "vox.toml"
    path.write_text(TOML)
    return path


def load(toml: Path, flags: dict[str, object], **environ: str) -> TrainSettings:
    with mock.patch.dict(os.environ, environ), reading(toml):
        return load_settings(TrainSettings, flags)


def test_sources_are_the_data(toml: Path) -> None:
    settings = load(toml, {})
    assert settings.source == (DataSource(path=toml.parent / "a.jsonl", weight=2),)
    assert settings.data == (toml.parent / "a.jsonl",)
    assert settings.curriculum == "difficulty"


def test_the_later_says_what_the_data_are(toml: Path) -> None:
    assert load(toml, {"data": ["b"]}).source == ()
    assert load(toml, {"data": ["b"]}).data == (Path("b"),)
    assert load(toml, {"source": ("c=1", "d=0.5")}).data == (Path("c"), Path("d"))
    assert load(toml, {}, VOX_DATA_SOURCE="e=1,f=2").data == (Path("e"), Path("f"))
    assert load(toml, {}, VOX_TRAIN_DATA="g").data == (Path("g"),)
    assert load(toml, {"source": ("c=1",)}, VOX_TRAIN_DATA="g").data == (Path("c"),)


def test_both_in_one_place_are_refused(toml: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(toml, {"data": ["b"], "source": ["c=1"]})
    assert "data or source, not both" in caught.value.faults[0]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("a.jsonl", "such as train.jsonl=0.7"),
        ("=1", "such as train.jsonl=0.7"),
        ("a=b", "valid number"),
        ("a=0", "greater than 0"),
        ("a=nan", "finite"),
        ({"path": "a", "wieght": 1}, "wieght is unknown; did you mean weight?"),
    ],
)
def test_a_source_that_makes_no_sense_is_told(said: object, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(TrainSettings, {"source": [said]})
    assert any(told in fault for fault in caught.value.faults)


def test_a_path_may_have_an_equals_sign_in_it() -> None:
    found = validate(TrainSettings, {"source": "a=b.jsonl=3"}).source
    assert found == (DataSource(path=Path("a=b.jsonl"), weight=3),)


def test_what_a_run_records_can_be_read_again(tmp_path: Path, toml: Path) -> None:
    kept = resume.recorded(load(toml, {"model": "m"}))
    assert kept["source"] == [{"path": str(toml.parent.resolve() / "a.jsonl"), "weight": 2.0}]
    assert validate(TrainSettings, kept).data == (toml.parent.resolve() / "a.jsonl",)


@pytest.mark.parametrize(
    "given",
    [
        {"data": ["hf:owner/name", "b.jsonl"], "valid": "hf:owner/name@validation"},
        {"source": ["hf:owner/name=1", "b.jsonl=2"]},
    ],
)
@pytest.mark.parametrize("kept", [resume.recorded, resume.in_force])
def test_what_is_kept_holds_in_another_folder(
    given: dict[str, object], kept: Callable[..., Any], tmp_path: Path, monkeypatch
) -> None:
    """Paths are absolute, those of sources too; a data set of the hub is in no folder."""
    monkeypatch.chdir(tmp_path)
    said = validate(TrainSettings, given)
    again = validate(TrainSettings, kept(said))
    assert again.data == (Path("hf:owner/name"), tmp_path.resolve() / "b.jsonl")
    assert again.valid == said.valid
    assert [source.path for source in again.source] in ([], [*again.data])
