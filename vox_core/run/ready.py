"""The way to the first step: whatever can be refused is refused here, and nothing is written.

`vox train` goes on from here and `vox plan` stops here, so what can be planned can be begun.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vox_core import files, models
from vox_core.config import TrainSettings
from vox_core.host import Origin
from vox_core.run import folder, resume
from vox_core.run.folder import RunFolder
from vox_core.run.prepare import Prepared, prepare, require_space
from vox_core.run.tuning.apply import tune
from vox_core.run.tuning.search import Tell


@dataclass(frozen=True, slots=True)
class Ready:
    """A run that may begin, or go on.

    Args:
        settings: those given; with `--resume`, over the run's own.
        fresh: it begins.
    """

    settings: TrainSettings
    run: RunFolder
    prepared: Prepared
    fresh: bool


def make_ready(
    settings: TrainSettings,
    origin: Origin | None,
    progress: models.Progress | None,
    *,
    tell: Tell,
    only_planned: bool = False,
) -> Ready:
    """Look at everything, the run folder first.

    Args:
        origin: where `settings.backend` was said, for the words of an error.
        tell: told of each measurement where there are any.
        only_planned: as for `prepare`; a run that is resumed is hashed all the same, to see that
            it is still the run that it was.

    Raises:
        InputError: the first thing that is wrong.
        StorageError: S001, the results would not fit on the disk.
    """
    settings, recorded = resume.settings_of(settings)
    run = RunFolder(settings.resume or settings.out or folder.default_path(settings.model))
    if recorded is None:
        files.require_absent(run.path)
    else:
        resume.require_unfinished(run, recorded)
    worked = resume.backends(run) if recorded else []
    resumed_from = worked[-1]["backend"] if worked else None
    planned = only_planned and recorded is None
    prepared = prepare(settings, origin, resumed_from, progress, only_planned=planned)
    if recorded is None:
        prepared = tune(prepared, settings, tell)
    else:
        resume.require_same(prepared.plan, recorded)
        prepared = replace(prepared, plan=resume.tuned_as_before(prepared.plan, recorded))
    require_space(prepared.plan, settings, run.path)
    return Ready(settings, run, prepared, recorded is None)
