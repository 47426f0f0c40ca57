"""The adapter of a run whose last checkpoint cannot be written, in any file that can.

Hours of training are in it, and it is a third of a checkpoint: where that does not fit, it may.
"""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path

from vox_core import files
from vox_core.adapter.peft import write_adapter
from vox_core.adapter.targets import linear_modules
from vox_core.contract import TrainState
from vox_core.errors import InputError, StorageError, command
from vox_core.run.folder import RunFolder
from vox_core.run.prepare import Prepared


def rescued(
    error: StorageError, run: RunFolder, prepared: Prepared, state: TrainState
) -> StorageError:
    """`error`, with the place where the adapter of `state` is kept, or the word that it is not."""
    kept = _kept(run, prepared, state)
    fault = (
        f"the adapter after step {state.step} is kept in {kept}"
        if kept
        else f"the adapter after step {state.step} could be kept nowhere"
    )
    return StorageError(
        error.code.removeprefix("VOX-"),
        error.what,
        where=error.where,
        found=error.found,
        faults=[*error.faults, fault],
        remedy=f"{error.remedy}: {command('vox', 'train', '--resume', run.path)}",
    )


def _kept(run: RunFolder, prepared: Prepared, state: TrainState) -> Path | None:
    """The first place that takes it: the run's folder, the one for temporary files, this one."""
    name = f"vox-adapter-{run.path.resolve().name}-{uuid.uuid4().hex[:8]}"
    places = (run.path, Path(tempfile.gettempdir()), Path.cwd())
    for place in (parent / name for parent in places):
        try:
            with files.atomic_folder(place) as folder:
                write_adapter(
                    folder,
                    state.adapter,
                    base=str(prepared.model.path),  # no manifest beside it would name these weights
                    modules=linear_modules(prepared.weights.tensors, prepared.model.model_type),
                    dropout=prepared.plan.contract.adapter.dropout,
                )
            return place
        except (StorageError, InputError):
            continue
    return None
