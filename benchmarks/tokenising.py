"""From a file of conversations to tokens and weights: vox against `datasets.map` with 2 processes.

Both begin with the same JSONL file (generated here from the texts in `vox_core/quickstart/data`),
the default model's tokenizer already loaded, and empty caches, and end with token ids and weights
of all rows on the disk. The peer does what vox does: the chat template once for the text and once
more for the prompt of every answer, the tokenizer with character offsets, and a mask from those. A
second peer has a template with `{% generation %}` markers, which saves it the prompts: somebody has
to have written that template. Token counts are compared.

Each measurement has a process of its own; its memory is that of all its processes, sampled. Rounds
are interleaved, so that a busy machine slows all, and ratios are taken round by round. `varied`
rows have as many different words as text of that length has (Zipf's law).

    python benchmarks/tokenising.py [--rows 100000] [--rounds 1] [--peer-python PYTHON]

`--peer-python` is an interpreter with `datasets` and vox; without it, this one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import vox_core

TEXTS = Path(vox_core.__file__).parent / "quickstart" / "data" / "train.jsonl"
SEQ_LEN = 2048
GENERATION = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
)

# --- data -----------------------------------------------------------------------------------------


def conversations(rows: int, *, varied: bool) -> Iterator[dict[str, Any]]:
    """Rows of one to three turns, some 330 tokens in the mean."""
    pairs = [json.loads(line)["messages"] for line in TEXTS.read_text().splitlines()]
    rng = random.Random(1)
    word = zipf_words(rng) if varied else None
    for _ in range(rows):
        messages = []
        for _ in range(rng.randint(1, 3)):
            chosen = rng.choices(pairs, k=rng.randint(2, 5))
            for index, role in enumerate(("user", "assistant")):
                text = "\n\n".join(pair[index]["content"] for pair in chosen)
                if word:
                    text = " ".join(word() if part.isalpha() else part for part in text.split(" "))
                messages.append({"role": role, "content": text})
        yield {"messages": messages}


def zipf_words(rng: random.Random) -> Callable[[], str]:
    """Words of one to four syllables, the n-th most frequent one 1 / n as frequent as the first."""
    syllables = [a + b for a in "bdfgklmnprstvw" for b in ("a", "e", "i", "o", "u", "en", "or")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(200_000)]
    return lambda: words[int(len(words) ** rng.random()) - 1]


# --- what is measured, each in a process of its own -----------------------------------------------


def vox(data: Path) -> dict[str, Any]:
    from vox_core.data.checked import check_files
    from vox_core.data.dataset_cache import open_dataset
    from vox_core.data.tokenizer import load_tokenizer

    model = smollm2()
    tokenizer = load_tokenizer(model)
    start = time.perf_counter()
    dataset = open_dataset(check_files([data]), model, lambda: tokenizer, SEQ_LEN)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": dataset.tokens, "trained": dataset.trained_tokens}


def vox_again(data: Path) -> dict[str, Any]:
    """As a second `vox train` does: nothing is loaded beforehand."""
    from vox_core.data.checked import check_files
    from vox_core.data.dataset_cache import open_dataset

    def load() -> Any:
        raise AssertionError("the tokenizer was asked for")

    start = time.perf_counter()
    dataset = open_dataset(check_files([data]), smollm2(), load, SEQ_LEN)
    tokens, trained, _ = dataset.tokens, dataset.trained_tokens, dataset.digest
    return {"seconds": time.perf_counter() - start, "tokens": tokens, "trained": trained}


def peer(data: Path, *, generation: bool = False) -> dict[str, Any]:
    import datasets

    from vox_core.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2())
    work = (lambda rows: with_markers(tokenizer, rows)) if generation else None
    start = time.perf_counter()
    read = datasets.load_dataset("json", data_files=str(data), split="train")
    loaded = time.perf_counter()
    made = read.map(
        work or (lambda rows: with_offsets(tokenizer, rows)),
        batched=True,
        num_proc=2,
        remove_columns=read.column_names,
    )
    end = time.perf_counter()
    tokens = trained = 0
    for batch in made.with_format("numpy").iter(1000):
        tokens += sum(len(row) for row in batch["tokens"])
        trained += int(sum(row.sum() for row in batch["weights"]))
    return {
        "seconds": end - start,
        "map_seconds": end - loaded,
        "tokens": tokens,
        "trained": trained,
    }


def with_offsets(tokenizer: Any, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A batch for `datasets.map`: the mask from the text and its prompts."""
    texts, spans = [], []
    for messages in rows["messages"]:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        found = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(
                    messages[:turn], tokenize=False, add_generation_prompt=True
                )
                assert text.startswith(prompt)
                end = text.index(tokenizer.eos_token, len(prompt)) + len(tokenizer.eos_token)
                found.append((len(prompt), end))
        texts.append(text)
        spans.append(found)
    batch = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    weights = [
        mask(offsets, found) for offsets, found in zip(batch["offset_mapping"], spans, strict=True)
    ]
    return {"tokens": batch["input_ids"], "weights": weights}


def mask(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> Any:
    import numpy as np

    begins, stops = np.array(offsets).T
    weights = np.zeros(len(begins), np.int8)
    for start, stop in spans:
        weights[(begins >= start) & (stops <= stop)] = 1
    return weights


def with_markers(tokenizer: Any, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A batch for `datasets.map`: the mask as transformers makes it from the template's markers."""
    batch = tokenizer.apply_chat_template(
        rows["messages"],
        chat_template=GENERATION,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    return {"tokens": batch["input_ids"], "weights": batch["assistant_masks"]}


def smollm2() -> Path:
    from vox_core.models import resolve

    return resolve("smollm2-135m").path


MEASURED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "vox": vox,
    "vox, again": vox_again,
    "datasets.map, 2 processes": peer,
    "the same, template with markers": lambda data: peer(data, generation=True),
}

# --- measuring ------------------------------------------------------------------------------------


def measure(name: str, data: Path, python: str, scratch: Path) -> dict[str, Any]:
    """Run one of `MEASURED` in a process, and watch its memory."""
    environment = {
        **os.environ,
        "VOX_CACHE": str(scratch / "cache"),
        "HF_DATASETS_CACHE": str(scratch / f"datasets-{time.monotonic_ns()}"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",  # what processes do, threads need not
    }
    command = [python, __file__, "--only", name, "--data", str(data)]
    before = cpu_seconds()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=errors)
        peak = 0
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(0.05)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{name} failed:\n{errors.read()[-3000:]}")
        found: dict[str, Any] = json.loads(out.read().splitlines()[-1])
    return {**found, "peak_mb": round(peak / 1e6), "cpu": cpu_seconds() - before}


def cpu_seconds() -> float:
    """Of all processes that have ended, their imports included: a busy machine changes it least."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory(pid: int) -> int:
    """Bytes that a process and its children hold; what they share is divided among them. 0 where
    there is no /proc."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        own = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, StopIteration):
        return 0
    return int(own.split()[1]) * 1024 + sum(memory(int(child)) for child in children)


def round_of(data: Path, python: str, scratch: Path) -> dict[str, dict[str, Any]]:
    """Measure each once, with an empty cache at first."""
    for folder in ("documents", "rows", "digests"):
        shutil.rmtree(scratch / "cache" / folder, ignore_errors=True)
    found = {}
    for name in MEASURED:
        interpreter = sys.executable if name.startswith("vox") else python
        found[name] = measure(name, data, interpreter, scratch)
        print(f"    {name}: {found[name]}", file=sys.stderr)
    return found


def table(kind: str, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Print medians, and the median of the rounds' ratios."""
    print(f"\n{kind} rows")
    heads = f"{'seconds':>9}{'x vox':>8}{'CPU s':>8}{'x vox':>8}{'peak MB':>9}"
    print(f"{'':34}{heads}{'tokens':>12}{'trained':>12}")
    result = {}
    for name in MEASURED:
        seconds = statistics.median(r[name]["seconds"] for r in rounds)
        ratio = statistics.median(r[name]["seconds"] / r["vox"]["seconds"] for r in rounds)
        cpu = statistics.median(r[name]["cpu"] for r in rounds)
        cpu_ratio = statistics.median(r[name]["cpu"] / r["vox"]["cpu"] for r in rounds)
        peak = max(r[name]["peak_mb"] for r in rounds)
        last = rounds[-1][name]
        print(
            f"{name:34}{seconds:9.2f}{ratio:8.2f}{cpu:8.1f}{cpu_ratio:8.2f}{peak:9}"
            f"{last['tokens']:12,}{last['trained']:12,}"
        )
        result[name] = {
            "seconds": round(seconds, 3),
            "ratio": round(ratio, 3),
            "cpu_seconds": round(cpu, 1),
            "cpu_ratio": round(cpu_ratio, 3),
            "peak_mb": peak,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--kinds", nargs="+", default=["quickstart", "varied"])
    parser.add_argument("--only", choices=MEASURED, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(MEASURED[asked.only](asked.data)))
        return
    results: dict[str, Any] = {"rows": asked.rows, "rounds": asked.rounds}
    with tempfile.TemporaryDirectory(prefix="vox-tokenising-") as name:
        scratch = Path(name)
        (scratch / "cache").mkdir()
        (scratch / "cache" / "models").symlink_to(smollm2().parent)
        for kind in asked.kinds:
            data = scratch / f"{kind}.jsonl"
            with data.open("w") as file:
                for row in conversations(asked.rows, varied=kind == "varied"):
                    file.write(json.dumps(row) + "\n")
            rounds = [round_of(data, asked.peer_python, scratch) for _ in range(asked.rounds)]
            results[kind] = table(kind, rounds)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
