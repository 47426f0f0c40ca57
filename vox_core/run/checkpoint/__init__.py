"""Checkpoints: a `TrainState` on the disk, the same for every backend, whole or not there.

    step-N/adapter.safetensors     float32, canonical names
    step-N/moments.safetensors     float32, `<canonical name>.exp_avg` and `.exp_avg_sq`
    step-N/state.json              step, contract digest, backend, the adapter's structure
    step-N/MANIFEST.json           size and SHA-256 of the three

A checkpoint counts only if every file is what the manifest says. No pickle.

    record.py    the two JSON files, with every field checked when they are read
    write.py     `save`: the protocol; `prune`: which are kept
    read.py      `load_newest`: what verifies, and why the rest does not
    writer.py    when a checkpoint is due, and the thread that writes it
"""

from __future__ import annotations

from vox_core.run.checkpoint.read import fault, load, load_newest, load_step, origin, read_record
from vox_core.run.checkpoint.record import BackendUse, Origin, Record
from vox_core.run.checkpoint.write import Retention, prune, save
from vox_core.run.folder import numbered, step_of

__all__ = [
    "BackendUse",
    "Origin",
    "Record",
    "Retention",
    "fault",
    "load",
    "load_newest",
    "load_step",
    "numbered",
    "origin",
    "prune",
    "read_record",
    "save",
    "step_of",
]
