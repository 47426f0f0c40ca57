"""Two runs: which fields of their contracts differ, and which has the better curve.

Held-out losses decide, if both were measured on the same rows: where one of them has written the
adapter of its best step (`--load-best-at-end`), those of the adapters that are there; or at the
last step at which both were measured, or else the last of each. Where there are none, it is the
mean of the last training losses up to the same step, which tells less: a run that remembers its
rows has a lower one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vox_core.errors import AdapterError
from vox_core.run.differences import contract_differences
from vox_core.run.folder import PLAN, RunFolder
from vox_core.run.history.find import summary_of
from vox_core.run.history.summary import Curve, Summary

LAST = 20
"""Steps whose mean loss is taken, or a tenth of those both have taken, if that is fewer."""

Basis: TypeAlias = Literal["held-out loss", "training loss"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of the contract, dotted, and its value in each run; None where there is none."""

    field: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which is better: the run's folder, or None for neither.

    Args:
        steps: after which each loss was measured, or the last of those whose mean it is.
        why: the verdict in one line.
    """

    better: str | None
    basis: Basis | None
    a: float | None
    b: float | None
    steps: tuple[int, int] | None
    why: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of runs `a` and `b`. `differences` is None if the contract of one cannot be read."""

    a: Summary
    b: Summary
    differences: list[Difference] | None
    verdict: Verdict


def compare(a: Path, b: Path) -> Comparison:
    """Hold two run folders against each other.

    Raises:
        AdapterError: A001, one of them is no run.
    """
    one, other = summary_of(a), summary_of(b)
    first, second = _contract(a), _contract(b)
    found = None
    if first is not None and second is not None:
        found = [Difference(*each) for each in contract_differences(first, second)]
    changed = {each.field for each in found or ()}
    same_rows = "data.valid_digest" not in changed
    return Comparison(one, other, found, verdict(one, other, same_rows))


def verdict(a: Summary, b: Summary, same_rows: bool = True) -> Verdict:
    """Which curve is better.

    Args:
        same_rows: held-out losses were measured on the same rows.
    """
    reason = "" if same_rows else " (held-out losses are of different rows)"
    if same_rows and (found := _of_adapters(a, b) or _held_out(a.held_out, b.held_out)):
        basis: Basis = "held-out loss"
        (step_a, loss_a), (step_b, loss_b) = found
    elif means := _means(a.losses, b.losses):
        basis = "training loss"
        step_a, loss_a, loss_b = means
        step_b = step_a
    else:
        return Verdict(None, None, None, None, None, f"nothing to compare{reason}")
    better = None if loss_a == loss_b else a.run if loss_a < loss_b else b.run
    steps = f"step {step_a}" if step_a == step_b else f"steps {step_a} and {step_b}"
    mean = "mean of the last losses up to " if basis == "training loss" else "after "
    numbers = f"{basis} {loss_a:.4f} and {loss_b:.4f}, {mean}{steps}{reason}"
    why = f"{better} is better: {numbers}" if better else f"neither is better: {numbers}"
    return Verdict(better, basis, loss_a, loss_b, (step_a, step_b), why)


def _of_adapters(a: Summary, b: Summary) -> tuple[tuple[int, float], tuple[int, float]] | None:
    if not (a.chosen or b.chosen) or a.judged is None or b.judged is None:
        return None
    return a.judged, b.judged


def _held_out(a: Curve, b: Curve) -> tuple[tuple[int, float], tuple[int, float]] | None:
    first, second = ({s: loss for s, loss in curve if s and loss is not None} for curve in (a, b))
    if not first or not second:
        return None
    if common := first.keys() & second.keys():
        step = max(common)
        return (step, first[step]), (step, second[step])
    last = max(first), max(second)
    return (last[0], first[last[0]]), (last[1], second[last[1]])


def _means(a: Curve, b: Curve) -> tuple[int, float, float] | None:
    """The step, and the mean of the losses of each run up to there."""
    first, second = ({s: loss for s, loss in curve if loss is not None} for curve in (a, b))
    if not (common := sorted(first.keys() & second.keys())):
        return None
    last = common[-min(LAST, max(len(common) // 10, 1)) :]
    mean_a, mean_b = (sum(run[step] for step in last) / len(last) for run in (first, second))
    return last[-1], mean_a, mean_b


def _contract(folder: Path) -> Mapping[str, Any] | None:
    if not (folder / PLAN).is_file():  # a pipe in its place would never end
        return None
    try:
        contract = RunFolder(folder).read(PLAN).get("contract")
    except (AdapterError, RecursionError):
        return None
    return contract if isinstance(contract, dict) else None
