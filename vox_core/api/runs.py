"""Run folders: find them, read their telemetry and contracts, compare two contracts."""

from vox_core.bounded_json import differences as differences
from vox_core.run.folder import (
    PLAN as PLAN,
    RECORD as RECORD,
    TELEMETRY as TELEMETRY,
    Results as Results,
    RunFolder as RunFolder,
    continued as continued,
    is_worked_in as is_worked_in,
    locked as locked,
)
from vox_core.run.telemetry import (
    RUNS as RUNS,
    Curve as Curve,
    Summary as Summary,
    is_run as is_run,
    read_run as read_run,
    read_runs as read_runs,
    require_run as require_run,
    runs_in as runs_in,
)
from vox_core.run.telemetry import Line as Line, Tail as Tail
