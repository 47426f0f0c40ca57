"""The cache's version is raised with every change of the golden tokens and diagnoses.

`cache_version.json` holds the version and the digest of these files; `python -m tests.golden.make`
writes it for a new version only.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden import make
from vox_core import cache


def test_the_golden_files_are_those_of_the_cache_version() -> None:
    held = json.loads(make.CACHE_VERSION_FILE.read_text(encoding="utf-8"))
    assert held == {"version": cache.CACHE_VERSION, "sha256": make.digest()}, (
        "golden tokens or diagnoses have changed: raise CACHE_VERSION in vox_core/cache.py, "
        "then run python -m tests.golden.make"
    )


def test_changed_tokens_are_refused_under_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "CACHE_VERSION_FILE", tmp_path / "held.json")
    make.hold_version()
    monkeypatch.setattr(make, "digest", lambda: "other")
    with pytest.raises(SystemExit, match="CACHE_VERSION"):
        make.hold_version()
    monkeypatch.setattr(cache, "CACHE_VERSION", cache.CACHE_VERSION + 1)
    make.hold_version()
    assert json.loads(make.CACHE_VERSION_FILE.read_text())["sha256"] == "other"
