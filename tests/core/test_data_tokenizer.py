"""Loading tokenizers from folders, and the tokens that end a turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.core.tiny_tokenizer import Family, make_tokenizer, tiny_tokenizer
from vox_core.data.messages import Message
from vox_core.data.render import Renderer
from vox_core.data.rows import Record
from vox_core.data.tokenizer import end_of_turn_ids, load_tokenizer, stop_ids, templated
from vox_core.errors import ConfigError, DataError


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


# --- another chat template ------------------------------------------------------------------------

TALK = (Message("user", "How?"), Message("assistant", "So."))
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\nHow?\n\n### Response:\n"
)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`saved(family)` -> a folder with its tokenizer."""
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))

    def save(family: str | Family) -> Path:
        made = tiny_tokenizer(family) if isinstance(family, str) else make_tokenizer(family)
        made.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


def trained(folder: Path, talk: tuple[Message, ...] = TALK) -> tuple[str, str]:
    """A conversation under the template of a folder: what comes first, and what is trained."""
    renderer = Renderer(load_tokenizer(folder))
    rendered = renderer.render(Record("chat", Path("x"), 1, talk))
    (span,) = rendered.spans
    assert span.closed
    return rendered.text[: span.start], rendered.text[span.start : span.stop]


@pytest.mark.parametrize(
    ("family", "template", "before", "answer", "ends", "notes"),
    [
        (
            Family(None, ("<|im_start|>", "<|im_end|>"), "<|endoftext|>"),
            "chatml",
            "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n",
            "So.<|im_end|>",
            {"<|im_end|>", "<|endoftext|>"},
            (),
        ),
        (
            "base",
            "chatml",
            "<|im_start|>user\nHow?<|endoftext|>\n<|im_start|>assistant\n",
            "So.<|endoftext|>",
            {"<|endoftext|>"},
            ("chatml: a turn ends with <|endoftext|>, because the tokenizer has no <|im_end|>",),
        ),
        ("base", "alpaca", ALPACA, "So.<|endoftext|>", {"<|endoftext|>"}, ()),
    ],
)
def test_a_named_template_ends_turns_with_a_token_of_the_tokenizer(
    saved, family, template: str, before: str, answer: str, ends: set[str], notes: tuple[str, ...]
) -> None:
    model = saved(family)
    folder, told = templated(model, template)
    assert (trained(folder), told) == ((before, answer), notes)
    tokenizer = load_tokenizer(folder)
    assert {*tokenizer.convert_ids_to_tokens(sorted(end_of_turn_ids(tokenizer)))} == ends
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert {*tokenizer.convert_ids_to_tokens(stops)} == ends
    assert templated(model, template) == (folder, notes)
    assert load_tokenizer(model).chat_template is None


def test_a_named_template_begins_as_the_tokenizer_does(saved) -> None:
    folder, _ = templated(saved("llama3"), "alpaca")
    before, answer = trained(folder)
    assert (before, answer) == (f"<|begin_of_text|>{ALPACA}", "So.<|end_of_text|>")


def test_alpaca_has_a_place_for_a_system_message_first(saved) -> None:
    before, _ = trained(templated(saved("base"), "alpaca")[0], (Message("system", "Be."), *TALK))
    assert before == "Be.\n\n### Instruction:\nHow?\n\n### Response:\n"


def test_a_file_takes_the_place_of_the_models_own_templates(saved, tmp_path: Path) -> None:
    model, file = saved("llama3"), tmp_path / "my.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{{ eos_token }}{% endfor %}")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "a"}]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("b")
    folder, notes = templated(model, file)
    assert notes == () and load_tokenizer(folder).chat_template == file.read_text()
    (model / "chat_template.jinja").write_text(file.read_text())
    assert templated(model, file).folder == model  # it is the model's own


def test_a_template_that_is_none_is_told(saved, tmp_path: Path) -> None:
    model, file = saved("base"), tmp_path / "my.jinja"
    with pytest.raises(ConfigError) as missing:
        templated(model, "chatlm")
    assert "chatml, alpaca, or a Jinja file" in str(missing.value)
    file.write_text("{% for m in messages %}")
    with pytest.raises(DataError) as wrong:
        templated(model, file)
    assert (wrong.value.code, "cannot be compiled" in str(wrong.value)) == ("VOX-D005", True)
    assert not [*(tmp_path / "cache" / "templates").iterdir()]


def test_a_template_that_takes_too_much_is_refused_before_rows_are_read(
    saved, tmp_path: Path
) -> None:
    model, file = saved("base"), tmp_path / "my.jinja"
    file.write_text("{{ 'a' * 10**10 }}")
    with pytest.raises(DataError, match="more time or memory") as caught:
        templated(model, file)
    assert caught.value.where == f"--template {file}"
    assert not [*(tmp_path / "cache" / "templates").iterdir()]
