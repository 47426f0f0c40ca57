"""`vox` in this process, behind its own error boundary, with nothing of the user's around it."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.core.plugin_site import MANIFEST, Site
from vox_core.cli import failures, root
from vox_core.host.discover import discover


class Done(NamedTuple):
    code: int
    out: str
    err: str


Vox = Callable[..., Done]


@pytest.fixture(autouse=True)
def _clean_place(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder, and no settings from outside but that the trackers are disabled: each would
    watch every run from a process of its own."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path_factory.mktemp("config")
    shutil.copy(Path(os.environ["VOX_CONFIG"]) / "plugins.json", config)
    for name in [name for name in os.environ if name.startswith("VOX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VOX_CONFIG", str(config))


@pytest.fixture
def vox(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Vox:
    """`vox("train", "--rank", 8, stdin="…")` -> exit code, stdout, stderr."""

    def run(*arguments: object, stdin: str = "", terminal: bool = False) -> Done:
        text = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        monkeypatch.setattr(text, "isatty", lambda: terminal)
        monkeypatch.setattr("sys.stdin", text)
        capsys.readouterr()
        code = failures.run(root, [str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A folder of plugins on the path; `mine` is in it."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    made = Site(folder)
    made.add("mine", manifest=MANIFEST.replace("1000000", "0"))
    return made


@pytest.fixture
def others_disabled(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plugin of this environment but `mine`: the doctor starts a process for each."""
    others = (each.id for each in discover() if each.id != "mine")
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", ",".join(others))


@pytest.fixture
def listed(vox: Vox) -> Callable[[], dict[str, dict[str, str]]]:
    """`vox plugin list --json`, by id."""
    return lambda: {each["id"]: each for each in json.loads(vox("plugin", "list", "--json").out)}
