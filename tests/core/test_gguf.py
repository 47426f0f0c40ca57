"""GGUF -> Hugging Face: the same logits, the same tokens, or a refusal that says why."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.core.tiny_gguf import (
    CHAT_TEMPLATE,
    byte_tokens,
    gguf_tensors,
    tiny_gguf,
    tiny_model,
    write_gguf,
)
from vox_core.errors import ModelError, OutputError
from vox_core.models import converted
from vox_core.weights import WeightFolder
from vox_formats import gguf_model
from vox_formats.gguf_tokenizer import merges_by_rank

Q8 = gguf.GGMLQuantizationType.Q8_0
TEXTS = [
    "hello hello",
    "12  34 he11o 2024",
    " leading,  two   three\n\n\ttabs",
    "déjà vu — 日本語 👍🏽 ½ ٣",
    "<|im_start|>user\nhello<|im_end|>\n",
    "",
]


def convert_gguf(path: Path, folder: Path) -> None:
    converted.convert_gguf(path, folder, lambda what, done, total: None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama, converted."""
    folder = tmp_path_factory.mktemp("llama")
    convert_gguf(tiny_gguf(folder / "tiny.gguf"), folder / "hf")
    return folder / "hf"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    convert_gguf(tiny_gguf(folder / "tiny.gguf", "gemma3"), folder / "hf")
    return folder / "hf"


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("gemma3", True)])
def test_the_converted_model_is_the_model(tmp_path: Path, family: str, tied: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = tiny_model(family, tied=tied)
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model, family), family)
    convert_gguf(path, tmp_path / "hf")
    converted: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.arange(4, 40).reshape(1, -1)
    with torch.no_grad():
        assert torch.equal(converted(tokens).logits, model(tokens).logits)


def test_weights_are_bfloat16_and_so_says_the_config(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert {info.dtype for info in WeightFolder(llama).tensors.values()} == {"BF16"}


@pytest.mark.parametrize("chunk", [1, 7 * 32, 1 << 20])
def test_quantised_blocks_are_dequantised_whatever_the_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    tensors = gguf_tensors(tiny_model("llama"), "llama")
    kinds = {"token_embd.weight": Q8, "blk.0.attn_v.weight": gguf.GGMLQuantizationType.Q4_1}
    path = write_gguf(tmp_path / "m.gguf", tensors, kinds=kinds)
    monkeypatch.setattr(gguf_model, "CHUNK", chunk)
    convert_gguf(path, tmp_path / "hf")
    weights = WeightFolder(tmp_path / "hf")
    for theirs, ours in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
    ):
        blocks = gguf.quants.quantize(tensors[theirs], kinds[theirs])
        expected = gguf.quants.dequantize(blocks, kinds[theirs])
        read = weights.read(ours)
        np.testing.assert_array_equal(read, expected.astype(read.dtype))


def test_progress_ends_at_the_size_of_the_weights(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    converted.convert_gguf(
        tiny_gguf(tmp_path / "m.gguf"),
        tmp_path / "hf",
        lambda what, done, total: calls.append((done, total)),
    )
    weights = WeightFolder(tmp_path / "hf")
    size = sum(info.nbytes for info in weights.tensors.values())
    assert calls == sorted(calls)
    assert len(calls) == len(weights.tensors)
    assert calls[-1] == (size, size)


# --- config ---------------------------------------------------------------------------------------


def test_the_config_says_what_the_metadata_says(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2
    assert "license: mit" in (llama / "README.md").read_text()


@pytest.mark.parametrize(
    ("written", "factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, 8.0),
        ({"rope.scaling.factor": 8.0}, 8.0),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 8.0}, None),
        ({"rope.scaling.type": "linear"}, None),
    ],
)
def test_linear_rope_scaling_reaches_the_config(
    tmp_path: Path, written: dict[str, str | float], factor: float | None
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in written.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            add(f"llama.{key}", value)

    convert_gguf(tiny_gguf(tmp_path / "m.gguf", change=change), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = None if factor is None else {"rope_type": "linear", "factor": factor}
    assert config.get("rope_scaling") == expected


def test_an_end_of_turn_of_its_own_ends_generation_too(gemma: Path) -> None:
    generation = json.loads((gemma / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 4]


# --- tokenizer ------------------------------------------------------------------------------------


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(llama: Path, text: str) -> None:
    tokenizer = load_tokenizer(llama)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_smollm_cuts_digits_off_before_anything_else(llama: Path) -> None:
    assert load_tokenizer(llama).tokenize("hello  12") == ["hello", "ĠĠ", "1", "2"]


def test_gpt2_does_not_cut_digits(tmp_path: Path) -> None:
    convert_gguf(tiny_gguf(tmp_path / "m.gguf", pre="gpt-2"), tmp_path / "hf")
    assert load_tokenizer(tmp_path / "hf").tokenize("hello  12") == ["hello", "Ġ", "Ġ", "1", "2"]


def test_special_tokens_are_single_and_special(llama: Path) -> None:
    tokenizer = load_tokenizer(llama)
    assert tokenizer.encode("<|im_start|>hello<|im_end|>") == [1, byte_tokens().index("hello"), 2]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert len(tokenizer) == len(byte_tokens())


def test_the_chat_template_comes_along(llama: Path) -> None:
    tokenizer = load_tokenizer(llama)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_gemma_begins_with_bos_and_falls_back_to_bytes(gemma: Path) -> None:
    tokenizer = load_tokenizer(gemma)
    assert tokenizer.tokenize("hello é") == ["hell", "o", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("hello")[0] == tokenizer.bos_token_id == 2
    assert tokenizer.decode(tokenizer.encode("hello é", add_special_tokens=False)) == "hello é"


def test_merges_of_a_vocabulary_without_any() -> None:
    assert merges_by_rank(["a", "b", "c", "bc", "ab", "abc"]) == [
        ("b", "c"),
        ("a", "b"),
        ("ab", "c"),
        ("a", "bc"),
    ]


def test_nothing_here_needs_torch(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from vox_core.models.converted import convert_gguf\n"
        "convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), lambda *progress: None)\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, path, tmp_path / "hf"], check=True)


# --- refusals -------------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    """What `convert_gguf` says of the file, having left nothing behind."""
    with pytest.raises(ModelError) as caught:
        convert_gguf(path, path.parent / "hf")
    assert caught.value.code == "VOX-M008"
    assert [left.name for left in path.parent.iterdir()] == [path.name]
    return str(caught.value)


def test_another_architecture_is_refused_with_what_is_supported(tmp_path: Path) -> None:
    said = refusal(tiny_gguf(tmp_path / "m.gguf", architecture="qwen3"))
    assert "architecture qwen3" in said
    assert "one of llama, gemma3" in said


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    said = refusal(tiny_gguf(tmp_path / "m.gguf", pre="tekken"))
    assert "found gpt2/tekken, expected one of gpt2/gpt-2, gpt2/smollm" in said


def test_missing_and_surplus_tensors_come_together(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_model("llama"), "llama")
    del tensors["blk.1.ffn_up.weight"]
    tensors["rope_freqs.weight"] = np.ones(4, np.float32)
    said = refusal(write_gguf(tmp_path / "m.gguf", tensors))
    assert "tensor blk.1.ffn_up.weight: missing" in said
    assert "tensor rope_freqs.weight: not supported" in said


def test_faults_of_the_metadata_come_together(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for key in ("llama.block_count", "llama.embedding_length"):
            del writer.kv_data[0][key]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    said = refusal(tiny_gguf(tmp_path / "m.gguf", change=change))
    assert "llama.block_count: found None" in said
    assert "llama.embedding_length: found None" in said
    assert "llama.rope.scaling.type: found yarn" in said


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("attention.head_count_kv", 0, "head_count_kv: found 0, expected a number above 0"),
        ("attention.head_count_kv", 4, "blk.1.attn_k.weight: found [16, 32], expected [32, 32]"),
        ("feed_forward_length", 40, "blk.0.ffn_down.weight: found [32, 48], expected [32, 40]"),
        ("rope.dimension_count", 4, "found 4, expected the width of a head, 8"),
    ],
)
def test_metadata_of_another_model_are_refused(
    tmp_path: Path, key: str, value: int, fault: str
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"llama.{key}", None)
        writer.add_uint32(f"llama.{key}", value)

    assert fault in refusal(tiny_gguf(tmp_path / "m.gguf", change=change))


def test_numbers_that_differ_from_layer_to_layer_are_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["llama.attention.head_count_kv"]
        writer.add_head_count_kv([2, 1])

    assert "head_count_kv: found [2, 1]" in refusal(tiny_gguf(tmp_path / "m.gguf", change=change))


def test_gemma_without_its_sliding_window_is_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["gemma3.attention.sliding_window"]

    path = tiny_gguf(tmp_path / "m.gguf", "gemma3", change=change)
    assert "gemma3.attention.sliding_window: found None" in refusal(path)


def test_a_type_without_dequantisation_is_refused(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_model("llama"), "llama")
    tensors["output_norm.weight"] = tensors["output_norm.weight"].astype(np.int8)
    said = refusal(write_gguf(tmp_path / "m.gguf", tensors))
    assert "tensor output_norm.weight: its type I8 cannot be dequantised" in said


def test_tokens_that_stand_twice_are_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[10] = b"hello"

    assert "different tokens" in refusal(tiny_gguf(tmp_path / "m.gguf", change=change))


@pytest.mark.parametrize("key", ["merges", "bos_token_id"])
def test_tokenizer_metadata_that_belong_to_no_tokenizer_are_refused(
    tmp_path: Path, key: str
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token(True)
        del writer.kv_data[0][f"tokenizer.ggml.{key}"]

    assert "tokenizer metadata" in refusal(tiny_gguf(tmp_path / "m.gguf", change=change))


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 5000, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    whole = tiny_gguf(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[:keep])
    assert "a whole GGUF file" in refusal(tmp_path / "m.gguf")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [0, 8, 9])
def test_an_array_longer_than_the_file_ends_at_the_end_of_the_file(
    tmp_path: Path, kind: int
) -> None:
    """The `gguf` package alone would go on for 2**62 elements."""
    key = b"general.tags"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    (tmp_path / "m.gguf").write_bytes(header + struct.pack("<IIQ", 9, kind, 2**62))
    assert "a whole GGUF file" in refusal(tmp_path / "m.gguf")


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    (tmp_path / "hf").mkdir()
    with pytest.raises(OutputError):
        convert_gguf(path, tmp_path / "hf")
    assert list((tmp_path / "hf").iterdir()) == []


# --- the real ones --------------------------------------------------------------------------------


PROSE = (
    "The history of the steam engine begins in the first century, when Hero of Alexandria "
    "described a device called the aeolipile. In 1712 Thomas Newcomen built the first "
    "commercially successful engine that could transmit continuous power to a machine. James "
    "Watt made a critical improvement in 1764 by removing spent steam to a separate vessel for "
    "condensation.\n"
)


@pytest.mark.real_model
def test_smollm2_knows_the_capital_of_france() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from vox_core.models import resolve

    folder = resolve("smollm2-135m").path
    tokenizer = load_tokenizer(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    said = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert said == "The capital of France is Paris.<|im_end|>"


@pytest.mark.real_model
def test_smollm2_tokens() -> None:
    from vox_core.models import resolve

    tokenizer = load_tokenizer(resolve("smollm2-135m").path)
    assert len(tokenizer) == 49152
    pieces = ["<|im_start|>", "user", "Ċ", "I", "'ve", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.tokenize("<|im_start|>user\nI've 12<|im_end|>") == pieces
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.real_model
def test_gemma3_in_transformers() -> None:
    """Origin of 3.1323: this test's first run; weights or tokens that are off give more."""
    import torch
    from transformers import AutoModelForCausalLM

    from vox_core.models import resolve

    folder = resolve("gemma3-270m").path
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template is None
    pieces = ["<bos>", "▁▁", "I", "'", "ve", "▁", "1", "2", "<end_of_turn>"]
    assert tokenizer.tokenize("  I've 12<end_of_turn>", add_special_tokens=True) == pieces
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = tokenizer(PROSE, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert float(model(tokens, labels=tokens).loss) == pytest.approx(3.1323, abs=1e-3)
