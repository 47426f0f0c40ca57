"""By what rows are chosen: filters, duplicates, the split, leaks, malformed rows, masks."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.tiny_tokenizer import tiny_tokenizer
from vox_core.cache import cached
from vox_core.contract import DataPolicy
from vox_core.data import chosen, row_facts
from vox_core.data.checked import CheckedFile, SourceFile, check_files, cut
from vox_core.data.chosen import choose_rows, overlap
from vox_core.data.dataset_cache import open_dataset
from vox_core.data.faults import CODES, RowError
from vox_core.data.fields import ATTRIBUTES, Attributes
from vox_core.data.json_rows import parse_object
from vox_core.data.messages import Message
from vox_core.data.row_facts import (
    NAMES,
    REASONS,
    RowFacts,
    characters,
    collect,
    digests,
    duplicates,
    filtered,
    held_out,
    row_text,
)
from vox_core.data.rows import Record, parse_row
from vox_core.data.source import RowSource
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import ConfigError, DataError, PluginError

HERE = Path("train.jsonl")
ALL = DataPolicy()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def text(line: int, says: str, **attributes: Any) -> Record:
    return Record("text", HERE, line, text=says, attributes=Attributes(**attributes))


def facts_of(rows: Sequence[Record]) -> RowFacts:
    return collect((row.line, row) for row in rows)


def not_read(*_: object) -> Any:
    raise AssertionError("no row is read")


def become(rows: Sequence[Record], policy: DataPolicy) -> list[str]:
    """Which filter refuses each row."""
    return [NAMES[code] for code in filtered(facts_of(rows), policy)]


def write(path: Path, rows: Sequence[object]) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("\n".join(lines))
    return path


def lines_of(files: Sequence[CheckedFile], block_bytes: int = 200) -> list[tuple[str, int]]:
    """(file, line) of every row that would be trained."""
    blocks = cut(files, block_bytes)
    return [(row.source.name, row.line) for block in blocks for row in block.rows()]


# --- what a row says ------------------------------------------------------------------------------


def chat(*said: Message, **others: Any) -> Record:
    return Record("chat", HERE, 1, messages=said, **others)


ASKED, SAID = Message("user", "how?"), Message("assistant", "so")


def test_the_digest_is_of_what_is_said_and_by_whom() -> None:
    said, whole = digests(chat(ASKED, SAID))
    assert said == whole and len(said) == 16
    same = Record("completion", Path("b"), 7, (ASKED, SAID), attributes=Attributes(rating=1.0))
    assert digests(same) == (said, said)
    others = [
        chat(SAID, ASKED),
        chat(ASKED, Message("assistant", "so "), SAID),
        chat(Message("system", "how?"), SAID),
        chat(ASKED, Message("assistant", "so", extra={"name": "x"})),
        chat(ASKED, SAID, tools=({"name": "f"},)),
        chat(ASKED, SAID, rejected=(SAID,)),
        text(1, "how?so"),
    ]
    found = [digests(each)[0] for each in others]
    assert len({said, *found}) == len(others) + 1


def test_weights_make_another_row_of_the_same_words() -> None:
    said, _ = digests(chat(ASKED, SAID))
    weighted = digests(chat(ASKED, replace(SAID, weight=0.0)))
    assert weighted[0] == said != weighted[1]
    assert weighted != digests(chat(ASKED, replace(SAID, weight=1.0)))


def test_prompts_without_an_answer_are_compared_with_their_other_fields(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "how?"}]}
    attributes = {**dict.fromkeys(ATTRIBUTES, "x"), "rating": 3, "tags": ["x"]}
    rows = [
        {"prompt": "how?", "tests": [1], "level": "easy"},
        {"level": "easy", "tests": [1], "prompt": "how?", "rating": None, "id": None},
        {"prompt": "how?", "tests": [2], "level": "easy"},
        {"prompt": "how?", "completion": "so", "tests": [1]},
        {"prompt": "how?", "completion": "so", "tests": [2]},
        {**asked, "tests": [1]},
        {**asked, "tests": [1, 1]},
        {**asked, "tests": [1]},
        asked,
        {"prompt": "how?"},
        *({"prompt": "how?", name: value} for name, value in attributes.items()),
    ]
    path = write(tmp_path / "a.jsonl", rows)
    (file,) = choose_rows([path], [], DataPolicy(dedup="exact"), answers="optional").train
    assert [line for line in range(1, 18) if file.uses(line)] == [1, 3, 4, 6, 7, 9, *range(11, 18)]
    said = [digests(parse_row(dict(row), answers="optional"))[0] for row in rows]
    assert len({*said}) == 2, "the split keeps rows of one prompt on one side"


def test_the_text_of_a_row_can_be_encoded() -> None:
    row = parse_row({"prompt": "ü", "given": "ö\ud800"}, answers="optional")
    assert row_text(row).encode().decode() == '[["given", "ö?"]]\nü'


def test_characters_are_those_of_all_messages() -> None:
    assert characters(chat(ASKED, SAID)) == 6
    assert characters(text(1, "日本")) == 2


# --- filters --------------------------------------------------------------------------------------

RATED = [
    text(1, "a", rating=0.7, category="code", lane="fast", tags=("x", "y")),
    text(2, "bb", rating=0.5, category="code", tags=("y",)),
    text(3, "ccc", category="prose", lane="slow"),
    text(4, "dddd", rating=0.9),
]

FILTERS: dict[str, tuple[DataPolicy, list[str]]] = {
    "rating": (
        DataPolicy(min_rating=0.7, unrated="keep"),
        ["kept", "rating", "kept", "kept"],
    ),
    "rating, and unrated rows go": (
        DataPolicy(min_rating=0.7, unrated="drop"),
        ["kept", "rating", "unrated", "kept"],
    ),
    "category": (DataPolicy(category=("code",)), ["kept", "kept", "category", "category"]),
    "one of two": (
        DataPolicy(category=("code", "prose")),
        ["kept", "kept", "kept", "category"],
    ),
    "lane": (DataPolicy(lane=("slow",)), ["lane", "lane", "kept", "lane"]),
    "tag": (DataPolicy(tag=("y",)), ["kept", "kept", "tag", "tag"]),
    "tags": (DataPolicy(tag=("x", "z")), ["kept", "tag", "tag", "tag"]),
    "length": (
        DataPolicy(min_chars=2, max_chars=3),
        ["too short", "kept", "kept", "too long"],
    ),
    "the first reason counts": (
        DataPolicy(min_rating=0.7, unrated="drop", category=("none",), min_chars=9),
        ["category", "rating", "unrated", "category"],
    ),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters(name: str) -> None:
    policy, expected = FILTERS[name]
    assert become(RATED, policy) == expected


# --- duplicates and the split ---------------------------------------------------------------------

SAYS = st.lists(st.sampled_from("abcdefgh"), max_size=40)
MANY = settings(max_examples=40, deadline=None)


@MANY
@given(st.lists(SAYS, min_size=1, max_size=4))
def test_of_each_row_that_is_there_several_times_the_first_stays(files: list[list[str]]) -> None:
    known = [facts_of([text(n, says) for n, says in enumerate(file, 1)]) for file in files]
    pairs_P2 = duplicates(np.concatenate([facts.rows_R["whole"] for facts in known]))
    flat = [says for file in files for says in file]
    gone = set(pairs_P2[:, 0].tolist())
    kept = [says for row, says in enumerate(flat) if row not in gone]
    assert kept == list(dict.fromkeys(flat))
    for row, stays in pairs_P2.tolist():
        assert stays == flat.index(flat[row]) < row
    assert len(pairs_P2) == len(flat) - len(kept)


@MANY
@given(
    st.lists(st.integers(0, 99).map(str), max_size=30),
    st.lists(st.integers(0, 99).map(str), max_size=30),
    st.floats(0, 0.99),
    st.floats(0, 0.99),
)
def test_a_row_keeps_its_side_when_the_set_grows(
    rows: list[str], more: list[str], share: float, other: float
) -> None:
    def sides(says: list[str], share: float) -> list[str]:
        return become([text(n, s) for n, s in enumerate(says, 1)], DataPolicy(valid_share=share))

    grown = sides([*more, *rows, *more], share)
    assert grown[len(more) : len(more) + len(rows)] == sides(rows, share)
    side = dict(zip([*more, *rows, *more], grown, strict=True))
    assert all(
        side[says] == where for says, where in zip([*more, *rows, *more], grown, strict=True)
    )
    low, high = sorted((share, other))
    held_out = {s for s, where in zip(rows, sides(rows, low), strict=True) if where == "held out"}
    more_so = {s for s, where in zip(rows, sides(rows, high), strict=True) if where == "held out"}
    assert held_out <= more_so


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.5, 0.9])
def test_the_share_is_right(share: float) -> None:
    rows, deviations = 20_000, 4
    said = facts_of([text(n, f"row {n}") for n in range(rows)]).rows_R["said"]
    found = held_out(said, share).sum()
    assert abs(found - share * rows) <= deviations * (rows * share * (1 - share)) ** 0.5


def test_weights_do_not_move_a_row_to_the_other_side() -> None:
    rows = [chat(ASKED, replace(SAID, content=f"{n}", weight=w)) for n in range(99) for w in (0, 1)]
    sides = held_out(facts_of(rows).rows_R["said"], 0.5).tolist()
    assert sides[::2] == sides[1::2]
    assert set(sides) == {True, False}


def test_without_a_plugin_for_near_duplicates_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "data")
    monkeypatch.setattr(chosen, "check_files", not_read)  # said before anything is read
    with pytest.raises(ConfigError, match="or choose --dedup exact") as caught:
        choose_rows([tmp_path / "a.jsonl"], [], DataPolicy(dedup="near", near_threshold=0.8))
    assert caught.value.code == "VOX-C009"


# --- masks ----------------------------------------------------------------------------------------


def masked(lines: Iterable[int], path: Path = HERE) -> CheckedFile:
    """A file of which these lines are used."""
    used = bytes(line in {*lines} for line in range(max(lines, default=0) + 3))
    return CheckedFile(
        path, SourceFile(path, "", (0, 0, 0)), RowSource(path, path, "key"), chosen=used
    )


def test_a_file_has_changed_if_its_bytes_have(tmp_path: Path) -> None:
    (path := tmp_path / "a.jsonl").write_text("first")
    file, times = SourceFile.of(path), path.stat()
    path.chmod(0o600)
    os.utime(path, (1, 1))
    assert file.unchanged()
    path.write_text("other")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not file.unchanged(), "of the same size, and its time was put back"
    path.unlink()
    assert not file.unchanged()


@MANY
@given(st.sets(st.integers(1, 60)))
def test_a_mask_has_the_lines_that_it_is_of(lines: set[int]) -> None:
    file = masked(lines)
    assert {line for line in range(99) if file.uses(line)} == lines
    assert file.used == len(lines)


def test_a_choice_is_named_after_the_lines_that_it_has() -> None:
    names = [masked(lines).identity for lines in ([], [8], [1], [9], [1, 9])]
    assert len({*names}) == 5
    longer = replace(masked([8]), chosen=(masked([8]).chosen or b"") + bytes(9))
    assert longer.identity == names[1]


@MANY
@given(st.lists(st.sampled_from(["row", "blank", "bad"]), min_size=1, max_size=30), st.data())
def test_masks_lose_and_repeat_nothing(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("masks") / "a.jsonl"
    shown = {"row": '{"text": "a"}', "blank": " ", "bad": "{"}
    write(path, [shown[kind] for kind in kinds])
    rows = [n for n, kind in enumerate(kinds, 1) if kind == "row"]
    wanted = data.draw(st.sets(st.sampled_from(rows))) if rows else set()
    size = data.draw(st.integers(1, 100))
    sides = [wanted, {*rows} - wanted]
    read = []
    for side in sides:
        read.append([r.line for b in cut([masked(side, path)], size) for r in b.rows()])
    assert read == [sorted(side) for side in sides]


# --- files ----------------------------------------------------------------------------------------

GOOD = [{"text": f"row {n}"} for n in range(40)]
FAULTY = [*GOOD[:3], "{bad", "", {"text": ""}, *GOOD[3:], "[]"]
SKIP = DataPolicy(malformed_rows="skip", max_skipped=0.1)


def test_without_filters_every_row_is_used_and_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD)
    found = choose_rows([path], [], ALL)
    (train,), (file,) = found.train, found.report.files
    assert (train.chosen, train.identity, found.valid) == (None, train.origin.sha256, [])
    assert (file.rows, file.used, file.left_out, file.malformed) == (40, 40, {}, {})
    assert [*found.report.told(), *found.report.warnings(), *found.report.listed] == []


def test_a_malformed_row_stops_the_run_or_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", FAULTY)
    with pytest.raises(DataError) as caught:
        choose_rows([path], [], DataPolicy(dedup="exact"))
    assert "--malformed-rows skip" in str(caught.value.remedy)
    assert caught.value.code == "VOX-D003" and len(caught.value.faults) == 3
    for _ in "the rows read", "the facts kept":
        found = choose_rows([path], [], SKIP)
        good = [("a.jsonl", n) for n in (1, 2, 3, *range(7, 44))]
        assert lines_of(found.train) == good
        (file,) = found.report.files
        assert (file.rows, file.used, file.left_out) == (43, 40, {"malformed": 3})
        assert file.malformed == {"invalid JSON": 1, "empty": 1, "no object": 1}
        listed = [each.to_json() for each in found.report.listed]
        assert [(each["line"], each["reason"]) for each in listed] == [
            (line, "malformed") for line in (4, 6, 44)
        ]
        (warning,) = found.report.warnings()
        assert "3 malformed rows are skipped" in warning and "line 4: found invalid" in warning
    with pytest.raises(DataError) as caught:
        choose_rows([path], [], DataPolicy(dedup="exact"))
    assert caught.value.code == "VOX-D003" and len(caught.value.faults) == 3
    with pytest.raises(DataError):
        check_files([path])


@pytest.mark.parametrize("policy", [ALL, DataPolicy(dedup="exact")])
def test_progress_is_bytes_of_each_file_that_is_read(tmp_path: Path, policy: DataPolicy) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    seen: list[tuple[str, int, int]] = []
    for _ in range(2):  # the second time, the cache has its facts
        choose_rows([path], [], policy, progress=lambda *told: seen.append(told))
    size = path.stat().st_size
    assert seen == [("reading a.jsonl", 0, size), ("reading a.jsonl", size, size)]


def test_the_share_of_skipped_rows_has_a_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", FAULTY)
    with pytest.raises(DataError, match=r"3 of 43 rows \(6.98%\)") as caught:
        choose_rows([path], [], DataPolicy(malformed_rows="skip", max_skipped=0.0697))
    assert caught.value.code == "VOX-D020" and len(caught.value.faults) == 3
    assert choose_rows([path], [], DataPolicy(malformed_rows="skip", max_skipped=0.0698)).train
    path = write(tmp_path / "b.jsonl", [*GOOD[:35], *GOOD[:36], *["{"] * 29])
    assert choose_rows([path], [], DataPolicy(malformed_rows="skip", max_skipped=0.29)).train


def test_a_file_of_malformed_rows_alone_is_refused_all_the_same(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", GOOD)
    bad = write(tmp_path / "bad.jsonl", ["{"])
    csv = write(tmp_path / "csv.jsonl", ["prompt,completion", "a,b"])
    for path in bad, csv:
        for _ in "twice":
            with pytest.raises(DataError, match=path.name) as caught:
                choose_rows([good, path], [], replace(SKIP, max_skipped=1.0))
            assert (caught.value.code, caught.value.where) == ("VOX-D003", str(path))
            assert "--malformed-rows skip" not in str(caught.value.remedy)
    empty = write(tmp_path / "empty.jsonl", [])
    for _ in "twice":
        with pytest.raises(DataError) as caught:
            choose_rows([good, empty], [], SKIP)
        assert caught.value.code == "VOX-D002"


def test_a_line_that_is_too_long_is_skipped_like_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    from vox_core.data import json_rows

    monkeypatch.setattr(json_rows, "MAX_LINE_BYTES", 100)
    path = write(tmp_path / "a.jsonl", [*GOOD[:2], {"text": "x" * 1000}, *GOOD[2:]])
    found = choose_rows([path], [], SKIP)
    assert lines_of(found.train, 60) == [("a.jsonl", n) for n in (1, 2, *range(4, 42))]
    assert found.report.files[0].malformed == {"line too long": 1}


def test_a_split_is_two_masks_of_the_same_file(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", GOOD), write(tmp_path / "b.jsonl", GOOD[::2])]
    found = choose_rows(paths, [], DataPolicy(valid_share=0.3))
    trained, held_out = lines_of(found.train), lines_of(found.valid)
    assert trained and held_out
    every = [("a.jsonl", n) for n in range(1, 41)] + [("b.jsonl", n) for n in range(1, 21)]
    assert sorted(trained + held_out) == every
    assert {(n + 1) // 2 for f, n in held_out if f == "a.jsonl" and n % 2} == {
        n for f, n in held_out if f == "b.jsonl"
    }, "duplicates are on the same side"
    assert [(f.used, f.held_out) for f in found.report.files] == [
        (Counter(f for f, _ in trained)[name], Counter(f for f, _ in held_out)[name])
        for name in ("a.jsonl", "b.jsonl")
    ]
    assert len({file.identity for file in (*found.train, *found.valid)}) == 4


def test_held_out_rows_that_are_trained_on_are_told(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", [{"text": "a long text"}, *GOOD])
    valid = write(tmp_path / "v.jsonl", [{"text": "new"}, GOOD[1], {"text": "other text"}, GOOD[1]])
    for policy, leaks in (
        (ALL, {2: 3, 4: 3}),
        (DataPolicy(min_chars=8), {}),
    ):
        found = choose_rows([train], [valid], policy)
        assert {leak.place.line: leak.of and leak.of.line for leak in found.report.leaks} == leaks
        warning = next(found.report.warnings(), "")
        assert (f"{len(leaks)} validation row" in warning) == bool(leaks)
        assert lines_of(found.valid) == [("v.jsonl", n) for n in range(1, 5)], "it is left as it is"


@MANY
@given(SAYS, SAYS)
def test_leaks_are_exactly_the_rows_on_both_sides(train: list[str], valid: list[str]) -> None:
    said_N2, said_V2 = (
        facts_of([text(n, says) for n, says in enumerate(rows)]).rows_R["said"]
        for rows in (train, valid)
    )
    expected = [[n, train.index(says)] for n, says in enumerate(valid) if says in train]
    assert overlap(said_N2, said_V2).tolist() == expected


def test_what_no_row_has_is_refused_with_what_there_is(tmp_path: Path) -> None:
    rows = [{"text": f"{n}", "category": "code", "tags": ["x", "y"]} for n in range(3)]
    path = write(tmp_path / "a.jsonl", [*rows, {"text": "b", "category": "prose"}])
    with pytest.raises(DataError) as caught:
        choose_rows([path], [], DataPolicy(category=("cod", "code")))
    assert caught.value.code == "VOX-D021"
    assert (caught.value.found, caught.value.expected) == ("cod", "code (3), prose (1)")
    remedy = "did you mean code? name a category that rows have, or leave out --category"
    assert caught.value.remedy == remedy
    with pytest.raises(DataError, match=r"x \(3\), y \(3\)"):
        choose_rows([path], [], DataPolicy(tag=("z",)))
    with pytest.raises(DataError, match="none has one"):
        choose_rows([path], [], DataPolicy(lane=("z",)))
    assert lines_of(choose_rows([path], [], DataPolicy(category=("prose",))).train) == [
        ("a.jsonl", 4)
    ]


def test_unrated_rows_need_a_rule(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a", "rating": 4}, {"text": "b"}])
    with pytest.raises(DataError, match="1 of 2 rows without a rating") as caught:
        choose_rows([path], [], DataPolicy(min_rating=3))
    assert caught.value.code == "VOX-D022"
    for rule, lines in (("keep", [1, 2]), ("drop", [1])):
        found = choose_rows([path], [], DataPolicy(min_rating=3, unrated=rule))  # type: ignore[arg-type]
        assert [line for _, line in lines_of(found.train)] == lines
    rated = write(tmp_path / "r.jsonl", [{"text": "a", "rating": 4}, {"text": "b", "rating": 1}])
    assert lines_of(choose_rows([rated], [], DataPolicy(min_rating=3)).train) == [("r.jsonl", 1)]


def test_a_policy_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD[:5])
    with pytest.raises(DataError, match="5 too short") as caught:
        choose_rows([path], [], DataPolicy(min_chars=100))
    assert caught.value.code == "VOX-D023"
    with pytest.raises(DataError, match="no row is held out"):
        choose_rows([path], [], DataPolicy(valid_share=1e-9))
    with pytest.raises(DataError, match="no row is left to train on"):
        choose_rows([path], [], DataPolicy(valid_share=1 - 1e-9))


# --- what is kept, and what is not asked ----------------------------------------------------------


def test_another_policy_reads_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [*GOOD, GOOD[0]])
    choose_rows([path], [], DataPolicy(dedup="exact"))
    monkeypatch.setattr(row_facts, "read_lines", not_read)
    again = choose_rows([path], [], DataPolicy(valid_share=0.5, dedup="exact", min_chars=1))
    assert again.report.left_out("train") == {"duplicate": 1}


def test_torn_facts_and_those_of_another_version_are_taken_anew(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, policy = write(tmp_path / "a.jsonl", [*GOOD, GOOD[0]]), DataPolicy(dedup="exact")
    first = choose_rows([path], [], policy)
    (entry,) = (cache / "facts").glob("*/*")
    whole = entry.read_bytes()
    for torn in (whole[:-9], b"", whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        entry.write_bytes(torn)
        assert choose_rows([path], [], policy) == first
        assert entry.stat().st_size == len(whole)
    monkeypatch.setattr(row_facts, "CACHE_VERSION", 0)
    assert choose_rows([path], [], policy) == first
    assert len([*(cache / "facts").iterdir()]) == 2


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file in its place")
    path = write(tmp_path / "a.jsonl", [*GOOD, GOOD[0]])
    found = choose_rows([path], [], DataPolicy(dedup="exact"))
    assert found.report.files[0].left_out["duplicate"] == 1


def test_entries_unused_for_a_month_go(cache: Path) -> None:
    def entry(name: str) -> str:
        made = cached("kind", name, lambda folder: (folder / "a").write_text(name), read)
        return made.value

    def read(folder: Path, _owner: object) -> str | None:
        return (folder / "a").read_text() if (folder / "a").exists() else None

    for name in ("old", "new"):
        entry(name)
    for name in ("old", "new"):
        os.utime(cache / "kind" / name, (time.time() - 31 * 86400,) * 2)
    assert entry("new") == "new"
    entry("newer")
    assert sorted(each.name for each in (cache / "kind").iterdir()) == ["new", "newer"]


# --- tokens ---------------------------------------------------------------------------------------


def test_the_tokens_of_a_mask_are_kept_under_a_name_of_their_own(tmp_path: Path) -> None:
    """With one process and with another beside it, and in the cache."""
    tiny_tokenizer("chatml").save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"question {n}", "completion": "so"} for n in range(40)]
    path = write(tmp_path / "a.jsonl", [*rows, "{", rows[0]])
    model, policy = tmp_path / "model", replace(SKIP, dedup="exact", valid_share=0.3)
    found = choose_rows([path], [], policy)
    lines = []
    for side in (found.train, found.valid):
        for workers in (1, 0):
            made = open_dataset(
                side, model, lambda: load_tokenizer(model), 64, workers=workers, block_bytes=300
            )
            assert [document.line for document in made] == [n for _, n in lines_of(side)]
            assert made.stats.rows == side[0].used
            if workers:
                shutil.rmtree(tmp_path / "cache" / "documents")
        again = open_dataset(side, model, not_read, 64)
        lines += [document.line for document in again]
    assert sorted(lines) == list(range(1, 41))


# --- the table ------------------------------------------------------------------------------------

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "choosing-rows.md"


def test_the_guide_prints_the_table_of_reasons() -> None:
    told = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", GUIDE.read_text(), re.M))
    assert {name: told.get(name) for name in REASONS} == REASONS
    for code in CODES:
        assert f"`{code}`" in GUIDE.read_text()


def faults() -> Iterator[tuple[str, Callable[[], object]]]:
    def row(**fields: object) -> Callable[[], object]:
        return lambda: parse_row(dict(fields))

    def line(text: bytes) -> Callable[[], object]:
        return lambda: parse_object(text)

    user = {"role": "user", "content": "a"}
    said = {"role": "assistant", "content": "b"}
    yield "line too long", lambda: parse_object(None)
    yield "invalid UTF-8", line(b"\xff")
    yield "invalid JSON", line(b"{")
    yield "invalid JSON", line(b'{"a": NaN}')
    yield "invalid JSON", line(b"[" * 100_000)
    yield "invalid JSON", line(b"1" * 10_000)
    yield "repeated key", line(b'{"a": 1, "a": 2}')
    yield "no object", line(b"[]")
    yield "half a character", row(text="\ud800")
    yield "misspelt field", row(text="a", promt="b")
    yield "unknown form", row(txt="a")
    yield "unsupported", row(messages=[user, said], documents=[{}])
    yield "unsupported", row(messages=[{**said, "content": [{"type": "image"}]}])
    yield "empty", row(text=" ")
    yield "empty", row()
    yield "empty", row(messages=[user, {**said, "content": ""}])
    yield "roles", row(messages=[user])
    yield "roles", row(messages=[{"role": "robot", "content": "a"}, said])
    yield "roles", row(messages=[user, {"role": "system", "content": "a"}, said])
    yield "unknown form", row(id=1)
    yield "several forms", row(text="a", prompt="b")
    yield "preference pair", row(chosen="a")
    yield "wrong value", row(text="a", rating=10**400)
    yield "unknown form", row(prompt="b")
    yield "wrong type", row(text=3)
    yield "wrong type", row(messages=[user, 3])


@pytest.mark.parametrize(("code", "read"), [*faults()])
def test_each_fault_has_its_code(code: str, read: Callable[[], object]) -> None:
    with pytest.raises(RowError) as caught:
        read()
    assert caught.value.faults[0].code == code


def test_facts_of_other_bytes_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is another one while it is read, and then what it was."""
    rows = [json.dumps({"text": says}) + "\n" for says in ("short", "a row of several words")]
    path, policy, listen = tmp_path / "train.jsonl", DataPolicy(min_chars=10), row_facts.read_lines
    path.write_text("".join(rows))

    def disturbed(*given: Any, **flags: Any) -> Any:
        path.write_text("".join(reversed(rows)))
        return listen(*given, **flags)

    monkeypatch.setattr(row_facts, "read_lines", disturbed)
    with pytest.raises(DataError, match="changed while it was read"):
        choose_rows([path], [], policy)
    monkeypatch.setattr(row_facts, "read_lines", listen)
    path.write_text("".join(rows))
    (file,) = choose_rows([path], [], policy).train
    assert [line for line, _ in file.used_lines()] == [2]


@pytest.mark.parametrize("pairs", [[[0, 1]], [[5, 0]], [[1, -1]], [[1, 0, 0]], [[1.0, 0.0]]])
def test_pairs_that_are_no_row_and_earlier_row_are_the_plugins_fault(pairs) -> None:
    finder = SimpleNamespace(id="near", manifest=None)
    with pytest.raises(PluginError, match="wrong result from vox_near_duplicates"):
        chosen._checked(pairs, 5, finder)
    assert chosen._checked([[4, 0]], 5, finder).tolist() == [[4, 0]]
