"""Files of every format as rows: what goes in comes out, where it stands, within limits."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.data_samples import load_records
from vox_core.config import TrainSettings
from vox_core.data import source
from vox_core.data.checked import check_files, unused_fields
from vox_core.data.faults import RowError
from vox_core.data.formats import find_split
from vox_core.data.records import FORMS_OF_PROMPTS, read_lines
from vox_core.data.rows import Answers, Record
from vox_core.data.source import open_source
from vox_core.errors import DataError

PAIR = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": 'é\n"x"'}]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- what goes in comes out -----------------------------------------------------------------------


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, names, delimiter=delimiter)
    writer.writeheader()
    cells = (
        {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows
    )
    writer.writerows(cells)
    return file.getvalue().encode()


def zstd(data: bytes) -> bytes:
    compressed: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return compressed


WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "rows.jsonl": jsonl,
    "rows.json": lambda rows: json.dumps(rows).encode(),
    "indented.json": lambda rows: b"\xef\xbb\xbf" + json.dumps(rows, indent=3).encode(),
    "wrapped.json": lambda rows: json.dumps({"v": [1][0], "m": {"x": [1]}, "data": rows}).encode(),
    "lines.json": jsonl,
    "rows.csv": lambda rows: table(rows, ","),
    "rows.tsv": lambda rows: b"\xef\xbb\xbf" + table(rows, "\t"),
}
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}

characters = st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["Cs"])
texts = st.text(characters, min_size=1, max_size=12).filter(lambda text: bool(text.strip()))
pairs = st.fixed_dictionaries(
    {"prompt": texts, "completion": texts}, optional={"rating": st.floats(0, 5), "lane": texts}
)
turns = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": texts}), max_size=2)
chats = st.builds(
    lambda before, said: {"messages": [*before, {"role": "assistant", "content": said}]},
    turns,
    texts,
)


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("name", WRITERS)
def test_every_reader_gives_the_rows_that_were_written(name: str, compression: str) -> None:
    @settings(max_examples=6, deadline=None)
    @given(st.lists(pairs, min_size=1, max_size=5) | st.lists(chats, min_size=1, max_size=4))
    def round_trip(rows: list[dict[str, Any]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            plain, path = Path(folder, "plain.jsonl"), Path(folder, name + compression)
            plain.write_bytes(jsonl(rows))
            path.write_bytes(COMPRESSORS[compression](WRITERS[name](rows)))
            found, expected = load_records([path]), load_records([plain])
        assert [record.source for record in found] == [path] * len(rows)
        assert [(r.line, r.form) for r in found] == [(r.line, r.form) for r in expected]
        for one, other in zip(found, expected, strict=True):
            assert (one.messages, one.attributes, one.unused) == (
                other.messages,
                other.attributes,
                other.unused,
            )

    round_trip()


def test_texts_hide_the_marks_of_a_document(tmp_path: Path) -> None:
    rows = [{"text": '"\\]},{'}, CHAT, PAIR, {"text": "\\\\"}]
    for name in ("rows.json", "indented.json", "wrapped.json", "lines.json"):
        (tmp_path / name).write_bytes(WRITERS[name](rows))
        lines = open_source(tmp_path / name).lines.read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows


@pytest.mark.parametrize(
    ("document", "rows", "fault"),
    [
        ('[{"text": "a"}] x', 1, "more after the end of the document"),
        ('[{"text": "a"}]\n[{"text": "b"}]', 1, "more after the end of the document"),
        ('[{"text": "a"}, {"text": "b"', 1, "invalid JSON at line 1, column 13 of the row"),
        ('{"v": {"x": [1]}, "rows": [{"text": "a"}], "n": 1}', 1, ""),
        ('{"v": 1, "rows": [{"text": "a"}]', 1, "the end of the document within an object"),
        ('{"rows": [{"text": "a"}]} {"text": "b"}', 1, "more after the end of the document"),
        ('{"rows": [{"text": "a"}}]}', 0, "invalid JSON at line 1, column 14 of the row"),
        ('{"text": "a", "x": [1]} {"text": "b"}', 2, ""),
        ('{"text": "a"} {"text": "b"', 1, "invalid JSON at line 1, column 13 of the row"),
        ('{"text": "a"} ]{"text": "b"}', 2, "invalid JSON at line 1, column 1 of the row"),
        ('7 {"text": "a"}', 0, "invalid JSON at line 1, column 3 of the row"),
    ],
)
def test_documents_of_every_shape(document: str, rows: int, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(document)
    found = [row for _, row in read_lines(path, open_source(path).lines)]
    faults = [str(row) for row in found if isinstance(row, RowError)]
    assert len(found) - len(faults) == rows
    assert any(fault in each for each in faults) if fault else not faults


def test_a_document_without_rows_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for document in ("", " ", "[ ]", '{"rows": []}'):
        path.write_text(document)
        with pytest.raises(DataError, match="is empty"):
            check_files([path])


def test_one_row_that_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(CHAT, indent=2))
    (record,) = load_records([path])
    assert (record.form, record.line) == ("messages", 1)


def test_a_row_that_is_wrong_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([PAIR, 3, {"txt": 1}, PAIR]))
    with pytest.raises(DataError) as caught:
        check_files([path])
    first, second = caught.value.faults
    assert first == f"{path}, row 2: found a number, expected a JSON object"
    assert second.startswith(f"{path}, row 3: found the fields txt")


def test_cells_that_are_no_texts(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        "prompt,response,rating,difficulty,tags,tools\n"
        'a,b,4,hard,"[""x""]","[{""name"": ""f""}]"\nc,d,,0.5,,\n'
    )
    first, second = load_records([path])
    assert (first.attributes.rating, first.attributes.difficulty) == (4.0, "hard")
    assert (first.attributes.tags, first.tools) == (
        ("x",),
        ({"type": "function", "function": {"name": "f"}},),
    )
    assert (second.attributes.rating, second.attributes.difficulty) == (None, 0.5)


def test_a_rating_that_is_no_number_is_missing_as_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,rating,difficulty\na,nan,NaN\nb,2.5,-nan\n")
    found = [record.attributes for record in load_records([path])]
    assert [each.rating for each in found] == [None, 2.5]
    assert [each.difficulty for each in found] == [None, None]
    path.write_text("text,rating,difficulty\na,inf,1\nb,1,1e400\nc,n/a,1\n")
    with pytest.raises(DataError) as caught:
        check_files([path])
    found = [str(fault).split("found ")[1].split(",")[0] for fault in caught.value.faults]
    assert found == ["Infinity", 'a string as "rating"']


def test_labels_of_a_table_are_true_or_false(tmp_path: Path) -> None:
    """As pandas and datasets write them; only `kto` reads them."""
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion,label\na,b,True\nc,d,false\ne,f,good\ng,h,1\n")
    lines = open_source(path).lines.read_text().splitlines()
    assert [json.loads(line)["label"] for line in lines] == [True, False, "good", True]


# --- text -----------------------------------------------------------------------------------------


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbfOne \xc3\xa9.\r\n\r\n{Two}\n")
    (record,) = load_records([path], {"prompt": "question"})  # which is of other files
    assert (record.kind, record.text, record.line) == ("text", "One \u00e9.\n\n{Two}\n", 1)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc\nd\n\nef", ["abc\nd\n\n", "ef"]),
        ("äöüßéèêëâ", ["äöü", "ßéè", "êëâ"]),  # without a line end, between characters
    ],
)
def test_a_long_text_is_cut_at_line_ends(
    text: str, pieces: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vox_core.data.tables.PIECE", 8)
    path = tmp_path / "book.txt.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert [record.text for record in load_records([path])] == pieces


def test_a_text_file_that_is_none_is_one_fault(tmp_path: Path) -> None:
    faults = {b"a\xff": "found invalid UTF-8 (0xff, byte 1)", b"\xff\xfea": "found UTF-16"}
    path = tmp_path / "book.txt"
    for data, fault in faults.items():
        path.write_bytes(data)
        with pytest.raises(DataError) as caught:
            load_records([path])
        assert len(caught.value.faults) == 1 and fault in caught.value.faults[0]
    path.write_bytes(b" \n\n")
    with pytest.raises(DataError, match="is empty"):
        load_records([path])


def test_a_configuration_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("base_model: a/b\nlearning_rate: 1e-4\n")
    with pytest.raises(DataError) as caught:
        check_files([tmp_path / "config.yaml"])
    assert "go into vox.toml" in caught.value.remedy


@pytest.mark.parametrize("name", ["book.md", "notes.text", "book.log.gz", "notes"])
def test_text_in_a_file_of_another_name_is_to_be_renamed(name: str, tmp_path: Path) -> None:
    text = b"# A book\n\n1984 was a year.\nIt was a dark night.\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    with pytest.raises(DataError) as caught:
        check_files([path])
    assert ".txt files, each of which is one document: rename the file" in caught.value.remedy
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\nb')
    with pytest.raises(DataError) as caught:
        check_files([tmp_path / "rows.jsonl"])
    assert ".txt" not in caught.value.remedy


def test_texts_beside_rows_are_no_data(tmp_path: Path) -> None:
    for name in ("notes.txt", "more.txt"):
        (tmp_path / name).write_text("a")
    assert find_split([tmp_path])[0] == [tmp_path / "more.txt", tmp_path / "notes.txt"]
    (tmp_path / "rows.csv").write_text("text\na\n")
    assert find_split([tmp_path])[0] == [tmp_path / "rows.csv"]
    (tmp_path / "train.txt").write_text("a")
    assert find_split([tmp_path])[0] == [tmp_path / "train.txt"]


# --- the header of a table ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "fields", "fault"),
    [
        ("q,a", {}, "found the fields q, a in the header, expected one of messages"),
        (
            "title,a",
            {"prompt": "titel", "completion": "a"},
            "found none of prompt, instruction, question in the header; "
            'no column "titel" (did you mean title?)',
        ),
        ("prompt,completion,promt", {}, 'found the field "promt" in the header, expected a known'),
        ("messages,promt", {}, 'found the field "promt" in the header, expected a known one'),
        (
            "q,a",
            {"prompt": "x"},
            'found the fields q, a in the header; no column "x", expected one',
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_header_is_one_fault(
    header: str, fields: dict[str, str], fault: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"rows.{suffix}"
    separator = "," if suffix == "csv" else "\t"
    lines = [header, *([header.replace(header[0], "x")] * 5)]
    path.write_text("\n".join(lines).replace(",", separator) + "\n")
    with pytest.raises(DataError) as caught:
        load_records([path], fields)
    (found,) = caught.value.faults
    assert found.startswith(f"{path}: {fault}")


def test_a_header_of_several_forms_is_left_to_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion,text,rating,tools\na,b,,1,\n,,c,2,\n")
    assert [record.kind for record in load_records([path])] == ["completion", "text"]


def test_a_table_of_prompts_is_one_where_the_model_answers(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,truth\na,4\nb,5\n,6\n")
    with pytest.raises(DataError) as caught:
        check_files([path])
    fault = "found none of completion, response, output, answer, expected one"
    assert caught.value.faults[0] == f"{path}, row 1, 2: {fault}"
    with pytest.raises(DataError) as caught:
        check_files([path], answers="optional")
    assert [fault.partition(": ")[0] for fault in caught.value.faults] == [f"{path}, row 3"]
    assert caught.value.expected == FORMS_OF_PROMPTS
    path.write_text("question,truth\na,4\nb,5\n")
    assert check_files([path], answers="optional")[0].rows == 2
    with pytest.raises(DataError, match="malformed") as caught:  # the facts are kept apart
        check_files([path])
    (fault,) = caught.value.faults
    assert fault.startswith(f"{path}: found in every row none of completion, response")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a", "question": None}, "form='text'"),
        ({"prompt": "a", "completon": "b"}, 'is it meant as "completion"?'),
        ({"prompt": ""}, 'found nothing in "prompt", expected text'),
        ({"prompt": []}, "an empty prompt"),
        ({"prompt": "a", "chosen": "b"}, '"chosen" without "rejected"'),
        (
            {"prompt": [{"role": "assistant", "content": "a"}]},
            "a prompt that ends with the assistant",
        ),
        ({"messages": []}, "no message"),
        ({"prompt": "a", "tools": 3}, "tools"),
    ],
)
def test_a_row_that_is_no_prompt_alone_is_read_as_ever(
    row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    ((_, found),) = read_lines(path, answers="optional")
    assert said in str(found)


@pytest.mark.parametrize("prompt", ["a", [{"role": "user", "content": "a"}]])
@pytest.mark.parametrize("answer", [7, ["é", 1], [], {"x": None}, [{"name": "Ann"}]])
def test_an_answer_for_a_reward_may_be_any_json_value(
    prompt: Any, answer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "answer": answer}))
    modes: tuple[Answers, ...] = ("optional", "last")
    for answers in modes:
        ((_, found),) = read_lines(path, answers=answers)
        assert isinstance(found, Record) and found.messages and found.answered
        assert json.loads(found.messages[-1].content) == answer
    ((_, found),) = read_lines(path)
    assert re.search('as "?answer', str(found)), "an answer that is trained is a text"
    for key in ("role", "from"):
        path.write_text(json.dumps({"prompt": prompt, "completion": {key: "assistant"}}))
        ((_, found),) = read_lines(path, answers="last")
        assert 'found an object as "completion"' in str(found), "its list is missing"


# --- where fields stand ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz"])
def test_fields_are_found_where_they_are_said_to_be(name: str, tmp_path: Path) -> None:
    row = {"q": {"text": "a"}, "answers": [{"x": "b"}], "a.b": "easy", "text": "left out", "id": 1}
    data = WRITERS["rows.json" if name == "rows.json" else "rows.jsonl"]([row, {"id": 2}, PAIR])
    path = tmp_path / name
    path.write_bytes(COMPRESSORS[".gz"](data) if name.endswith(".gz") else data)
    fields = {"prompt": "q.text", "completion": "answers.0.x", "difficulty": "a.b", "text": ""}
    with pytest.raises(DataError) as caught:
        check_files([path], fields)
    unit = "row" if name == "rows.json" else "line"
    assert list(caught.value.faults) == [
        f"{path}, {unit} {number}: found the fields {found}, "
        "expected one that --field names (q.text, answers.0.x, a.b)"
        for number, found in ((2, "id"), (3, "prompt, completion"))
    ]
    path.write_bytes(data.split(b"\n")[0] if unit == "line" else json.dumps([row]).encode())
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    (record,) = load_records([path], fields)
    assert [message.content for message in record.messages or ()] == ["a", "b"]
    assert (record.attributes.difficulty, record.unused) == ("easy", ("id",))
    (file,) = check_files([path], fields)
    assert file.source.key != file.origin.sha256
    assert unused_fields([file, file]) == {"id": 1}  # for training and for validation


# --- several files --------------------------------------------------------------------------------


def test_a_folder_stands_for_its_files(tmp_path: Path) -> None:
    names = ["a.csv", "b.jsonl.gz", "test.jsonl", "validation.json", "notes.md", ".hidden.csv"]
    for name in names:
        (tmp_path / name).touch()
    files = {path.name: path for path in tmp_path.iterdir()}
    assert find_split([tmp_path]) == (
        [files["a.csv"], files["b.jsonl.gz"]],
        [files["validation.json"]],
    )
    parts = [tmp_path / f"train-0000{n}-of-00002.json" for n in range(2)]
    for part in parts:
        part.touch()
    assert find_split([tmp_path])[0] == parts
    (tmp_path / "train.csv").touch()
    with pytest.raises(DataError) as caught:
        find_split([tmp_path])
    assert caught.value.code == "VOX-D013"
    (tmp_path / "train.jsonl").touch()
    assert find_split([tmp_path])[0] == [tmp_path / "train.jsonl"]


def test_without_zstandard_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv.zst"
    path.touch()
    monkeypatch.setitem(sys.modules, "zstandard", None)  # type: ignore[arg-type]
    with pytest.raises(DataError) as caught:
        check_files([path])
    assert (caught.value.code, caught.value.where) == ("VOX-D010", str(path))
    assert "pip install zstandard" in caught.value.remedy


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow.gz", "hf:owner/name"])
def test_without_its_plugin_it_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "data")
    path = Path(name) if ":" in name else tmp_path / name
    if ":" not in name:
        path.write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    with pytest.raises(DataError) as caught:
        check_files([path])
    assert (caught.value.code, caught.value.where) == ("VOX-D010", str(path))
    assert "plugin 'data'" in (caught.value.found or "")


def test_zstd_in_several_frames_and_one_that_is_cut_off(tmp_path: Path) -> None:
    rows = [jsonl([PAIR]), jsonl([CHAT])]
    path = tmp_path / "a.jsonl.zst"
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    path.write_bytes(zstd(rows[0]) + skippable + zstd(rows[1]))
    assert open_source(path).lines.read_bytes() == b"".join(rows)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError) as caught:
        check_files([path])
    assert "zstd data that end before they are complete" in caught.value.faults[0]


# --- what is kept ---------------------------------------------------------------------------------


def test_lines_are_made_once_and_anew_where_something_differs(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([PAIR]))
    first = open_source(path)
    made = first.lines.stat().st_mtime_ns
    assert open_source(path).lines.stat().st_mtime_ns == made
    first.lines.write_bytes(first.lines.read_bytes().replace(b"a", b"x"))
    assert b'"a"' in open_source(path).lines.read_bytes()
    assert open_source(path, {"text": ""}).lines != first.lines
    path.write_text(json.dumps([CHAT]))
    assert open_source(path).lines != first.lines
    old = time.time() - 31 * 24 * 3600
    for entry in (cache / source.KIND).iterdir():
        os.utime(entry, (old, old))
    path.write_text(json.dumps([PAIR, CHAT]))
    open_source(path)
    assert len(list((cache / source.KIND).iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text\na\n")
    cache.write_text("a file in its place")
    (file,) = check_files([path])
    assert file.lines.read_text() == '{"text":"a"}\n'
    lines = file.lines
    del file
    assert not lines.exists()


def test_a_file_that_changes_is_not_the_one_that_was_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text\na\n")
    (file,) = check_files([path])
    file.require_unchanged()
    path.write_text("text\nb\n")
    with pytest.raises(DataError, match="changed"):
        file.require_unchanged()


def test_lines_of_other_bytes_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is another one while it is read, and then what it was."""
    path, rows = tmp_path / "a.jsonl.gz", source._rows
    first, other = (gzip.compress(b'{"text": "%s"}\n' % word) for word in (b"one", b"two"))
    path.write_bytes(first)

    def disturbed(*given: Any) -> Any:
        path.write_bytes(other)
        yield from rows(*given)

    monkeypatch.setattr(source, "_rows", disturbed)
    with pytest.raises(DataError, match="changed while it was read"):
        open_source(path)
    monkeypatch.setattr(source, "_rows", rows)
    path.write_bytes(first)
    assert open_source(path).lines.read_bytes() == b'{"text": "one"}\n'


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.json.zst"])
def test_data_that_expand_without_end_are_given_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "FREE_BYTES", 100_000)
    monkeypatch.setattr(source, "MAX_RATIO", 10)
    data = jsonl([PAIR]) * 50_000
    (tmp_path / name).write_bytes(COMPRESSORS.get(Path(name).suffix, bytes)(data))
    with pytest.raises(DataError) as caught:
        check_files([tmp_path / name])
    assert "found data that expand to more than" in caught.value.faults[-1]


HUGE = """
import gzip, resource, sys
from pathlib import Path
from vox_core.data.records import read_lines
from vox_core.data.rows import Record
from vox_core.data.rows import Answers, Record
from vox_core.data.source import open_source
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = Path(sys.argv[1])
found = [row for _, row in read_lines(path, open_source(path).lines)]
faults = [row for row in found if not isinstance(row, Record)]
assert len(found) - len(faults) == 2
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, *faults)
"""


@pytest.mark.parametrize("name", ["a.jsonl.gz", "c.csv.gz"])
def test_a_huge_row_takes_no_memory(name: str, tmp_path: Path) -> None:
    """50 MB that little expands to, in one row between two small ones."""
    starts = {
        "a.jsonl.gz": (b'{"text": "a"}\n{"text": "', b'"}\n{"text": "b"}\n'),
        "c.csv.gz": (b"text\na\n", b"\nb\n"),
    }
    head, tail = starts[name]
    with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(50):
            file.write(os.urandom(500).hex().encode() * 1000)
        file.write(tail)
    command = [sys.executable, "-c", HUGE, str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, said = done.stdout.split(" ", 1)
    assert int(grown) < 40
    assert "found a line of more than 10,000,000 bytes, expected less" in said


# --- to the end -----------------------------------------------------------------------------------


def test_what_is_no_jsonl_is_trained_alike(tmp_path: Path) -> None:
    """Tokens, weights and places are those of the same rows in JSONL; faults name the file."""
    from tests.core.tiny_tokenizer import tiny_tokenizer
    from vox_core.data import dataset_cache
    from vox_core.data.tokenizer import load_tokenizer

    model = tmp_path / "model"
    tiny_tokenizer("chatml").save_pretrained(model)
    rows = [PAIR, CHAT, {"text": "once"}] * 4
    datasets = []
    for name in ("rows.jsonl", "rows.json.gz"):
        path = tmp_path / name
        path.write_bytes(WRITERS["rows.json"](rows) if "gz" in name else jsonl(rows))
        if "gz" in name:
            path.write_bytes(gzip.compress(path.read_bytes()))
        (file,) = check_files([path])
        datasets.append(
            dataset_cache.open_dataset(
                [file],
                model,
                lambda: load_tokenizer(model),
                64,
                workers=int("gz" in name),
                block_bytes=200,
            )
        )
        assert {document.source for document in datasets[-1]} == {path}
    one, other = datasets
    assert one.digest == other.digest
    assert [d.line for d in one] == [d.line for d in other]
    (model / "chat_template.jinja").unlink()
    with pytest.raises(DataError) as caught:
        dataset_cache.open_dataset(check_files([path]), model, lambda: load_tokenizer(model), 64)
    assert caught.value.faults[0].startswith(f"{path}, row 2, 5, 8, 11: ")


def test_settings_say_where_fields_stand(tmp_path: Path) -> None:
    from vox_core.run.inputs import chosen_rows

    path = tmp_path / "rows.csv"
    path.write_text("q,a\nx,y\n")
    settings = TrainSettings(data=(path,), fields={"prompt": "q", "completion": "a"})
    rows = chosen_rows(settings)
    ((file,), valid) = rows.train, rows.valid
    assert (file.rows, file.path, valid) == (1, path, [])
