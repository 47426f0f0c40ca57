"""Where a run starts: the core's seeded adapter, or the newest good checkpoint; and its plan.

What is written here is written before anything else of a run: `preflight.json` and `plan.json`. A
run that goes on keeps the plan that it had, with what has changed since.
"""

from __future__ import annotations

from typing import Any

from vox_core import files
from vox_core.contract import Notice, Resumed, TrainState
from vox_core.data.templated import TEMPLATE
from vox_core.run import checkpoint, folder, resume
from vox_core.run.context import Observe
from vox_core.run.prepare import preflight
from vox_core.run.ready import Ready
from vox_core.run.recorded import plan_of
from vox_core.run.rows import write_skipped
from vox_core.run.sources import to_json
from vox_core.run.trained import seeded


def begin(ready: Ready, observe: Observe) -> TrainState:
    """The state to start from; the plan is written."""
    if ready.fresh:
        files.write_json(ready.run.path / folder.PREFLIGHT, preflight(ready.prepared))
        write_skipped(ready.run.path / folder.SKIPPED, ready.prepared.rows)
        if templated := ready.prepared.model.templated:  # a resumed run reads this copy
            source = (templated / TEMPLATE).read_bytes()
            files.write_bytes(ready.run.path / TEMPLATE, source)
        files.write_json(ready.run.path / folder.PLAN, _plan_json(ready))
        return _beginning(ready)
    for worked_in in (ready.run.path, ready.run.checkpoints):
        files.remove_leftovers(worked_in)
    state = _resumed(ready, observe)
    _keep_plan(ready, state.step)
    return state


def _beginning(ready: Ready) -> TrainState:
    prepared = ready.prepared
    return TrainState(0, seeded(prepared.plan, prepared.weights))


def _resumed(ready: Ready, observe: Observe) -> TrainState:
    checkpoints = ready.run.checkpoints
    if not checkpoint.numbered(checkpoints):
        observe(Notice("there is no checkpoint yet: the run begins again"))
        return _beginning(ready)
    state, skipped = checkpoint.load_newest(checkpoints)
    path = str(checkpoints / f"step-{state.step}")
    observe(Resumed(state.step, path, tuple(skipped)))  # the first of this process
    for reason in skipped:
        observe(Notice(f"checkpoint passed over and set aside: {reason}", "warning"))
    return state


def _keep_plan(ready: Ready, step: int) -> None:
    """The plan that holds from now on, and what held before, if there is a difference."""
    before, now = plan_of(ready.run), _plan_json(ready)
    changes = before.get("changes", [])
    if ready.changes:
        told = {"after_step": step, "contract": before["digest"], "changes": ready.changes}
        changes = [*changes, told]
    elif before["settings"] == now["settings"]:
        return
    now |= {"changes": changes} if changes else {}
    if "planned" in before:  # the run began so
        now["planned"] = before["planned"]
    files.write_json(ready.run.path / folder.PLAN, now)


def _plan_json(ready: Ready) -> dict[str, Any]:
    return {
        **ready.prepared.plan.to_json(),
        "settings": resume.recorded(ready.settings),
        "sources": to_json(ready.prepared.sources),
        **({"planned": ready.planned} if ready.planned else {}),
    }
