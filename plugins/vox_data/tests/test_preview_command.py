"""`vox data preview` in the terminal: what is marked, and that data do not steer it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.core.tiny_tokenizer import tiny_tokenizer

from vox_core import models
from vox_core.models import LocalModel
from vox_data import cli

LOADING = "loading the tokenizer …\n"
ROWS = [
    {"prompt": "how?", "completion": "so"},
    {"prompt": "\x1b[31mred\u202e", "completion": "a \x07 word\nand a number"},
    {"text": "the <|im_end|> answer"},
]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data file, and a model that is a tokenizer alone."""
    folder = tmp_path / "model"
    tiny_tokenizer("chatml").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 400}))
    found = LocalModel(folder, "tiny", None, None, "llama")
    monkeypatch.setattr(models, "resolve", lambda *_, **__: found)
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def test_what_is_trained_stands_in_brackets(vox, data: Path) -> None:
    done = vox("data", "preview", "--data", data)
    assert (done.code, done.err) == (0, LOADING)
    assert "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n⟦so<|im_end|>⟧\n" in done.out
    assert f"── {data}:1, prompt/completion, " in done.out
    assert f"── {data}:3, text, " in done.out and "rendered-text ──" in done.out
    assert "rows     3 of 3, at most 2,048 tokens each" in done.out
    assert "3 rows with a trained end-of-turn token" in done.out
    assert "markers; nothing needs to be done [no-markers]" in done.out
    assert re.search(rf"warning: 1 row: .* \({data}:3\); .* \[rendered-text\]", done.out)


def test_an_objective_shows_the_sides_of_a_pair(vox, data: Path) -> None:
    pair = {"prompt": "how?", "chosen": "so", "rejected": "a word"}
    data.write_text("\n".join([json.dumps(pair)] * 2))
    done = vox("data", "preview", "--data", data, "--objective", "dpo", "--row", "1")
    assert (done.code, done.err) == (0, LOADING)
    chosen, rejected = done.out.split(f"── {data}:1, ")[1:]
    assert chosen.startswith("chosen, ") and "⟦so<" in chosen
    assert rejected.startswith("rejected, ") and "⟦a word<" in rejected
    assert "rows     1 of 2, " in done.out and "audited  2 rows, " in done.out
    assert "; 2 rows with a trained end-of-turn token" in done.out


def test_data_do_not_steer_the_terminal(vox, data: Path) -> None:
    done = vox("data", "preview", "--data", data, "--row", "2")
    assert "\\x1b[31mred\\u202e<|im_end|>" in done.out
    assert "⟦a \\x07 word\nand a number<|im_end|>⟧" in done.out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", done.out)


def test_colours_on_a_terminal_of_those_who_want_them(
    vox, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_colourful", lambda: True)
    done = vox("data", "preview", "--data", data, "--row", "2")
    assert "\x1b[30m\x1b[42ma \\x07 word\x1b[0m\n\x1b[30m\x1b[42mand a number\x1b[0m" in done.out
    assert "\x1b[30m\x1b[42m\x1b[1m<|im_end|>\x1b[0m" in done.out
    assert "⟦" not in done.out and "\\x1b[31mred" in done.out


@pytest.mark.parametrize(
    ("terminal", "environment", "wanted"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_when_there_are_colours(
    terminal: bool, environment: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert cli._colourful() is wanted


def test_weights_on_request(vox, data: Path) -> None:
    done = vox("data", "preview", "--data", data, "--row", "1", "--weights")
    assert "⟦so<|im_end|>⟧{1}\n" in done.out


def test_as_json(vox, data: Path) -> None:
    found = json.loads(vox("data", "preview", "--data", data, "-n", 2, "--json").out)
    assert len(found["shown"]) == 2
    row = found["shown"][0]
    assert len(row["tokens"]) == len(row["ids"]) == len(row["weights"])
    assert [each["id"] for each in found["audit"]["findings"]] == ["rendered-text", "no-markers"]
    assert (found["model"], found["rows"], found["audited"]) == ("tiny", 3, 3)


def test_a_table_with_other_names_under_a_policy(vox, data: Path) -> None:
    table = data.parent / "rows.csv"
    table.write_text("q,a,rating\nhow?,so,1\nwhy?,a word,5\nwho?,a number,5\n")
    Path("vox.toml").write_text('[data.fields]\nprompt = "q"\ncompletion = "a"\n')
    asked = ("data", "preview", "--data", table, "--min-rating", 3)
    found = json.loads(vox(*asked, "--json").out)
    assert (found["rows"], found["audited"]) == (2, 2)
    assert [(row["file"], row["line"]) for row in found["shown"]] == [
        (str(table), 2),
        (str(table), 3),
    ]
    assert "user\nwhy?<|im_end|>" in "".join(found["shown"][0]["tokens"])
    refused = vox(*asked, "--row", "1")
    assert refused.code == 2 and "error[VOX-D051]" in refused.err
    assert "found:    left out by the policy of the data" in refused.err


def test_only_the_rows_that_are_shown_are_audited_where_all_would_take_long(
    vox, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vox_data.preview.QUICK_BYTES", 10)
    row = ("data", "preview", "--data", data, "--row", "1", "--json")
    assert json.loads(vox(*row).out)["audited"] == 1
    assert json.loads(vox(*row, "--audit").out)["audited"] == 3


def test_what_would_stop_a_run_is_shown_and_told(vox, data: Path) -> None:
    config = data.parent / "model" / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    done = vox("data", "preview", "--data", data, "-n", 1)
    assert done.code == 2
    assert "error[VOX-D050]" in done.err and "[outside-vocabulary]" in done.err
    assert "── " in done.out and "error: 3 rows: a token that the model has no" in done.out
    told = vox("data", "preview", "--data", data, "-n", 1, "--json")
    assert told.code == 2 and json.loads(told.out)["error"]["code"] == "VOX-D050"


def test_a_page_is_written_over_a_page_and_over_nothing_else(vox, data: Path) -> None:
    page, before = data.parent / "page.html", data.read_bytes()
    for _ in range(2):
        done = vox("data", "preview", "--data", data, "--html", page)
        assert (done.code, done.err) == (0, LOADING)
        assert "⟦" not in done.out and str(page) in done.out
    assert page.read_text().startswith("<!doctype html>")
    refused = vox("data", "preview", "--data", data, "--html", data)
    assert refused.code == 2 and "error[VOX-O001]" in refused.err
    assert data.read_bytes() == before
