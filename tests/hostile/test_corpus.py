"""Every file of the corpus is refused, by an error of vox's own that names it, within a second."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.data_samples import load_records
from tests.hostile.make import CORPUS, HERE
from vox_core.catalog import read_catalogs
from vox_core.config import TrainSettings, load_settings, reading
from vox_core.data import worker
from vox_core.data.template import ChatTemplate, TemplateFault
from vox_core.errors import VoxError
from vox_core.host.manifest import parse_manifest
from vox_core.models.folder import check_folder
from vox_core.weights import SafetensorsFile, write_safetensors


def model(path: Path, folder: Path) -> None:
    shutil.copy(path, folder / "config.json")
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", {}, [])
    check_folder(folder)


def settings(path: Path, _: Path) -> None:
    with reading(path):
        load_settings(TrainSettings, {"model": "x"})


READERS: dict[str, Callable[[Path, Path], object]] = {
    "safetensors": lambda path, _: SafetensorsFile(path),
    "jsonl": lambda path, _: load_records([path]),
    "catalog": lambda path, _: read_catalogs([path]),
    "manifest": lambda path, _: parse_manifest(path.read_text(), path),
    "vox_toml": settings,
    "template": lambda path, _: ChatTemplate(path.read_text(), {}, str(path)).render([]),
    "config": model,
}


@pytest.mark.parametrize("name", CORPUS)
def test_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SECONDS", 0.5)
    kind = name.partition("/")[0]
    before = time.process_time()
    with pytest.raises((VoxError, TemplateFault)) as caught:
        READERS[kind](HERE / "corpus" / name, tmp_path)
    assert time.process_time() - before < 1
    if isinstance(caught.value, VoxError):
        assert str(HERE / "corpus" / name) in str(caught.value) or kind in ("config", "vox_toml")


def test_the_corpus_is_what_its_script_makes() -> None:
    found = {p.relative_to(HERE / "corpus").as_posix(): p for p in (HERE / "corpus").rglob("*.*")}
    found |= {f"{p.parent.name}/{p.name}": p for p in (HERE / "corpus").glob("*/*")}
    assert found.keys() == CORPUS.keys()
    assert all(found[name].read_bytes() == content for name, content in CORPUS.items())
