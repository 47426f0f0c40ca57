"""What `--tune` says: use what was measured, measure anew, or leave it."""

from __future__ import annotations

from dataclasses import replace

from vox_core.config import TrainSettings
from vox_core.run.prepare import Prepared
from vox_core.run.tuning import answers
from vox_core.run.tuning.search import Tell, search


def tune(prepared: Prepared, settings: TrainSettings, tell: Tell) -> Prepared:
    """The same run, in the way that was measured to be fastest on this machine.

    Args:
        tell: told of each measurement as it is done.

    Raises:
        VoxError: with `refresh`: the plan cannot be carried out, or the cache not be written.
    """
    if settings.tune == "ignore":
        return prepared
    asked = answers.question(prepared, settings)
    if settings.tune == "refresh":
        answers.keep(asked, search(prepared, settings, tell))
    answer = answers.recall(asked)
    if answer is None:
        return prepared
    if answers.tokens_given(settings, prepared.plan):
        # Whatever the file says: with dropout, another number would be another run.
        answer = replace(answer, micro_batch_tokens=prepared.plan.micro_batch_tokens)
    plan = replace(
        prepared.plan, micro_batch_tokens=answer.micro_batch_tokens, tuning=answer.tuning
    )
    return replace(prepared, plan=plan, tuned=answer)
