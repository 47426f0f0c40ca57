"""Compare predicted with measured peak memory: the origin of `[memory]` in manifests.

    python benchmarks/memory.py                       every setting, on the CPU; some minutes
    python benchmarks/memory.py --backend cuda        the same on a GPU
    python benchmarks/memory.py --only bf16-2048      one of them
    python benchmarks/memory.py --show                what was measured, with today's formula

Each setting is a run of `vox train` on SmolLM2-135M, of three steps of one micro-batch each, in a
process of its own; from the second step on there are the optimizer's moments, and the allocator has
what it keeps (at eight steps of `bf16-512` it was 2 % more). Documents are texts whose every token
is trained, but for `mixed`, whose lengths go from 32 to 1024 and whose first half is not.

Measured is, on the CPU, the most that was resident at once (VmHWM of /proc/self/status, which
unlike ru_maxrss owes nothing to the parent; ru_maxrss where there is no /proc). It has in it the
interpreter, libraries, and what the C library's allocator keeps of freed memory: settings of it
(MALLOC_ARENA_MAX and the like) are taken out of the environment, since users have none. On CUDA it
is `torch.cuda.max_memory_allocated`, against the prediction without its part for the runtime, which
the driver takes beside torch's allocator.

Writes benchmarks/results/memory.json; a second run of a setting replaces the first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "memory.json"
MODEL = "smollm2-135m"
STEPS = 3

# name -> length of the documents (0: mixed), and the settings of the run.
SETTINGS: dict[str, tuple[int, dict[str, object]]] = {
    "bf16-512": (512, {"dtype": "bf16", "micro_batch_tokens": 512}),
    "bf16-2048": (512, {"dtype": "bf16", "micro_batch_tokens": 2048}),
    "bf16-4096": (1024, {"dtype": "bf16", "micro_batch_tokens": 4096}),
    "bf16-4096-mixed": (0, {"dtype": "bf16", "micro_batch_tokens": 4096}),
    "bf16-2048-checkpointing": (
        512,
        {"dtype": "bf16", "micro_batch_tokens": 2048, "gradient_checkpointing": True},
    ),
    "bf16-4096-checkpointing": (
        2048,
        {"dtype": "bf16", "micro_batch_tokens": 4096, "gradient_checkpointing": True},
    ),
    "fp32-512": (512, {"dtype": "fp32", "micro_batch_tokens": 512}),
    "fp32-2048": (512, {"dtype": "fp32", "micro_batch_tokens": 2048}),
    "fp32-4096-checkpointing": (
        1024,
        {"dtype": "fp32", "micro_batch_tokens": 4096, "gradient_checkpointing": True},
    ),
    "full-bf16-512": (512, {"method": "full", "dtype": "bf16", "micro_batch_tokens": 512}),
    "full-bf16-2048": (512, {"method": "full", "dtype": "bf16", "micro_batch_tokens": 2048}),
    "full-fp32-512": (512, {"method": "full", "dtype": "fp32", "micro_batch_tokens": 512}),
    "full-fp32-2048": (512, {"method": "full", "dtype": "fp32", "micro_batch_tokens": 2048}),
    "full-fp32-2048-checkpointing": (
        512,
        {
            "method": "full",
            "dtype": "fp32",
            "micro_batch_tokens": 2048,
            "gradient_checkpointing": True,
        },
    ),
    "nf4-2048": (512, {"dtype": "bf16", "micro_batch_tokens": 2048, "quant": "nf4"}),
    "nf4-4096-checkpointing": (
        1024,
        {
            "dtype": "bf16",
            "micro_batch_tokens": 4096,
            "quant": "nf4",
            "gradient_checkpointing": True,
        },
    ),
    "nf4-embeddings-2048": (
        512,
        {"dtype": "bf16", "micro_batch_tokens": 2048, "quant": "nf4-embeddings"},
    ),
    "int8-2048": (512, {"dtype": "bf16", "micro_batch_tokens": 2048, "quant": "int8"}),
}


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        print(json.dumps(run(arguments.child, arguments.backend, planned_only=arguments.show)))
        return
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    names = arguments.only or [
        name
        for name in SETTINGS
        if not arguments.show or f"{arguments.backend}/{name}" in kept.get("runs", {})
    ]
    runs = kept.get("runs", {})
    print(f"{'':28} {'predicted':>10} {'measured':>10} {'ratio':>6}   parts, in MB")
    for name in names:
        key = f"{arguments.backend}/{name}"
        found = {**runs.get(key, {}), **child(name, arguments.backend, show=arguments.show)}
        found["ratio"] = round(found["predicted"] / found["measured"], 3)
        runs[key] = found
        show(name, found)
        keep(key, found)


def keep(key: str, found: dict[str, object]) -> None:
    """Write one result beside the others."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    runs = {**kept.get("runs", {}), key: found}
    machine = {"machine": platform.machine(), "python": platform.python_version()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**machine, "runs": dict(sorted(runs.items()))}, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--only", action="append", choices=SETTINGS)
    parser.add_argument("--show", action="store_true", help="predict again, measure nothing")
    parser.add_argument("--child", choices=SETTINGS, help=argparse.SUPPRESS)
    return parser.parse_args()


def child(name: str, backend: str, *, show: bool) -> dict[str, object]:
    """Measure one setting in a process of its own."""
    environ = {key: v for key, v in os.environ.items() if not key.startswith("MALLOC_")}
    command = [sys.executable, __file__, "--child", name, "--backend", backend]
    command += ["--show"] * show
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(name: str, backend: str, *, planned_only: bool) -> dict[str, object]:
    """Predict, train and measure."""
    from vox_core.config import TrainSettings, validate
    from vox_core.run.train import train
    from vox_plan.planner import plan

    length, given = SETTINGS[name]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "train.jsonl"
        data.write_text("\n".join(map(json.dumps, rows(length))))
        settings = validate(
            TrainSettings,
            {
                "model": MODEL,
                "data": [data],
                "out": Path(folder) / "run",
                "backend": backend,
                "allow_cpu": True,
                "max_steps": STEPS,
                "batch_size": documents_per_step(length, int(str(given["micro_batch_tokens"]))),
                "seq_len": length or 2048,
                **given,
            },
        )
        planned = plan(settings)
        parts = planned.memory.parts
        told = {"predicted": planned.memory.peak, "parts": parts, "largest": planned.steps.largest}
        if backend == "cuda":
            told["predicted"] -= parts["runtime"]
        if planned_only:
            return told
        train(settings)
        return {**told, "measured": measured(backend)}


def rows(length: int) -> list[dict[str, str]]:
    """Texts that are cut into documents of `length` tokens; or, for 0, prompts and completions."""
    if length:
        return [
            {"text": f"{number} " + "fine tuning of models " * 3 * length} for number in range(4)
        ]
    sizes = [32 * 2 ** (number % 6) for number in range(48)]
    return [{"prompt": "word " * (s // 2), "completion": "word " * (s // 2)} for s in sizes]


def documents_per_step(length: int, tokens: int) -> int:
    """Return the documents that make one micro-batch; a dozen of mixed lengths."""
    return tokens // length if length else 12


def measured(backend: str) -> int:
    """Bytes at the peak of this process so far."""
    if backend == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes


def show(name: str, found: dict) -> None:
    parts = ", ".join(f"{part} {size / 1e6:.0f}" for part, size in found["parts"].items())
    print(
        f"{name:28} {found['predicted'] / 1e6:7.0f} MB {found['measured'] / 1e6:7.0f} MB "
        f"{found['ratio']:6.2f}   {parts}",
        flush=True,
    )


if __name__ == "__main__":
    main()
