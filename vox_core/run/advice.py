"""Collect the advice of plugins on a run (`vox_advise`), and apply it.

Every installed plugin that names the hook in its manifest is imported and called, in the order of
ids. The first value of a knob wins, the first refusal too; notices add up. A plugin that cannot be
loaded or that raises costs the run one warning. A `VoxError` is an error for the user and ends the
command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vox_core.config import TrainSettings
from vox_core.contract import Advice, ExecutionPlan, Notice
from vox_core.errors import BackendError, VoxError
from vox_core.host.discover import Found
from vox_core.host.load import broken, format_error, load_plugin
from vox_core.host.machine import unmet
from vox_core.host.provide import providers
from vox_core.host.seen import Seen

if TYPE_CHECKING:
    from vox_core.run.run_plan import RunPlan

Tell = Callable[[str], None]


def with_advice(plan: RunPlan, tell: Tell) -> RunPlan:
    """The same run with what plugins advise.

    A run that goes on, or that follows a pinned plan, keeps its micro-batches and knobs.

    Args:
        tell: receives what a plugin reports while it works, such as measurements.

    Raises:
        VoxError: a plugin's error for the user. A refusal is not raised: it is in `advice`.
    """
    advice = _merged(_advice_of_all(plan, tell))
    execution = plan.execution
    if plan.fresh and plan.pinned is None and plan.settings.tune != "ignore":
        execution = _applied(advice, execution, plan.settings)
    return replace(plan, execution=execution, advice=advice)


def fixed_micro_batch(settings: TrainSettings, plan: ExecutionPlan) -> bool:
    """Whether `micro_batch_tokens` must stay: the user set them, or other micro-batches would draw
    another dropout."""
    return "micro_batch_tokens" in settings.model_fields_set or plan.contract.adapter.dropout > 0


def _applied(advice: Advice, plan: ExecutionPlan, settings: TrainSettings) -> ExecutionPlan:
    tokens = advice.micro_batch_tokens
    if tokens is None or fixed_micro_batch(settings, plan):
        tokens = plan.micro_batch_tokens
    return replace(plan, micro_batch_tokens=tokens, tuning={**plan.tuning, **advice.tuning})


def _merged(every: Sequence[Advice]) -> Advice:
    return Advice(
        notices=tuple(notice for each in every for notice in each.notices),
        micro_batch_tokens=next((t for each in every if (t := each.micro_batch_tokens)), None),
        tuning={name: value for each in reversed(every) for name, value in each.tuning.items()},
        refusal=next((each.refusal for each in every if each.refusal), None),
    )


def _advice_of_all(plan: RunPlan, tell: Tell) -> list[Advice]:
    seen = plan.inputs.seen
    return [_ask(each, seen, plan, tell) for each in providers("hooks", "vox_advise", seen.plugins)]


def _ask(plugin: Found, seen: Seen, plan: RunPlan, tell: Tell) -> Advice:
    assert plugin.manifest is not None, plugin.id
    try:
        if requirement := unmet(plugin.manifest, seen.machine):
            raise broken(plugin, ": ".join(requirement))
        hook = load_plugin(plugin).hook.vox_advise
    except BackendError as error:
        return _fault(plugin, str(error.found))
    try:
        answers = hook(plan=plan, tell=tell)
    except VoxError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything
        return _fault(plugin, f"vox_advise: {format_error(error)}")
    if len(answers) != 1 or not isinstance(answers[0], Advice):
        return _fault(plugin, f"vox_advise gave {answers!r}, expected one Advice")
    tokens = answers[0].micro_batch_tokens
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        return _fault(plugin, f"micro_batch_tokens {tokens!r}, expected a number above 0")
    return answers[0]


def _fault(plugin: Found, why: str) -> Advice:
    text = f"plugin {plugin.id!r} gives no advice: {why}; see `vox plugin doctor {plugin.id}`"
    return Advice((Notice(text, "warning"),))
