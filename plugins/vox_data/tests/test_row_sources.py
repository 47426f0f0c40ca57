"""Parquet, Arrow and Hugging Face data sets as rows."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet as pq
from tests.core.data_samples import load_records

from vox_core.data import source
from vox_core.data.checked import check_files
from vox_core.data.faults import RowError
from vox_core.data.formats import find_split
from vox_core.data.source import open_source
from vox_core.errors import DataError
from vox_data.row_sources import open_rows

PAIR = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": 'é\n"x"'}]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))


def table(rows: list[dict[str, Any]]) -> pyarrow.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    made = table(rows)
    if ".parquet" in path.name:
        pq.write_table(made, path, row_group_size=max(2, len(rows) // 2))
        return path
    new = pyarrow.ipc.new_file if path.name.startswith("file") else pyarrow.ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, made.schema) as writer:
        writer.write_table(made, max_chunksize=3)
    return path


NAMES = ["rows.parquet", "rows.parquet.gz", "stream.arrow", "file.arrow", "stream.arrow.gz"]


@pytest.mark.parametrize("name", NAMES)
def test_what_goes_in_comes_out(name: str, tmp_path: Path) -> None:
    rows = [PAIR, CHAT, {"prompt": "é", "completion": "c", "rating": 2.5}] * 70
    path = write(tmp_path / name, rows)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    lines = open_source(path).lines.read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert [record.line for record in load_records([path])] == [*range(1, 211)]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"{}", b"x" * 1000])
def test_what_is_none_is_one_fault(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        check_files([tmp_path / name])
    (fault,) = caught.value.faults
    kind = "Parquet" if "parquet" in name else "Arrow"
    assert fault.startswith(f"{tmp_path / name}, row 1: found no {kind} that can be read (")


def test_a_folder_of_parts(tmp_path: Path) -> None:
    parts = [tmp_path / f"train-0000{n}-of-00002.parquet" for n in range(2)]
    for part in parts:
        part.touch()
    assert find_split([tmp_path])[0] == parts


def test_what_json_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    columns = {
        "text": ["a", "b"],
        "rating": [float("nan"), 2.0],
        "when": [datetime.datetime(2024, 1, 2), None],
        "raw": [b"xyz", None],
        "price": [decimal.Decimal("1.50"), None],
    }
    pq.write_table(pyarrow.table(columns), path)
    lines = open_source(path).lines.read_text().splitlines()
    assert json.loads(lines[0]) == {
        "text": "a",
        "rating": None,
        "when": "2024-01-02T00:00:00",
        "raw": {"bytes": 3},
        "price": 1.5,
    }
    assert json.loads(lines[1]) == {"text": "b", "rating": 2.0}


def test_parquet_that_expands_without_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "FREE_BYTES", 100_000)
    monkeypatch.setattr(source, "MAX_RATIO", 10)
    with pytest.raises(DataError) as caught:
        check_files([write(tmp_path / "bomb.parquet", [PAIR] * 50_000)])
    assert "found data that expand to more than" in caught.value.faults[-1]


def test_parquet_that_expands_without_end_is_not_begun(tmp_path: Path) -> None:
    """A few kilobytes whose first rows alone would be an eighth of a gigabyte."""
    path = tmp_path / "bomb.parquet"
    table = pyarrow.table({"text": [f"{n}{'a' * 4_000_000}" for n in range(32)]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    with pytest.raises(RowError, match="expand to more than"):
        next(iter(open_rows(str(path)).rows))


class Rows(list):  # type: ignore[type-arg]
    _fingerprint = "f1"


def hub(monkeypatch: pytest.MonkeyPatch, load: Callable[..., object]) -> None:
    library = types.ModuleType("datasets")
    library.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[object, ...]] = []

    def load(name: str, config: str | None, *, split: str) -> Rows:
        asked.append((name, config, split))
        return Rows([{"question": "a", "completion": "b", "text": None}, {"question": "c"}])

    hub(monkeypatch, load)
    named = Path("hf:owner/name:main@train[:2]")
    assert find_split([named, Path("hf:squad")]) == ([named, Path("hf:squad")], [])
    with pytest.raises(DataError) as caught:
        check_files([named], {"prompt": "question"})
    assert list(caught.value.faults) == [
        f"{named}, row 2: found none of completion, response, output, answer, expected one"
    ]
    assert asked == [("owner/name", "main", "train[:2]")]
    hub(monkeypatch, lambda *_, split: Rows([PAIR]))
    (file,) = check_files([Path("hf:squad")])
    assert (file.path, file.rows) == (Path("hf:squad"), 1)
    file.require_unchanged()
    file.lines.write_text("other")
    with pytest.raises(DataError, match="changed"):
        file.require_unchanged()
    (again,) = check_files([Path("hf:squad")])
    assert again.source.key == file.source.key
    assert load_records([Path("hf:squad")])[0].place == "hf:squad, row 1"


@pytest.mark.parametrize("code", ["VOX-D010", "VOX-D011", "VOX-D012"])
def test_a_data_set_of_the_hub_that_cannot_be_had(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, split: str) -> Rows:
        raise ValueError('Unknown split "train"')

    hub(monkeypatch, fail)
    if code == "VOX-D010":
        monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    with pytest.raises(DataError) as caught:
        check_files([Path("hf:a b" if code == "VOX-D011" else "hf:owner/name")])
    assert caught.value.code == code
    if code == "VOX-D010":
        assert "pip install datasets" in caught.value.remedy
    if code == "VOX-D012":
        assert caught.value.found == 'ValueError: Unknown split "train"'
