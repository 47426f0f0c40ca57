"""GGUF files: their tensors and metadata, and what is refused.

Byte for byte against llama.cpp's converters: benchmarks/gguf_against_llamacpp.py.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
import sys
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.quants import quantize
from tests.golden.families import FAMILIES as GOLDEN
from tests.golden.families import tokenizer

from vox_core.adapter.peft import read_adapter
from vox_core.config import validate
from vox_core.contract import WriteModelJob
from vox_core.data.tokenizer import end_of_turn_ids, load_tokenizer
from vox_core.errors import AdapterError, ConfigError, ModelError, ProofError, StorageError
from vox_core.host.load import ignore, write_model
from vox_core.models import converted
from vox_core.run.reference import ModelReference, resolve_reference
from vox_core.run.train import train
from vox_core.weights import WeightFolder
from vox_export import child, gguf_file, llama_cpp, quality
from vox_export.export import (
    Job,
    _engine_notes,
    export,
    read_lora,
    require_same_template,
    write_gguf,
)
from vox_export.gguf_file import FORMATS, ModelFile, Stored, write_lora
from vox_export.settings import ExportSettings
from vox_export.vocabulary import read_vocabulary
from vox_formats.gguf_families import LAYOUTS, in_pairs
from vox_formats.gguf_model import GgufSource
from vox_testing.llama import write_llama

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2", "phi3")
Kind = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def _without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare by vox's own reader, whatever is installed here."""
    monkeypatch.setattr(llama_cpp, "engine", lambda: None)
    monkeypatch.setattr(llama_cpp, "quantiser", lambda: None)


def reconfigured(folder: Path, copy: Path, **settings: Any) -> Path:
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **settings}))
    return copy


@pytest.fixture
def model(tiny, tmp_path) -> Any:
    """`model(family)` -> folder that llama.cpp can compute."""

    def make(family: str) -> Path:
        sliding = {"layer_types": ["sliding_attention"] * 2} if family == "gemma3" else {}
        return reconfigured(tiny(family), tmp_path / family, **sliding)

    return make


def run_export(reference: object, **given: Any) -> Any:
    return export(str(reference), validate(ExportSettings, {"to": "gguf", **given}))


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_reads_back_as_the_models(model, tmp_path, family) -> None:
    source = resolve_reference(str(model(family)))
    write_gguf(source, "f32", tmp_path / "m.gguf")
    back = quality.dequantised(tmp_path / "m.gguf", ModelFile(source, "f32"))
    assert back.tensors.keys() == source.weights.tensors.keys()
    for name in back.tensors:
        found, expected = back.read(name), source.weights.read(name)
        if family == "gemma3" and "norm" in name:  # 1 + w and back rounds
            np.testing.assert_allclose(found, expected, atol=2**-24)
        else:
            assert found.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_another_reader_gives_the_model_back(model, tmp_path, family, monkeypatch) -> None:
    """By `vox_formats`, which shares no code with the writer; in bfloat16."""
    from vox_formats import gguf_model

    folder = model(family)
    kinds = frozenset({("gpt2", "gpt-2")})  # the tiny tokenizer, which has no merges
    own = replace(gguf_model.FAMILIES[family], tokenizers=kinds)
    monkeypatch.setattr(gguf_model, "FAMILIES", {family: own})
    tokenizer = load_tokenizer(folder).backend_tokenizer
    monkeypatch.setattr(gguf_model, "build_tokenizer", lambda metadata: tokenizer)
    write_gguf(resolve_reference(str(folder)), "f32", tmp_path / "m.gguf")
    converted.convert_gguf(tmp_path / "m.gguf", tmp_path / "back", lambda *_: None)
    found, expected = WeightFolder(tmp_path / "back"), WeightFolder(folder)
    assert found.tensors.keys() == expected.tensors.keys()
    for name in found.tensors:
        np.testing.assert_allclose(
            found.read(name).astype(np.float32), expected.read(name), rtol=2**-8, atol=2**-8
        )


def test_rows_stand_in_pairs() -> None:
    rows = np.array(["a0", "a1", "a2", "b0", "b1", "b2"])
    pairs = in_pairs(1).apply(rows)
    assert pairs.tolist() == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert in_pairs(1).undo(pairs).tolist() == rows.tolist()


@pytest.mark.parametrize("quant", FORMATS)
def test_each_format_is_that_of_the_gguf_package(model, tmp_path, quant, monkeypatch) -> None:
    monkeypatch.setattr(gguf_file, "CHUNK", 29 * 32)  # in several pieces
    source = resolve_reference(str(model("qwen3")))
    write_gguf(source, quant, tmp_path / "m.gguf")
    file = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in file.tensors}
    up = tensors["blk.0.ffn_up.weight"]
    assert up.tensor_type == FORMATS[quant][0]
    W = source.weights.read("model.layers.0.mlp.up_proj.weight")
    stored = quantize(np.ascontiguousarray(W), FORMATS[quant][0])
    assert up.data.tobytes() == stored.tobytes()
    assert tensors["blk.0.attn_norm.weight"].tensor_type == Kind.F32
    embedding = Kind.Q8_0 if quant not in gguf_file.UNQUANTISED else FORMATS[quant][0]
    assert tensors["token_embd.weight"].tensor_type == embedding


def test_bfloat16_weights_are_rounded_as_gguf_rounds(monkeypatch) -> None:
    monkeypatch.setattr(gguf_file, "CHUNK", 4096)
    values = np.concatenate([np.random.default_rng(0).normal(size=8190), [0.0, 65504.0]])
    rows = values.astype(np.float32).reshape(2, -1)
    for kind in (Kind.BF16, Kind.F16, Kind.F32):
        Stored([rows], kind, rows.nbytes).tofile(file := io.BytesIO())
        assert file.getvalue() == quantize(rows, kind).tobytes()


def test_every_bfloat16_becomes_the_number_that_gguf_makes_of_it() -> None:
    numbers = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        rows = numbers[np.isfinite(numbers)].reshape(2, -1)
        for kind in (Kind.BF16, Kind.F16, Kind.F32):
            Stored([rows], kind, rows.nbytes).tofile(file := io.BytesIO())
            assert file.getvalue() == quantize(rows.astype(np.float32), kind).tobytes()


def test_a_large_tensor_is_not_held_in_the_format_of_the_file(monkeypatch) -> None:
    monkeypatch.setattr(gguf_file, "CHUNK", 1 << 16)
    rows = np.ones((1024, 1024), ml_dtypes.bfloat16)  # 4 MB in float32
    for kind in (Kind.F32, Kind.Q8_0):
        tracemalloc.start()
        with Path(os.devnull).open("wb") as file:
            Stored([rows], kind, rows.nbytes).tofile(file)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 << 20  # 256 KB a piece, and a few of them at a time


def test_llama_3_frequencies_are_divided() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {"rope_parameters": rope, "head_dim": 64}
    (factors,) = LAYOUTS["llama"].factors(config).values()
    assert factors[0] == 1  # short wavelengths stay
    assert factors[-1] == 8  # long ones are interpolated
    assert (np.diff(factors) >= 0).all()


# --- metadata -------------------------------------------------------------------------------------


def test_the_file_says_what_llama_cpp_needs(model, tmp_path) -> None:
    folder = model("llama")
    write_gguf(resolve_reference(str(folder)), "f16", tmp_path / "m.gguf")
    file = gguf.GGUFReader(tmp_path / "m.gguf")
    said = {key: field.contents() for key, field in file.fields.items()}
    assert said["general.architecture"] == "llama"
    assert said["llama.rope.dimension_count"] == 8
    assert said["tokenizer.ggml.model"], said["tokenizer.ggml.pre"] == ("gpt2", "gpt-2")
    tokenizer = load_tokenizer(folder)
    assert said["tokenizer.chat_template"] == tokenizer.chat_template
    stops = {said.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    assert stops >= end_of_turn_ids(tokenizer)
    assert said["tokenizer.ggml.tokens"][tokenizer.eos_token_id] == tokenizer.eos_token


def spoilt_tokenizer(folder: Path, change: Any) -> ModelReference:
    described = json.loads((folder / "tokenizer.json").read_text())
    change(described)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return resolve_reference(str(folder))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"pre_tokenizer": {"type": "Whitespace"}},
            "a pre-tokenizer that llama.cpp does not name",
        ),
        ({"normalizer": {"type": "Lowercase"}}, "the normalizer Lowercase"),
    ],
)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(model, tmp_path, change, fault) -> None:
    source = spoilt_tokenizer(model("llama"), lambda described: described.update(change))
    with pytest.raises(ModelError) as caught:
        write_gguf(source, "f32", tmp_path / "m.gguf")
    assert fault in caught.value.faults[0]
    assert not (tmp_path / "m.gguf").exists()


def test_texts_that_llama_cpp_does_not_normalise_are_noted(model) -> None:
    source = spoilt_tokenizer(model("llama"), lambda d: d.update(normalizer={"type": "NFC"}))
    found = read_vocabulary(load_tokenizer(source.base.path), 260, source.base.path)
    assert "NFC" in found.notes[0]


PREPEND = {"type": "Prepend", "prepend": "▁"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "prefixed"),
    [
        ({"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, None, True),
        (PREPEND, None, True),
        (REPLACE, None, False),
        (None, metaspace("always"), True),
        (None, metaspace("first"), True),
        (None, metaspace("never"), False),
    ],
)
def test_a_space_before_a_text_is_that_of_the_tokenizer(
    model, tmp_path, normalizer, pre_tokenizer, prefixed
) -> None:
    """As of Llama 2, which has it in the normalizer, and of Mistral and Gemma."""

    def of_sentencepiece(described: dict[str, Any]) -> None:
        described.update(normalizer=normalizer, pre_tokenizer=pre_tokenizer)
        described["model"].update(byte_fallback=True)

    source = spoilt_tokenizer(model("llama"), of_sentencepiece)
    write_gguf(source, "f32", tmp_path / "m.gguf")
    said = GgufSource(tmp_path / "m.gguf").metadata
    assert said["tokenizer.ggml.model"] == "llama"
    assert said["tokenizer.ggml.add_space_prefix"] is prefixed


def test_the_name_makes_llama_cpp_strip_as_the_tokenizer_does(model, tmp_path) -> None:
    folder = model("llama")
    found = read_vocabulary(load_tokenizer(folder), 260, folder)
    assert [found.model_name(n) for n in ("my-Phi-3", "phi3", "phi-4")] == [
        "my-Phi 3",
        "phi 3",
        "phi-4",
    ]
    as_phi3 = replace(found, strips=True)
    assert [as_phi3.model_name(n) for n in ("sums", "Phi-3-mini")] == ["sums (Phi-3)", "Phi-3-mini"]
    named = folder.rename(folder.with_name("phi3"))
    write_gguf(resolve_reference(str(named)), "f32", tmp_path / "m.gguf")
    assert "phi3" not in GgufSource(tmp_path / "m.gguf").metadata["general.name"]


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_template_with_another_default_than_llama_cpps_is_refused(name) -> None:
    refused = name == "deepseek-v3.1"  # does not think unless asked; the others are equal there
    with pytest.raises(ModelError, match="exactly") if refused else nullcontext():
        require_same_template(tokenizer(name))


def in_a_new_process(program: str, *arguments: object) -> tuple[str, str]:
    """Run a program; return what it wrote to its two outputs."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    return done.stdout.strip(), done.stderr


def test_a_conversion_imports_neither_torch_nor_transformers(model, tmp_path) -> None:
    program = (
        "import sys; from pathlib import Path; from vox_export.export import write_gguf;"
        "from vox_core.api.models import resolve_reference as found;"
        "write_gguf(found(sys.argv[1]), 'f32', Path(sys.argv[2]));"
        "print({'torch', 'transformers'} & {*sys.modules});"
        "import os; os.waitpid(-1, 0)"  # fails: the child has ended
    )
    said, failed = in_a_new_process(program, model("llama"), tmp_path / "m.gguf")
    assert said == "set()"
    assert "ChildProcessError" in failed


def test_what_the_child_cannot_read_is_this_processs_error(model) -> None:
    folder = model("llama")
    spoilt_tokenizer(folder, lambda described: described.update(normalizer={"type": "Lowercase"}))
    program = (
        "import sys; from pathlib import Path; from vox_export import child, vocabulary\n"
        "try: child.without_torch(vocabulary.vocabulary_in, Path(sys.argv[1]), 260)\n"
        "except Exception as error: print(error.code, error.faults, len(child._child))"
    )
    assert in_a_new_process(program, folder)[0] == "VOX-M002 ('the normalizer Lowercase',) 1"


def test_the_child_imports_neither_models_nor_generation() -> None:
    program = "import sys, vox_export.child, vox_export.vocabulary; print(*sys.modules)"
    imported = set(in_a_new_process(program)[0].split())
    assert "vox_core.api.tokenizers" in imported
    assert not imported & {"pydantic", "safetensors", "vox_core.api.models", "vox_core.run"}


def test_a_process_that_has_transformers_needs_no_child(model, monkeypatch) -> None:
    monkeypatch.setattr(child, "_child", [])
    load_tokenizer(folder := model("llama"))
    assert child.full_config(folder)["model_type"] == "llama"
    assert not child._child


@pytest.mark.parametrize(
    ("family", "said", "fault"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type dynamic",
        ),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("gemma3", {"query_pre_attn_scalar": 9}, "query_pre_attn_scalar 9"),
        ("gpt2", {"n_inner": 96}, "n_inner 96"),
        ("qwen3_5", {}, "family qwen3_5_text"),
    ],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(
    tiny, tmp_path, family, said, fault
) -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2} if family == "gemma3" else {}
    folder = reconfigured(tiny(family), tmp_path / "m", **{**sliding, **said})
    with pytest.raises(ModelError) as caught:
        run_export(folder, out=tmp_path / "out")
    assert any(fault in each for each in caught.value.faults), caught.value.faults
    assert not (tmp_path / "out").exists()


# --- whole exports --------------------------------------------------------------------------------


@pytest.fixture
def run(tiny, settings) -> Path:
    return train(settings(tiny("llama"), max_steps=8, lr=2e-2)).run


def test_a_run_is_exported_and_compared(run) -> None:
    report = run_export(run, quant="f32")
    assert report.file == run.with_name("run-gguf") / "run-f32.gguf"
    assert report.quality is not None
    assert report.quality.engine.startswith("vox's own reader, on cpu")
    assert report.quality.rows.endswith("rows of the run")
    assert report.quality.mean_kl < 1e-9
    assert report.quality.carried == pytest.approx(1, abs=1e-3)
    assert (report.quality.top1, report.quality.greedy) == (1, 1)
    proof = json.loads((report.out / "proof.json").read_text())
    assert proof["mean_kl"] == report.quality.mean_kl
    names = ["README.md", "proof.json", "run-f32.gguf"]
    assert sorted(path.name for path in report.out.iterdir()) == names
    card = (report.out / "README.md").read_text()
    assert card.startswith("---\npipeline_tag: text-generation\n"), "its base is a folder"
    assert "llama-server -m run-f32.gguf --jinja" in card and "Base + adapter as GGUF" in card
    assert f"mean KL {report.quality.mean_kl:.2g} nats" in card


def test_a_model_without_adapter_is_exported_too(model, tmp_path) -> None:
    report = run_export(model("gpt2"), quant="bf16", out=tmp_path / "out")
    assert report.quality is not None
    assert report.quality.carried is None
    assert report.quality.rows == "a fixed text"
    assert 0 < report.quality.mean_kl < 1e-3


def test_a_model_without_adapter_is_not_called_base_and_adapter(vox, model, tmp_path) -> None:
    folder = model("gpt2")
    done = vox("export", folder, "--to", "gguf", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert "+ adapter" not in done.out + done.err
    assert "computing the model\n" in done.err
    assert [line.split()[0] for line in done.out.splitlines()][2] == "model"
    assert ", the model " in done.out
    with pytest.raises(ProofError, match="differs from the model"):
        run_export(folder, quant="q4_0", max_kl=1e-9, out=tmp_path / "far")


def test_the_smallest_format_that_keeps_the_bound_is_taken(run, tmp_path) -> None:
    kl = {
        quant: run_export(run, quant=quant, out=tmp_path / quant).quality.mean_kl
        for quant in ("q4_0", "q8_0")
    }
    between = math.sqrt(kl["q4_0"] * kl["q8_0"])
    assert kl["q8_0"] < between < kl["q4_0"]
    report = run_export(run, quant="auto", max_kl=between, out=tmp_path / "auto")
    assert report.quant in ("q4_1", "q5_0", "q5_1", "q8_0")
    assert report.quality.mean_kl <= between
    assert len(list(report.out.glob("*.gguf"))) == 1
    with pytest.raises(ProofError, match="differs from base"):
        run_export(run, quant="q4_0", max_kl=between, out=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_files_are_tried_by_size_and_not_by_the_names_of_their_formats(
    run, tmp_path, monkeypatch
) -> None:
    """llama.cpp stores rows that no block of a K-quant fits in more bits."""
    monkeypatch.setattr(llama_cpp, "quantiser", lambda: ["fake"])
    monkeypatch.setattr(llama_cpp, "quantise", lambda source, out, *_: shutil.copy(source, out))
    report = run_export(run, quant="auto", max_kl=0.5, out=tmp_path / "auto")
    assert report.quant in ("mxfp4", "q4_0")
    bound = report.quality.mean_kl / 1e3
    report = run_export(run, quant="auto", max_kl=bound, out=tmp_path / "closer")
    assert report.quant in ("q5_0", "q5_1", "q8_0", "f16")
    assert "q4_0" in report.notes[-1] and "q4_k_m" not in report.notes[-1]
    assert sorted(p.suffix for p in report.out.iterdir()) == [".gguf", ".json", ".md"]
    report = run_export(run, quant="q4_k_m", out=tmp_path / "one")
    assert report.file is not None
    assert report.quality.mean_kl < 1e-9


def test_a_bound_below_rounding_names_the_bound(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(quality, "_kl", lambda *_: np.array([1e-9]))
    with pytest.raises(ProofError) as caught:
        run_export(run, quant="auto", max_kl=1e-12, out=tmp_path / "auto")
    assert "--max-kl" in caught.value.remedy
    assert "report" not in caught.value.remedy


def test_what_llama_cpp_tokenises_or_renders_otherwise_is_a_note(run) -> None:
    own = load_tokenizer(run)

    class Server(llama_cpp.LlamaCpp):
        def tokenise(self, text: str) -> list[int]:
            tokens = list(own(text, add_special_tokens=False)["input_ids"])
            return tokens[:3] if "Gr" in text else tokens

        def render(self, messages: Any) -> str:
            return ""

    job = Job("run", ExportSettings(), resolve_reference(str(run)), own, frozenset(), ignore)
    tokenised, rendered = _engine_notes(job, Server("llama.cpp", run))
    assert "tokenises a text otherwise than vox: '  Gr" in tokenised
    assert "renders this model's chat template otherwise" in rendered


def test_a_quantised_file_without_finite_numbers_is_refused(run, tmp_path) -> None:
    report = run_export(run, quant="q8_0", out=tmp_path / "out")
    with pytest.raises(ProofError, match="inf nats"):
        quality.require_kept(replace(report.quality, mean_kl=math.inf), "q8_0", None)


# Five faults that an export could have, as seen by a user: a tensor with another sign, no adapter,
# another scale, no stop token, another template.


def flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModelFile.tensor

    def tensor(self: ModelFile, target: Any) -> Any:
        found = real(self, target)
        if "blk.1.attn_output" in target.name:
            return replace(found, arrays=[-array for array in found.arrays])
        return found

    monkeypatch.setattr(ModelFile, "tensor", tensor)


def dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ModelFile,
        "merged",
        lambda self, name: self.source.weights.read(self.source.parameters[name]),
    )


def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    real = gguf_file._added

    def added(W: Any, adapter: Any, path: str) -> Any:
        return real(W, adapter, path) * np.float32(0.5) + W * np.float32(0.5)

    monkeypatch.setattr(gguf_file, "_added", added)


def unstopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vox_export.vocabulary.STOP_KEYS", ("sep", "mask", "sep"))


def another_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_chat_template",
        lambda self, value: self.add_string("tokenizer.chat_template", value + " "),
    )


@pytest.mark.parametrize("fault", [flipped, dropped, scaled, unstopped, another_template])
def test_a_faulty_export_is_refused(run, tmp_path, monkeypatch, fault) -> None:
    fault(monkeypatch)
    with pytest.raises(ProofError) as caught:
        run_export(run, quant="f32", out=tmp_path / "out")
    assert caught.value.code == "VOX-V006"
    assert not (tmp_path / "out").exists()


# --- the adapter alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "rslora"])
def test_an_adapter_is_exported_alone(tiny, settings, method) -> None:
    run = train(settings(tiny("llama"), method=method)).run
    report = run_export(run, to="gguf-lora")
    assert report.file is not None
    file = gguf.GGUFReader(report.file)
    assert file.fields["adapter.type"].contents() == "lora"
    tensors = {tensor.name: tensor.data for tensor in file.tensors}
    adapter = read_adapter(run)
    first = adapter.modules["model.layers.0.self_attn.q_proj"]
    ratio = adapter.scale("model.layers.0.self_attn.q_proj") * first.rank / first.alpha
    B_OR = in_pairs(4).apply(first.B_OR * np.float32(ratio))
    assert np.array_equal(tensors["blk.0.attn_q.weight.lora_b"], B_OR)
    assert np.array_equal(tensors["blk.0.attn_q.weight.lora_a"], first.A_RI)


def test_an_adapter_whose_rows_moved_is_refused(run, monkeypatch) -> None:
    monkeypatch.setattr(gguf_file, "_scaled", lambda low_rank, scale, alpha: low_rank.B_OR * 2)
    with pytest.raises(ProofError):
        run_export(run, to="gguf-lora")
    assert not run.with_name("run-gguf-lora").exists()


def test_gpt2s_adapter_reads_back(tiny, settings, tmp_path) -> None:
    run = train(settings(tiny("gpt2"), max_steps=1)).run
    source = resolve_reference(str(run))
    write_lora(tmp_path / "lora.gguf", source, "lora")
    back = read_lora(tmp_path / "lora.gguf", source)
    for path, module in source.adapter.modules.items():
        assert np.array_equal(back.modules[path].B_OR, module.B_OR)


def test_an_adapter_that_llama_cpp_cannot_apply_is_refused(tiny, settings, tmp_path) -> None:
    with pytest.raises(AdapterError, match="no adapter to export"):
        run_export(tiny("llama"), to="gguf-lora", out=tmp_path / "out")
    run = train(settings(tiny("llama"), method="dora", max_steps=1)).run
    with pytest.raises(AdapterError) as caught:
        run_export(run, to="gguf-lora")
    assert "DoRA" in caught.value.faults[0]


def test_other_plugins_get_files_too(run, tmp_path) -> None:
    base = resolve_reference(str(run)).base.path
    for job in (
        WriteModelJob(base, "gguf", dtype="bf16"),
        WriteModelJob(base, "gguf-lora", adapter=run),
    ):
        write_model(job)  # checks
        out = tmp_path / job.format
        out.mkdir()
        write_model(replace(job, out=out))
        (file,) = out.glob("*.gguf")
        assert gguf.GGUFReader(file).fields["general.architecture"].contents() == "llama"
    kinds = {t.tensor_type for t in gguf.GGUFReader(tmp_path / "gguf/model.gguf").tensors}
    assert kinds == {Kind.BF16, Kind.F32}
    with pytest.raises(ModelError):
        write_model(WriteModelJob(reconfigured(base, tmp_path / "m", hidden_act="gelu"), "gguf"))


# --- mlx-lm ---------------------------------------------------------------------------------------


def test_a_folder_for_mlx_lm_says_what_mlx_lm_reads(run) -> None:
    report = run_export(run, to="mlx")
    assert (report.format, report.quant, report.file) == ("mlx", "none", None)
    config = json.loads((report.out / "config.json").read_text())
    assert config["rope_theta"] == 10000.0  # which transformers keeps under rope_parameters
    assert (report.out / "vox_merge.json").is_file()


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"quant": "q9"}, "VOX-C002"),
        ({"quant": "q4_k_m"}, "VOX-C009"),
        ({"to": "gguf-lora", "quant": "q8_0"}, "VOX-C002"),
        ({"to": "mlx", "quant": "q8_0"}, "VOX-C002"),
        ({"to": "mlx", "max_kl": 0.1}, "VOX-C004"),
        ({"to": None}, "VOX-C004"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_first(given, code) -> None:
    with pytest.raises(ConfigError) as caught:
        run_export("nowhere", **given)
    assert caught.value.code == code


def test_a_disk_without_room_is_refused_first(run, monkeypatch) -> None:
    free = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    with pytest.raises(StorageError) as caught:
        run_export(run)
    assert caught.value.code == "VOX-S001"
    assert not run.with_name("run-gguf").exists()


def test_a_window_that_llama_cpp_leaves_out_is_noted(model, tmp_path) -> None:
    report = run_export(model("mistral"), out=tmp_path / "out")
    assert any("sliding window of 16 tokens" in note for note in report.notes)


def test_rows_that_fit_no_block_are_noted(tmp_path, monkeypatch) -> None:
    base = write_llama(tmp_path / "llama", dtype="F32")
    monkeypatch.setitem(gguf_file.GGML_QUANT_SIZES, Kind.Q8_0, (48, 48 // 32 * 34))
    coarse = ModelFile(resolve_reference(str(base)), "q8_0").coarse
    assert "blk.0.attn_q.weight" in coarse
