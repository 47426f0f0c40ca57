"""What `vox merge` of a run would need: memory of the machine, room on the disk."""

from __future__ import annotations

import os
from dataclasses import asdict

from vox_core.run.dequantised_base import as_trained
from vox_core.run.foresight import foresee_merge
from vox_core.run.merge import space_needed
from vox_core.run.planning.report import DiskPlan, MemoryPlan, MergePlan
from vox_core.run.prepare import Prepared, space_free
from vox_core.run.ready import Ready


def merge_plan(ready: Ready) -> MergePlan:
    """Of `vox merge RUN`, as it is without further flags."""
    prepared = ready.prepared
    return MergePlan(_memory(prepared), _disk(ready))


def _memory(prepared: Prepared) -> MemoryPlan:
    found = foresee_merge(prepared)
    total, free = _of_the_machine(prepared)
    limit = total if free is None else free
    fits = None if limit is None else found.peak <= limit
    return MemoryPlan(found.peak, asdict(found), total, free, fits)


def _of_the_machine(prepared: Prepared) -> tuple[int | None, int | None]:
    """All of its memory, and what is free: a merge works there, whatever device trains."""
    for device in prepared.selection.hardware.devices:
        if device.tag == "cpu":
            return device.memory_bytes, device.available_bytes
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    except (AttributeError, OSError, ValueError):
        return None, None


def _disk(ready: Ready) -> DiskPlan:
    prepared, plan = ready.prepared, ready.prepared.plan
    quant, model_type = plan.contract.quant, plan.contract.model.model_type
    trained = as_trained(prepared.weights, quant, model_type, plan.dtype)
    where, free = space_free(ready.run.path)
    return DiskPlan(space_needed(prepared.weights, trained), free, where)
