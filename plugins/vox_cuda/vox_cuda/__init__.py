"""The CUDA backend of vox: the torch engine on an NVIDIA GPU, with bitsandbytes' quantisations.

A process uses one GPU, the first visible one. The dtype is decided at plan time from the probe.
Before each operation the backend checks that torch can use the GPU that the probe found, so that a
torch build without CUDA is reported before any work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vox_core.hookspecs import hookimpl
from vox_cuda.ready import checks, require_bitsandbytes, require_cuda, without_plans
from vox_torch.engine import Engine
from vox_torch.profile import DeviceProfile

if TYPE_CHECKING:
    from vox_core.contract import (
        Check,
        LoadJob,
        MergeJob,
        MergeResult,
        Model,
        RunContext,
        Trainer,
        TrainJob,
    )


class CudaBackend:
    """vox's hooks on a `vox_torch` engine for CUDA."""

    def __init__(self) -> None:
        self._engine = Engine(DeviceProfile("cuda"))

    @hookimpl
    def vox_train(self, job: TrainJob, context: RunContext) -> Trainer:
        require_cuda()
        contract = job.plan.contract
        require_bitsandbytes(contract.quant, contract.optimizer.name)
        without_plans()
        return self._engine.train(job, context)

    @hookimpl
    def vox_merge(self, job: MergeJob, context: RunContext) -> MergeResult:
        require_cuda()
        return self._engine.merge(job)

    @hookimpl
    def vox_load(self, job: LoadJob, context: RunContext) -> Model:
        require_cuda()
        require_bitsandbytes(job.quant)
        without_plans()
        return self._engine.load(job)

    @hookimpl
    def vox_doctor(self) -> Iterator[Check]:
        return checks()


backend = CudaBackend()
