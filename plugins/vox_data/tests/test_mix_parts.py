"""Mixtures: proportions, the draw, and rows that are copied as bytes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vox_core.data.batching import apportion
from vox_core.data.checked import check_files
from vox_core.errors import ConfigError
from vox_data import mix_sources
from vox_data.mix_draw import drawn, largest_rows, mixed, most_rows, permutation
from vox_data.mix_sources import Pool, pool_of, without_duplicates
from vox_data.recipe import MixSource, read_recipe

FIRST_DRAW = [4, 5, 3, 0, 2]
FIRST_ORDER = [7, 1, 6, 4, 3, 5, 0, 2]
weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)
seeds = st.integers(0, 2**63 - 1)


# --- shares ---------------------------------------------------------------------------------------


@given(weights, st.integers(1, 10_000))
def test_shares_are_right_to_within_a_row(weights: list[float], rows: int) -> None:
    counts = apportion(rows, weights)
    assert sum(counts) == rows
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - rows * weight / sum(weights)) < 1 + 1e-6


def test_the_largest_remainders_get_the_rest() -> None:
    assert apportion(10, [0.55, 0.25, 0.2]) == [6, 2, 2]  # 5.5, 2.5, 2: the first of equals
    assert apportion(3, [1, 1]) == [2, 1]
    assert apportion(100, [0.1, 0.2, 0.7]) == [10, 20, 70]


@given(weights, st.data())
def test_the_most_rows_fit(weights: list[float], data: st.DataObject) -> None:
    size = len(weights)
    limits = data.draw(st.lists(st.integers(0, 500), min_size=size, max_size=size))
    most = most_rows(weights, limits)
    assert most is not None
    counts = apportion(most, weights)
    assert all(count <= limit for count, limit in zip(counts, limits, strict=True))
    more = most + 1 + int(sum(weights) / min(weights))  # a whole row more for every source
    assert any(c > limit for c, limit in zip(apportion(more, weights), limits, strict=True))


def test_without_limits_there_is_no_most() -> None:
    assert most_rows([1, 2], [None, None]) is None
    assert most_rows([1, 2], [None, 20]) == 30


limited = st.tuples(st.sampled_from([0.1, 0.2, 0.5, 1, 2, 3, 7, 9]), st.integers(0, 8) | st.none())


@given(st.lists(limited, min_size=1, max_size=5))
@example([(1, 3), (1, None)])  # one more than most_rows
@example([(0.1, 1), (9, None), (9, None), (9, None)])  # rounding is not monotonic
def test_the_largest_number_of_rows_is_the_one_that_counting_finds(
    sources: list[tuple[float, int | None]],
) -> None:
    weights, limits = [weight for weight, _ in sources], [limit for _, limit in sources]
    quotas = [(n + 1) * sum(weights) / w for w, n in sources if n is not None]
    if not quotas:
        assert largest_rows(weights, limits) is None
        return
    fits = [
        rows
        for rows in range(int(min(quotas)) + 2)
        if all(
            limit is None or count <= limit
            for count, limit in zip(apportion(rows, weights), limits, strict=True)
        )
    ]
    assert largest_rows(weights, limits) == fits[-1]


def test_a_search_among_too_many_numbers_ends_with_one_that_fits() -> None:
    weights, limits = [1e-9, 1.0, 1.0], [1, None, None]
    found = largest_rows(weights, limits)
    assert found and found >= (most_rows(weights, limits) or 0) >= 2 * 10**9
    assert apportion(found, weights)[0] <= 1


# --- draw -----------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(0, 200), seeds, st.integers(0, 5))
def test_nothing_is_drawn_twice_before_all_is_drawn(
    rows: int, count: int, seed: int, source: int
) -> None:
    times = Counter(drawn(rows, count, seed, source).tolist())
    assert sum(times.values()) == count
    assert set(times) <= set(range(rows))
    assert all(times[row] in (count // rows, count // rows + 1) for row in range(rows))


def test_the_draw_never_changes() -> None:
    """A recipe gives the same rows after an upgrade: printed by the calls of the first version."""
    assert drawn(8, 5, 42, 0).tolist() == FIRST_DRAW
    assert permutation(8, 42, 0).tolist() == FIRST_ORDER


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), seeds)
def test_a_mixture_loses_nothing(counts: list[int], seed: int) -> None:
    chosen = [np.arange(count, dtype=np.int64) for count in counts]
    sources, rows = mixed(chosen, seed)
    found = sorted(zip(sources.tolist(), rows.tolist(), strict=True))
    assert found == [(s, row) for s, count in enumerate(counts) for row in range(count)]


def pool(path: Path, **source: object) -> Pool:
    (file,) = check_files([path])
    return pool_of(file, MixSource.model_validate({"path": path, **source}))


def test_the_first_of_each_row_is_kept(tmp_path: Path) -> None:
    pools = []
    for number, some in enumerate([["a", "b", "a"], ["c", "b", "d", "d"]]):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
        pools.append(pool(path))
    found = without_duplicates(pools)
    assert [each.row_N.tolist() for each in found] == [[0, 1], [0, 2]]
    assert [each.reasons["duplicate"] for each in found] == [1, 2]


# --- rows -----------------------------------------------------------------------------------------


def copied(paths: list[Path], lanes: list[str | None], order: list[tuple[int, int]]) -> bytes:
    pools = [pool(path, lane=lane) for path, lane in zip(paths, lanes, strict=True)]
    sources, rows = (np.array(column, np.int64) for column in zip(*order, strict=True))
    return b"".join(mix_sources.pieces(pools, lanes, sources, rows))


texts = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)


@settings(max_examples=30)
@given(
    st.lists(st.lists(texts, min_size=1, max_size=8), min_size=1, max_size=3),
    st.integers(1, 200),
    st.integers(1, 40),
    st.data(),
)
def test_rows_are_copied_byte_for_byte(
    sources: list[list[str]], block: int, piece: int, data: st.DataObject
) -> None:
    """Whatever the sizes in which files are read and written."""
    ends = data.draw(st.sampled_from(["\n", "\r\n", "\n\n  \n"]))
    places = [(s, row) for s, rows in enumerate(sources) for row in range(len(rows))]
    order = data.draw(st.permutations(places))
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOX_CACHE", str(Path(name, "cache")))
        patch.setattr(mix_sources, "PIECE_BYTES", piece)
        patch.setattr(mix_sources, "_READ_BYTES", block)
        paths = []
        for number, rows in enumerate(sources):
            lines = [json.dumps({"text": t}, ensure_ascii=bool(number)) for t in rows]
            paths.append(Path(name, str(number)))
            paths[-1].write_bytes((" " * number + ends.join(lines) + ends).encode())
        found = copied(paths, [None] * len(sources), order)
    texts_of = [json.loads(line)["text"] for line in found.splitlines()]
    assert texts_of == [sources[s][row] for s, row in order]


def test_a_lane_is_written_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = ['{"text": "a"}', '{"text": "b", "lane": "own"}', '{"lane": null, "text": "c" }']
    path.write_text("\n".join(rows))
    found = copied([path], ['ö"'], [(0, 2), (0, 1), (0, 0)]).decode().splitlines()
    assert found[1] == rows[1]
    assert found[2] == '{"text": "a", "lane": "\\u00f6\\""}'
    assert [json.loads(row).get("lane") for row in found] == ['ö"', "own", 'ö"']


def test_what_is_wanted_of_a_source(tmp_path: Path) -> None:
    rows = [
        {"category": "a", "rating": 3},
        {"category": "a", "rating": 3.5, "lane": "chat"},
        {"category": "a", "rating": 3, "lane": "maths"},
        {"category": "b", "rating": 3},
        {"rating": 3},
        {"category": "a", "rating": 2.99},
        {"category": "a"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "t", **row}) + "\n" for row in rows))
    found = pool(path, lane="code", lanes=("code", "chat"), categories=("a",), min_rating=3)
    assert found.row_N.tolist() == [0, 1]
    assert found.reasons == {"other lane": 1, "other category": 2, "low rating": 2}
    assert found.others == {
        "other lane": {"maths": 1},
        "other category": {"b": 1},
    }


# --- the recipe -----------------------------------------------------------------------------------


def test_all_faults_of_a_recipe_are_told(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text('sead = 1\nrows = 0\n[[source]]\nwieght = 1\n[[source]]\npath = "a"\ncap = -1')
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    told = "\n".join(caught.value.faults)
    expected = [
        "sead is unknown; did you mean seed?",
        "rows = 0: input should be greater than 0",
        "[[source]] 1: wieght is unknown; did you mean weight?",
        "[[source]] 1: path is missing",
        "[[source]] 2: cap = -1: input should be greater than 0",
    ]
    assert all(one in told for one in expected)
    assert len(caught.value.faults) == len(expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "[[source]] is missing"),
        ("source = []", "there is no [[source]]"),
        ("[[source]]\npath='a'\nweight=1\n[[source]]\npath='b'", "[[source]] 2: weight is missing"),
        ("[[source]]\npath='a'\nrepeat=true", "repeat = true needs weights"),
        ("[[source]]\npath='a'\nweight=nan", "weight = nan"),
        ("source = 3", "source = 3"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mix.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(tmp_path / "mix.toml")
    assert said in "\n".join(caught.value.faults)


def test_a_recipe_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path, text in ((tmp_path / "none.toml", None), (tmp_path / "bad.toml", "a = = 1")):
        if text:
            path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            read_recipe(path)
        assert caught.value.code == "VOX-C003"


def test_paths_are_as_seen_from_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "mix.toml").write_text("[[source]]\npath = 'a/b.jsonl'")
    assert [s.path for s in read_recipe(tmp_path / "mix.toml").source] == [tmp_path / "a/b.jsonl"]
