"""Measure the tolerances of `probe.json` (`vox_core/run/load_proof.py`).

Trains SmolLM2 for a few steps on sums, in float32 and bfloat16 on the cpu and in bfloat16 on mlx,
opens each adapter in every backend and dtype, and prints the distance of the log-probabilities from
those at the end of training: the base's, the adapter's, their ratio, and those of faulty adapters.

    python benchmarks/load_proof_tolerance.py
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from vox_core.config import LoadSettings, TrainSettings, validate
from vox_core.contract import AdapterState
from vox_core.errors import ProofError
from vox_core.run.load import open_base
from vox_core.run.load_proof import check_probe, read_probe
from vox_core.run.reference import resolve_reference
from vox_core.run.train import train

TRAINED = (("cpu", "fp32"), ("cpu", "bf16"), ("mlx", "bf16"))
LOADED = (
    ("cpu", "fp32", "none"),
    ("cpu", "bf16", "none"),
    ("mlx", "fp32", "none"),
    ("mlx", "bf16", "none"),
    ("cpu", "bf16", "int8"),
    ("cpu", "bf16", "nf4"),
    ("mlx", "fp32", "affine4"),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        sums = [
            {"prompt": f"What is {n} + {n + 7}?", "completion": str(2 * n + 7)} for n in range(80)
        ]
        rows.write_text("\n".join(map(json.dumps, sums)))
        for backend, dtype in TRAINED:
            given = {"data": [rows], "backend": backend, "dtype": dtype, "max_steps": 4}
            run = train(
                validate(TrainSettings, given | {"out": Path(scratch) / backend / dtype})
            ).run
            for loaded in LOADED:
                _report(run, f"{backend} {dtype}", *loaded)


def _report(run: Path, trained: str, backend: str, dtype: str, quant: str) -> None:
    source = resolve_reference(str(run))
    assert source.adapter is not None
    probe = read_probe(source)
    assert probe is not None
    adapters = {"whole": source.adapter, **_faulty(source.adapter)}
    settings = LoadSettings.model_validate({"backend": backend, "dtype": dtype, "quant": quant})
    with open_base(source, adapters, settings) as opened:
        for name in adapters:
            try:
                made = check_probe(opened.model, name, probe, opened.job.dtype, run)
                print(
                    f"{trained} -> {backend} {dtype} {quant}  {name:<8} effect {made.effect:.2f}  "
                    f"base {made.base:.1e}  adapter {made.adapter:.1e}  "
                    f"ratio {made.adapter / made.base:.2f}  of {made.tolerance:.1e}"
                )
            except ProofError as error:
                print(f"{trained} -> {backend} {dtype} {quant}  {name:<8} refused: {error.found}")


def _faulty(adapter: AdapterState) -> dict[str, AdapterState]:
    modules = adapter.modules
    middle = list(modules)[len(modules) // 2]
    scaled = {
        name: {p: replace(m, B_OR=m.B_OR * np.float32(by)) for p, m in modules.items()}
        for name, by in (("zeroed", 0), ("halved", 0.5), ("louder", 1.1))
    }
    negated = {**modules, middle: replace(modules[middle], B_OR=-modules[middle].B_OR)}
    return {
        name: replace(adapter, modules=each)
        for name, each in {**scaled, "negated": negated}.items()
    }


if __name__ == "__main__":
    main()
