"""Warn of learning rates and losses that no sound run has.

    before the run    a learning rate outside 1e-7 .. 1e-2, or 1e-3 with the method `full`
    first loss        above ln(vocabulary): worse than a uniform guess
    end of the run    training loss at ln(vocabulary), or higher than it began

A rise is judged on the means of two windows: the first thirtieth of the steps (three at least;
about the default warm-up) and the last quarter. Their difference has to exceed five standard
errors, by the spread of the losses in the second half, and a tenth of the first mean. A run of
fewer than 20 steps, or with a curriculum, which brings difficult examples last, is not judged.
tests/run/test_sanity.py counts false alarms over random losses that neither rise nor fall.

Nothing here stops a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, stdev

from vox_core.config import FULL_LR, LORA_LR
from vox_core.contract import Event, Method, Notice, StepDone, Validation
from vox_core.run.progress import Progress

LEAST_LR, MOST_LR, MOST_FULL_LR = 1e-7, 1e-2, 1e-3
"""Bounds on AdamW's peak rate. LoRA (arXiv:2106.09685, appendix D) and QLoRA (arXiv:2305.14314,
appendix B) train at 1e-4 to 5e-4, the quick start at 1e-3, and full fine-tuning goes down to about
1e-6; each bound is ten times beyond. Full fine-tuning at 1e-3 suits models of 0.4B and less
(alignment-handbook, recipes/smollm2/sft/config_smol.yaml); no recipe goes above."""

LEAST_STEPS = 20
_BEGINNING, _LEAST_BEGINNING = 30, 3
_STANDARD_ERRORS, _LEAST_RISE = 5, 0.1
_UNIFORM = 0.98
"""Share of ln(vocabulary) from which on a loss counts as that of a uniform guess: where logits have
collapsed, the loss of a batch scatters around it."""


def rate_warning(lr: float, method: Method) -> Notice | None:
    """What to say of a learning rate that nobody uses."""
    most, default = (MOST_FULL_LR, FULL_LR) if method == "full" else (MOST_LR, LORA_LR)
    if LEAST_LR <= lr <= most:
        return None
    effect = "training will probably diverge" if lr > most else "next to nothing is learnt"
    return Notice(
        f"--lr {lr:g} is outside the range in which models are trained ({LEAST_LR:g} to "
        f"{most:g}): {effect}; {default:g} is the default",
        "warning",
    )


class LossWatch:
    """Follows the losses of a run.

    Args:
        vocabulary: tokens that the model predicts among.
        progress: the losses of all steps; it hears of a step before this does.
        ordered: by a curriculum.
    """

    def __init__(self, vocabulary: int, progress: Progress, *, ordered: bool = False) -> None:
        self._vocabulary, self._ordered, self._progress = vocabulary, ordered, progress
        self._uniform = math.log(vocabulary)
        self._first_seen = bool(progress.losses)

    def __call__(self, event: Event) -> Iterator[Notice]:
        """A warning, where the event gives reason for one."""
        if isinstance(event, StepDone | Validation) and not self._first_seen:
            self._first_seen = True
            if event.loss > self._uniform:
                yield self._first(event.loss)

    def at_end(self) -> Iterator[Notice]:
        """A warning about the losses of all steps, where there is reason for one."""
        if not (losses := self._progress.losses):
            return
        ended = fmean(losses[-max(1, len(losses) // 4) :])
        if ended >= _UNIFORM * self._uniform:
            yield Notice(
                f"the training loss ends at {ended:.2f}, and ln(vocabulary) is "
                f"{self._uniform:.2f}: the model predicts no better than a uniform guess; do not "
                "use this run's result. If the loss began lower, train again with a lower --lr",
                "warning",
            )
        elif (began := self._risen_from(ended)) is not None:
            yield Notice(
                f"the training loss rose from {began:.2f} to {ended:.2f} (means of the first and "
                "the last steps): the learning rate is probably too high; train again with a lower "
                "--lr",
                "warning",
            )

    def _risen_from(self, ended: float) -> float | None:
        """Mean of the first steps; None unless `ended` is above it by more than chance."""
        losses = self._progress.losses
        if self._ordered or len(losses) < LEAST_STEPS:
            return None
        first = max(_LEAST_BEGINNING, len(losses) // _BEGINNING)
        began, last = fmean(losses[:first]), len(losses) // 4
        error = stdev(losses[len(losses) // 2 :]) * math.sqrt(1 / first + 1 / last)
        margin = max(_STANDARD_ERRORS * error, _LEAST_RISE * began)
        return began if ended - began > margin else None

    def _first(self, loss: float) -> Notice:
        return Notice(
            f"the first loss, {loss:.2f}, is above ln(vocabulary) = {self._uniform:.2f}: before "
            "any training the model predicts worse than a uniform guess over its "
            f"{self._vocabulary:,} tokens. Weights, tokenizer or chat template do not belong "
            "together, the weights are broken, or the backend computes wrongly; `vox data preview` "
            "shows what is trained, and `vox generate` what the model answers without training",
            "warning",
        )
