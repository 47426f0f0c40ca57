"""The backend `float64` of vox: the torch engine on the CPU, computing in float64.

An oracle: what a float32 backend gives can be held against it. Weights are widened when they are
read; forward, backward, clipping and AdamW are float64; each step ends in a state rounded to
float32, which is what the seam carries. So a checkpoint loses nothing, and a curve differs from
exact arithmetic by one rounding of the state a step. Logits are rounded to float32 when they leave.
Streamed loads and merges, which vox holds against one another, are the engine's own, in float32.

The seam knows no float64, so the manifest declares fp32: what a plan with it asks for, this backend
gives and betters. It is slow, and therefore never chosen unless by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.hookspecs import hookimpl
from vox_testing.float64 import compute_in_float64
from vox_torch.engine import Engine
from vox_torch.profile import DeviceProfile

if TYPE_CHECKING:
    from vox_core.contract import (
        LoadJob,
        MergeJob,
        MergeResult,
        Model,
        RunContext,
        Trainer,
        TrainJob,
    )


class Backend:
    """vox's hooks on a `vox_torch` engine that computes in float64."""

    def __init__(self) -> None:
        self._engine = Engine(DeviceProfile("cpu", prepare=compute_in_float64))

    @hookimpl
    def vox_train(self, job: TrainJob, context: RunContext) -> Trainer:
        return self._engine.train(job, context)

    @hookimpl
    def vox_merge(self, job: MergeJob, context: RunContext) -> MergeResult:
        return self._engine.merge(job)

    @hookimpl
    def vox_load(self, job: LoadJob, context: RunContext) -> Model:
        return self._engine.load(job)


backend = Backend()
