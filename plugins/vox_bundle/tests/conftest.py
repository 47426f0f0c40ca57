"""The bundle of samples.py, built once from real packages; fixtures for tests of commands."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from plugins.vox_bundle.tests.samples import sources
from tests.cli.fixtures import _clean_place, vox

from vox_bundle.archive import Bundle
from vox_bundle.build import build
from vox_core.catalog import Catalog

__all__ = ["_clean_place", "bundle", "catalog", "nvidia", "vox", "wheels"]


@pytest.fixture(scope="session")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def bundle(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build("small", catalog, tmp_path_factory.mktemp("out") / "small.zip", isolation=False)


@pytest.fixture(scope="session")
def wheels(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of the bundle."""
    folder = tmp_path_factory.mktemp("wheels")
    with zipfile.ZipFile(bundle.file) as archive:
        for wheel in bundle.wheels:
            (folder / wheel.file).write_bytes(archive.read(wheel.member))
    return folder


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOX_OVERRIDE_HARDWARE", "nvidia")
