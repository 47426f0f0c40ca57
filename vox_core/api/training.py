"""For plugins that drive a trainer: a learner that takes steps."""

from vox_core.run.learner import Learner as Learner, micro_batch_seed as micro_batch_seed
