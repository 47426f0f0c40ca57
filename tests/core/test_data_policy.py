"""By what rows are chosen: filters, duplicates, the split, leaks, malformed rows, masks."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.tiny_tokenizer import tiny_tokenizer
from vox_core.contract import DataPolicy
from vox_core.data import checked, chosen
from vox_core.data.blocks import cut
from vox_core.data.checked import check_files
from vox_core.data.chosen import Chosen, choose_rows
from vox_core.data.faults import CODES, RowError
from vox_core.data.jsonl import parse_object
from vox_core.data.kept import open_dataset
from vox_core.data.messages import Message
from vox_core.data.policy import choose, facts, near, shelf
from vox_core.data.policy.content import chars, digests, text_of
from vox_core.data.policy.facts import Collector, Facts
from vox_core.data.policy.leaks import shared
from vox_core.data.policy.mask import Mask, used
from vox_core.data.policy.reasons import NAMES, REASONS
from vox_core.data.records import Record
from vox_core.data.rows import Attributes, parse_row
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import ConfigError, DataError

HERE = Path("train.jsonl")
ALL = DataPolicy()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def text(line: int, says: str, **attributes: Any) -> Record:
    return Record("text", HERE, line, text=says, attributes=Attributes(**attributes))


def facts_of(rows: Sequence[Record]) -> Facts:
    collector = Collector()
    for row in rows:
        collector.add(row)
    return collector.facts()


def not_near(*_: object) -> Any:
    raise AssertionError("nobody asked for near duplicates")


def become(rows: Sequence[Record], policy: DataPolicy) -> list[str]:
    """What becomes of each row."""
    code_N, _ = choose.choose([facts_of(rows)], policy, not_near)
    return [NAMES[code] for code in code_N]


def write(path: Path, rows: Sequence[object]) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("\n".join(lines))
    return path


def lines_of(files: Sequence[checked.CheckedFile], block_bytes: int = 200) -> list[tuple[str, int]]:
    """(file, line) of every row that would be trained."""
    blocks = cut([f.path for f in files], block_bytes, [f.chosen for f in files])
    return [(row.source.name, row.line) for block in blocks for row in block.records()]


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


def test_characters_are_those_of_all_messages() -> None:
    assert chars(chat(ASKED, SAID)) == 6
    assert chars(text(1, "日本")) == 2


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
    code_N, pairs_P2 = choose.choose(known, DataPolicy(dedup="exact"), not_near)
    flat = [says for file in files for says in file]
    kept = [says for says, code in zip(flat, code_N, strict=True) if NAMES[code] == "kept"]
    assert kept == list(dict.fromkeys(flat))
    assert {NAMES[code] for code in code_N} <= {"kept", "duplicate"}
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
    said = facts_of([text(n, f"row {n}") for n in range(rows)]).said_R2
    found = choose.held_out(said, share).sum()
    assert abs(found - share * rows) <= deviations * (rows * share * (1 - share)) ** 0.5


def test_weights_do_not_move_a_row_to_the_other_side() -> None:
    rows = [chat(ASKED, replace(SAID, content=f"{n}", weight=w)) for n in range(99) for w in (0, 1)]
    sides = become(rows, DataPolicy(valid_share=0.5))
    assert sides[::2] == sides[1::2]
    assert set(sides) == {"kept", "held out"}


# --- near duplicates ------------------------------------------------------------------------------

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LONG = " ".join(f"{word} {other}" for word in WORDS for other in WORDS[:5])


def test_near_duplicates_are_found_and_others_are_not() -> None:
    texts = [
        LONG,
        LONG.upper().replace(" ", "  ") + "!",
        LONG.replace("seven three", "seven thirteen"),
        " ".join(reversed(LONG.split())),
        "",
        "日本語の文章はとても長いです、そして面白いです",
        "日本語の文章はとても長いです。そして面白いです!",
        "?!",
    ]
    assert near.near_pairs(texts, len(texts), 0.8).tolist() == [[1, 0], [2, 0], [6, 5]]
    assert near.near_pairs(texts, len(texts), 0.99).tolist() == [[1, 0], [6, 5]]
    assert near.near_pairs([], 0, 0.8).shape == (0, 2)


def test_similarity_is_estimated_within_its_error() -> None:
    """Pairs with a known share of common sequences: below the threshold none goes, above it all."""
    common = [f"w{n}" for n in range(300)]
    first, found = " ".join(common), {}
    for changed in (2, 6, *range(24, 30), 60, 90):  # each changes three of 298 sequences
        spots = {n * (300 // changed) + 2 for n in range(changed)}
        other = " ".join(f"x{changed}" if n in spots else w for n, w in enumerate(common))
        a, b = ({*near.sequences(each).tolist()} for each in (first, other))
        found[len(a & b) / len(a | b)] = len(near.near_pairs([first, other], 2, 0.7)) == 1
    assert {round(similarity, 1) for similarity in found} >= {1.0, 0.9, 0.6, 0.2}
    assert all(gone == (similarity > 0.7) for similarity, gone in found.items()), found


def test_a_row_goes_for_one_that_stays_and_not_for_one_that_went() -> None:
    words = [f"w{n}" for n in range(300)]
    second = [f"x{n}" if n % 25 == 3 else word for n, word in enumerate(words)]  # J = 0.78
    third = [f"y{n}" if n % 25 == 15 else word for n, word in enumerate(second)]  # 0.78 and 0.61
    texts = [*map(" ".join, (words, second, third))]
    assert near.near_pairs(texts, 3, 0.7).tolist() == [[1, 0]]
    assert near.near_pairs(texts[1:], 2, 0.7).tolist() == [[1, 0]]


def test_signatures_are_the_same_in_every_process() -> None:
    """The numbers are what this gave when it was written."""
    (hashes_KH,) = near._signatures(["one two three four"])
    assert hashes_KH[0, :3].tolist() == [1250491910, 282575619, 473518289]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.sampled_from(WORDS[:3]), max_size=12).map(" ".join), max_size=30))
def test_near_duplicates_are_the_same_each_time_and_the_first_stays(texts: list[str]) -> None:
    pairs = near.near_pairs(texts, len(texts), 0.8).tolist()
    assert near.near_pairs(iter(texts), len(texts), 0.8).tolist() == pairs
    gone = [row for row, _ in pairs]
    assert len({*gone}) == len(gone)
    for row, stays in pairs:
        assert stays < row and stays not in gone
    kept = [says for row, says in enumerate(texts) if row not in gone]
    assert len({*kept}) == len(kept), "equal texts are near, too"


def test_a_bucket_that_is_full_costs_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "_DEPTH", 1)
    texts = [LONG, LONG.replace("two", "2"), LONG]
    assert near.near_pairs(texts, 3, 0.9).tolist() == [[2, 0]]


def test_without_datasketch_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(chosen, "check_files", not_near)  # said before anything is read
    with pytest.raises(ConfigError, match=r"pip install 'vox-ml\[data\]'") as caught:
        choose_rows([tmp_path / "a.jsonl"], [], DataPolicy(dedup="near", near_threshold=0.8))
    assert caught.value.code == "VOX-C009"


# --- masks ----------------------------------------------------------------------------------------


@MANY
@given(st.sets(st.integers(1, 60)), st.integers(1, 60), st.integers(1, 40))
def test_a_part_of_a_mask_says_the_same(lines: set[int], first: int, count: int) -> None:
    mask = Mask.of(np.array(sorted(lines), np.int64))
    part = mask.part(first, count)
    assert used(part, count) == [line in lines for line in range(first, first + count)]
    assert bool(part) == any(used(part, count))
    assert mask.rows == len(lines)


def test_a_mask_is_named_after_the_lines_that_it_has() -> None:
    def digest(*lines: int) -> str:
        return Mask.of(np.array(lines, np.int64)).digest

    assert digest(1, 2) == digest(1, 2) != digest(1, 3)
    assert len({digest(), digest(8), digest(1), digest(9), digest(1, 9)}) == 5


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
        mask = Mask.of(np.array(sorted(side), np.int64))
        read.append([r.line for b in cut([path], size, [mask]) for r in b.records()])
    assert read == [sorted(side) for side in sides]


# --- files ----------------------------------------------------------------------------------------

GOOD = [{"text": f"row {n}"} for n in range(40)]
FAULTY = [*GOOD[:3], "{bad", "", {"text": ""}, *GOOD[3:], "[]"]
SKIP = DataPolicy(malformed_rows="skip", max_skipped=0.1)


def test_a_malformed_row_stops_the_run_or_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", FAULTY)
    with pytest.raises(DataError) as caught:
        choose_rows([path], [], DataPolicy(dedup="exact"))
    assert caught.value.code == "VOX-D003" and len(caught.value.faults) == 3
    for _ in "the rows read", "the facts kept":
        found = choose_rows([path], [], SKIP)
        good = [("a.jsonl", n) for n in (1, 2, 3, *range(7, 44))]
        assert lines_of(found.train) == good
        assert found.report is not None
        (file,) = found.report.files
        assert (file.rows, file.used, file.out) == (43, 40, {"malformed": 3})
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
            assert caught.value.code == "VOX-D003"
    empty = write(tmp_path / "empty.jsonl", [])
    for _ in "twice":
        with pytest.raises(DataError) as caught:
            choose_rows([good, empty], [], SKIP)
        assert caught.value.code == "VOX-D002"


def test_a_line_that_is_too_long_is_skipped_like_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vox_core.data import blocks, jsonl

    for module in (blocks, jsonl):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    path = write(tmp_path / "a.jsonl", [*GOOD[:2], {"text": "x" * 1000}, *GOOD[2:]])
    found = choose_rows([path], [], SKIP)
    assert lines_of(found.train, 60) == [("a.jsonl", n) for n in (1, 2, *range(4, 42))]
    assert found.report and found.report.files[0].malformed == {"line too long": 1}


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
    assert found.report is not None
    assert [(f.used, f.held_out) for f in found.report.files] == [
        (Counter(f for f, _ in trained)[name], Counter(f for f, _ in held_out)[name])
        for name in ("a.jsonl", "b.jsonl")
    ]
    assert len({file.identity for file in (*found.train, *found.valid)}) == 4


def test_near_duplicates_are_on_no_other_side(tmp_path: Path) -> None:
    rows = [{"text": f"{LONG} {n}"} for n in range(30)] + GOOD
    found = choose_rows(
        [write(tmp_path / "a.jsonl", rows)],
        [],
        DataPolicy(dedup="near", near_threshold=0.8, valid_share=0.4),
    )
    both = lines_of(found.train) + lines_of(found.valid)
    assert sorted(n for _, n in both if n <= 30) == [1]
    assert found.report and found.report.left_out("train")["near duplicate"] == 29


def test_near_duplicates_are_looked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = DataPolicy(dedup="near", near_threshold=0.8)
    path = write(tmp_path / "a.jsonl", [{"text": LONG}, *GOOD, {"text": f"{LONG}."}, GOOD[0]])
    told: list[tuple[str, int, int]] = []
    first = choose_rows([path], [], policy, lambda *what: told.append(what))
    assert told[-1] == ("looking for near duplicates", 42, 42)
    assert first.report is not None
    assert [str(each).rpartition("/")[0] and each.to_json() for each in first.report.duplicates]
    assert [(d.place.line, d.of and d.of.line, d.reason) for d in first.report.duplicates] == [
        (42, 1, "near duplicate"),
        (43, 2, "duplicate"),
    ]
    monkeypatch.setattr(near, "near_pairs", not_near)
    monkeypatch.setattr(checked, "read_lines", not_near)
    assert choose_rows([path], [], policy) == first
    with pytest.raises(AssertionError, match="nobody asked"):
        choose_rows([path], [], replace(policy, near_threshold=0.9))


def test_held_out_rows_that_are_trained_on_are_told(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", [{"text": LONG}, *GOOD])
    valid = write(tmp_path / "v.jsonl", [{"text": "new"}, GOOD[1], {"text": f"{LONG} x"}, GOOD[1]])
    for policy, leaks in (
        (ALL, {2: 3, 4: 3}),
        (DataPolicy(dedup="near", near_threshold=0.8), {2: 3, 3: 1, 4: 3}),
        (DataPolicy(min_chars=8), {}),
    ):
        found = choose_rows([train], [valid], policy)
        assert found.report is not None
        assert {leak.held_out.line: leak.trained.line for leak in found.report.leaks} == leaks
        assert [leak.held_out.line for leak in found.report.leaks if leak.near] == [
            line for line in leaks if line == 3
        ]
        warning = next(found.report.warnings(), "")
        assert (f"{len(leaks)} held-out row" in warning) == bool(leaks)
        assert lines_of(found.valid) == [("v.jsonl", n) for n in range(1, 5)], "it is left as it is"


@MANY
@given(SAYS, SAYS)
def test_leaks_are_exactly_the_rows_on_both_sides(train: list[str], valid: list[str]) -> None:
    said_N2, said_V2 = (
        facts_of([text(n, says) for n, says in enumerate(rows)]).said_R2 for rows in (train, valid)
    )
    expected = [[n, train.index(says)] for n, says in enumerate(valid) if says in train]
    assert shared(said_N2, said_V2).tolist() == expected


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


def test_without_a_policy_no_facts_are_taken(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "Collector", not_near)
    path = write(tmp_path / "a.jsonl", GOOD)
    found = choose_rows([path], [], ALL)
    assert found == Chosen(check_files([path]), [], None)
    assert [each.name for each in cache.iterdir()] == ["rows"]


def test_another_policy_reads_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [*GOOD, GOOD[0]])
    choose_rows([path], [], DataPolicy(dedup="exact"))
    monkeypatch.setattr(checked, "read_lines", not_near)
    again = choose_rows([path], [], DataPolicy(valid_share=0.5, dedup="exact", min_chars=1))
    assert again.report and again.report.left_out("train") == {"duplicate": 1}


def test_torn_facts_and_those_of_other_rules_are_taken_anew(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, policy = write(tmp_path / "a.jsonl", [*GOOD, GOOD[0]]), DataPolicy(dedup="exact")
    first = choose_rows([path], [], policy)
    (entry,) = (cache / facts.SHELF).iterdir()
    whole = entry.read_bytes()
    for torn in (whole[:-9], b"", whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        entry.write_bytes(torn)
        assert choose_rows([path], [], policy) == first
        assert entry.stat().st_size == len(whole)
    monkeypatch.setattr(facts, "CACHE_VERSION", 0)
    assert facts.recall(entry.stem) is None
    assert choose_rows([path], [], policy) == first


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file in its place")
    path = write(tmp_path / "a.jsonl", [*GOOD, GOOD[0]])
    found = choose_rows([path], [], DataPolicy(dedup="near", near_threshold=0.8))
    assert found.report and found.report.files[0].left_out["duplicate"] == 1


def test_entries_that_nobody_used_for_a_month_go(cache: Path) -> None:
    import os
    import time

    for name in ("old", "new"):
        shelf.write("kind", name, {"x": np.arange(3)}, {"a": 1})
    os.utime(cache / "kind" / "old.npz", (time.time() - 31 * 86400,) * 2)
    found = shelf.read("kind", "new")
    assert found and found[0]["x"].tolist() == [0, 1, 2] and found[1] == {"a": 1}
    shelf.write("kind", "newer", {}, {})
    assert sorted(each.name for each in (cache / "kind").iterdir()) == ["new.npz", "newer.npz"]


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
            assert [document.line for document in made.documents] == [n for _, n in lines_of(side)]
            assert made.rows == side[0].used
            if workers:
                shutil.rmtree(tmp_path / "cache" / "documents")
        again = open_dataset(side, model, not_near, 64)
        lines += [document.line for document in again.documents]
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


def test_rows_that_differ_in_calls_or_rejected_answers_are_not_near() -> None:
    def row(said: dict[str, Any]) -> str:
        read = parse_row(said)
        record = Record(read.kind, HERE, 1, read.messages, None, (), read.rejected, read.tools)
        return text_of(record)

    def called(name: str, **arguments: object) -> dict[str, object]:
        call = {"function": {"name": name, "arguments": arguments}}
        asked = {"role": "user", "content": "please do what I asked you for before"}
        return {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]}

    pair = {"prompt": "which of both?", "chosen": "this one and no other, please"}
    texts = [
        row(called("add", first=1, second=2)),
        row(called("weather", town="Ulm", days="all of next week")),
        row({**called("add", first=1, second=2), "tools": [{"name": "multiply"}]}),
        row({**pair, "rejected": "none of them would do, I am afraid"}),
        row({**pair, "rejected": "ask somebody else, who knows more of it"}),
    ]
    assert not len(near.near_pairs(texts, len(texts), 0.8))


def test_facts_of_other_bytes_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is another one while it is read, and then what it was."""
    rows = [json.dumps({"text": says}) + "\n" for says in ("short", "a row of several words")]
    path, policy, listen = tmp_path / "train.jsonl", DataPolicy(min_chars=10), checked._listen
    path.write_text("".join(rows))

    def disturbed(*given: Any) -> None:
        path.write_text("".join(reversed(rows)))
        listen(*given)

    monkeypatch.setattr(checked, "_listen", disturbed)
    with pytest.raises(DataError, match="changed while it was read"):
        choose_rows([path], [], policy)
    monkeypatch.setattr(checked, "_listen", listen)
    path.write_text("".join(rows))
    (file,) = choose_rows([path], [], policy).train
    assert file.chosen == Mask.of(np.array([2]))
