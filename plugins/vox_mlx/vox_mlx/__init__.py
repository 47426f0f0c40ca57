"""The MLX backend of vox, for the GPU of a Mac; on Linux for the CPU.

Model definitions and quantisation are mlx-lm's; the adapter's modules, the loss, the optimizer and
the running batch are here, because mlx-lm's own train on padding, average micro-batches without
weights, omit Adam's bias correction and have one adapter at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vox_core.hookspecs import hookimpl
from vox_mlx.blas import REMEDY, load_blas, slow

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


class MlxBackend:
    """vox's hooks on MLX."""

    @hookimpl
    def vox_train(self, job: TrainJob, context: RunContext) -> Trainer:
        before_mlx()
        _warn_if_slow(context)
        from vox_mlx.train import MlxTrainer

        return MlxTrainer(job, context)

    @hookimpl
    def vox_merge(self, job: MergeJob, context: RunContext) -> MergeResult:
        before_mlx()
        from vox_mlx.merge import merge

        return merge(job)

    @hookimpl
    def vox_load(self, job: LoadJob, context: RunContext) -> Model:
        before_mlx()
        _warn_if_slow(context)
        from vox_mlx.load import load

        return load(job)

    @hookimpl
    def vox_doctor(self) -> Iterator[Check]:
        before_mlx()
        from vox_mlx.blas import checks

        return checks()


def before_mlx() -> None:
    """Configure what must be set before the first import of MLX."""
    # By default MLX multiplies float32 with fewer bits where the hardware can; a float32 run must
    # compute in float32.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    load_blas()


def _warn_if_slow(context: RunContext) -> None:
    from vox_core.contract import Notice

    if complaint := slow():
        context.emit(Notice(f"{complaint}; {REMEDY}", "warning"))


backend = MlxBackend()
