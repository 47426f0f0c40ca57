"""For plugins that drive a trainer: a learner that takes steps, and a base that learners share."""

from vox_core.data.batching import cut_groups as cut_groups
from vox_core.run.checkpoint import load_newest as load_newest
from vox_core.run.learner import Learner as Learner, micro_batch_seed as micro_batch_seed
from vox_core.run.open_trainer import (
    TrainingBase as TrainingBase,
    open_training_base as open_training_base,
)
from vox_core.run.telemetry import Telemetry as Telemetry
