"""A right backend with every quantisation, whichever it has itself."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from vox_core.adapter.targets import format_of, quantised_modules
from vox_core.contract import Quant, RunContext, Trainer, TrainJob
from vox_core.weights import WEIGHTS, WeightFolder, write_safetensors
from vox_testing.quantised import round_trip

if TYPE_CHECKING:
    from libs.vox_testing.tests.mutant import Train

QUANTISATIONS: tuple[Quant, ...] = get_args(Quant)


class Quantising:
    """The hooks of `backend`, with every quantisation: the dequantised weights are trained on."""

    def __init__(self, backend: Any) -> None:
        self.vox_merge, self.vox_load = backend.vox_merge, backend.vox_load
        self._backend = backend

    def vox_train(self, job: TrainJob, context: RunContext) -> Trainer:
        quant = job.plan.contract.quant
        if quant == "none":
            return self._right(job, context)
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(job.model, folder, dirs_exist_ok=True)
            weights = WeightFolder(job.model)
            reached = quantised_modules(weights.tensors, "llama", quant)
            formats = {m.tensor: format_of(path, quant) for path, m in reached.items()}
            specs = {name: (info.dtype, info.shape) for name, info in weights.tensors.items()}
            values = {name: weights.read(name).astype(np.float64) for name in specs}
            made = (
                (name, (round_trip(formats[name], W) if name in formats else W).astype(np.float32))
                for name, W in values.items()
            )
            write_safetensors(Path(folder) / WEIGHTS, specs, made)
            plain = replace(job.plan.contract, quant="none")
            plan = replace(job.plan, contract=plain)
            return self._right(replace(job, model=Path(folder), plan=plan), context)

    def _right(self, job: TrainJob, context: RunContext) -> Trainer:
        trainer: Trainer = self._backend.vox_train(job, context)
        return trainer


def as_quantisation(quant: Quant) -> Any:
    """Whatever quantisation was asked for, train on this one."""

    def train(right: Train, job: TrainJob) -> Trainer:
        if job.plan.contract.quant == "none":
            return right(job)
        contract = replace(job.plan.contract, quant=quant)
        return right(replace(job, plan=replace(job.plan, contract=contract)))

    return train
