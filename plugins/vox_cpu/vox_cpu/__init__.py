"""The CPU backend of vox: the torch engine on the processor.

The dtype is bfloat16 where the processor multiplies it natively (AMX, AVX512-BF16), else float32;
it is decided at plan time from the probe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.hookspecs import hookimpl
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


class CpuBackend:
    """vox's hooks on a `vox_torch` engine for the CPU."""

    def __init__(self) -> None:
        self._engine = Engine(DeviceProfile("cpu"))

    @hookimpl
    def vox_train(self, job: TrainJob, context: RunContext) -> Trainer:
        return self._engine.train(job, context)

    @hookimpl
    def vox_merge(self, job: MergeJob, context: RunContext) -> MergeResult:
        return self._engine.merge(job)

    @hookimpl
    def vox_load(self, job: LoadJob, context: RunContext) -> Model:
        return self._engine.load(job)


backend = CpuBackend()
