"""Losses, validations and skipped steps of a run so far, over every resume.

Each checkpoint holds what was measured up to its step, so a resumed run decides as the
uninterrupted one would have. A better validation is strictly lower; one that is not a number never
is. The validation before the first step does not count: it is the base model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from vox_core.contract import Event, StepDone, StepSkipped, Validation
from vox_core.run.telemetry import finite


class Progress:
    """Follows the steps and validations of a run.

    Args:
        patience: so many validations without a better one exhaust it; 0: never.
        losses, validations, skipped_in_a_row: from before, None for what is not finite.

    Attributes:
        losses: of the steps that were applied, in order.
        validations: (step, loss), step 0 before training.
        best_step, best_loss: of the best validation; None and infinity while there is none.
        since_best: validations after it.
        skipped_in_a_row: steps since the last one that was applied.
    """

    def __init__(
        self,
        patience: int = 0,
        losses: Iterable[float | None] = (),
        validations: Iterable[tuple[int, float | None]] = (),
        skipped_in_a_row: int = 0,
    ) -> None:
        self._patience, self.skipped_in_a_row = patience, skipped_in_a_row
        self.losses = [math.nan if loss is None else loss for loss in losses]
        self.validations: list[tuple[int, float]] = []
        self.best_step: int | None = None
        self.best_loss, self.since_best = math.inf, 0
        for step, loss in validations:
            self._validated(step, math.nan if loss is None else loss)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.losses.append(event.loss)
            self.skipped_in_a_row = 0
        elif isinstance(event, StepSkipped):
            self.skipped_in_a_row += 1
        elif isinstance(event, Validation):
            self._validated(event.step, event.loss)

    def _validated(self, step: int, loss: float) -> None:
        self.validations.append((step, loss))
        if not step:
            return
        if loss < self.best_loss:
            self.best_step, self.best_loss, self.since_best = step, loss, 0
        else:
            self.since_best += 1

    @property
    def exhausted(self) -> bool:
        """Whether `patience` validations have brought no better one."""
        return bool(self._patience) and self.since_best >= self._patience

    @property
    def first_and_last(self) -> tuple[float, float] | tuple[None, None]:
        """Validation loss before training and the last one; None where either is missing, as after
        a resume on other validation rows."""
        if len(self.validations) < 2 or self.validations[0][0]:
            return None, None
        return self.validations[0][1], self.validations[-1][1]

    def saved(self) -> dict[str, Any]:
        """The fields of a checkpoint's `Origin`."""
        return {
            "losses": tuple(map(finite, self.losses)),
            "validations": tuple((step, finite(loss)) for step, loss in self.validations),
            "skipped_in_a_row": self.skipped_in_a_row,
        }
