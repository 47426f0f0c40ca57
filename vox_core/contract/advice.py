"""A plugin's advice on a planned run, before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vox_core.contract.events import Notice
from vox_core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Advice:
    """The result of `vox_advise`; it changes time and memory, never the trained numbers.

    Args:
        notices: shown, and kept in the run's telemetry.
        micro_batch_tokens: replaces the plan's value, unless the user set it or there is dropout,
            whose mask depends on the micro-batch.
        tuning: values for the backend's knobs, by name.
        refusal: why the run cannot succeed. It is raised by `vox train`, and shown by `vox plan`.
    """

    notices: tuple[Notice, ...] = ()
    micro_batch_tokens: int | None = None
    tuning: Mapping[str, str] = field(default_factory=dict)
    refusal: PlanError | None = None
