"""Going on with a run: its settings, its contract, its newest good checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vox_core.config import TrainSettings, validate
from vox_core.contract import FineTuneContract
from vox_core.errors import PlanError
from vox_core.run.folder import PLAN, RunFolder

_OF_THIS_CALL = {"resume", "out", "config", "allow_cpu"}


def recorded(settings: TrainSettings) -> dict[str, Any]:
    """The settings as `plan.json` keeps them: those given, with paths made absolute."""
    given = settings.model_dump(
        mode="json", include=settings.model_fields_set - _OF_THIS_CALL, by_alias=False
    )
    paths = {key: given[key] for key in ("data", "valid") if given.get(key)}
    for key, value in paths.items():
        kept = getattr(settings, key)
        given[key] = (
            [str(p.resolve()) for p in kept] if isinstance(value, list) else str(kept.resolve())
        )
    return given


def settings_of(settings: TrainSettings) -> tuple[TrainSettings, dict[str, Any] | None]:
    """With `--resume`, the run's own settings under those given now; and the run's plan.

    Raises:
        InputError: A001, the folder is not a run.
    """
    if settings.resume is None:
        return settings, None
    plan = RunFolder(settings.resume).read(PLAN)
    given = settings.model_dump(include=settings.model_fields_set)
    return validate(TrainSettings, {**plan["settings"], **given}), plan


def require_same(contract: FineTuneContract, plan: Mapping[str, Any]) -> None:
    """Refuse to go on under another contract.

    Raises:
        PlanError: P003, naming each field that changed.
    """
    changed = list(_changes(plan["contract"], contract.to_json()))
    if changed:
        raise PlanError(
            "P003",
            "the run cannot be resumed under this contract",
            faults=changed,
            remedy="undo these changes, or train anew with another --out",
        )


def _changes(before: Any, now: Any, where: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from _changes(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield f"{where}: it was {before!r}, now it is {now!r}"
