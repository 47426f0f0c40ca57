"""Further catalogs, and whose configuration folder it is: what a user's settings reach."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from platformdirs import user_config_path

from vox_core.config import PluginSettings, load_settings, reading, settings_file
from vox_core.errors import ConfigError, ModelError
from vox_core.host.blocked import blocked_plugins, config_folder, disabled, set_disabled
from vox_core.host.discover import known, known_plugins
from vox_core.models import resolve

CATALOG = """
[[model]]
id = "house-model"
description = "Of the house"
licence = "MIT"
parameters = 5
hub = "house/model"

[[plugin]]
id = "house"
description = "Of the house"
default-source = "pypi:vox-z-house==1.0"
distribution = "vox-z-house"
import-package = "vox_z_house"
licence = "MIT"
"""


@pytest.fixture
def further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file, elsewhere, that names a further catalog."""
    for variable in ("VOX_CATALOG", "VOX_DISABLE_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "more.toml").write_text(CATALOG)
    file = tmp_path / "other.toml"
    file.write_text('[plugin]\ncatalogs = "more.toml"\nblocked = "house"\n')
    return file


def test_a_catalog_that_vox_toml_names_is_known_everywhere(further: Path) -> None:
    assert "house" not in known().plugins
    Path("vox.toml").write_text('[plugin]\ncatalogs = "../more.toml"\n')
    assert known().plugins["house"].distribution == "vox-z-house"
    assert known_plugins()["house"] == known().plugins["house"]
    with pytest.raises(ModelError) as caught:
        resolve("house-modell")
    assert "did you mean house-model?" in caught.value.remedy


def test_a_settings_file_stands_in_for_vox_toml_and_no_longer(
    further: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOX_CONFIG", str(tmp_path / "config"))
    Path("vox.toml").write_text('[plugin]\nblocked = "cpu"\n')
    with reading(further):
        assert settings_file() == further
        assert "house" in known().plugins
        assert load_settings(PluginSettings, {}).blocked == ("house",)
        assert blocked_plugins([]) == {"house": str(further)}
    assert settings_file() == Path("vox.toml")
    assert "house" not in known().plugins
    assert blocked_plugins(["cpu"]) == {"cpu": "vox.toml"}


def test_a_settings_file_that_was_named_has_to_exist(further: Path) -> None:
    with reading(further.with_name("gone.toml")), pytest.raises(ConfigError, match="cannot be re"):
        known()


# --- tests and the user's own folder --------------------------------------------------------------


def test_what_the_user_disabled_reaches_no_test() -> None:
    assert config_folder() != user_config_path("vox", appauthor=False)
    assert disabled() == ("tensorboard", "wandb"), "by conftest.py, and nothing else"


def test_nor_a_process_that_a_test_starts() -> None:
    script = "from vox_core.host.blocked import config_folder; print(config_folder())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(config_folder()) == os.environ["VOX_CONFIG"]


def test_the_configuration_folder_is_that_of_the_platform_unless_named(tmp_path: Path) -> None:
    assert config_folder({}) == user_config_path("vox", appauthor=False)
    named = {"VOX_CONFIG": str(tmp_path / "mine")}
    assert set_disabled(["x"], named) == tmp_path / "mine/plugins.json"
    assert disabled(named) == ("x",)
