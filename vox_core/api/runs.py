"""Run folders: find them, read their telemetry and contracts, compare two contracts."""

from vox_core.bounded_json import differences
from vox_core.run.folder import PLAN, TELEMETRY, RunFolder, is_worked_in
from vox_core.run.history import (
    RUNS,
    Curve,
    Summary,
    is_run,
    read_run,
    read_runs,
    require_run,
    runs_in,
)
from vox_core.run.telemetry import Line, Tail

__all__ = [
    "PLAN",
    "RUNS",
    "TELEMETRY",
    "Curve",
    "Line",
    "RunFolder",
    "Summary",
    "Tail",
    "differences",
    "is_run",
    "is_worked_in",
    "read_run",
    "read_runs",
    "require_run",
    "runs_in",
]
