"""Each malformed file has exactly the diagnosis that is written down for it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.malformed.make import EXPECTED, cases
from vox_core.config import TrainSettings
from vox_core.data.faults import RowError
from vox_core.data.fields import NO_FIELDS
from vox_core.data.records import NO_ROW, STEP, read_lines
from vox_core.data.source import open_source
from vox_data.check import check

WRITTEN: dict[str, list[str]] = json.loads(EXPECTED.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))


def diagnosis(folder: Path, name: str, data: bytes) -> list[str]:
    """What `vox data check` says of a file, without the folder; the next step, where it says more
    than of any fault."""
    path = folder / name
    path.write_bytes(data)
    report = check(TrainSettings(data=(path,)))
    faults = report.faults
    assert faults.total == faults.kinds.total() >= len(faults.first)
    lines, text = open_source(path, NO_FIELDS).lines, "\n".join(faults.first)
    rows = [row for _, row in read_lines(path, lines) if isinstance(row, RowError)]
    found = [fault for row in rows for fault in row.faults]
    shown = {fault.kind for fault in found if str(fault).removeprefix("found ") in text}
    assert shown == faults.kinds.keys(), "the first ones have one of each kind"
    told = [*faults.first, *report.notes]
    if report.next not in ("", STEP, NO_ROW):
        said = report.next.removeprefix(f"{STEP}; ").removeprefix(f"{NO_ROW}; ")
        told.append(f"next: {said}")
    assert told, "nothing is wrong with it"
    return [text.replace(f"{folder}/", "") for text in told]


def diagnoses() -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        return {name: diagnosis(Path(folder), name, data) for name, data in cases().items()}


@pytest.mark.parametrize("name", cases())
def test_the_diagnosis_is_the_one_written_down(name: str, tmp_path: Path) -> None:
    assert diagnosis(tmp_path, name, cases()[name]) == WRITTEN[name]


def test_there_are_forty_of_them() -> None:
    assert WRITTEN.keys() == cases().keys()
    assert len(WRITTEN) >= 40
