"""The frozen types exchanged between the core and a backend.

A `FineTuneContract` is the fingerprint of everything that decides a run's result, independent of
paths, time and machine; its digest identifies the run. An `ExecutionPlan` says how one backend
carries it out. Jobs go to a backend; results and events come back. All of it is plain Python and
numpy.

    spec.py      contract and plan
    batch.py     documents, steps, kinds of array
    state.py     adapters, training state
    events.py    events of a run
    jobs.py      jobs, results, context, a plugin's advice on a planned run
    model.py     what a backend returns: a model, and a model that learns
    objective.py what a step minimises

These modules read nothing, and import numpy where they compute with it.
"""

from __future__ import annotations

from vox_core.contract.batch import (
    Batch as Batch,
    Bools as Bools,
    Doubles as Doubles,
    Floats as Floats,
    Ints as Ints,
    Place as Place,
    Step as Step,
    padded_groups as padded_groups,
    probe_document as probe_document,
)
from vox_core.contract.events import (
    CheckpointWritten as CheckpointWritten,
    Evaluation as Evaluation,
    Event as Event,
    FastPaths as FastPaths,
    Notice as Notice,
    ObjectiveMetrics as ObjectiveMetrics,
    Outcome as Outcome,
    Resumed as Resumed,
    RunEnd as RunEnd,
    RunStart as RunStart,
    StepDone as StepDone,
    StepSkipped as StepSkipped,
    Validation as Validation,
)
from vox_core.contract.jobs import (
    Advice as Advice,
    Check as Check,
    Evaluator as Evaluator,
    LoadJob as LoadJob,
    MergeJob as MergeJob,
    MergeResult as MergeResult,
    MergeTarget as MergeTarget,
    RowStream as RowStream,
    RunContext as RunContext,
    TrainJob as TrainJob,
    LaunchJob as LaunchJob,
    LaunchResult as LaunchResult,
    World as World,
    WriteModelJob as WriteModelJob,
)
from vox_core.contract.model import (
    Model as Model,
    RowByRow as RowByRow,
    Trainer as Trainer,
    Update as Update,
    Weigh as Weigh,
)
from vox_core.contract.objective import (
    Group as Group,
    Need as Need,
    Objective as Objective,
    Reward as Reward,
    Side as Side,
    Totals as Totals,
    Weighed as Weighed,
)
from vox_core.contract.spec import (
    API_VERSION as API_VERSION,
    SFT as SFT,
    AdapterSpec as AdapterSpec,
    Curriculum as Curriculum,
    DataIdentity as DataIdentity,
    DataPolicy as DataPolicy,
    Dedup as Dedup,
    DType as DType,
    ExecutionPlan as ExecutionPlan,
    FineTuneContract as FineTuneContract,
    MalformedRows as MalformedRows,
    Method as Method,
    ModelIdentity as ModelIdentity,
    ModuleShape as ModuleShape,
    ObjectiveSpec as ObjectiveSpec,
    Optimizer as Optimizer,
    OptimizerSpec as OptimizerSpec,
    OrderSpec as OrderSpec,
    Packing as Packing,
    Quant as Quant,
    RolloutSpec as RolloutSpec,
    Schedule as Schedule,
    Unrated as Unrated,
)
from vox_core.contract.state import (
    AdapterState as AdapterState,
    LazyMapping as LazyMapping,
    LowRank as LowRank,
    TrainState as TrainState,
)
