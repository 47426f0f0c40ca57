"""Full fine-tuning against a plain transformers and torch loop: each loss, and the weights after.

    python benchmarks/full_against_torch.py                  SmolLM2-135M, 20 steps, float32
    python benchmarks/full_against_torch.py --backend cuda

The loop is tests/parity/reference_loop.py, which imports nothing of vox; both train the same
documents in the same order, with warm-up, cosine, clipping and weight decay. Documents are short
conversations about vox, two a step, each a micro-batch of its own in vox and one padded batch in
the loop.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vox_core.data.dataset import Dataset

ROOT = Path(__file__).parent.parent
STEPS, BATCH, SEED = 20, 2, 42
RATE = {"lr": 2e-5, "warmup": 0.15, "clip": 1.0, "weight_decay": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--model", default="smollm2-135m")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), arguments.model, arguments.backend)


def compare(folder: Path, model: str, backend: str) -> None:
    """Train twice, and print how far apart the two are."""
    from vox_core import models
    from vox_core.config import TrainSettings, validate
    from vox_core.run.run_plan import plan_run
    from vox_core.run.train import train

    base, data = models.resolve(model).path, folder / "train.jsonl"
    data.write_text("\n".join(rows()))
    numbers = {"max_steps": STEPS, "batch_size": BATCH, "seed": SEED, "method": "full", **RATE}
    given = {"model": str(base), "data": [data], "out": folder / "run", "dtype": "fp32"}
    cut = {"micro_batch_tokens": 32, "tune": "ignore", "backend": backend, "allow_cpu": True}
    settings = validate(TrainSettings, {**given, **numbers, **cut})
    steps = documents(plan_run(settings).data.train)
    run = train(settings).run
    spec = {"model": str(base), "steps": steps, **RATE}
    (folder / "spec.json").write_text(json.dumps(spec))
    loop = ROOT / "tests" / "parity" / "reference_loop.py"
    out = folder / "loop.json"
    subprocess.run([sys.executable, loop, folder / "spec.json", out], check=True)

    events = map(json.loads, (run / "telemetry.jsonl").read_text().splitlines())
    found = [event["loss"] for event in events if event["event"] == "step"]
    expected = json.loads(out.read_text())
    print(f"{'step':>4} {'vox':>12} {'torch':>12} {'relative':>10}")
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
        print(f"{number:4} {ours:12.7f} {theirs:12.7f} {abs(ours / theirs - 1):10.1e}")
    weights, update = apart(run / "model", folder / "loop.adapter", base)
    print(f"weights {weights:.1e} apart, what training changed of them {update:.1e}")


def rows() -> list[str]:
    """Conversations of short turns."""
    shipped = ROOT / "vox_core" / "quickstart" / "data" / "train.jsonl"
    made = []
    for line in shipped.read_text().splitlines()[::3][:64]:
        turns = json.loads(line)["messages"]
        short = [{**turn, "content": " ".join(turn["content"].split()[:8])} for turn in turns]
        made.append(json.dumps({"messages": [{"role": "system", "content": "vox"}, *short]}))
    return made


def documents(dataset: Dataset) -> list[list[tuple[list[int], list[float]]]]:
    """Tokens and weights of each step's documents, in vox's order."""
    from vox_core.data.batching import documents_in_step

    return [
        [
            (dataset[index].tokens_T.tolist(), dataset[index].weights_T.tolist())
            for index in documents_in_step(dataset, BATCH, SEED, step)
        ]
        for step in range(1, STEPS + 1)
    ]


def apart(ours: Path, theirs: Path, base: Path) -> tuple[float, float]:
    """Return the relative distances of the weights, and of their changes since `base`."""
    from vox_core.weights import WeightFolder

    mine, other, before = map(WeightFolder, (ours, theirs, base))
    squares = np.zeros(3)
    for name in mine.tensors:
        a, b, c = (np.asarray(each.read(name), np.float64) for each in (mine, other, before))
        squares += [np.sum((a - b) ** 2), np.sum(b**2), np.sum((b - c) ** 2)]
    difference, size, moved = np.sqrt(squares)
    return difference / size, difference / moved


if __name__ == "__main__":
    main()
