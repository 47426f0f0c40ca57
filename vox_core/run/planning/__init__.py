"""`vox plan`: a whole plan, from the way that `vox train` goes up to its first write.

report.py    the plan as it is told
make.py      settings -> report
work.py      documents and tokens of the whole run, counted
speed.py     how long it would take, measured
merging.py   what a merge of the run would need
"""

from __future__ import annotations

from vox_core.run.planning.make import plan
from vox_core.run.planning.report import (
    AdapterPlan,
    BackendPlan,
    DiskPlan,
    MemoryPlan,
    MergePlan,
    ModelPlan,
    PlanReport,
    SpeedPlan,
    StepPlan,
    Suggestion,
    Work,
)

__all__ = [
    "AdapterPlan",
    "BackendPlan",
    "DiskPlan",
    "MemoryPlan",
    "MergePlan",
    "ModelPlan",
    "PlanReport",
    "SpeedPlan",
    "StepPlan",
    "Suggestion",
    "Work",
    "plan",
]
