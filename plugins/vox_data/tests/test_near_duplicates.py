"""Near duplicates: MinHash, and the policy that leaves them out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vox_core.contract import DataPolicy
from vox_core.data import row_facts
from vox_core.data.chosen import choose_rows
from vox_core.data.row_facts import row_text
from vox_core.data.rows import parse_row
from vox_core.errors import PluginError
from vox_data import near_duplicates as near

GOOD = [{"text": f"row {n} says something of its own"[: 8 + n % 3]} for n in range(40)]
POLICY = DataPolicy(dedup="near", near_threshold=0.8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def near_pairs(texts: Any, count: int, threshold: float) -> Any:
    return near.near_duplicates(texts, count, threshold)


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
    assert near_pairs(texts, len(texts), 0.8).tolist() == [[1, 0], [2, 0], [6, 5]]
    for threshold in (0.99, 0.999, 1.0):
        assert near_pairs(texts, len(texts), threshold).tolist() == [[1, 0], [6, 5]]
    assert near_pairs([], 0, 0.8).shape == (0, 2)


def test_similarity_is_estimated_within_its_error() -> None:
    """Pairs with a known share of common sequences: below the threshold none goes, above it all."""
    common = [f"w{n}" for n in range(300)]
    first, found = " ".join(common), {}
    for changed in (2, 6, *range(24, 30), 60, 90):  # each changes three of 298 sequences
        spots = {n * (300 // changed) + 2 for n in range(changed)}
        other = " ".join(f"x{changed}" if n in spots else w for n, w in enumerate(common))
        a, b = ({*near.sequences(each).tolist()} for each in (first, other))
        found[len(a & b) / len(a | b)] = len(near_pairs([first, other], 2, 0.7)) == 1
    assert {round(similarity, 1) for similarity in found} >= {1.0, 0.9, 0.6, 0.2}
    assert all(gone == (similarity > 0.7) for similarity, gone in found.items()), found


def test_a_row_goes_for_one_that_stays_and_not_for_one_that_went() -> None:
    words = [f"w{n}" for n in range(300)]
    second = [f"x{n}" if n % 25 == 3 else word for n, word in enumerate(words)]  # J = 0.78
    third = [f"y{n}" if n % 25 == 15 else word for n, word in enumerate(second)]  # 0.78 and 0.61
    texts = [*map(" ".join, (words, second, third))]
    assert near_pairs(texts, 3, 0.7).tolist() == [[1, 0]]
    assert near_pairs(texts[1:], 2, 0.7).tolist() == [[1, 0]]


def test_a_long_text_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole_KH,) = near._signatures([LONG])
    monkeypatch.setattr(near, "_AT_A_TIME", 3)
    assert (next(near._signatures([LONG])) == whole_KH).all()


def test_signatures_are_the_same_in_every_process() -> None:
    """The numbers are what this gave when it was written."""
    (hashes_KH,) = near._signatures(["one two three four"])
    assert hashes_KH[0, :3].tolist() == [76323587, 1157564996, 1555416123]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.sampled_from(WORDS[:3]), max_size=12).map(" ".join), max_size=30))
def test_near_duplicates_are_the_same_each_time_and_the_first_stays(texts: list[str]) -> None:
    pairs = near_pairs(texts, len(texts), 0.8).tolist()
    assert near_pairs(iter(texts), len(texts), 0.8).tolist() == pairs
    gone = [row for row, _ in pairs]
    assert len({*gone}) == len(gone)
    for row, stays in pairs:
        assert stays < row and stays not in gone
    kept = [says for row, says in enumerate(texts) if row not in gone]
    assert len({*kept}) == len(kept), "equal texts are near, too"


def test_a_bucket_that_is_full_costs_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "_DEPTH", 1)
    texts = [LONG, LONG.replace("two", "2"), LONG]
    assert near_pairs(texts, 3, 0.9).tolist() == [[2, 0]]


# --- rows -----------------------------------------------------------------------------------------


def test_near_duplicates_are_on_no_other_side(tmp_path: Path) -> None:
    rows = [{"text": f"{LONG} {n}"} for n in range(30)] + GOOD
    found = choose_rows(
        [write(tmp_path / "a.jsonl", rows)],
        [],
        DataPolicy(dedup="near", near_threshold=0.8, valid_share=0.4),
    )
    files = (*found.train, *found.valid)
    assert [line for line in range(1, 31) if any(file.uses(line) for file in files)] == [1]
    assert found.report.left_out("train")["near duplicate"] == 29


def test_near_duplicates_are_looked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = POLICY
    path = write(tmp_path / "a.jsonl", [{"text": LONG}, *GOOD, {"text": f"{LONG}."}, GOOD[0]])
    first = choose_rows([path], [], policy)
    assert [str(each).rpartition("/")[0] and each.to_json() for each in first.report.duplicates]
    assert [(d.place.line, d.of and d.of.line, d.reason) for d in first.report.duplicates] == [
        (42, 1, "near duplicate"),
        (43, 2, "duplicate"),
    ]
    monkeypatch.setattr(near, "near_duplicates", None)
    monkeypatch.setattr(row_facts, "read_lines", None)
    assert choose_rows([path], [], policy) == first
    with pytest.raises(PluginError, match="not callable"):
        choose_rows([path], [], replace(policy, near_threshold=0.9))


def test_rows_with_an_answer_are_compared_without_their_other_fields(tmp_path: Path) -> None:
    def turns(n: int) -> dict[str, Any]:
        roles = ("user", "assistant", "user")
        return {"messages": [{"role": role, "content": f"{LONG} {n}"} for role in roles]}

    rows = [{**turns(n), "meta": " ".join(str(n * i) for i in range(400, 800))} for n in (1, 2)]
    for name, data in (("a", rows), ("b", [turns(1), turns(2)])):
        found = choose_rows([write(tmp_path / f"{name}.jsonl", data)], [], POLICY)
        assert found.report.left_out("train") == {"near duplicate": 1}, name


def test_validation_rows_that_nearly_are_trained_on(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", [{"text": LONG}, *GOOD])
    valid = write(tmp_path / "v.jsonl", [{"text": "new"}, GOOD[1], {"text": f"{LONG} x"}])
    found = choose_rows([train], [valid], POLICY)
    leaks = [
        (leak.place.line, leak.of and leak.of.line, leak.reason) for leak in found.report.leaks
    ]
    assert leaks == [(2, 3, "duplicate"), (3, 1, "near duplicate")]


def test_rows_that_differ_in_calls_or_rejected_answers_are_not_near() -> None:
    def row(said: dict[str, Any]) -> str:
        return row_text(parse_row(said))

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
    assert not len(near_pairs(texts, len(texts), 0.8))
