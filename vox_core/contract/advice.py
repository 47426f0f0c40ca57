"""What a plugin says of a run that has been planned and not yet begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vox_core.contract.events import Notice
from vox_core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer of `vox_advise`. What it changes is time and memory, never a number.

    Args:
        notices: shown, and kept in the run's telemetry.
        micro_batch_tokens: in place of those of the plan. The core leaves them where the user set
            them, and with dropout, whose mask depends on the micro-batch.
        tuning: values for the backend's knobs, by name.
        refusal: why the run cannot succeed. It is raised by `vox train`, and shown by `vox plan`.
    """

    notices: tuple[Notice, ...] = ()
    micro_batch_tokens: int | None = None
    tuning: Mapping[str, str] = field(default_factory=dict)
    refusal: PlanError | None = None
