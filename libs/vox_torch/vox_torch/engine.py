"""The operations of a torch backend (train, merge, load) for a device profile.

A plugin wraps an `Engine` in hookimpls; the profile holds the differences between devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_torch.libraries import bound_primitives
from vox_torch.profile import DeviceProfile, keep_to_quota

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


class Engine:
    """Train, merge and load with torch on the device of `profile`."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile

    def train(self, job: TrainJob, context: RunContext) -> Trainer:
        """Load a base model, for learners to be added."""
        bound_primitives()
        keep_to_quota()
        from vox_torch.train import TorchTrainer

        return TorchTrainer(job, context, self._profile)

    def merge(self, job: MergeJob) -> MergeResult:
        """Yield merged tensors, lazily, in the order of the job's targets."""
        from vox_torch.merge import merge

        return merge(job)

    def load(self, job: LoadJob) -> Model:
        """Load a model for scores, logits and generation."""
        bound_primitives()
        keep_to_quota()
        from vox_torch.load import load

        return load(job, self._profile)
