"""`vox model new`: weights, configuration, tokenizer, and that what it makes can be trained."""

from __future__ import annotations

import json
import math
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import vox_core as vox
from vox_core.api.rows import check_files
from vox_core.cli import failures, root
from vox_core.errors import VoxError
from vox_scratch.model import _without_bars, new_model
from vox_scratch.tokenizer import bytes_per_token
from vox_testing.tiny import VOCABULARY, make_model

HOSTILE = "naïve 你好 \t  שלום 🙂\n\n\x7f e\u0301 \u2028 <|im_end|> ½"


@pytest.fixture(scope="module")
def likes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def like(family: str) -> str:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = str(make_model(family, folder, away=True))
        return made[family]

    return like


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "train.txt"
    path.write_text("".join(f"the cat number {n} sat on the mät\n" for n in range(400)))
    return path


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_the_weights_are_the_familys_own_random_ones(likes, tmp_path: Path) -> None:
    made = new_model(tmp_path / "new", like=likes("llama"), values={"initializer_range": 0.02})
    weights = load_file(made.path / "model.safetensors")
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    assert made.parameters == sum(array.size for array in weights.values())
    assert made.vocabulary == VOCABULARY
    for name, array in weights.items():
        if name.endswith("norm.weight"):
            assert (array == 1).all()
        else:  # four standard errors of a standard deviation
            assert abs(array.std() / 0.02 - 1) < 4 / math.sqrt(2 * array.size), name
    modes = {stat.S_IMODE(path.stat().st_mode) for path in made.path.iterdir()}
    assert len(modes) == 1, "one may read the weights who may read the rest"


def test_a_seed_gives_the_same_weights_again_and_another_seed_others(likes, tmp_path: Path) -> None:
    seeds = (1, 1, 2)
    made = [
        new_model(tmp_path / str(n), like=likes("llama"), seed=seed) for n, seed in enumerate(seeds)
    ]
    one, same, other = [(each.path / "model.safetensors").read_bytes() for each in made]
    assert one == same != other


def test_the_callers_random_numbers_stay_what_they_were(likes, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    new_model(tmp_path / "new", like=likes("llama"))
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_5", "gemma3", "phi3"]
)
def test_families_with_more_layers_than_the_model_they_are_like(
    likes, tmp_path: Path, family: str
) -> None:
    old = config(Path(likes(family)))
    layers = old["num_hidden_layers"] + 1
    values = {"num_hidden_layers": layers, "initializer_range": 0.02}
    made = new_model(tmp_path / "new", like=likes(family), values=values)
    new = config(made.path)
    assert new["model_type"] == old["model_type"] == made.model_type
    assert new["num_hidden_layers"] == layers
    if types := old.get("layer_types"):
        assert new["layer_types"] == [*types, types[0]]
    assert made.vocabulary == new["vocab_size"] == VOCABULARY
    kept = {"hidden_size", "rms_norm_eps", "num_key_value_heads", "bos_token_id", "eos_token_id"}
    assert {name: new[name] for name in kept} == {name: old[name] for name in kept}
    run = vox.train(
        model=made.path,
        data=[{"text": "a text to learn"}] * 2,
        method="full",
        backend="cpu",
        dtype="fp32",
        max_steps=1,
        out=tmp_path / "run",
    )
    assert run.losses == [pytest.approx(math.log(VOCABULARY), rel=0.05)]


def test_a_value_may_be_left_out(likes, tmp_path: Path) -> None:
    made = new_model(tmp_path / "new", like=likes("mistral"), values={"sliding_window": None})
    assert config(Path(likes("mistral")))["sliding_window"] == 16
    assert config(made.path)["sliding_window"] is None


@pytest.mark.parametrize("kind", ["vit", "unheard-of"])
def test_what_is_no_causal_language_model(likes, tmp_path: Path, kind: str) -> None:
    like = tmp_path / "like"
    shutil.copytree(likes("llama"), like)
    (like / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(VoxError, match="VOX-C002") as caught:
        new_model(tmp_path / "new", like=str(like))
    assert "does not make a model" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({"hidden_size": 64}, (128, 8, 4)),
        ({"hidden_size": 48}, (128, 6, 3)),
        ({"hidden_size": 40}, (128, 5, 1)),
        ({"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4}, (96, 4, 1)),
        ({"hidden_size": 128, "num_key_value_heads": 2}, (256, 16, 2)),
        ({"hidden_size": 32}, (64, 4, 2)),
        ({"num_attention_heads": 6}, (64, 6, 2)),
        ({"num_attention_heads": 3}, (64, 3, 1)),
    ],
)
def test_other_sizes_follow_the_width(likes, tmp_path: Path, values, sizes) -> None:
    new = config(new_model(tmp_path / "new", like=likes("qwen3"), values=values).path)
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
    assert tuple(new[name] for name in names) == sizes


@pytest.mark.parametrize(
    "values",
    [{"num_hidden_layers": 3, "hidden_size": 64}, {"n_layer": 3, "n_embd": 64, "n_positions": 32}],
)
def test_a_family_with_names_of_its_own_takes_the_usual_ones_too(
    likes, tmp_path: Path, values
) -> None:
    new = config(new_model(tmp_path / "new", like=likes("gpt2"), values=values).path)
    heads = 2 * config(Path(likes("gpt2")))["n_head"]
    assert (new["n_layer"], new["n_embd"], new["n_head"]) == (3, 64, heads)
    assert not {"num_hidden_layers", "hidden_size", "num_attention_heads"} & new.keys()
    assert (new["n_positions"] == 32) == ("n_positions" in values)
    with pytest.raises(VoxError, match="did you mean n_layer"):
        new_model(tmp_path / "other", like=likes("gpt2"), values={"n_layers": 3})


def test_another_name_for_a_usual_one_changes_nothing(likes, tmp_path: Path, monkeypatch) -> None:
    from transformers import Qwen3Config

    monkeypatch.setattr(Qwen3Config, "attribute_map", {"groups": "num_key_value_heads"})
    values = {"hidden_size": 64}
    new = config(new_model(tmp_path / "new", like=likes("qwen3"), values=values).path)
    assert new["num_key_value_heads"] == 4, "it follows the width"


def test_a_tokenizer_of_its_own_keeps_every_text(likes, text: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made = new_model(tmp_path / "new", like=likes("llama"), data=[text], vocab=300)
    new, old = (AutoTokenizer.from_pretrained(path) for path in (made.path, likes("llama")))
    assert made.vocabulary == len(new) == config(made.path)["vocab_size"] == 300
    for each in (text.read_text(), HOSTILE):
        ids = new(each, add_special_tokens=False)["input_ids"]
        assert new.decode(ids, clean_up_tokenization_spaces=False) == each
        assert max(ids) < 300
    ids = new(text.read_text())["input_ids"]
    assert made.bytes_per_token == pytest.approx(len(text.read_bytes()) / len(ids), rel=1e-3)
    assert len(ids) < len(old(text.read_text())["input_ids"]) / 3, "it knows the words"
    assert new.chat_template is None
    assert old.chat_template is not None
    for name in ("bos_token", "eos_token", "pad_token"):
        assert getattr(new, name) == getattr(old, name)
        assert config(made.path)[f"{name}_id"] == getattr(new, f"{name}_id")
    generation = json.loads((made.path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == new.eos_token_id


def test_rows_of_every_form_train_the_tokenizer(likes, tmp_path: Path) -> None:
    rows = [{"prompt": "abcabc " * 30, "completion": "xyzxyz " * 30}]
    rows += [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]}
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = new_model(tmp_path / "new", like=likes("llama"), data=[path], vocab=280)
    tokens = json.loads((made.path / "tokenizer.json").read_text())["model"]["vocab"]
    assert {"abcabc", "xyzxyz"} <= {token.removeprefix("Ġ") for token in tokens}


def test_tools_and_calls_train_the_tokenizer_as_templates_render_them(
    likes, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    function = {"name": "f", "description": "größe " * 30, "parameters": {"type": "object"}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"ort": "münchen " * 30}}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    rows = [{"messages": turns, "tools": [{"type": "function", "function": function}]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = new_model(tmp_path / "new", like=likes("llama"), data=[path], vocab=400)
    tokenizer = AutoTokenizer.from_pretrained(made.path)
    for word in (" größe", " münchen"):
        assert len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1


def test_bytes_per_token_are_those_of_a_million_characters(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    texts = "a" * 999_999, "üüü", "ü"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def tokenizer(text: str, **_: object) -> dict[str, str]:
        return {"input_ids": text}  # a token for each character

    assert bytes_per_token(tokenizer, check_files([rows])) == 1_000_001 / 1_000_000


@pytest.mark.parametrize("shown", [True, False])
def test_transformers_bars_are_off_and_then_as_they_were(
    likes, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    from transformers.utils import logging

    like = likes("llama")
    monkeypatch.setattr(logging, "_tqdm_active", shown)
    capsys.readouterr()
    new_model(tmp_path / "new", like=like)
    assert "shards" not in capsys.readouterr().err
    assert logging.is_progress_bar_enabled() == shown
    with suppress(KeyboardInterrupt), _without_bars():
        assert not logging.is_progress_bar_enabled()
        raise KeyboardInterrupt
    assert logging.is_progress_bar_enabled() == shown


def test_training_a_tokenizer_shows_progress(likes, text: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(1000)))
    shown: list[tuple[str, int, int]] = []
    new_model(
        tmp_path / "new",
        like=likes("llama"),
        data=[text, rows],
        vocab=300,
        progress=lambda *told: shown.append(told),
    )
    assert {(label, total) for label, _, total in shown} == {("training a tokenizer", shown[0][2])}
    done = [each for _, each, _ in shown]
    assert len(done) == 1001
    assert done == sorted({*done}), "each more than the one before"
    assert done[0] == 0
    assert 0.99 < done[-1] / shown[0][2] < 1


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_it_learns_from_nothing(likes, text: Path, tmp_path: Path, backend: str) -> None:
    rows = [{"text": line} for line in text.read_text().splitlines()]
    made = new_model(
        tmp_path / "new",
        like=likes("llama"),
        values={"initializer_range": 0.02},
        data=[text],
        vocab=320,
    )
    run = vox.train(
        model=made.path,
        data=rows,
        valid=rows[:8],
        method="full",
        backend=backend,
        dtype="fp32",
        lr=3e-3,
        epochs=3,
        batch_size=8,
        out=tmp_path / "run",
    )
    before, after = run.report.valid_before, run.report.valid_after
    assert before == pytest.approx(math.log(320), rel=0.02), "a uniform guess"
    assert after < 0.5 * before
    assert not [each for each in run.report.warnings if "loss" in each or "lr" in each]
    again = new_model(tmp_path / "again", like=str(run.path))
    assert again.parameters == made.parameters, "a run stands for its model"
    with vox.load(run, backend=backend) as model:
        assert "sat" in model.generate("the cat number 7", max_tokens=12)


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ({"values": {"hiden_size": 64}}, "C002", "did you mean hidden_size?"),
        ({"values": {"hidden_size": "64"}}, "C002", "a value such as 32"),
        ({"values": {"hidden_size": True}}, "C002", "a value such as 32"),
        ({"values": {"vocab_size": 64}}, "C002", "with --data and --vocab"),
        ({"values": {"num_hidden_layers": 0}}, "C002", "a value such as"),
        ({"values": {"num_attention_heads": 5}}, "C002", "does not make a model"),
        ({"values": {"num_hidden_layers": -1}}, "C002", "a value such as"),
        ({"values": {"num_hidden_layers": None}}, "C002", "does not make a model"),
        ({"values": {"hidden_size": None}}, "C002", "does not make a model"),
        ({"values": {"hidden_size": 0}}, "C002", "a value such as"),
        ({"values": {"hidden_size": -32}}, "C002", "a value such as"),
        ({"values": {"hidden_size": 33}}, "C002", "no multiple of 8, the size of a head"),
        ({"values": {"bos_token_id": 5}}, "C002", "no such value"),
        ({"values": {"max_position_embeddings": -5}}, "C002", "a value such as 512"),
        ({"values": {"rms_norm_eps": math.nan}}, "C002", "not finite"),
        ({"vocab": 300}, "C004", "--data"),
        ({"data": ["train.txt"], "vocab": 259}, "C002", "at least 260"),
        ({"data": ["none.txt"]}, "D001", "none.txt"),
        ({"data": ["empty.jsonl"]}, "D002", "empty.jsonl"),
        ({"data": ["bad.jsonl"]}, "D003", "or name other files with --data"),
        ({"data": ["book.md"]}, "D003", "rename the file"),
    ],
)
def test_what_does_not_make_a_model(
    likes, text: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], code: str, said: str
) -> None:
    monkeypatch.chdir(text.parent)
    Path("empty.jsonl").touch()
    Path("book.md").write_text("Once upon a time\n")
    Path("bad.jsonl").write_text('{"text": "x"}\n{"text": 3}\n')
    given = {**given, "data": [Path(each) for each in given.get("data", ())]}
    with pytest.raises(VoxError) as caught:
        new_model(Path("new"), like=likes("llama"), **given)
    assert caught.value.code == f"VOX-{code}"
    assert said in str(caught.value)
    assert sorted(path.name for path in Path().iterdir()) == [
        "bad.jsonl",
        "book.md",
        "empty.jsonl",
        "train.txt",
    ]


def test_only_byte_level_bpe_is_trained(likes, text: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers

    byte_tokens = ["<unk>", *(f"<0x{n:02X}>" for n in range(256))]
    falling_back = Tokenizer(
        models.BPE(
            {t: id for id, t in enumerate(byte_tokens)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    falling_back.normalizer = normalizers.Lowercase()
    falling_back.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    for number, tokenizer in enumerate((falling_back, unigram)):
        like = tmp_path / f"like{number}"
        shutil.copytree(likes("llama"), like)
        tokenizer.add_special_tokens(["<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"])
        tokenizer.save(str(like / "tokenizer.json"))
        with pytest.raises(VoxError, match="cannot be trained"):
            new_model(tmp_path / "new", like=str(like), data=[text], vocab=1000)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("within", [False, True])
def test_the_tokens_around_a_text_are_renumbered(
    likes, text: Path, tmp_path: Path, within: bool
) -> None:
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer

    like = tmp_path / "like"
    shutil.copytree(likes("llama"), like)
    tokenizer = Tokenizer.from_file(str(like / "tokenizer.json"))
    bos = "<|endoftext|>"
    around = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    within_sequence = processors.Sequence([processors.ByteLevel(trim_offsets=False), around])
    tokenizer.post_processor = within_sequence if within else around  # as Llama 3 has it
    tokenizer.save(str(like / "tokenizer.json"))
    made = new_model(tmp_path / "new", like=str(like), data=[text], vocab=300)
    new, old = (AutoTokenizer.from_pretrained(path) for path in (made.path, like))
    assert old("the cat")["input_ids"][0] == old.bos_token_id == 259
    assert new("the cat")["input_ids"][0] == new.bos_token_id != 259


def test_a_disk_without_room(likes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vox_core.files.free_space", lambda path: (path.parent, 1000))
    with pytest.raises(VoxError, match="VOX-S001") as caught:
        new_model(tmp_path / "new", like=likes("llama"))
    assert "or give another OUT" in str(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_a_model_to_imitate_needs_no_weights(likes, tmp_path: Path) -> None:
    like = tmp_path / "like"
    shutil.copytree(likes("llama"), like, ignore=shutil.ignore_patterns("*.safetensors"))
    values = json.loads((like / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (like / "config.json").write_text(json.dumps(values))
    made = new_model(tmp_path / "new", like=str(like))
    assert "quantization_config" not in config(made.path)


def test_an_adapter_stands_for_its_base(likes, tmp_path: Path) -> None:
    run = vox.train(
        model=likes("llama"),
        data=[{"text": "a text to learn"}] * 2,
        backend="cpu",
        max_steps=1,
        out=tmp_path / "run",
    )
    made = new_model(tmp_path / "new", like=str(run.path))
    assert made.like == Path(likes("llama")).name
    assert config(made.path)["hidden_size"] == config(Path(likes("llama")))["hidden_size"]


def test_the_command(likes, text: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(text.parent)
    asked = ["--like", likes("llama"), "--set", "num_hidden_layers=1", "--set", "hidden_act=gelu"]
    asked += ["--data", "train.txt", "--vocab", "300"]
    assert failures.run(root, ["model", "new", "new", *asked]) == 0
    shown = capsys.readouterr().out
    assert "vocabulary    300 tokens, " in shown
    assert "next: vox train train.txt --model new --method full --lr 1e-3" in shown
    new = config(Path("new"))
    assert (new["num_hidden_layers"], new["hidden_act"]) == (1, "gelu")
    assert failures.run(root, ["model", "new", "new", *asked]) == 2
    refused = capsys.readouterr().err
    assert "VOX-O001" in refused and "give another OUT" in refused
    assert failures.run(root, ["model", "new", "other", *asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["vocabulary"], told["model_type"]) == ("other", 300, "llama")
    assert (Path("new") / "model.safetensors").read_bytes() == (
        Path("other") / "model.safetensors"
    ).read_bytes()
    assert failures.run(root, ["model", "new", "few", *asked[:-1], "99999"]) == 0
    assert "the data has no more pairs to merge" in capsys.readouterr().out
    assert failures.run(root, ["model", "new", "third", "--set", "x"]) == 2
    assert "expected NAME=VALUE" in capsys.readouterr().err
