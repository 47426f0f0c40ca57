"""The backend `numpy` of vox: a Llama in numpy, forward and backward by hand.

To read, and to start a backend from. It is slow, and therefore chosen by name only.

    functions.py   the functions of the model, each with its gradient
    llama.py       one document's pass through the model, and back
    config.py      a model's folder: settings and weights
    adapter.py     adapters, AdamW, the merge
    trainer.py     `Model` and `Trainer` of vox's plugin API

Importing this module does nothing; a hook imports what it needs.
"""

from __future__ import annotations

from vox_core import contract as seam
from vox_core.hookspecs import hookimpl


class Backend:
    """vox's hooks in numpy."""

    @hookimpl
    def vox_train(self, job: seam.TrainJob, context: seam.RunContext) -> seam.Trainer:
        from vox_numpy.config import Llama
        from vox_numpy.trainer import NumpyTrainer

        dropout = job.plan.contract.adapter.dropout
        return NumpyTrainer(Llama(job.model), dropout, job.plan.gradient_checkpointing)

    @hookimpl
    def vox_merge(self, job: seam.MergeJob, context: seam.RunContext) -> seam.MergeResult:
        from vox_numpy.adapter import merged

        return seam.MergeResult(merged(job))

    @hookimpl
    def vox_load(self, job: seam.LoadJob, context: seam.RunContext) -> seam.Model:
        from vox_numpy.config import Llama
        from vox_numpy.trainer import NumpyModel

        return NumpyModel(Llama(job.model, streamed=job.streamed))


backend = Backend()
