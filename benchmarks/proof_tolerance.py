"""Measure the tolerance of the merge's verification (`vox_core/run/proof.py`).

Trains a short adapter on each tiny family, merges it into bfloat16, float16 and float32 copies of
the base, and prints the relative difference of the logits as a multiple of u * sqrt(L): u the
dtype's unit roundoff, L the number of linear layers. With arguments, folders of runs to merge too:

    python benchmarks/proof_tolerance.py [RUN ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from libs.vox_torch.tests.jobs import documents, plan, step, train
from vox_core.adapter.peft import write_adapter
from vox_core.adapter.targets import linear_modules
from vox_core.config import MergeSettings
from vox_core.run.merge import merge
from vox_core.run.proof import TOLERANCE, Proof
from vox_core.weights import WeightFolder
from vox_testing.tiny import FAMILIES, make_model

ROUNDOFF = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24}
TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def main() -> None:
    worst: dict[str, float] = dict.fromkeys(ROUNDOFF, 0.0)
    with tempfile.TemporaryDirectory() as scratch:
        for family in FAMILIES:
            for dtype in ROUNDOFF:
                proof = _tiny(family, dtype, Path(scratch) / f"{family}-{dtype}")
                worst[dtype] = max(worst[dtype], _report(f"{family} {dtype}", dtype, proof))
        for index, run in enumerate(sys.argv[1:]):
            out = Path(scratch) / f"run-{index}"
            _report(run, "BF16", merge(run, MergeSettings(out=out)).proof)
    print("largest:", {dtype: round(value, 2) for dtype, value in worst.items()})


def _tiny(family: str, dtype: str, folder: Path) -> Proof:
    base = make_model(family, folder / "base", dtype=TORCH[dtype])
    steps = [step(n, [documents(3, seed=n)], lr=1e-2) for n in range(1, 6)]
    trained, _ = train(base, steps, plan(base, total_steps=5))
    weights = WeightFolder(base)
    model_type = plan(base).contract.model.model_type
    adapter = folder / "adapter"
    adapter.mkdir()
    modules = linear_modules(weights.tensors, model_type)
    write_adapter(adapter, trained.adapter, base=str(base), modules=modules)
    return merge(str(adapter), MergeSettings(out=folder / "merged")).proof


def _report(name: str, dtype: str, proof: Proof) -> float:
    layers = (proof.tolerance / TOLERANCE[dtype]) ** 2
    multiple = proof.relative / (ROUNDOFF[dtype] * layers**0.5)
    print(
        f"{name:<20} relative {proof.relative:.1e} = {multiple:5.2f} u sqrt(L)"
        f"   effect {proof.adapter_effect:.2f}   carried {proof.carried:.4f}"
    )
    return multiple


if __name__ == "__main__":
    main()
