"""`vox data mix`: every row is accounted for, and nothing is done twice."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from vox_core.cli import root
from vox_core.config.sections import kebab
from vox_core.errors import ConfigError, DataError, OutputError
from vox_core.files import write_json
from vox_data import mix as service
from vox_data.mix import MixReport, mix, report_path

FIRST = ["a 95", "b 27", "b 18", "a 62", "b 19", "a 10"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    write(tmp_path, "a", 100)
    write(tmp_path, "b", 40)
    return tmp_path


def write(folder: Path, name: str, rows: int, **more: Any) -> Path:
    path = folder / f"{name}.jsonl"
    lines = (json.dumps({"text": f"{name} {row}", **more}) for row in range(rows))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def recipe(folder: Path, *sources: dict[str, Any], **top: Any) -> Path:
    """`mix.toml` with these keys."""
    lines = [f"{kebab(key)} = {json.dumps(value)}" for key, value in top.items()]
    for source in sources:
        lines.append("[[source]]")
        lines += (f"{kebab(key)} = {json.dumps(value)}" for key, value in source.items())
    (folder / "mix.toml").write_text("\n".join(lines))
    return folder / "mix.toml"


def a(**more: Any) -> dict[str, Any]:
    return {"path": "a.jsonl", **more}


def b(**more: Any) -> dict[str, Any]:
    return {"path": "b.jsonl", **more}


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def require_accounted(report: MixReport, out: Path) -> None:
    for source in report.sources:
        assert source.rows == source.taken + sum(source.left_out.values())
    assert report.rows == sum(s.taken + s.repeated for s in report.sources)
    assert report.rows == len(out.read_bytes().splitlines())
    assert report.sha256 == hashlib.sha256(out.read_bytes()).hexdigest()
    assert report.bytes == out.stat().st_size


def test_a_mixture_has_the_shares_that_were_asked_for(folder: Path) -> None:
    out = folder / "train.jsonl"
    report = mix(recipe(folder, a(weight=2), b(weight=1), rows=90, seed=1), out)
    assert Counter(text[0] for text in texts(out)) == {"a": 60, "b": 30}
    assert len(set(texts(out))) == 90
    assert [(s.asked, s.share) for s in report.sources] == [(2 / 3, 2 / 3), (1 / 3, 1 / 3)]
    assert [s.left_out for s in report.sources] == [{"not drawn": 40}, {"not drawn": 10}]
    require_accounted(report, out)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 30),
            st.sampled_from([0.2, 1.0, 3.0]),
            st.one_of(st.none(), st.integers(1, 20)),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    st.one_of(st.none(), st.integers(1, 60)),
    st.integers(0, 3),
)
def test_any_recipe_is_made_right_or_refused(
    sources: list[tuple[int, float, int | None, bool]], rows: int | None, seed: int
) -> None:
    """Proportions to within a row; nothing lost, and nothing repeated where that was not said."""
    with TemporaryDirectory() as name:
        folder, tables = Path(name), []
        for number, (size, weight, cap, repeat) in enumerate(sources):
            write(folder, str(number), size)
            table = {"path": f"{number}.jsonl", "weight": weight, "repeat": repeat}
            tables.append(table | ({"cap": cap} if cap else {}))
        made = recipe(folder, *tables, seed=seed, **({"rows": rows} if rows else {}))
        out = folder / "out.jsonl"
        with suppress(DataError):
            report = mix(made, out)
        if not out.exists():
            with pytest.raises(DataError, match="have not got the rows"):
                mix(made, out)
            return
        require_accounted(report, out)
        found = Counter(texts(out))
        for (size, _, cap, repeat), source in zip(sources, report.sources, strict=True):
            count = source.taken + source.repeated
            assert abs(count - report.rows * (source.asked or 0)) < 1
            assert cap is None or count <= cap
            assert repeat or count <= size
            assert sum(n for text, n in found.items() if text.startswith(source.path[0])) == count
        assert rows in (None, report.rows)


def test_the_same_recipe_gives_the_same_bytes(folder: Path) -> None:
    def made(seed: int) -> str:
        again = recipe(folder, a(weight=1), b(weight=1), seed=seed)
        return mix(again, folder / "out.jsonl", force=True).sha256

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_the_first_mixture_never_changes(folder: Path) -> None:
    """Bytes of the first version: a recipe is worth something for as long as they stay."""
    made = recipe(folder, a(weight=1), b(weight=1, lane="b"), rows=6, seed=5)
    mix(made, folder / "out.jsonl")
    assert texts(folder / "out.jsonl") == FIRST


def test_without_weights_every_row_is_taken(folder: Path) -> None:
    report = mix(recipe(folder, a(), b(cap=10)), folder / "out.jsonl")
    assert [(s.taken, s.left_out) for s in report.sources] == [
        (100, {}),
        (10, {"over the cap": 30}),
    ]
    assert [s.asked for s in report.sources] == [None, None]


def test_every_row_that_is_left_out_has_a_reason(folder: Path) -> None:
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"text": "a 0"}\n{"text": 3}\n{"text": "x", "lane": "other"}\n')
        file.write('{"text": "rated", "lane": "one", "rating": 4}\n')
    out = folder / "out.jsonl"
    made = recipe(
        folder, a(lane="one", lanes=["one"], min_rating=3), b(), malformed_rows="skip", seed=1
    )
    report = mix(made, out)
    assert report.sources[0].left_out == {"faulty": 1, "other lane": 1, "low rating": 101}
    assert report.sources[0].taken == 1
    assert len(report.faults) == 1 and "line 102: " in report.faults[0]
    require_accounted(report, out)


def test_duplicates_are_dropped_across_sources_or_kept(folder: Path) -> None:
    (folder / "b.jsonl").write_text((folder / "a.jsonl").read_text() + '{"text": "b"}\n')
    out = folder / "out.jsonl"
    report = mix(recipe(folder, a(), b()), out)
    assert [(s.taken, s.left_out) for s in report.sources] == [(100, {}), (1, {"duplicate": 100})]
    assert mix(recipe(folder, a(), b(), dedup="none"), out).rows == 201


def test_a_malformed_source_is_refused_with_every_fault(folder: Path) -> None:
    for name in "ab":
        (folder / f"{name}.jsonl").write_text('{"text": ""}\n{"text": "t"}\n{}\n')
    with pytest.raises(DataError, match="malformed") as caught:
        mix(recipe(folder, a(), b()), folder / "out.jsonl")
    assert len(caught.value.faults) == 4
    assert 'malformed-rows = "skip" in the recipe' in caught.value.remedy
    assert "--" not in caught.value.remedy, "a flag that the command lacks"
    assert not (folder / "out.jsonl").exists()


@pytest.mark.parametrize("skip", ["strict", "skip"])
def test_the_next_step_is_one_that_a_recipe_has(folder: Path, skip: str) -> None:
    (folder / "b.jsonl").write_text('{"title": "a"}\n')
    with pytest.raises(DataError) as caught:
        mix(recipe(folder, a(), b(), malformed_rows=skip), folder / "out.jsonl")
    found = caught.value.remedy or ""
    assert "convert" in found and "--" not in found
    assert ('malformed-rows = "skip" in the recipe' in found) == (skip == "strict")


def test_a_shortage_says_what_would_fit(folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        mix(recipe(folder, a(weight=1), b(weight=1), rows=200), folder / "out.jsonl")
    assert caught.value.code == "VOX-D030"
    assert [fault.partition("jsonl: ")[2] for fault in caught.value.faults] == [
        "100 rows are asked for, and it has 40"
    ]
    assert caught.value.remedy.startswith("rows = 81 would fit")


def test_the_number_that_would_fit_is_the_largest(folder: Path) -> None:
    """81 rows are 41 and 40: the source that is named first gets the odd one."""
    with pytest.raises(DataError, match="rows = 81 would fit"):
        mix(recipe(folder, a(weight=1), b(weight=1), rows=200), folder / "out.jsonl")
    assert mix(recipe(folder, a(weight=1), b(weight=1), rows=81), folder / "out.jsonl").rows == 81
    with pytest.raises(DataError, match="VOX-D030"):
        mix(recipe(folder, a(weight=1), b(weight=1), rows=82), folder / "next.jsonl")
    assert mix(recipe(folder, a(weight=1), b(weight=1)), folder / "all.jsonl").rows == 80


def lanes(folder: Path) -> None:
    """Three of code, one of them hard, one of prose, one that names none."""
    rows = [("code", "hard"), ("code", "easy"), ("code", "easy"), ("prose", "long"), (None, None)]
    told = ({"text": f"c{n}", "lane": x, "category": y} for n, (x, y) in enumerate(rows))
    (folder / "b.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in told))


@pytest.mark.parametrize(
    ("asked", "found", "expected", "remedy"),
    [
        ({"lanes": ["Codes"]}, "lanes: Codes", "code (3), prose (1)", "did you mean code? name a"),
        ({"lanes": ["x"], "lane": "own"}, "lanes: x", "code (3), prose (1), own (1)", "name a l"),
        ({"categories": ["hrd", "zz"]}, "categories: hrd, zz", "easy (2), hard (1), long (1)",
         "did you mean hard? name a category that rows have, or leave out categories"),
        ({"lanes": ["code"], "categories": ["long"]}, "categories: long", "easy (2), hard (1)",
         "name a category that rows have, or leave out categories"),
    ],
)  # fmt: skip
def test_a_filter_that_no_row_matches_says_what_there_is(
    folder: Path, asked: dict[str, Any], found: str, expected: str, remedy: str
) -> None:
    lanes(folder)
    with pytest.raises(DataError) as caught:
        mix(recipe(folder, a(), b(**asked)), folder / "out.jsonl")
    error = caught.value
    assert (error.code, error.found, error.expected) == ("VOX-D021", found, expected)
    assert error.remedy.startswith(remedy)
    of = ", of the 3 rows that lanes lets through" if asked.get("lanes") == ["code"] else ""
    assert error.where == f"{folder / 'mix.toml'}, {folder / 'b.jsonl'}{of}"


def test_a_filter_of_which_one_value_matches_is_none_of_these(folder: Path) -> None:
    lanes(folder)
    report = mix(recipe(folder, b(lanes=["prose", "x"])), folder / "out.jsonl")
    assert (report.rows, report.sources[0].left_out) == (1, {"other lane": 4})


def test_rows_are_repeated_where_that_is_said(folder: Path) -> None:
    out = folder / "out.jsonl"
    report = mix(recipe(folder, a(weight=1), b(weight=1, repeat=True)), out)
    assert [(s.taken, s.repeated) for s in report.sources] == [(100, 0), (40, 60)]
    times = Counter(text for text in texts(out) if text[0] == "b")
    assert len(times) == 40 and set(times.values()) == {2, 3}


# --- up to date -----------------------------------------------------------------------------------


def untouched(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def test_what_is_up_to_date_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, out = recipe(folder, a(weight=1), b(weight=1)), folder / "out.jsonl"
    first = mix(made, out)
    before = untouched(out), untouched(report_path(out))
    monkeypatch.setattr(service, "pool_of", None)  # no row is looked at
    again = mix(made, out)
    assert (first.fresh, again.fresh) == (True, False)
    assert again.sources == first.sources and again.fingerprint == first.fingerprint
    assert (untouched(out), untouched(report_path(out))) == before


@pytest.mark.parametrize("change", ["recipe", "source", "version", "output gone", "force"])
def test_what_is_not_up_to_date_is_made_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    made, out = recipe(folder, a(weight=1), b(weight=1)), folder / "out.jsonl"
    first = mix(made, out)
    if change == "recipe":
        recipe(folder, a(weight=1), b(weight=2))
    elif change == "source":
        write(folder, "a", 101)
    elif change == "version":
        monkeypatch.setattr(service, "CACHE_VERSION", 0)
    elif change == "output gone":
        out.unlink()
    again = mix(made, out, force=change == "force")
    assert again.fresh
    assert (again.fingerprint == first.fingerprint) == (change in ("output gone", "force"))


def test_a_recipe_that_says_the_same_is_up_to_date(folder: Path) -> None:
    out = folder / "out.jsonl"
    mix(recipe(folder, a(weight=1), b(weight=1)), out)
    (folder / "a.jsonl").rename(folder / "c.jsonl")
    text = '# the same\nseed = 42\n[[source]]\nweight = 1.0\npath = "c.jsonl"\n'
    (folder / "mix.toml").write_text(text + '[[source]]\npath = "b.jsonl"\nweight = 1')
    assert not mix(folder / "mix.toml", out).fresh


@pytest.mark.parametrize("mixed_before", [False, True])
def test_somebody_elses_file_is_not_replaced(folder: Path, mixed_before: bool) -> None:
    made, out = recipe(folder, a(), b()), folder / "out.jsonl"
    if mixed_before:
        mix(made, out)
    out.write_text("mine")
    with pytest.raises(OutputError, match="is not what vox data mix has left"):
        mix(made, out)
    assert out.read_text() == "mine"
    assert mix(made, out, force=True).rows == 140


def test_a_folder_of_several_files_is_not_taken_for_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [folder / "a.jsonl", folder / "b.jsonl"]
    monkeypatch.setattr(service, "find_split", lambda _: (both, []))
    with pytest.raises(ConfigError, match="is one file"):
        mix(recipe(folder, {"path": "."}), folder / "out.jsonl")


def test_a_source_is_not_written_over(folder: Path) -> None:
    asked = recipe(folder, a(), b())
    for read in (folder / "a.jsonl", asked):
        before = read.read_bytes()
        with pytest.raises(OutputError, match="is one that is read") as caught:
            mix(asked, read, force=True)
        assert caught.value.code == "VOX-O004"
        assert read.read_bytes() == before


@pytest.mark.parametrize("before", [False, True])
def test_a_crash_between_report_and_rows_is_made_good(
    folder: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    out = folder / "out.jsonl"
    if before:
        mix(recipe(folder, a()), out)
    made = recipe(folder, a(), b())

    def crash(path: Path, value: Any) -> None:
        write_json(path, value)
        if path == report_path(out):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(service, "write_json", crash)
        with pytest.raises(KeyboardInterrupt):
            mix(made, out)
    assert out.exists() == before
    assert mix(made, out).fresh
    assert not mix(made, out).fresh


def test_a_source_that_changes_meanwhile_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = service.pieces

    def late(*arguments: Any) -> Any:
        write(folder, "a", 99)
        return pieces(*arguments)

    monkeypatch.setattr(service, "pieces", late)
    with pytest.raises(DataError, match="changed while it was read"):
        mix(recipe(folder, a(), b()), folder / "out.jsonl")
    assert not (folder / "out.jsonl").exists()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_shows_the_account(folder: Path) -> None:
    made, out = recipe(folder, a(weight=3), b(weight=1)), folder / "sub" / "train.jsonl"
    arguments = ["data", "mix", str(made), "--out", str(out)]
    shown = CliRunner().invoke(root, arguments, catch_exceptions=False)
    assert "a.jsonl  100   100    75.00%     75.19%" in shown.stdout
    assert "133 rows" in shown.stdout and "; written" in shown.stdout
    shown = CliRunner().invoke(root, [*arguments, "--json"], catch_exceptions=False)
    told = json.loads(shown.stdout)
    assert told["fresh"] is False
    kept = json.loads((folder / "sub" / "train.mix.json").read_text())
    assert {**told, "format": 1} == {**kept, "fresh": False}


def test_a_source_of_another_format_is_rows_like_any_other(folder: Path) -> None:
    (folder / "c.csv").write_text("prompt,completion\nWhich?,That.\nWho?,Me.\n")
    of = recipe(folder, {"path": "c.csv"}, {"path": "a.jsonl", "cap": 1})
    report = mix(of, folder / "out.jsonl")
    assert [source.rows for source in report.sources] == [2, 100]
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert {row.get("completion") for row in rows} == {"That.", "Me.", None}
    (folder / "c.csv").write_text("prompt,completion\nWhich?,\n")
    with pytest.raises(DataError) as caught:
        mix(of, folder / "out.jsonl")
    assert "c.csv, row 1: found" in str(caught.value)


def test_what_rows_say_does_not_steer_the_terminal(folder: Path) -> None:
    wrong = {"messages": [{"role": "\x1b]0;title\x07", "content": "x"}]}
    (folder / "a.jsonl").write_text(f'{json.dumps(wrong)}\n{{"text": "x"}}\n')
    given = [str(recipe(folder, a(), malformed_rows="skip")), "--out", str(folder / "out.jsonl")]
    result = CliRunner().invoke(root, ["data", "mix", *given])
    assert (result.exit_code, "\\x1b]0;title\\x07" in result.output) == (0, True)
    assert not {"\x1b", "\x07"} & {*result.output}
