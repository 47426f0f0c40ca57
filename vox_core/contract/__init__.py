"""The frozen types exchanged between the core and a backend.

A `FineTuneContract` is the fingerprint of everything that decides a run's result, independent of
paths, time and machine; its digest identifies the run. An `ExecutionPlan` says how one backend
carries it out. Jobs go to a backend; results and events come back. All of it is plain Python and
numpy.

    spec.py      contract and plan
    batch.py     documents, steps
    state.py     adapters, training state
    events.py    events of a run
    jobs.py      jobs, results, context
    advice.py    a plugin's advice on a planned run
    sampling.py  the choice of the next token

These modules read nothing, and import numpy where they compute with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.contract.advice import Advice
from vox_core.contract.batch import (
    Batch,
    Step,
    cut_to_rows,
    padded_groups,
    probe_document,
)
from vox_core.contract.events import (
    CheckpointWritten,
    Event,
    FastPaths,
    Notice,
    Resumed,
    RunEnd,
    RunStart,
    StepDone,
    StepSkipped,
    Validation,
)
from vox_core.contract.jobs import (
    Check,
    LoadedModel,
    LoadJob,
    MergeJob,
    MergeResult,
    MergeTarget,
    RowStream,
    RunContext,
    TrainJob,
    TrainResult,
    World,
    WriteModelJob,
)
from vox_core.contract.sampling import Sampling, next_token
from vox_core.contract.spec import (
    API_VERSION,
    AdapterSpec,
    Curriculum,
    DataIdentity,
    DataPolicy,
    Dedup,
    DType,
    ExecutionPlan,
    FineTuneContract,
    MalformedRows,
    Method,
    ModelIdentity,
    ModuleShape,
    Optimizer,
    OptimizerSpec,
    OrderSpec,
    Packing,
    Quant,
    Schedule,
    Unrated,
)
from vox_core.contract.state import (
    AdapterState,
    LowRank,
    TrainState,
)

if TYPE_CHECKING:
    from vox_core.contract.arrays import Floats as Floats
    from vox_core.contract.arrays import Ints as Ints

__all__ = [
    "API_VERSION",
    "AdapterSpec",
    "AdapterState",
    "Advice",
    "Batch",
    "Check",
    "CheckpointWritten",
    "Curriculum",
    "DType",
    "DataIdentity",
    "DataPolicy",
    "Dedup",
    "Event",
    "ExecutionPlan",
    "FastPaths",
    "FineTuneContract",
    "LoadJob",
    "LoadedModel",
    "LowRank",
    "MalformedRows",
    "MergeJob",
    "MergeResult",
    "MergeTarget",
    "Method",
    "ModelIdentity",
    "ModuleShape",
    "Notice",
    "Optimizer",
    "OptimizerSpec",
    "OrderSpec",
    "Packing",
    "Quant",
    "Resumed",
    "RowStream",
    "RunContext",
    "RunEnd",
    "RunStart",
    "Sampling",
    "Schedule",
    "Step",
    "StepDone",
    "StepSkipped",
    "TrainJob",
    "TrainResult",
    "TrainState",
    "Unrated",
    "Validation",
    "World",
    "WriteModelJob",
    "cut_to_rows",
    "next_token",
    "padded_groups",
    "probe_document",
]
