"""Planned runs: the pipeline of `vox train` up to its first write, what `vox_advise` receives, and
steps that train nothing."""

from vox_core.adapter.targets import HasShape, parameter_names, quantised_modules
from vox_core.config import TrainSettings
from vox_core.data.batching import (
    cut,
    documents_in_step,
    epochs_after,
    make_step_batches,
    micro_batches,
    steps_for,
    validation_batches,
)
from vox_core.data.dataset import Dataset
from vox_core.data.encode import Document
from vox_core.digests import TOKENIZER_FILES
from vox_core.host import Origin
from vox_core.host.manifest import MemoryProfile
from vox_core.host.probe import Device
from vox_core.models import Progress
from vox_core.run import folder
from vox_core.run.advice import Tell, fixed_micro_batch, with_advice
from vox_core.run.artifacts import versions
from vox_core.run.context import Context
from vox_core.run.dequantised_base import as_trained, seeded
from vox_core.run.loop import is_validated
from vox_core.run.merge import space_needed as merge_space_needed
from vox_core.run.pinned_plan import FORMAT as PLAN_FORMAT
from vox_core.run.pinned_plan import digest_of
from vox_core.run.plan import has_linear_attention, possible_quants, text_config, vocabulary_size
from vox_core.run.progress import peak_resident
from vox_core.run.resume import in_force, metadata
from vox_core.run.run_plan import RunPlan, account, plan_run, space_free, space_needed
from vox_core.run.sources import Fetching

__all__ = [
    "PLAN_FORMAT",
    "TOKENIZER_FILES",
    "Context",
    "Dataset",
    "Device",
    "Document",
    "Fetching",
    "HasShape",
    "MemoryProfile",
    "Origin",
    "Progress",
    "RunPlan",
    "Tell",
    "TrainSettings",
    "account",
    "as_trained",
    "cut",
    "digest_of",
    "documents_in_step",
    "epochs_after",
    "fixed_micro_batch",
    "folder",
    "has_linear_attention",
    "in_force",
    "is_validated",
    "make_step_batches",
    "merge_space_needed",
    "metadata",
    "micro_batches",
    "parameter_names",
    "peak_resident",
    "plan_run",
    "possible_quants",
    "quantised_modules",
    "seeded",
    "space_free",
    "space_needed",
    "steps_for",
    "text_config",
    "validation_batches",
    "versions",
    "vocabulary_size",
    "with_advice",
]
