"""Generate `docs/benchmarks.md` from the training results in `benchmarks/results`.

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

Training in vox and in its peers, side by side: LoRA of rank 16 on all linear modules of the body,
or all weights in cells that end in `full`; AdamW, gradient clipping at 1.
`python -m benchmarks.training.report` generates this page from `benchmarks/results`; do not edit
it.

**Same work.** In each cell, every trainer gets the same token ids, in the same optimizer steps but
for `loop-sorted`, the same initial adapter, learning rates and number of threads. The examples are
those that `loop-sorted` would have together: it pads 2 % at most. (`cpu-fp32` is older; its
examples were drawn at random.) Rounds are interleaved, and each run is a new process. One script
drives all trainers from token ids, so vox runs without its command line here.

**Same results.** A trainer, vox included, is *void* unless the loss of every step matches
transformers and PEFT in float32 on the same device with one example at a time: to 1e-4 in
float32, and to 1 % in bfloat16 (whose own rounding is 0.2 %). The norm of the trained adapter, or
of what all weights changed by, is checked too.

| column | meaning |
| --- | --- |
| tokens/s | real tokens, without padding, over all steps but the first; median of the rounds |
| vox speedup | median of the rounds' ratios, with minimum and maximum; for `mlx-lm`, of `vox-mlx` |
| wall time | from process start to the adapter on disk, with imports and loading |
| peak memory | resident memory; on a GPU, torch's allocated and reserved memory |
| of peak | FLOP/s, relative to this machine's matrix products in the same round (see below) |
| loss error | largest relative difference of a step's loss from the float32 reference |

An example of L tokens, S of them trained, counts as {FORMULA} FLOP; with all
weights trained, 6 instead of 4. *of peak* divides the
trainer's FLOP/s by what the machine reaches when it multiplies matrices of the model's shapes in
the same dtype.

| trainer | settings |
| --- | --- |
| `trl` | `SFTTrainer` with its defaults: float32 weights, gradient checkpointing, padding |
| `trl-best` | weights in the cell's dtype, no gradient checkpointing, padding-free batches |
| `loop` | transformers and PEFT in a plain loop, the examples of a step sorted by length |
| `loop-sorted` | the same, in the steps of a loop over 100 steps of examples sorted by length |
| `mlx-lm` | its own training function, loss and optimizer corrected, the BLAS of `vox-mlx` |

In `full` cells, `loop` and `loop-sorted` have float32 weights and autocast to bfloat16. On a GPU
without flash attention, `trl-best` pads and groups examples by length, because
padding-free batches would need a mask of all tokens by all tokens.

Below each table are each trainer's attention implementation and batch layout. Models ending in
`-real` are the catalog's, trained on text. Others have random weights in the real shapes, and
random tokens.
"""


def page(results: Iterable[Json], others: Iterable[str] = ()) -> str:
    """The whole page. Pure.

    Args:
        others: sections of other benchmarks, in Markdown.
    """
    return "\n".join([METHOD, *map(_section, results), *others])


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
        f"Rounds: {len(cell['rounds'])}, of {settings['steps']} steps with {settings['per_step']} "
        f"examples and {mean:,.0f} tokens each."
    )
    return [f"### {cell['id']}", "", work, "", markdown(cell["rows"]), "", notes(cell["rows"]), ""]


def current() -> str:
    """The page of the results that are there."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    others = [file.read_text() for file in sorted(RESULTS.glob("*.md"))]
    return page((r for r in results if r.get("benchmark") == KIND), others)


def write() -> Path:
    """Write the page; returns where."""
    PAGE.write_text(current())
    return PAGE


if __name__ == "__main__":
    print(f"wrote {write()}")
