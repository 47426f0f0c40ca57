"""The CPU backend of vox: the torch engine on the processor.

bfloat16 where the processor multiplies it natively (AMX, AVX512-BF16), float32 elsewhere; which of
the two is decided at plan time from the probe, not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.hookspecs import hookimpl
from vox_torch.engine import Engine
from vox_torch.profile import DeviceProfile

if TYPE_CHECKING:
    from vox_core.contract import (
        LoadedModel,
        LoadJob,
        MergeJob,
        MergeResult,
        RunContext,
        TrainJob,
        TrainResult,
    )


class CpuBackend:
    """vox's hooks on a `vox_torch` engine."""

    def __init__(self) -> None:
        self._engine = Engine(DeviceProfile("cpu"))

    @hookimpl
    def vox_train(self, job: TrainJob, context: RunContext) -> TrainResult:
        return self._engine.train(job, context)

    @hookimpl
    def vox_merge(self, job: MergeJob, context: RunContext) -> MergeResult:
        return self._engine.merge(job)

    @hookimpl
    def vox_load(self, job: LoadJob, context: RunContext) -> LoadedModel:
        return self._engine.load(job)


backend = CpuBackend()
