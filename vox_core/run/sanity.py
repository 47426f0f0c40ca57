"""Warn of learning rates and losses that no sound run has.

    before the run    a learning rate outside 1e-7 .. 1e-2
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
from collections.abc import Iterable, Iterator
from statistics import fmean, stdev

from vox_core.contract import Event, Notice, StepDone, Validation

LEAST_LR, MOST_LR = 1e-7, 1e-2
"""Bounds on AdamW's peak rate for an adapter. LoRA (arXiv:2106.09685, appendix D) and QLoRA
(arXiv:2305.14314, appendix B) train at 1e-4 to 5e-4, the quick start at 1e-3, and full fine-tuning
goes down to about 1e-6; each bound is ten times beyond."""

LEAST_STEPS = 20
_BEGINNING, _LEAST_BEGINNING = 30, 3
_STANDARD_ERRORS, _LEAST_RISE = 5, 0.1
_UNIFORM = 0.98
"""Share of ln(vocabulary) from which on a loss counts as that of a uniform guess: where logits have
collapsed, the loss of a batch scatters around it."""


def rate_warning(lr: float) -> Notice | None:
    """What to say of a learning rate that nobody uses."""
    if LEAST_LR <= lr <= MOST_LR:
        return None
    effect = "training will probably diverge" if lr > MOST_LR else "next to nothing is learnt"
    return Notice(
        f"--lr {lr:g} is outside the range in which adapters are trained ({LEAST_LR:g} to "
        f"{MOST_LR:g}): {effect}; 2e-4 is the default",
        "warning",
    )


class LossWatch:
    """Follows the losses of a run.

    Args:
        vocabulary: tokens that the model predicts among.
        ordered: by a curriculum.
    """

    def __init__(self, vocabulary: int, *, ordered: bool = False) -> None:
        self._vocabulary, self._ordered = vocabulary, ordered
        self._uniform = math.log(vocabulary)
        self._losses: list[float] = []
        self._first_seen = False

    def begin(self, losses: Iterable[float]) -> None:
        """Go on after steps with these losses."""
        self._losses = list(losses)
        self._first_seen = bool(self._losses)

    def hear(self, event: Event) -> Iterator[Notice]:
        """What the event gives reason to warn of."""
        if isinstance(event, StepDone):
            self._losses.append(event.loss)
        if isinstance(event, StepDone | Validation) and not self._first_seen:
            self._first_seen = True
            if event.loss > self._uniform:
                yield self._first(event.loss)

    def at_end(self) -> Notice | None:
        """What to say of the losses of all steps."""
        if not self._losses:
            return None
        ended = fmean(self._losses[-max(1, len(self._losses) // 4) :])
        if ended >= _UNIFORM * self._uniform:
            return Notice(
                f"the training loss ends at {ended:.2f}, and ln(vocabulary) is "
                f"{self._uniform:.2f}: the model predicts no better than a uniform guess; do not "
                "use this adapter. If the loss began lower, train again with a lower --lr",
                "warning",
            )
        if (began := self._risen_from(ended)) is None:
            return None
        return Notice(
            f"the training loss rose from {began:.2f} to {ended:.2f} (means of the first and the "
            "last steps): the learning rate is probably too high; train again with a lower --lr",
            "warning",
        )

    def _risen_from(self, ended: float) -> float | None:
        """Mean of the first steps; None unless `ended` is above it by more than chance."""
        losses = self._losses
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
