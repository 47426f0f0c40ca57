"""`vox train`: from settings to a run folder.

First everything that can be wrong is found (`run_plan.py`), and nothing is written. Then the run
folder is opened (`session.py`), the backend trains (`loop.py`), and what it returns is written
(`artifacts.py`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vox_core.contract import Notice
from vox_core.errors import ConfigError, OutputError, StorageError
from vox_core.host.load import Observe, ignore, world_of
from vox_core.run.artifacts import TrainReport, report_of, report_of_ended, write_artifacts
from vox_core.run.loop import run_training
from vox_core.run.run_plan import plan_run, with_advice
from vox_core.run.session import Session

if TYPE_CHECKING:
    from vox_core import models
    from vox_core.config import TrainSettings
    from vox_core.run.resume import PinnedPlan

_REMEDIES = {  # of a resume, where another --out is none
    "VOX-S001": "free space on that disk, and run again",
    "VOX-O002": "get permission to write there, and run again",
    "VOX-O003": "wait until it has ended, or stop it",
}


def train(
    settings: TrainSettings,
    *,
    observe: Observe = ignore,
    progress: models.Progress | None = None,
    pinned: PinnedPlan | None = None,
) -> TrainReport:
    """Train, or go on with `settings.resume`.

    Args:
        progress: called while models are downloaded or converted, and data are read.
        pinned: the plan that the run is held against; `settings` are its own.

    Raises:
        InputError: anything wrong that could be found before the first step; nothing was written.
        WorkError: something failed while working; the run folder keeps what was done.
        StoppedAtOnce: a second signal did not wait for the end of the step.
    """
    began = time.perf_counter()

    def tell(text: str) -> None:
        observe(Notice(text))

    world = world_of()
    if settings.processes not in (1, world.size):
        raise ConfigError(
            "C004",
            "several processes are started by the command `vox train`",
            where="processes",
            found=f"{settings.processes}, and this process is one of {world.size}",
            remedy="use vox train --processes N, or leave it out",
        )
    tell("reading the model and the data …")
    try:
        plan = plan_run(settings, progress, tell=tell, pinned=pinned, world=world)
        if plan.ended:
            tell(f"the run has finished already ({plan.ended}); there is nothing to do")
            return report_of_ended(plan)
        plan = with_advice(plan, tell)
        if plan.advice.refusal:
            raise plan.advice.refusal
        with Session.open(plan, observe, began, world) as session, run_training(session) as trained:
            return (write_artifacts if world.leads else report_of)(session, trained)
    except (OutputError, StorageError) as error:
        if settings.resume is None or error.code not in _REMEDIES:
            raise
        raise error.but(remedy=_REMEDIES[error.code]) from error
