"""Loading tokenizers from folders, and the tokens that end a turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.core.tiny_tokenizer import tiny_tokenizer
from vox_core.data.tokenizer import end_of_turn_ids, load_tokenizer, stop_ids
from vox_core.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer("llama3").save_pretrained(tmp_path)
    return tmp_path


def names(family: str) -> set[str]:
    tokenizer = tiny_tokenizer(family)
    return set(tokenizer.convert_ids_to_tokens(sorted(end_of_turn_ids(tokenizer))))


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        ("chatml", {"<|im_end|>"}),
        ("gemma", {"<end_of_turn>", "<eos>"}),
        ("llama3", {"<|eot_id|>", "<|end_of_text|>"}),
        ("generation", {"<|im_end|>", "<|endoftext|>"}),
        ("harmony", {"<|end|>", "<|return|>"}),
        ("last_closed", {"</s>"}),  # and not <|user|>, which opens the next turn
        ("never_closed", {"</s>"}),
        ("base", {"<|endoftext|>"}),
    ],
)
def test_the_tokens_that_end_a_turn(family: str, tokens: set[str]) -> None:
    assert names(family) == tokens


def test_a_loaded_tokenizer_is_the_saved_one(folder: Path) -> None:
    tokenizer, saved = load_tokenizer(folder), tiny_tokenizer("llama3")
    assert tokenizer("hello there")["input_ids"] == saved("hello there")["input_ids"]
    assert tokenizer.chat_template == saved.chat_template


def test_generation_config_names_more_tokens_that_stop(folder: Path) -> None:
    assert len(stop_ids(load_tokenizer(folder))) == 1
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|end_header_id|>", "Ġanswer"])
    config = folder / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": ids}))
    assert stop_ids(tokenizer) == {tokenizer.eos_token_id, *ids[:2]}  # a word stops nothing
    config.write_text(json.dumps({"eos_token_id": ids[0]}))
    assert stop_ids(tokenizer) == {tokenizer.eos_token_id, ids[0]}
    config.write_text("{")
    with pytest.raises(DataError, match="tokenizer cannot be used") as caught:
        stop_ids(tokenizer)
    assert caught.value.where == str(config)


def test_a_tokenizer_in_memory_reads_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    assert len(stop_ids(tiny_tokenizer("base"))) == 1


@pytest.mark.parametrize("damage", ["absent", "corrupt", "code"])
def test_a_tokenizer_that_cannot_be_loaded(folder: Path, damage: str) -> None:
    if damage == "absent":
        for path in folder.iterdir():
            path.unlink()
    if damage == "corrupt":
        (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    if damage == "code":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()
        auto_map = {"AutoTokenizer": ["code.Tokenizer", None]}
        (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    assert caught.value.code == "VOX-D005"
    assert caught.value.where == str(folder)
