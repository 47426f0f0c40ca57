"""Time of a training step over a quantised base against bfloat16, in interleaved rounds.

    .venv/bin/python -m benchmarks.quantised_speed [--rounds 3] [--steps 5] [--quant nf4 int8]

Each round runs `vox train` on SmolLM2-135M in bf16 with and without `--quant`, in new processes, on
the same rows of mixed length (against.py). The ratio of the times is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.against import ROOT, train, write_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quant", nargs="+", default=["nf4", "int8"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        write_rows(rows)
        for quant in given.quant:
            pairs = [
                (
                    train(ROOT, rows, given.steps, "bf16"),
                    train(ROOT, rows, given.steps, "bf16", "--quant", quant),
                )
                for _ in range(given.rounds)
            ]
            longer = [plain.speed / packed.speed for plain, packed in pairs]
            plain, packed = pairs[0]
            print(
                f"{quant}: a step takes {statistics.median(longer):.3f} times bf16's "
                f"({min(longer):.3f} to {max(longer):.3f}); peak memory "
                f"{packed.memory / 1e9:.2f} GB, bf16 {plain.memory / 1e9:.2f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
