"""The way to the first step: whatever can be refused is refused here, and nothing is written.

`vox train` goes on from here and `vox plan` stops here, so what can be planned can be begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vox_core import files, models
from vox_core.config import TrainSettings
from vox_core.data.readers import is_hub
from vox_core.errors import ConfigError, OutputError, command
from vox_core.host import Origin
from vox_core.run import folder, foresight, resume
from vox_core.run.folder import RunFolder
from vox_core.run.planned import Planned
from vox_core.run.prepare import Prepared, prepare, require_space
from vox_core.run.resume import PreviousRun
from vox_core.run.tuning.apply import tune
from vox_core.run.tuning.search import Tell


@dataclass(frozen=True, slots=True)
class Ready:
    """A run that may begin, or go on.

    Args:
        settings: those given; with `--resume`, over the run's own.
        fresh: it begins.
        changes: what differs from the run that is resumed, and may; in words.
        ended: how it has ended already, where `--resume auto` finds nothing left to do.
        planned: the digest of the plan that it was held against.
    """

    settings: TrainSettings
    run: RunFolder
    prepared: Prepared
    fresh: bool
    changes: tuple[str, ...] = ()
    ended: str | None = None
    planned: str | None = None


def make_ready(
    settings: TrainSettings,
    origin: Origin | None,
    progress: models.Progress | None,
    *,
    tell: Tell,
    only_planned: bool = False,
    hashed: bool = True,
    planned: Planned | None = None,
) -> Ready:
    """Look at everything, the run folder first.

    Args:
        origin: where `settings.backend` was said, for the words of an error.
        tell: told of each measurement where there are any.
        only_planned: as for `prepare`.
        hashed: as for `prepare`; a run that is resumed is hashed all the same, to see that it is
            still the run that it was.
        planned: what the run has to be.

    Raises:
        InputError: the first thing that is wrong.
        StorageError: S001, the results would not fit on the disk.
    """
    auto, refresh = settings.resume == "auto", settings.tune == "refresh"
    _require_apart(settings)
    previous = resume.load_previous(settings)
    settings = resume.merge_settings(settings, previous)
    if refresh:
        _require_measurable(settings, only_planned, goes_on=previous is not None and not auto)
    run = _folder(settings)
    folder.require_free(run)
    asked = planned.asked(settings) if planned else settings
    if previous is not None:
        if refresh:  # with --resume auto: the command that began the run
            tell("nothing is measured for --tune refresh: a run that goes on is cut as it began")
        look = partial(prepare, asked, origin, progress=progress)
        return _going_on(settings, previous, look, planned, auto=auto)
    if not auto:
        _require_new(run)
    prepared = prepare(asked, origin, None, progress, only_planned=only_planned, hashed=hashed)
    if planned:
        prepared = planned.applied(prepared)
    _require_validated(settings, prepared)
    require_space(prepared.plan, settings, run.path)
    if refresh:  # which takes steps
        foresight.require_memory(prepared, allowed=settings.allow_overcommit)
    if planned is None:
        return Ready(settings, run, tune(prepared, settings, tell), fresh=True)
    return Ready(settings, run, prepared, fresh=True, planned=planned.digest)


def _going_on(
    settings: TrainSettings,
    previous: PreviousRun,
    look: Callable[[str | None], Prepared],
    planned: Planned | None,
    *,
    auto: bool,
) -> Ready:
    """Of a run that is there.

    Args:
        look: id of the backend that worked on it last -> everything, looked at.
    """
    then, patience = previous.plan, settings.patience
    if not auto and not {"epochs", "max-steps"} & {*settings.allow_change}:
        previous.require_unfinished(then["contract"]["total_steps"], patience)
    prepared = look(previous.backend)
    if planned:
        planned.require(prepared)
    made = prepared.plan
    _require_validated(settings, prepared)
    changes = resume.require_same(made, then, prepared.sources, settings.allow_change)
    total = made.contract.total_steps
    if not auto:
        previous.require_unfinished(total, patience)
    how = previous.ended(total, patience)
    if not how:
        previous.require_checkpoints(total)
    require_space(made, settings, previous.run.path)
    if then["backend"] == made.backend:  # cut as it was, with the knobs that it had
        tuning, packing = then.get("tuning", {}), then.get("packing", "rows")
        prepared = replace(prepared, plan=replace(made, tuning=tuning, packing=packing))
    digest = planned.digest if planned else None
    return Ready(settings, previous.run, prepared, False, changes, how, digest)


def _folder(settings: TrainSettings) -> RunFolder:
    named = settings.resume or settings.out or folder.default_path(settings.model)
    return RunFolder(Path(named))


def _require_apart(settings: TrainSettings) -> None:
    """Refuse to write where data or model lie.

    Raises:
        OutputError: O004.
    """
    if settings.out is None:
        return
    named = [("--data", path) for path in settings.data]
    named += [("--valid", settings.valid)] if settings.valid else []
    local = [(flag, path) for flag, path in named if not is_hub(path)]
    model = Path(settings.model)
    files.require_apart(settings.out, [*local, *([("--model", model)] if model.exists() else [])])


def _require_new(run: RunFolder) -> None:
    """Refuse a folder that is there, and name the run in it.

    Raises:
        OutputError: O001.
    """
    if (run.path / folder.PLAN).is_file():
        raise OutputError(
            "O001",
            "the output path exists",
            where=run.path,
            found="a run",
            remedy=f"go on with it: {command('vox', 'train', '--resume', run.path)}; or choose "
            "another folder with --out",
        )
    files.require_absent(run.path)


def _require_measurable(settings: TrainSettings, only_planned: bool, *, goes_on: bool) -> None:
    """Refuse to measure what would not be used, or on documents that nobody has.

    Raises:
        ConfigError: C004.
    """
    if goes_on:
        raise ConfigError(
            "C004",
            "a resumed run is cut as it began, whatever is measured",
            where="--tune refresh",
            remedy="leave out --tune, or measure with vox plan --tune refresh for the next run",
        )
    if only_planned and not settings.data:
        raise ConfigError(
            "C004",
            "what is fastest is measured on the run's own documents",
            where="--tune refresh",
            found="no --data",
            expected="--data",
            remedy="add --data, or leave out --tune refresh",
        )


def _require_validated(settings: TrainSettings, prepared: Prepared) -> None:
    """Refuse to wait for a better validation where there is none.

    Raises:
        ConfigError: C004.
    """
    flags = {"--patience": settings.patience, "--load-best-at-end": settings.load_best_at_end}
    asked = next((flag for flag, value in flags.items() if value), None)
    if asked is None or not settings.data or (prepared.valid and settings.eval_every):
        return
    raise ConfigError(
        "C004",
        f"{asked} needs validations on the way",
        where=asked,
        found="no --eval-every" if prepared.valid else "no held-out rows",
        expected="held-out rows (--valid), and --eval-every N",
        remedy=f"add what is missing, or leave out {asked}",
    )
