"""The audit before a run: warnings are told and kept, and errors stop it before it starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from vox_core.contract import Notice
from vox_core.errors import DataError
from vox_core.run.train import train


def test_warnings_are_told_and_kept(tiny, settings, data) -> None:
    long = {"prompt": "Talk?", "completion": "a word " * 99}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    with (data / "train.jsonl").open("a") as file:
        file.write("\n" + json.dumps(long) + "\n" + json.dumps({"messages": turns * 9}))
    events: list[object] = []
    run = train(settings(tiny("llama"), max_steps=1, seq_len=128), observe=events.append).run
    told = [e.message for e in events if isinstance(e, Notice) and e.level == "warning"]
    (cut,) = (message for message in told if "[cut-in-answer]" in message)
    assert cut.startswith("training: 1 row: cut at --seq-len in the middle of an answer")
    assert f"{data / 'train.jsonl'}:7" in cut
    assert not any("mid-turn" in message for message in told)  # once is enough
    assert "1 training row longer than 128 tokens: cut to whole turns" in told
    found = json.loads((run / "preflight.json").read_text())["audit"]
    assert found.keys() == {"training", "validation"}
    ids = [finding["id"] for finding in found["training"]["findings"]]
    assert ids == ["cut-in-answer", "no-markers"]
    assert found["training"]["rows_with_trained_end"] == 7


def test_that_a_long_text_becomes_several_examples_is_no_warning(tiny, settings, tmp_path) -> None:
    (tmp_path / "book.txt").write_text("a word " * 99)
    events: list[object] = []
    given = settings(tiny("llama"), data=[tmp_path / "book.txt"], max_steps=1, seq_len=64)
    warnings = train(given, observe=events.append).warnings
    text = "1 training row longer than 64 tokens: split into several examples"
    assert Notice(text, "info") in events
    assert not [each for each in warnings if "split" in each]


def wrong_model(tiny, folder: Path) -> Path:
    """Its tokenizer has a token that the vocabulary has not."""
    model = shutil.copytree(tiny("llama"), folder)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 300, "content": "Talk"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model


def test_errors_stop_a_run_before_it_starts(tiny, settings, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="masks of the data are wrong") as caught:
        train(settings(wrong_model(tiny, tmp_path / "model")))
    assert caught.value.code == "VOX-D050"
    assert "outside-vocabulary" in str(caught.value) and "train.jsonl:3" in str(caught.value)
    assert not (tmp_path / "run").exists()
