"""`--config FILE` is the `vox.toml` of the whole command: its catalogs and blocked plugins too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.core.plugin_site import Site
from tests.core.test_known import CATALOG
from vox_core.config import CONFIG_FILE, settings_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file, elsewhere, that names a catalog with a plugin and a model."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "more.toml").write_text(CATALOG.replace("{digest}", "0" * 64))
    (folder / "other.toml").write_text('[plugin]\ncatalogs = "more.toml"\n')
    return folder / "other.toml"


def test_models(vox, file: Path) -> None:
    assert "house-model" not in vox("model", "list").out
    assert "house-model" in vox("model", "list", "--config", file).out
    Path("vox.toml").write_text('[plugin]\ncatalogs = "elsewhere/more.toml"\n')
    assert "house-model" in vox("model", "list").out


def test_a_model_to_train_on(vox, file: Path) -> None:
    done = vox("generate", "house-modell", "x", "--config", file)
    assert (done.code, "did you mean house-model?" in done.err) == (2, True)


@pytest.mark.parametrize("command", [("list",), ("info", "house")])
def test_plugins(vox, file: Path, command: tuple[str, ...]) -> None:
    done = vox("plugin", *command, "--config", file)
    assert (done.code, "vox plugin install house" in done.out) == (0, True)


def test_bundles(vox, file: Path) -> None:
    with (file.parent / "more.toml").open("a") as catalog:
        catalog.write('[[bundle]]\nid = "all"\n')
        catalog.write('description = "x"\nplugins = ["house"]\n')
    assert "house" in vox("bundle", "list", "--config", file).out


def test_the_choice_of_a_backend(vox, file: Path) -> None:
    train = ("train", "--backend", "house", "--data", "train.jsonl")
    Path("train.jsonl").write_text('{"prompt": "Which?", "completion": "That one."}\n')
    assert "vox plugin install house" not in vox(*train).err
    done = vox(*train, "--config", file)
    assert done.code == 2
    assert "next: install 'house': vox plugin install house" in done.err
    explained = vox("backend", "explain", "--backend", "house", "--config", file).out
    assert "next: install 'house': vox plugin install house" in explained


def test_blocked_plugins(vox, site: Site, file: Path) -> None:
    file.write_text('[plugin]\nblocked = "mine"\n')
    told = json.loads(vox("backend", "explain", "--config", file, "--json").out)
    reasons = {verdict["id"]: verdict["reason"] for verdict in told["verdicts"]}
    assert reasons["mine"] == f"blocked by {file}"


def test_it_does_not_outlive_its_command(vox, file: Path) -> None:
    vox("model", "list", "--config", file)
    vox("model", "list", "--config", file, "--nonsense")
    assert settings_file() == Path(CONFIG_FILE)
