"""`vox data stats`: what it says, and when it tokenises."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tests.core.tiny_tokenizer import tiny_tokenizer

from vox_core import models
from vox_core.errors import ConfigError
from vox_core.models import LocalModel

ROWS = [
    {"prompt": "how?", "completion": "so", "category": "a"},
    {"prompt": "how?", "completion": "so", "category": "\x1b[31m"},
    {"text": "the answer is a number " * 60},
]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    tiny_tokenizer("chatml").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 400}))
    found = LocalModel(folder, "tiny", None, None, "llama")
    monkeypatch.setattr(models, "resolve", lambda *_, **__: found)


def test_without_a_model_nothing_is_tokenised(vox, data: Path, monkeypatch) -> None:
    monkeypatch.setattr(models, "resolve", None)
    with data.open("a") as file:
        file.write("\n{")
    done = vox("data", "stats", "--data", data)
    assert done.code == 0
    lines = dict(line.split("  ", 1) for line in done.out.splitlines() if line[0] != " ")
    told = {name: text.strip() for name, text in lines.items()}
    assert told["rows"] == "3, 1 more cannot be read: vox data check says why"
    assert told["formats"] == "prompt/completion 67 %, text 33 %"
    assert told["messages"] == "2 user, 2 assistant"
    assert told["duplicates"] == f"1 repetition of 1 row ({data}:2 as {data}:1)"
    assert "tokens" not in told and "--seq-len" not in done.out
    assert "\x1b" not in done.out


@pytest.mark.usefixtures("model")
def test_prompts_are_dropped_where_they_leave_no_room_for_an_answer(vox, data: Path) -> None:
    rows = [{"prompt": "a number " * length} for length in (1, 50, 200)]
    data.write_text("\n".join(map(json.dumps, rows)))
    given = ("data", "stats", data, "--model", "tiny", "--objective", "grpo")
    lengths = json.loads(vox(*given, "--json").out)["train"]["tokens"]["lengths"]
    middle = lengths["percentiles"]["50"]
    for seq_len, dropped in ((middle + 1, 1), (middle, 2)):
        done = vox(*given, "--seq-len", seq_len)
        prompts = "2 prompts" if dropped == 1 else "1 prompt"
        assert f"per row; {prompts}, which the model answers\n" in done.out
        assert "trained" not in done.out
        lines = [line.split() for line in done.out.splitlines()]
        assert ["--seq-len", "rows", "dropped", "tokens", "in", "them"] in lines
        lost = lengths["longest"] + (middle if dropped == 2 else 0)
        share = "33" if dropped == 1 else "67"
        row = [str(seq_len), "*", str(dropped), share, "%", str(lost)]
        assert row in [line[:6] for line in lines]


@pytest.mark.usefixtures("model")
def test_with_a_model_tokens_and_truncation_are_told(vox, data: Path) -> None:
    done = vox("data", "stats", "--data", data, "--model", "tiny", "--seq-len", 128)
    assert done.code == 0
    found = json.loads(vox("data", "stats", "--data", data, "--model", "tiny", "--json").out)
    tokens = found["train"]["tokens"]
    assert tokens["rows"] == 3 and tokens["lengths"]["total"] == tokens["tokens"] > 300
    assert 0 < tokens["trained"] < tokens["tokens"]
    longest = tokens["lengths"]["longest"]
    rows = [line.split() for line in done.out.splitlines()]
    assert ["128", "*", "1", "33", "%", str(longest - 128)] in [row[:6] for row in rows]
    assert "with tiny" in done.out


@pytest.mark.usefixtures("model")
def test_files_are_data_and_what_is_of_chosen_rows_says_so(vox, data: Path) -> None:
    said = vox("data", "stats", data).out
    assert said == vox("data", "stats", "--data", data).out
    asked = ("data", "stats", data, "--model", "tiny")
    assert "filtered rows" not in vox(*asked).out
    some = vox(*asked, "--category", "a").out
    assert "with tiny, in 1 filtered row; the other lines cover all rows" in some


def test_a_model_in_vox_toml_counts_as_named(vox, data: Path, monkeypatch) -> None:
    asked: list[dict[str, object]] = []

    def stop(*_: object, **rest: object) -> None:
        asked.append(rest)
        raise ConfigError("C004", "enough", remedy="none")

    monkeypatch.setattr("vox_data.stats.stats", stop)
    Path("vox.toml").write_text('[train]\nmodel = "m"\n')
    vox("data", "stats", "--data", data)
    Path("vox.toml").write_text("")
    vox("data", "stats", "--data", data)
    assert [rest["tokenise"] for rest in asked] == [True, False]


def test_any_format_with_other_names_is_counted_as_jsonl_is(vox, data: Path) -> None:
    rows = [("how?", "so"), ("why?", "a word"), ("how?", "so"), ("", "b"), ("who?", "a")]
    same = [{"prompt": prompt, "completion": completion} for prompt, completion in rows]
    data.write_text("\n".join(map(json.dumps, same)))
    expected = json.loads(vox("data", "stats", "--data", data, "--json").out)["train"]
    assert (expected["rows"], expected["malformed"]) == (4, 1)
    Path("vox.toml").write_text('[data.fields]\nprompt = "q"\ncompletion = "a.0"\n')
    renamed = [{"q": prompt, "a": [completion]} for prompt, completion in rows]
    array, packed = data.with_name("rows.json"), data.with_name("rows.ndjson.gz")
    array.write_text(json.dumps(renamed, indent=1))
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, renamed)).encode()))
    table = data.with_name("rows.csv")
    table.write_text("".join(f"{q},{a}\n" for q, a in [("q", "a.0"), *rows]))
    for path in (array, packed, table):
        found = json.loads(vox("data", "stats", "--data", path, "--json").out)["train"]
        assert found["files"] == {str(path): 4}
        assert found["duplicates"]["first"] == [[f"{path}:3", f"{path}:1"]]
        for told in ("rows", "malformed", "forms", "characters", "roles", "turns", "languages"):
            assert found[told] == expected[told]


def test_held_out_rows_are_counted_apart(vox, data: Path) -> None:
    done = vox("data", "stats", "--data", data, "--valid", data, "--json")
    found = json.loads(done.out)
    assert found["train"] == found["valid"]
    assert vox("data", "stats", "--data", data, "--valid", data).out.count("formats") == 2


def test_without_data_it_says_so(vox) -> None:
    done = vox("data", "stats")
    assert done.code == 2 and "error[VOX-C004]" in done.err


def test_the_sides_of_pairs_are_documents_not_rows(vox, data: Path, model: None) -> None:
    pair = {"prompt": "how?", "chosen": "so", "rejected": "a word " * 90}
    data.write_text("\n".join([json.dumps(pair)] * 3))
    given = ("--data", data, "--model", "tiny", "--objective", "dpo", "--json")
    tokens = json.loads(vox("data", "stats", *given).out)["train"]["tokens"]
    assert (tokens["rows"], tokens["documents"]) == (3, 6)
    lines = vox("data", "stats", *given[:-1]).out.splitlines()
    assert "of the 6 rows" not in "".join(lines)
    assert "--seq-len  examples cut" in lines[-3]
    assert lines[-1].split()[:5] == ["2048", "*", "0", "0", "%"]


def test_many_different_numbers_are_summarised(vox, data: Path) -> None:
    rows = [{"text": f"text {n}", "rating": n / 8, "difficulty": n % 3} for n in range(1, 101)]
    rows += [{"text": "unrated", "category": f"c{n}"} for n in range(100)]
    data.write_text("\n".join(map(json.dumps, rows)))
    told = dict(line.split(None, 1) for line in vox("data", "stats", data).out.splitlines())
    spread = "p5 0.625, p25 3.125, p50 6.25, p75 9.375, p90 11.25, p95 11.88, p99 12.38"
    ends = "mean 6.312, min 0.125, max 12.5"
    assert told["rating"] == f"{ends}, {spread}, in 50 % of the rows"
    assert told["difficulty"] == "1.0 17 %, 2.0 16 %, 0.0 16 %"
    assert told["category"].startswith("c0 0.5 %, c1 0.5 %, ")
    found = json.loads(vox("data", "stats", data, "--json").out)["train"]["numbers"]
    assert (found["rating"]["rows"], found["rating"]["percentiles"]["50"]) == (100, 6.25)
    assert [*found] == ["rating", "difficulty"]


def test_words_among_numbers_have_no_spread(vox, data: Path) -> None:
    levels = ["hard", *range(20)]
    data.write_text("\n".join(json.dumps({"text": "a", "difficulty": each}) for each in levels))
    assert "difficulty  hard 5 %, 0.0 5 %, " in vox("data", "stats", data).out
