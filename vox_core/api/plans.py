"""Planned runs: the pipeline of `vox train` up to its first write, what `vox_advise` receives, and
steps that train nothing.
"""

from vox_core.adapter.targets import HasShape as HasShape
from vox_core.config import TrainSettings as TrainSettings
from vox_core.data.batching import (
    cut as cut,
    documents_in_step as documents_in_step,
    epochs_after as epochs_after,
    grouped as grouped,
    steps_for as steps_for,
    ValidationBatches as ValidationBatches,
)
from vox_core.data.dataset import Dataset as Dataset
from vox_core.data.encode import Document as Document
from vox_core.host.manifest import MemoryProfile as MemoryProfile
from vox_core.host.probe import Device as Device
from vox_core.run import folder as folder, merge, resume
from vox_core.run.artifacts import versions as versions
from vox_core.run.hf_checkpoint import as_trained as as_trained, seeded as seeded
from vox_core.run.loop import is_validated as is_validated
from vox_core.run.plan import (
    find_experts as find_experts,
    has_linear_attention as has_linear_attention,
    has_tied_head as has_tied_head,
    text_config as text_config,
    vocabulary_size as vocabulary_size,
    width_faults as width_faults,
)
from vox_core.run.progress import peak_resident as peak_resident
from vox_core.run.resume import digest_of as digest_of, in_force as in_force, metadata as metadata
from vox_core.run.run_plan import (
    RunPlan as RunPlan,
    Tell as Tell,
    account as account,
    fixed_micro_batch as fixed_micro_batch,
    plan_run as plan_run,
    space_needed as space_needed,
    with_advice as with_advice,
)

merge_space_needed = merge.space_needed
PLAN_FORMAT = resume.FORMAT
