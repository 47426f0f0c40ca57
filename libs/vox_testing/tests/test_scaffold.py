"""Packages that `vox plugin new` writes: what is in them, what is refused, and whether they work.

The last part installs each kind into an environment of its own and runs its tests there, unedited.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.core.author_env import Environment

from vox_core.api.models import WeightFolder
from vox_core.contract import API_VERSION
from vox_core.errors import ConfigError, ModelError, OutputError, StorageError
from vox_core.host.manifest import Manifest, parse_manifest
from vox_testing.llama import write_llama
from vox_testing.scaffold import Kind, Project, render, write
from vox_testing.suite.faults import BROKEN

KINDS: tuple[Kind, ...] = ("torch", "bare")
NAMES = {"torch": "vox_on_torch", "bare": "vox_bare"}


def project(kind: Kind, **other: str) -> Project:
    return Project(NAMES[kind], kind, kind, **other)


def manifest(files: dict[str, str], name: str) -> Manifest:
    return parse_manifest(files[f"{name}/vox_plugin.toml"], "vox_plugin.toml")


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_agree_with_one_another(kind: Kind) -> None:
    files = render(project(kind, licence="MIT"))
    name, told = NAMES[kind], manifest(files, NAMES[kind])
    packaged = tomllib.loads(files["pyproject.toml"])
    about = packaged["project"]
    assert (about["name"], about["version"], about["license"]) == (name, told.version, "MIT")
    assert (told.id, told.licence, told.api) == (kind, "MIT", API_VERSION)
    assert about["entry-points"]["vox_core.plugins"] == {told.id: f"{name}:backend"}
    assert packaged["tool"]["pytest"]["ini_options"]["vox_backend"] == told.id
    assert told.probe is not None and f"{name}/{told.probe.file}" in files


@pytest.mark.parametrize("kind", KINDS)
def test_the_core_is_required_and_the_engine_by_those_that_use_it(kind: Kind) -> None:
    requirements = tomllib.loads(render(project(kind))["pyproject.toml"])["project"]["dependencies"]
    names = [requirement.partition(">=")[0] for requirement in requirements]
    assert names == ["vox-ml", "vox-ml-torch"][: 2 if kind == "torch" else 1]


@pytest.mark.parametrize("kind", KINDS)
def test_no_placeholder_is_left_and_all_code_compiles(kind: Kind) -> None:
    for path, text in render(project(kind)).items():
        assert "$" not in text, path
        assert text.endswith("\n")
        if path.endswith(".py"):
            compile(text, path, "exec")


def test_a_bare_backend_declares_nothing() -> None:
    told = manifest(render(project("bare")), NAMES["bare"])
    assert not told.is_backend
    assert told.capabilities.methods == told.capabilities.dtypes == ()


@pytest.mark.parametrize("fault", [None, *BROKEN])
def test_a_bare_model_refuses_a_broken_folder(fault: str | None, tmp_path: Path) -> None:
    """With the shapes that its author adds, it passes the suite's test of broken models."""
    module: dict[str, Any] = {}
    exec(render(project("bare"))[f"{NAMES['bare']}/model.py"], module)
    folder = write_llama(tmp_path)
    shapes = {name: info.shape for name, info in WeightFolder(folder).tensors.items()}
    written = type("Written", (module["BaseModel"],), {"shapes": lambda self: shapes})
    if fault is None:
        written(folder, "fp32").close()
        return
    BROKEN[fault](folder)
    with pytest.raises(ModelError) as caught:
        written(folder, "fp32")
    assert caught.value.code == ("VOX-M005" if fault == "no weights" else "VOX-M002")


# --- what is refused ------------------------------------------------------------------------------

REFUSED = {
    "Upper": "expected lower-case letters",
    "with-hyphen": "expected lower-case letters",
    "1st": "expected lower-case letters",
    "trailing_": "expected lower-case letters",
    "../up": "expected lower-case letters",
    "": "expected lower-case letters",
    "class": "a keyword of Python",
    "json": "standard library",
    "click": "installed in this environment",
    "pluggy": "installed in this environment",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_cannot_be_used_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(Project(name, "fine"))
    assert [REFUSED[name] in fault for fault in caught.value.faults] == [True]


def test_the_catalogs_names_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = tmp_path / "more.toml"
    catalog.write_text(ENTRY)
    monkeypatch.setenv("VOX_CATALOG", str(catalog))
    with pytest.raises(ConfigError) as caught:
        render(Project("vox_somebodys", "somebodys"))
    assert [fault.partition(": ")[2] for fault in caught.value.faults] == [
        "the package of plugin 'somebodys' in the catalog",
        "a plugin of the catalog",
    ]


ENTRY = """
[[plugin]]
id = "somebodys"
description = "Another's"
default-source = "pypi:vox-x-somebodys==1.0"
distribution = "vox-x-somebodys"
import-package = "vox_somebodys"
licence = "MIT"
"""


def test_all_faults_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        render(Project("class", "cpu", licence="free for all"))
    assert [fault.partition(" ")[0] for fault in caught.value.faults] == ["name", "id", "licence"]


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        write(tmp_path, {"a": ""})
    assert list(tmp_path.iterdir()) == []


def test_a_package_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        write(tmp_path / "out", {"a": "a file", "a/b": "a file in a file"})
    assert list(tmp_path.iterdir()) == []


# --- whether it works -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Both kinds, written and installed, each in a folder of its own name."""
    environment = Environment(tmp_path_factory.mktemp("author"))
    for kind in KINDS:
        write(environment.folder / kind, render(project(kind)))
    environment.install_editable(*(environment.folder / kind for kind in KINDS))
    return environment


def test_both_kinds_are_found_and_only_the_one_that_can_work_is_a_backend(
    installed: Environment,
) -> None:
    listed = json.loads(installed.run("-m", "vox_core.cli", "plugin", "list", "--json").stdout)
    assert {each["id"]: each["status"] for each in listed}.items() >= {
        ("torch", "installed"),
        ("bare", "installed"),
    }
    backends = json.loads(installed.run("-m", "vox_core.cli", "backend", "list", "--json").stdout)
    status = {each["id"]: each["status"] for each in backends}
    assert status["torch"] == "available"
    assert "bare" not in status


REFUSE = """
from vox_core.errors import PlanError
from vox_core.host.discover import discover
from vox_core.host.load import load_backend

(found,) = [each for each in discover() if each.id == "bare"]
backend = load_backend(found, "train")
for call in (backend.train, backend.merge, backend.load):
    try:
        call(None, None)
    except PlanError as error:
        print(error.what, "|", error.remedy)
"""


def test_a_bare_backend_loads_and_refuses_each_operation(installed: Environment) -> None:
    said = installed.run("-c", REFUSE).stdout.splitlines()
    hooks = ("vox_train", "vox_merge", "vox_load")
    assert [line.partition(" |")[0] for line in said] == [
        f"backend 'bare' has no {hook} yet" for hook in hooks
    ]
    assert all("write-a-backend.md" in line for line in said)


CORE = "loss_falls or are_the_formula or are_the_references or hook or manifest or declared"
"""A check of each operation, and those of the package; the engine has the whole suite in the tests
of vox_cpu, and the torch kind is built on it."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        pytest.param("torch", CORE, id="torch"),
        pytest.param("torch", "", id="torch-whole", marks=pytest.mark.long),
        pytest.param("bare", "", id="bare"),
    ],
)
def test_its_own_tests_are_green_without_an_edit(
    kind: Kind, chosen: str, installed: Environment
) -> None:
    how = ("-q", "-p", "no:cacheprovider", "-k", chosen)
    done = installed.run("-m", "pytest", *how, folder=kind)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert (" skipped" in done.stdout) >= (kind == "bare")
