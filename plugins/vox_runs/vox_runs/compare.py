"""Compare two runs: differing contract fields, and the better validation.

Only validations decide, on the same data (equal `data.valid_digest`) and by the same objective with
the options that were given, or by the same rewards: the validations of the written adapters, if a
run wrote its best (`--load-best-at-end`); else those at the last common step; else the last of
each. Without them there is no winner, because a run that memorises its examples has a lower
training loss: mean training losses up to the same step are shown with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vox_core.api.runs import PLAN, Curve, RunFolder, Summary, differences, read_run
from vox_core.errors import AdapterError

_SFT = {"name": "sft", "options": {}}
LAST = 20
"""Steps whose mean loss is taken, or a tenth of those both have taken, if that is fewer."""

Basis: TypeAlias = Literal["validation loss", "validation reward", "training loss"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A dotted field of the contract and its value in each run; None if the run lacks it."""

    field: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """The folder of the better run; None if they are equal or nothing decides.

    Args:
        basis, a, b: what was compared, and its value in each run.
        steps: step of each value, or the last step of each mean.
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
    """Differences and verdict of runs `a` and `b`; `differences` is None if a contract is
    unreadable."""

    a: Summary
    b: Summary
    differences: list[Difference] | None
    verdict: Verdict


def compare(a: Path, b: Path) -> Comparison:
    """Compare two run folders.

    Raises:
        AdapterError: A001, one of them is no run.
    """
    one, other = read_run(a), read_run(b)
    first, second = plan_part(a, "contract"), plan_part(b, "contract")
    found = None
    if first is not None and second is not None:
        found = [Difference(*each) for each in _by_field(differences(first, second))]
    best = _wrote_best(a, one) or _wrote_best(b, other)
    decided = verdict(one, other, first or {}, second or {}, of_adapters=best)
    return Comparison(one, other, found, decided)


def _wrote_best(folder: Path, run: Summary) -> bool:
    """With `--load-best-at-end`, whose best step may be the last."""
    settings = plan_part(folder, "settings") or {}
    best = run.best is not None and run.best[0] == run.adapter_step
    return best and settings.get("load_best_at_end") is True


def _by_field(found: Iterable[tuple[str, Any, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Replace an object that one contract lacks by its fields."""
    for field, a, b in found:
        if isinstance(a or b, dict) and None in (a, b):
            yield from differences(a or {}, b or {}, field)
        else:
            yield field, a, b


def verdict(
    a: Summary,
    b: Summary,
    contract_a: Mapping[str, Any],
    contract_b: Mapping[str, Any],
    *,
    of_adapters: bool = False,
) -> Verdict:
    """Decide which run is better, if anything does.

    Args:
        of_adapters: the losses of the written adapters decide, even if both are of the last step.
    """
    of_adapters = of_adapters or a.chosen or b.chosen
    data_a, data_b = _part(contract_a, "data"), _part(contract_b, "data")
    same_valid, same_train = (
        data_a.get(key) is not None and data_a.get(key) == data_b.get(key)
        for key in ("valid_digest", "digest")
    )
    written = (a.judged, b.judged) if of_adapters and a.judged and b.judged else None
    same_measure = _measure(contract_a) == _measure(contract_b)
    found = written or _held_out(a.held_out, b.held_out)
    if same_valid and same_measure and found:
        return _decided(a, b, *found)
    known = "valid_digest" in data_a and "valid_digest" in data_b
    of = "different data" if known else "data that a contract does not name"
    if same_valid:
        of = "different objectives, options or rewards"
    reason = _undecided(a, b, of)
    if (means := _means(a.losses, b.losses)) is None:
        return Verdict(None, None, None, None, None, f"nothing to compare: {reason}")
    step, loss_a, loss_b = means
    why = (
        f"no verdict: {reason}; training losses{'' if same_train else ' of other data'} "
        f"{loss_a:z.4f} and {loss_b:z.4f}, means of the last up to step {step}, do not decide"
    )
    return Verdict(None, "training loss", loss_a, loss_b, (step, step), why)


def _decided(a: Summary, b: Summary, of_a: tuple[int, float], of_b: tuple[int, float]) -> Verdict:
    (step_a, loss_a), (step_b, loss_b) = of_a, of_b
    better = None if loss_a == loss_b else a.run if loss_a < loss_b else b.run
    basis: Basis = "validation loss"
    if a.rewarded:
        basis, loss_a, loss_b = "validation reward", -loss_a, -loss_b
    steps = f"step {step_a}" if step_a == step_b else f"steps {step_a} and {step_b}"
    why = f"{better or 'neither'} is better: {basis} {loss_a:z.4f} and {loss_b:z.4f}, after {steps}"
    return Verdict(better, basis, loss_a, loss_b, (step_a, step_b), why)


def _undecided(a: Summary, b: Summary, of: str) -> str:
    """Explain why no validations decide."""
    lacking = {each.run: None for each in (a, b) if each.judged is None}
    if lacking:
        return f"{' and '.join(lacking)} {'have' if len(lacking) > 1 else 'has'} no validation"
    return f"their validations are of {of}"


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
    """Return the last common step, and each run's mean training loss up to it."""
    first, second = ({s: loss for s, loss in curve if loss is not None} for curve in (a, b))
    if not (common := sorted(first.keys() & second.keys())):
        return None
    last = common[-min(LAST, max(len(common) // 10, 1)) :]
    mean_a, mean_b = (sum(run[step] for step in last) / len(last) for run in (first, second))
    return last[-1], mean_a, mean_b


def plan_part(folder: Path, name: str) -> Mapping[str, Any] | None:
    """Return an object of a run's plan; None if it cannot be read."""
    if not (folder / PLAN).is_file():  # reading a pipe would never end
        return None
    try:
        part = RunFolder(folder).read(PLAN).get(name)
    except (AdapterError, RecursionError):
        return None
    return part if isinstance(part, dict) else None


def _measure(contract: Mapping[str, Any]) -> object:
    """Return what a validation measures: the rewards of answers of a length, or the objective and
    its teacher."""
    rollouts = _part(contract, "rollouts")
    if isinstance(rewards := rollouts.get("rewards"), list) and rewards:
        return sorted(map(str, rewards)), rollouts.get("tokens")
    return _part(contract, "objective") or _SFT, rollouts.get("teacher") or ""


def _part(contract: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of the contract; empty if it has none."""
    part = contract.get(name)
    return part if isinstance(part, dict) else {}
