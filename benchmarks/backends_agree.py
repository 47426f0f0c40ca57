"""Greedy answers of cpu and mlx in float32 that differ, of 1,000.

    python benchmarks/backends_agree.py FOLDER [MODEL]

MODEL is smollm2-135m, unless another is named; `tiny` is a random Llama of 70,000 parameters, whose
answers are as long as they may be. Both evaluations are `vox eval`'s, so that a second call
continues. Exits with 1 if an answer or a score differs. On Linux, set VOX_MLX_BLAS to a library
with cblas_sgemm, or MLX takes hours.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from vox_testing.llama import write_llama

ANSWERS = 1000
SUITE = """name = "sums"
[[task]]
id = "sums"
rows = "sums.jsonl"
scorer = "numeric"
sampling = { max-tokens = 8 }
"""


def main(folder: Path, model: str = "smollm2-135m") -> int:
    folder.mkdir(parents=True, exist_ok=True)
    if model == "tiny":
        model = str(folder / "tiny")
        if not Path(model).exists():
            write_llama(Path(model))
    draw = random.Random(0)
    pairs = [(draw.randrange(1000), draw.randrange(1000)) for _ in range(ANSWERS)]
    rows = [json.dumps({"prompt": f"{a} + {b} =", "ideal": a + b}) for a, b in pairs]
    (folder / "sums.jsonl").write_text("\n".join(rows))
    (folder / "suite.toml").write_text(SUITE)
    found = [evaluated(folder, model, backend) for backend in ("cpu", "mlx")]
    answers, scores = (
        sum(int(one[key] != other[key]) for one, other in zip(*found, strict=True))
        for key in ("answer", "score")
    )
    tokens = sum(len(line["log_probs"][0]) for line in found[0])
    print(f"{ANSWERS} answers, {tokens} tokens: {answers} answers and {scores} scores differ")
    return int(answers + scores > 0)


def evaluated(folder: Path, model: str, backend: str) -> list[dict[str, Any]]:
    command = ["eval", model, "--suite", str(folder / "suite.toml"), "--out", str(folder / backend)]
    command += ["--backend", backend, "--dtype", "fp32"]
    subprocess.run([sys.executable, "-m", "vox_core.cli", *command], check=True)
    lines = (folder / backend / "eval.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
