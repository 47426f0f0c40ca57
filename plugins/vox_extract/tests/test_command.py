"""`vox data extract`: the file that it writes, what it says, and its errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest
from plugins.vox_extract.tests.samples import GOOGLE, NUMPY, SPHINX, made
from tests.core.data_samples import load_records

from vox_core.cli import failures, root

STYLES = {"maths.py": NUMPY, "boxes.py": GOOGLE, "web.py": SPHINX}


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def extract(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Done:
        code = failures.run(root, ["data", "extract", *map(str, arguments)])
        return Done(code, *capsys.readouterr())

    return run


def test_python_rows_that_vox_reads(extract, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("vox_core.display.WORTH_SECONDS", 0.0)
    made(tmp_path, {**STYLES, "bad.py": "def f(:"})
    done = extract("python", "./pack", "--out", "new/rows.jsonl")
    assert done.code == 0
    assert done.out.splitlines() == [
        "written   new/rows.jsonl",
        "rows      26 from 4 files",
        "kinds     parameter 8, describe 4, signature 4, returns 3, raises 3, example 2, "
        "attribute 1, deprecated 1",
        "licence   unknown 26",
        "left out  nothing",
        "next: vox data check --data new/rows.jsonl",
    ]
    assert "warning: not read: pack/bad.py: line 1: " in done.err
    assert "reading: 0 MB" in done.err
    records = load_records([Path("new/rows.jsonl")])
    assert len(records) == 26
    assert all("provenance" not in record.unused for record in records)


def test_a_row(extract, tmp_path: Path) -> None:
    made(tmp_path, {"web.py": SPHINX})
    extract("python", "./pack", "--out", "rows.jsonl")
    assert json.loads(Path("rows.jsonl").read_text().splitlines()[0]) == {
        "messages": [
            {"role": "user", "content": "Explain what `pack.web.fetch` does."},
            {
                "role": "assistant",
                "content": "Fetch what is at an address.\n\n"
                "Deprecated since version 2.1: Use `get`.",
            },
        ],
        "category": "describe",
        "lane": "extracted",
        "task_family": "python-docs",
        "provenance": {
            "package": "pack",
            "version": "unknown",
            "file": "pack/web.py",
            "line": 2,
            "object": "pack.web.fetch",
            "licence": "unknown",
        },
    }


def test_the_same_sources_give_the_same_bytes(extract, tmp_path: Path) -> None:
    made(tmp_path, STYLES)
    for name in ("a.jsonl", "b.jsonl"):
        assert extract("python", "./pack", "json", "--out", name).code == 0
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()


def test_a_limit_takes_rows_from_all_over_and_keeps_their_order(extract, tmp_path: Path) -> None:
    made(tmp_path, STYLES)
    extract("python", "./pack", "--out", "all.jsonl")
    told = json.loads(extract("python", "./pack", "--limit", 9, "--out", "few.jsonl", "--json").out)
    every, few = (Path(f"{name}.jsonl").read_text().splitlines() for name in ("all", "few"))
    assert few == [line for line in every if line in few] != every[:9]
    assert len({json.loads(line)["provenance"]["file"] for line in few}) == 3
    assert (told["rows"], told["left_out"]) == (9, {"over the limit": 17})


def test_json_tells_what_was_read(extract, tmp_path: Path) -> None:
    made(tmp_path, {"web.py": SPHINX, "bad.py": "\0"})
    told = json.loads(extract("python", "./pack", "--out", "rows.jsonl", "--json").out)
    (unread,) = told["unread"]
    assert unread.startswith("pack/bad.py: ")
    assert (told["out"], told["rows"], told["files"]) == ("rows.jsonl", 7, 2)
    assert told["licences"] == {"unknown": 7}
    assert sum(told["kinds"].values()) == 7


def test_private_names_and_longer_answers(extract, tmp_path: Path) -> None:
    made(tmp_path, {"_a.py": f"def f():\n  'Does it {'very ' * 500} well.'"})
    done = extract("python", "./pack", "--out", "rows.jsonl")
    assert (done.code, "VOX-D061" in done.err, Path("rows.jsonl").exists()) == (2, True, False)
    assert "left out: 1 private" in done.err
    flags = ("--private", "--max-chars", 3000)
    assert extract("python", "./pack", "--out", "rows.jsonl", *flags).code == 0


def test_a_file_that_is_there_stays(extract, tmp_path: Path) -> None:
    made(tmp_path, STYLES)
    Path("rows.jsonl").write_text("mine")
    done = extract("python", "./pack", "--out", "rows.jsonl")
    assert (done.code, Path("rows.jsonl").read_text()) == (2, "mine")
    assert "give --overwrite" in done.err
    assert extract("python", "./pack", "--out", "rows.jsonl", "--overwrite").code == 0
    assert Path("rows.jsonl").read_text() != "mine"
    source = next(Path("pack").glob("*.py"))
    done = extract("python", "./pack", "--out", source, "--overwrite")
    assert (done.code, "VOX-O004" in done.err) == (2, True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(extract, tmp_path: Path) -> None:
    package = made(tmp_path, {"web.py": SPHINX, "shut.py": ""})
    (package / "shut.py").chmod(0)
    told = json.loads(extract("python", "./pack", "--out", "rows.jsonl", "--json").out)
    assert told["unread"] == ["pack/shut.py: Permission denied"]


@pytest.mark.parametrize("form", ["python", "markdown"])
def test_what_is_not_there_is_refused_before_anything_is_written(extract, form: str) -> None:
    done = extract(form, "./nothing", "--out", "rows.jsonl")
    assert (done.code, "VOX-D060" in done.err, Path("rows.jsonl").exists()) == (2, True, False)


@pytest.mark.parametrize("form", ["python", "markdown"])
def test_links_out_of_the_folder_are_named_and_not_read(extract, form: str) -> None:
    suffix, text = {
        "python": ("py", f'"""{"Text of a module. " * 9}"""\n'),
        "markdown": ("md", "# Tool\n\nIt does a thing.\n"),
    }[form]
    Path("docs").mkdir()
    for name in ("docs/a", "b"):
        Path(f"{name}.{suffix}").write_text(text)
    Path(f"docs/inside.{suffix}").symlink_to(f"a.{suffix}")
    Path(f"docs/outside.{suffix}").symlink_to(f"../b.{suffix}")
    told = json.loads(extract(form, "./docs", "--out", "rows.jsonl", "--json").out)
    assert told["unread"] == [f"outside.{suffix}: it is a link that leads out of the folder"]
    assert told["files"] == 2


def test_markdown(extract, tmp_path: Path) -> None:
    Path("docs").mkdir()
    Path("docs/a.md").write_text("# Tool\n\nIt does a thing.\n\n```sh\ntool\n```\n")
    done = extract("markdown", "docs", "--out", "rows.jsonl", "--json")
    assert json.loads(done.out)["kinds"] == {"section": 1, "code": 1}
    assert [record.messages[1].content for record in load_records([Path("rows.jsonl")])] == [
        "It does a thing.\n\n```sh\ntool\n```",
        "```sh\ntool\n```",
    ]
