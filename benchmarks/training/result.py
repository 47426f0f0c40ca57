"""Results of a cell: rounds, rows, JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.training.cells import SORTED, Cell
from benchmarks.training.gate import MOVED, Verdict, judge
from benchmarks.training.stats import Spread, rate, ratios, spread
from benchmarks.training.task import Answer

COUNTERPARTS = {"mlx-lm": "vox-mlx"}
"""Peers that vox is held against on another backend than the device's own."""


@dataclass(frozen=True, slots=True)
class Round:
    """Answers of a round's trainers, and the roof in FLOP per second."""

    answers: Mapping[str, Answer]
    roof: float


@dataclass(frozen=True, slots=True)
class Row:
    """Result of a trainer in a cell. Numbers are None where there is none.

    Args:
        tokens_per_second: real tokens, padding never counted, over all steps but the first.
        ahead: how many times as fast vox is, round by round; on the same library (COUNTERPARTS).
        to_adapter: seconds from command to saved adapter.
        memory: bytes, the largest of all rounds, by kind.
        utilisation: share of the roof.
        attention, layout: how it computed, also where it is void, if it answered at all.
        void: why there is no result.
    """

    trainer: str
    tokens_per_second: Spread | None = None
    step_milliseconds: float | None = None
    ahead: Spread | None = None
    to_adapter: float | None = None
    memory: Mapping[str, int] | None = None
    utilisation: float | None = None
    worst_loss: float | None = None
    attention: str | None = None
    layout: str | None = None
    void: str | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """A run's steps, and what their losses are held against.

    Args:
        tokens, flop: of each step.
        reference: the plain loop in float32, or why there is none.
    """

    tokens: Sequence[int]
    flop: Sequence[int]
    reference: Answer | str


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell with all its rounds.

    Args:
        tokens, flop: of each step.
        reference: what everybody is held against, or why there is none.
        faults: trainer -> how it failed.
        sorted: the work of `loop-sorted`, if it is in the cell.
    """

    cell: Cell
    tokens: Sequence[int]
    flop: Sequence[int]
    reference: Answer | str
    tolerance: float
    rounds: Sequence[Round]
    faults: Mapping[str, str]
    sorted: Work | None = None

    def work(self, trainer: str) -> Work:
        """Return the work of a trainer."""
        if trainer == SORTED and self.sorted is not None:
            return self.sorted
        return Work(self.tokens, self.flop, self.reference)

    def rows(self) -> list[Row]:
        return [self._row(trainer) for trainer in self.cell.trainers]

    def _row(self, trainer: str) -> Row:
        attention, layout = self._how(trainer)
        void = self._void(trainer)
        row = Row(trainer, attention=attention, layout=layout, void=void)
        return replace(row, worst_loss=self._worst(trainer)) if void else self._measured(row)

    def _measured(self, row: Row) -> Row:
        """With its numbers."""
        trainer = row.trainer
        answers = [r.answers[trainer] for r in self.rounds]
        work = self.work(trainer)
        rates = self._rates(trainer, work.tokens)
        flops = self._rates(trainer, work.flop)
        kinds = answers[0].memory
        return replace(
            row,
            tokens_per_second=spread(rates),
            step_milliseconds=1e3 / spread(self._rates(trainer, [1] * len(work.tokens))).median,
            ahead=self._ahead(trainer, rates),
            to_adapter=spread([a.saved for a in answers]).median,
            memory={kind: max(a.memory[kind] for a in answers) for kind in kinds},
            utilisation=ratios(flops, [r.roof for r in self.rounds]).median,
            worst_loss=self._worst(trainer),
        )

    def _void(self, trainer: str) -> str | None:
        """Why a trainer has no result; None if it has one."""
        reference = self.work(trainer).reference
        if isinstance(reference, str):
            return f"no reference: {reference}"
        if trainer in self.faults:
            return f"failed: {self.faults[trainer]}"
        verdict = self._verdict(trainer, reference)
        return self._unmoved(trainer, reference) if verdict.passed else verdict.told()

    def _unmoved(self, trainer: str, reference: Answer) -> str | None:
        """Return how far off the adapter's distance from its start is, in the worst round."""
        answers = [r.answers[trainer] for r in self.rounds]
        moved = max((a.moved / reference.moved for a in answers), key=lambda m: abs(m - 1))
        if abs(moved - 1) <= MOVED[self.cell.dtype]:
            return None
        return f"its adapter moved {moved:.2f} times as far as it should"

    def _worst(self, trainer: str) -> float | None:
        reference = self.work(trainer).reference
        if isinstance(reference, str) or trainer in self.faults:
            return None
        return self._verdict(trainer, reference).worst

    def _verdict(self, trainer: str, reference: Answer) -> Verdict:
        """That of the worst round."""
        verdicts = [
            judge(r.answers[trainer].losses, reference.losses, self.tolerance) for r in self.rounds
        ]
        return max(verdicts, key=lambda v: v.worst)

    def _how(self, trainer: str) -> tuple[str | None, str | None]:
        """Its attention and its layout, which are the same in all rounds."""
        answers = (r.answers[trainer] for r in self.rounds if trainer in r.answers)
        first = next(answers, None)
        return (first.attention, first.layout) if first else (None, None)

    def _ahead(self, trainer: str, rates: Sequence[float]) -> Spread | None:
        """None where vox itself has no result to be ahead with."""
        vox = COUNTERPARTS.get(trainer, "vox")
        if vox not in self.cell.trainers or self._void(vox):
            return None
        return ratios(self._rates(vox, self.tokens), rates)

    def _rates(self, trainer: str, amounts: Sequence[float]) -> list[float]:
        return [rate(amounts, r.answers[trainer].marks) for r in self.rounds]


def to_json(measured: Measured) -> dict[str, Any]:
    """Everything: the rows, and what they were computed from; a loss that is no number is null."""
    rows = [asdict(row) for row in measured.rows()]
    whole: dict[str, Any] = _finite({"id": measured.cell.id, **asdict(measured), "rows": rows})
    return whole


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
