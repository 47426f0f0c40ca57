"""The decision of a gate: its rules, error rate and power, on scorecards without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from vox_core.errors import ConfigError
from vox_eval import gate as gate_module
from vox_eval import statistics
from vox_eval.gate import Decision, Gate, Requirement, decide, foretell, read_gate
from vox_eval.scorecard import Scorecard, TaskScore
from vox_eval.statistics import above, power_of_shares, rows_needed
from vox_eval.suites import read_suites

SUPERIOR = {"suites": ["s.toml"], "require": [{"task": "t", "superior": 0.1}]}


def card(**scores: Any) -> Scorecard:
    """A scorecard; scores that are not 0 and 1 are better when lower."""
    values = {id: np.asarray(each, np.float64) for id, each in scores.items()}
    tasks = {}
    for id, each in values.items():
        binary = bool(np.isin(each, (0, 1)).all())
        tasks[id] = TaskScore("s", len(each), each.mean(), (0, 1), binary, binary, 1.0, {})
    ones = {id: np.ones(len(each)) for id, each in values.items()}
    return Scorecard("m", "s", None, tasks, "", "", "", values, ones)


def pairs(wins: int, losses: int, ties: int) -> tuple[list[int], list[int]]:
    """Scores of two models, mixed."""
    order = np.random.default_rng(0).permutation(wins + losses + ties)
    own = np.array([1] * wins + [0] * losses + [1] * ties)[order]
    other = np.array([0] * wins + [1] * losses + [1] * ties)[order]
    return own.tolist(), other.tolist()


def decided(gate: dict[str, Any], own: Any, other: Any, **measured: float) -> Decision:
    evidence = {"": ([card(**each) for each in own], [card(**each) for each in other])}
    return decide(Gate.model_validate(gate), evidence, measured)


def one(wins: int, losses: int, ties: int, **gate: Any) -> Decision:
    own, other = pairs(wins, losses, ties)
    return decided({**SUPERIOR, **gate}, [{"t": own}], [{"t": other}])


# --- the rules ------------------------------------------------------------------------------------


def test_superior() -> None:
    yes = one(30, 5, 65)
    (found,) = yes.findings
    assert (yes.answer, found.state, found.rows_needed) == ("yes", "met", None)
    expected = stats.binomtest(30, 35, alternative="greater").pvalue
    assert found.p == pytest.approx(expected, rel=1e-12)
    assert found.gain == 0.25 and min(found.cycles) > 0
    assert sum(found.cycles) / 2 == pytest.approx(found.gain)


def test_no_is_an_improvement_that_is_too_small_to_matter_or_a_loss() -> None:
    assert one(2, 2, 296).answer == "no"
    assert one(0, 20, 80).answer == "no"


def test_not_enough_evidence_says_how_many_rows_would_decide() -> None:
    undecided = one(5, 1, 4)
    (found,) = undecided.findings
    assert (undecided.answer, found.state) == ("not enough evidence", "undecided")
    assert found.rows_needed and found.rows_needed > 10
    # With as many rows, and the gain as it is, four of five comparisons are a yes.
    assert power_of_shares(found.rows_needed, 0.4, 0, 2, 7 / 12) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize(("rows", "answer"), [(10, "not enough evidence"), (12, "yes")])
def test_each_cycle_has_rows_to_show_it_alone(rows, answer) -> None:
    """Of five rows in a cycle, all won, the test alone has a p of 0.031; of six, 0.016."""
    for wins in (6, rows):
        decision = one(wins, 0, rows - wins)
        (found,) = decision.findings
        assert found.p <= statistics.ONE_SIDED and min(found.cycles) > 0
        assert decision.answer == answer
        assert found.rows_needed == (None if answer == "yes" else 12)
    assert one(0, 10, 0).answer == "no"


@pytest.mark.parametrize("margin", [None, 0.01, 0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("binary", [True, False])
def test_the_fewest_rows_are_those_of_the_best_outcome(margin, binary) -> None:
    require = {"superior": 0.1} if margin is None else {"not-inferior": margin}
    each = Requirement.model_validate({"task": "t", **require})
    fewest = each.fewest(binary=binary)
    best = 0.0 if binary and margin else 1.0
    for rows, shown in ((fewest - 1, False), (fewest, True)):
        p = above(np.full(rows, best), np.ones(rows), each.bound, binary=binary) if rows else 1
        assert (p <= statistics.ONE_SIDED) == shown


def test_each_cycle_has_to_agree() -> None:
    gate, other = Gate.model_validate(SUPERIOR), np.zeros(40)

    def found(own: Any) -> Any:
        return decide(gate, {"": ([card(t=own)], [card(t=other)])}, {}).findings[0]

    first = [found(np.eye(40)[at]).cycles[0] > 0 for at in range(40)]  # won in the first cycle
    assert sum(first) == 20
    one_sided = found(np.array(first, float))
    assert one_sided.p < 1e-5 and one_sided.cycles == (1, 0)
    assert one_sided.state == "undecided"


def test_not_inferior() -> None:
    gate = {"require": [{"task": "t", "not-inferior": 0.05}]}
    assert one(10, 10, 480, **gate).answer == "yes"
    assert one(1, 2, 17, **gate).answer == "not enough evidence"
    assert one(0, 40, 160, **gate).answer == "no"
    # Tango 1998, table 1 (Miyanaga 1994): 44 pairs, 0 and 1 discordant, margin 0.1: z = 1.709.
    (found,) = one(0, 1, 43, require=[{"task": "t", "not-inferior": 0.1}]).findings
    assert found.p == pytest.approx(0.0437, abs=2e-4)


def test_tasks_without_a_requirement_must_not_be_worse() -> None:
    own, other = pairs(30, 5, 65)
    worse, same = pairs(0, 12, 88), pairs(5, 5, 90)
    sides = [{"t": own, "g": worse[0], "h": same[0]}], [{"t": other, "g": worse[1], "h": same[1]}]
    found = decided(SUPERIOR, *sides)
    assert found.answer == "no"
    states = {each.task: (each.demand, each.state) for each in found.findings}
    assert states["g"] == ("not worse", "failed") and states["h"] == ("not worse", "met")


def test_rows_of_one_source_decide_nothing() -> None:
    own, other = pairs(40, 5, 55)
    scores = {"t": own, "guard": [0.4]}, {"t": other, "guard": [0.9]}
    found = decided(SUPERIOR, [scores[0]], [scores[1]])
    _, guard = found.findings
    assert (found.answer, guard.state, guard.interval) == ("not enough evidence", "undecided", None)
    assert guard.would_decide == "one source decides nothing; add rows of other sources"


def test_lower_scores_are_better_where_the_scorer_says_so() -> None:
    other = np.linspace(1.1, 2, 20)
    assert decided(SUPERIOR, [{"t": other - 0.2}], [{"t": other}]).answer == "yes"
    assert decided(SUPERIOR, [{"t": other + 0.2}], [{"t": other}]).answer == "no"


def test_limits() -> None:
    gate = {**SUPERIOR, "limits": {"megabytes": 5, "leakage": 0.1}}
    own, other = pairs(30, 5, 65)
    sides = [{"t": own}], [{"t": other}]
    assert decided(gate, *sides, megabytes=5, leakage=0.1).answer == "yes"
    assert decided(gate, *sides, megabytes=6, leakage=0.1).answer == "no"
    assert decided(gate, *sides, megabytes=5, leakage=0.2).answer == "no"


def test_seeds_are_cycles_in_which_a_row_counts_once() -> None:
    gate = {**SUPERIOR, "seeds": [1, 2]}
    own, other = pairs(6, 0, 6)
    twice = decided(gate, [{"t": own}] * 2, [{"t": other}] * 2)
    (found,) = twice.findings
    assert (found.rows, found.p) == (12, 2**-6)  # and not 2**-12
    assert twice.answer == "yes"
    assert decided(gate, [{"t": own}, {"t": other}], [{"t": other}] * 2).answer != "yes"


def test_every_backend_has_to_agree() -> None:
    own, other = pairs(30, 5, 65)
    gate = Gate.model_validate({**SUPERIOR, "backends": ["a", "b"]})
    good, current = [card(t=own)], [card(t=other)]
    assert decide(gate, {"a": (good, current), "b": (good, current)}, {}).answer == "yes"
    flipped = [card(t=[1 - own[0], *own[1:]])]
    found = decide(gate, {"a": (good, current), "b": (flipped, current)}, {})
    assert (found.answer, found.checks[0].found) == ("no", 0.01)
    loose = gate.model_copy(
        update={"limits": gate.limits.model_copy(update={"backend_differences": 0.02})}
    )
    assert decide(loose, {"a": (good, current), "b": (flipped, current)}, {}).answer == "yes"


# --- error rate and power -------------------------------------------------------------------------


@pytest.fixture
def _answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that an undecided simulation would need are a simulation of their own."""
    monkeypatch.setattr(gate_module, "_needed", lambda *_: None)


def simulated(
    rows: int, gain: float, discordant: float, gate: dict[str, Any], rounds: int
) -> float:
    """The share of simulated pairs of models that are promoted."""
    rng, yes = np.random.default_rng(rows), 0
    shares = (discordant + gain) / 2, (discordant - gain) / 2, 1 - discordant
    for _ in range(rounds):
        outcome = rng.choice(3, rows, p=shares)
        sides = [{"t": (outcome != 1).astype(float)}], [{"t": (outcome != 0).astype(float)}]
        yes += decided(gate, *sides).answer == "yes"
    return yes / rounds


@pytest.mark.usefixtures("_answers_alone")
@pytest.mark.parametrize(("rows", "discordant"), [(20, 0.5), (100, 0.3), (300, 0.1)])
def test_of_1000_pairs_without_a_difference_at_most_5_percent_are_promoted(
    rows, discordant
) -> None:
    assert simulated(rows, 0.0, discordant, SUPERIOR, 1000) <= 0.05


@pytest.mark.usefixtures("_answers_alone")
def test_of_1000_pairs_at_the_margin_at_most_5_percent_are_promoted() -> None:
    gate = {**SUPERIOR, "require": [{"task": "t", "not-inferior": 0.1}]}
    assert simulated(100, -0.1, 0.3, gate, 1000) <= 0.05


@pytest.mark.parametrize(("rows", "margin"), [(6, 0.1), (20, 0.05), (50, 0.03)])
def test_ties_beside_rare_losses_do_not_show_a_margin(rows, margin) -> None:
    """Of scores other than 0 and 1, whose true mean difference is the margin."""
    rng = np.random.default_rng(0)
    lost = -(rng.random((500, rows)) < margin).astype(float)
    p_values = [statistics.above(each, np.ones(rows), -margin, binary=False) for each in lost]
    assert np.mean(np.array(p_values) <= statistics.ONE_SIDED) <= 0.05


@pytest.mark.usefixtures("_answers_alone")
@pytest.mark.parametrize(
    ("require", "rows", "gain", "discordant", "cycles"),
    [
        ({"superior": 0.1}, 200, 0.1, 0.5, 2),
        ({"superior": 0.1}, 100, 0.1, 0.2, 4),
        ({"not-inferior": 0.1}, 150, 0.0, 0.2, 2),
    ],
)
def test_the_power_is_what_was_said(require, rows, gain, discordant, cycles) -> None:
    gate = {**SUPERIOR, "cycles": cycles, "require": [{"task": "t", **require}]}
    bound = -require.get("not-inferior", 0.0)
    said = power_of_shares(rows, gain, bound, cycles, discordant)
    assert 0.1 < said < 0.95
    # 1,500 rounds: a standard error of 1.3 points at most.
    assert simulated(rows, gain, discordant, gate, 1500) == pytest.approx(said, abs=0.03)


def test_rows_needed_have_the_power_that_was_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(statistics, "MOST_ROWS", 4000)
    need = rows_needed(lambda n: power_of_shares(n, 0.1, 0, 2), 2)
    assert need and power_of_shares(need, 0.1, 0, 2) == pytest.approx(0.8, abs=0.01)
    assert rows_needed(lambda n: power_of_shares(n, 1e-2, 0, 2), 2) is None


# --- the file -------------------------------------------------------------------------------------

GATE = """
suites = ["suite.toml"]
[[require]]
task = "say"
superior = 0.3
"""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "suites is missing"),
        (GATE.replace("superior", "better"), "better is unknown"),
        (GATE + "not-inferior = 0.1", "superior or not-inferior, one of them"),
        (GATE.replace("superior = 0.3", ""), "superior or not-inferior, one of them"),
        (GATE + '[[require]]\ntask = "say"\nsuperior = 1', "two requirements"),
        ("cycles = 1" + GATE, "greater than or equal to 2"),
        ("seeds = [1]" + GATE, "two seeds or more"),
        ("cycles = 2\nseeds = [1, 2]" + GATE, "no cycles beside them"),
        ('name = "../x"' + GATE, "write up to 64 letters"),
        ('backends = ["cpu", "cpu"]' + GATE, "named twice"),
        ("x = [", "cannot be read"),
    ],
)
def test_a_faulty_gate(write, text, fault) -> None:
    with pytest.raises(ConfigError) as caught:
        read_gate(write("gate.toml", text))
    assert caught.value.code == "VOX-C012"
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"task": "none"}, "there is no task 'none'; there are say, warm, pick, text"),
        ({"task": "pick"}, "task 'pick': 3 rows are too few"),
        ({"task": "say", "superior": None, "not-inferior": 0.1}, "5 rows are too few"),
        ({"task": "say", "superior": 5}, "'superior, 5 matters' of scores of 0 and 1"),
        ({"task": "say", "superior": None, "not-inferior": 3}, "write 0.05 for 5 %"),
    ],
)
def test_a_gate_that_no_outcome_can_decide(suite, changed, fault) -> None:
    gate = Gate.model_validate({**SUPERIOR, "require": [{**SUPERIOR["require"][0], **changed}]})
    with pytest.raises(ConfigError, match="the gate cannot be used") as caught:
        foretell(gate, read_suites([suite]), "gate.toml")
    assert any(fault in each for each in caught.value.faults)


def test_seeds_of_greedy_tasks_decide_nothing(suite, write) -> None:
    write("say.jsonl", *({"prompt": f"Say {n}.", "ideal": str(n)} for n in range(9)))
    gate = Gate.model_validate(
        {"suites": ["s"], "seeds": [1, 2], "require": [{"task": "warm", "superior": 0.1}]}
    )
    with pytest.raises(ConfigError) as caught:
        foretell(gate, read_suites([suite]), "gate.toml")
    assert caught.value.faults[0].startswith("tasks pick, say, text: every seed gives the same")


def test_the_power_is_told_beforehand(suite, write) -> None:
    write("say.jsonl", *({"prompt": f"Say {n}.", "ideal": str(n)} for n in range(100)))
    gate = Gate.model_validate(
        {
            "suites": ["s"],
            "require": [{"task": "say", "superior": 0.2}, {"task": "warm", "not-inferior": 0.2}],
        }
    )
    first, second = foretell(gate, read_suites([suite]), "gate.toml")
    power = power_of_shares(100, 0.2, 0, 2)
    assert first.startswith(
        f"say: 100 rows show 'superior, 0.2 matters' with a power of {power:.0%} if the gain is 0.2"
    )
    assert second.startswith("warm: 100 rows show 'not inferior by 0.2'")
    write("say.jsonl", *({"prompt": f"Say {n}.", "ideal": str(n)} for n in range(20)))
    _, few = foretell(gate, read_suites([suite]), "gate.toml")
    assert (
        few == "warm: 20 rows are too few to show 'not inferior by 0.2', "
        "which takes 16 in each of 2 cycles"
    )
