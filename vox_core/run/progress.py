"""Losses and validations of a run so far, over every resume.

Each checkpoint holds what was measured up to its step, so a resumed run decides as the
uninterrupted one would have. A better validation is strictly lower; one that is not a number never
is. The validation before the first step does not count: it is the base model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

from vox_core.contract import Event, StepDone, Validation
from vox_core.run.telemetry import finite

Losses: TypeAlias = tuple[float | None, ...]
Validations: TypeAlias = tuple[tuple[int, float | None], ...]


class Progress:
    """Follows the steps and validations of a run.

    Args:
        patience: so many validations without a better one exhaust it; 0: never.
        losses, validations: from before, None for what is not finite.

    Attributes:
        losses: of the steps that were applied, in order.
        validations: (step, loss), step 0 before training.
        best_step, best_loss: of the best validation; None and infinity while there is none.
        since_best: validations after it.
    """

    def __init__(
        self,
        patience: int = 0,
        losses: Losses = (),
        validations: Iterable[tuple[int, float | None]] = (),
    ) -> None:
        self._patience = patience
        self.losses = [math.nan if loss is None else loss for loss in losses]
        self.validations: list[tuple[int, float]] = []
        self.best_step: int | None = None
        self.best_loss, self.since_best = math.inf, 0
        for step, loss in validations:
            self._validated(step, math.nan if loss is None else loss)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.losses.append(event.loss)
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

    def saved(self) -> tuple[Losses, Validations]:
        """Losses and validations as a checkpoint holds them."""
        return tuple(map(finite, self.losses)), tuple((s, finite(x)) for s, x in self.validations)
