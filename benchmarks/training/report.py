"""`docs/benchmarks.md`, written from the JSONs in `benchmarks/results` that are of this benchmark.

python -m benchmarks.training.report
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.training.flops import FORMULA
from benchmarks.training.table import Json, markdown, notes

ROOT = Path(__file__).resolve().parents[2]
KIND = "training"
"""What results of this benchmark say of themselves; others lie in the same folder."""
RESULTS, PAGE = ROOT / "benchmarks/results", ROOT / "docs/benchmarks.md"

METHOD = f"""# Benchmarks

LoRA training (rank 16 on all linear modules of the body, AdamW, clipping at 1) in vox and in its
peers, side by side. Written by `python -m benchmarks.training.report`; do not edit.

- In each cell every trainer gets the same token ids in the same optimizer steps, the same adapter
  to start from, the same rates and the same number of threads. Rounds are interleaved, and each run
  is a new process.
- A trainer, vox too, is void unless each loss of each step is that of transformers and PEFT in
  float32 on the same device, each document computed by itself: to 1e-4 in float32, to 1 % in
  bfloat16 (whose own rounding is 0.2 %). *loss off by* is the largest relative distance. The norm
  of what was learnt is held against it as well.
- *tokens/s* counts real tokens, never padding, over all steps but the first; the median of rounds.
  *vox is faster by* is the median of the rounds' ratios, with the smallest and the largest;
  for `mlx-lm` it is `vox-mlx` that is faster.
- *to adapter* is from the start of the process, imports and loading included, to the adapter on the
  disk. All are driven by one script from token ids: no text gives `vox train` exactly these.
- *peak memory* is resident memory, or on a GPU what torch allocated and what it reserved.
- *of roof* is {FORMULA} FLOP for each document of L tokens, S of them trained, over what the same
  machine reaches, in the same round, multiplying matrices of the model's own shapes in that dtype.
- `trl` is `SFTTrainer` with its defaults (float32 weights, gradient checkpointing, padding);
  `trl-best` has weights in the cell's dtype, no gradient checkpointing, and padding-free rows on
  the CPU and with flash attention; on a GPU without it, rows are padded and grouped by length, as
  padding-free ones would go through a mask of all tokens by all tokens;
  `loop` is transformers and PEFT in a plain loop, sorted by length; `mlx-lm` is its own training
  function with loss and optimizer set right, and the BLAS that `vox-mlx` has.
- Below each table is the attention that each trainer used, and how documents lay in its rows.
- Models ending in `-real` are the catalog's, trained on text; others have random weights of the
  real shapes, and random tokens.
"""


def page(results: Iterable[Json]) -> str:
    """The whole page. Pure."""
    return "\n".join([METHOD, *map(_section, results)])


def _section(result: Json) -> str:
    machine, versions = result["machine"], result["versions"]
    where = f"{machine['gpu']}; {machine['cpu']}" if "gpu" in machine else machine["cpu"]
    told = ", ".join(f"{name} {number}" for name, number in versions.items())
    head = [
        f"## {result['name']}",
        "",
        f"{result['date']}, {where}, {machine['threads']} threads, {machine['system']}; {told}.",
        "",
        f"    {result['command']}",
        "",
    ]
    tables = [part for cell in result["cells"] for part in _cell(cell)]
    return "\n".join([*head, *tables])


def _cell(cell: Json) -> list[str]:
    mean = sum(cell["tokens"]) / len(cell["tokens"])
    settings = cell["cell"]
    work = (
        f"{len(cell['rounds'])} rounds of {settings['steps']} steps, {settings['per_step']} "
        f"documents and {mean:,.0f} tokens a step."
    )
    return [f"### {cell['id']}", "", work, "", markdown(cell["rows"]), "", notes(cell["rows"]), ""]


def write() -> Path:
    """Write the page; returns where."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    PAGE.write_text(page(r for r in results if r.get("benchmark") == KIND))
    return PAGE


if __name__ == "__main__":
    print(f"wrote {write()}")
