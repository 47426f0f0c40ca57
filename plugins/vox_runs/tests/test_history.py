"""What run folders tell: summaries, comparisons, following, pictures, and strangers' files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from tests.run.history_samples import make_run, start, step, text_of, whole, worked_in

from vox_core.contract import Notice, Resumed, RunEnd, Validation
from vox_core.errors import AdapterError, ConfigError
from vox_core.run.folder import RunFolder, is_worked_in
from vox_core.run.telemetry import Summary, read_run, read_runs, runs_in
from vox_runs import plot as plotting
from vox_runs.compare import compare, verdict
from vox_runs.plot import plot
from vox_runs.watch import follow


def test_a_run_that_is_done(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", whole())
    for name in ("step-2", "step-4", "damaged-step-3-ab", "step-x", "step-03", ".tmp-step-5"):
        (run / "checkpoints" / name).mkdir(parents=True)
    (run / "checkpoints" / "step-9").write_text("no folder")
    told = read_run(run)
    assert (told.status, told.step, told.total_steps, told.loss) == ("done", 4, 4, 1.0)
    assert told.losses == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    assert told.held_out == [(0, 5.0), (4, 1.5)]
    assert (told.tokens_per_second, told.memory, told.seconds) == (200.0, 5, 7.0)
    assert (told.started, told.last) == (1000.0, 1007.0)
    assert (told.model, told.backend, told.device) == ("m", "cpu", "a CPU")
    assert told.checkpoints == [2, 4]
    assert (told.resumes, told.warnings, told.passed_over) == (0, [], 0)


STATUS = {
    "done": (whole(), False, "done"),
    "stopped": ([start(), step(1, 2.0), RunEnd(1, "stopped", 1.0)], False, "stopped"),
    "failed": ([start(), step(1, 2.0), RunEnd(1, "failed", 1.0)], False, "failed"),
    "running": ([start(), step(1, 2.0)], True, "running"),
    "died": ([start(), step(1, 2.0)], False, "died"),
    "nothing told, and at work": ([], True, "running"),
    "nothing told": ([], False, "died"),
    "gone on with": ([start(), RunEnd(1, "stopped", 1.0), Resumed(1, "p")], True, "running"),
    "ended, and still putting things away": (whole(), True, "done"),
}


@pytest.mark.parametrize("case", STATUS)
def test_status(case: str, tmp_path: Path) -> None:
    events, at_work, expected = STATUS[case]
    run = make_run(tmp_path / "r", events)
    if at_work:
        with worked_in(run):
            assert read_run(run).status == expected
            with pytest.raises(Exception, match="another process"), worked_in(run):
                pass
    else:
        assert read_run(run).status == expected
    (run / ".lock").touch()
    assert not is_worked_in(run)
    with worked_in(run):
        pass


def test_steps_before_a_resume_count_once(tmp_path: Path) -> None:
    """Killed after step 4, gone on with after step 2, an hour later."""
    before = [start(6), *(step(number, 5.0 - number) for number in range(1, 5))]
    before.insert(4, Validation(3, 9.0))
    before.insert(0, Notice("torn", "warning"))
    after = [Resumed(2, "p", ("step-4: torn",)), Notice("torn", "warning"), start(6, first=3)]
    after += [step(3, 1.5), step(4, 1.25)]
    run = make_run(tmp_path / "r", before)
    with (run / "telemetry.jsonl").open("a") as file:
        file.write(text_of(after, began=5000.0))
    told = read_run(run)
    assert told.losses == [(1, 4.0), (2, 3.0), (3, 1.5), (4, 1.25)]
    assert told.held_out == []
    assert (told.step, told.resumes, told.warnings) == (4, 1, ["torn"])
    assert told.seconds == 6.0 + 4.0


def test_a_clock_that_was_set_back_takes_no_time_away(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", whole())
    with (run / "telemetry.jsonl").open("a") as file:
        file.write(text_of([start(), Notice("y")], began=10.0))
    assert read_run(run).seconds == 7.0 + 1.0


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [start(), step(1, math.nan), step(2, math.inf)])
    assert read_run(run).losses == [(1, None), (2, None)]
    json.dumps(read_run(run).losses, allow_nan=False)


def test_which_folders_are_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "runs" / name, whole()) for name in "ba"]
    (tmp_path / "runs" / "c").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    assert runs_in(tmp_path / "runs") == sorted(runs)
    assert runs_in(runs[0]) == [runs[0]]
    assert runs_in(tmp_path / "runs" / "c") == []
    for wrong in (tmp_path / "nowhere", tmp_path / "runs" / "file"):
        with pytest.raises(AdapterError, match="not a run folder"):
            runs_in(wrong)
        with pytest.raises(AdapterError, match="not a run folder"):
            read_run(wrong)


def test_a_run_is_meant_that_lies_under_runs(tmp_path: Path, monkeypatch) -> None:
    (make_run(tmp_path / "runs" / "a", whole()) / "plan.json").touch()
    monkeypatch.chdir(tmp_path)
    for read in (read_run, runs_in, lambda run: RunFolder(run).read("plan.json")):
        with pytest.raises(AdapterError) as caught:
            read(Path("a"))
        assert caught.value.remedy.startswith("did you mean runs/a? ")
        with pytest.raises(AdapterError) as caught:
            read(Path("b"))
        assert "did you mean" not in caught.value.remedy


def test_a_folder_that_may_not_be_entered_is_listed(tmp_path: Path) -> None:
    """By a user who is not root."""
    for name in ("good", "shut"):
        make_run(Path("runs", name), whole())
    shut, user = Path("runs/shut"), os.geteuid()
    tmp_path.chmod(0o755)
    shut.chmod(0)
    os.seteuid(user or 65534)
    try:
        good, bad = read_runs(Path("runs"))
        with pytest.raises(AdapterError, match="telemetry of a run cannot be read") as refused:
            compare(Path("runs/good"), shut)
        with pytest.raises(AdapterError, match="telemetry of a run cannot be read"):
            plot([Path("runs/good"), shut], Path("losses.png"))
    finally:
        os.seteuid(user)
        shut.chmod(0o755)
    assert (good.status, bad.run, bad.status) == ("done", "runs/shut", "unreadable")
    assert "Permission denied" in (bad.error or "")
    assert (refused.value.where, refused.value.found) == (
        "runs/shut/telemetry.jsonl",
        "Permission denied",
    )


def summed(**given: object) -> Summary:
    summary = Summary("run")
    for key, value in given.items():
        setattr(summary, key, value)
    return summary


def test_the_adapter_that_is_there_is_judged(tmp_path: Path) -> None:
    """Of a run that wrote its best step's (`--load-best-at-end`), and one that stopped early."""
    events = [start(9), Validation(0, 5.0), step(1, 4.0), Validation(1, 1.0), step(2, 3.0)]
    events += [Validation(2, 2.0), RunEnd(2, "done", 2.0)]
    data = {"data": {"valid_digest": "v"}}
    run = make_run(tmp_path / "r", events, data)
    told = read_run(run)
    assert (told.early, told.adapter_step, told.best, told.judged) == (True, None, (1, 1.0), (2, 2))
    (run / "vox_adapter.json").write_text(json.dumps({"step": 1, "last_step": 2}))
    told = read_run(run)
    assert (told.adapter_step, told.chosen, told.judged) == (1, True, (1, 1.0))
    other = make_run(tmp_path / "o", whole(held_out=1.5), data)
    assert (read_run(other).early, read_run(other).chosen) == (False, False)
    found = compare(run, other).verdict
    assert (found.better, found.a, found.b, found.steps) == (str(run), 1.0, 1.5, (1, 4))
    for broken in ("{", "[]", '{"step": "x"}', '{"step": true}', "{}"):
        (run / "vox_adapter.json").write_text(broken)
        assert read_run(run).adapter_step is None
    with worked_in(at_work := make_run(tmp_path / "w", [start(9), step(1, 4.0)])):
        (at_work / "vox_adapter.json").write_text(json.dumps({"step": 1, "last_step": 1}))
        assert read_run(at_work).adapter_step is None, "what an earlier stop left"


VERDICTS = {
    "held out, at the last common step": (
        {"held_out": [(0, 9.0), (10, 2.0), (20, 1.0)]},
        {"held_out": [(0, 9.0), (10, 1.5)]},
        ("b", "validation loss", 2.0, 1.5, (10, 10)),
    ),
    "held out, the last of each": (
        {"held_out": [(0, 9.0), (20, 1.0)]},
        {"held_out": [(0, 9.0), (10, 1.5)]},
        ("a", "validation loss", 1.0, 1.5, (20, 10)),
    ),
    "before training alone": (
        {"held_out": [(0, 9.0)], "losses": [(1, 3.0)]},
        {"held_out": [(0, 9.0)], "losses": [(1, 2.0)]},
        (None, "training loss", 3.0, 2.0, (1, 1)),
    ),
    "the mean of the last losses up to the same step": (
        {"losses": [(n, 2.0 if n <= 100 else 0.0) for n in range(1, 201)]},
        {"losses": [(n, 1.5 if n > 90 else 9.0) for n in range(1, 101)]},
        (None, "training loss", 2.0, 1.5, (100, 100)),
    ),
    "a gap is no loss": (
        {"losses": [(1, 3.0), (2, None)]},
        {"losses": [(1, 3.5), (2, 0.0)]},
        (None, "training loss", 3.0, 3.5, (1, 1)),
    ),
    "alike": (
        {"held_out": [(1, 3.0)]},
        {"held_out": [(1, 3.0)]},
        (None, "validation loss", 3, 3, (1, 1)),
    ),
    "rewards, whose losses are negative": (
        {"held_out": [(1, -0.25)], "rewarded": True},
        {"held_out": [(1, -0.5)], "rewarded": True},
        ("b", "validation reward", 0.25, 0.5, (1, 1)),
    ),
    "nothing": ({}, {"losses": [(1, 3.0)]}, (None, None, None, None, None)),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_which_is_better(case: str) -> None:
    a, b, expected = VERDICTS[case]
    data = digests("t", "v")
    found = verdict(summed(**{**a, "run": "a"}), summed(**{**b, "run": "b"}), data, data)
    assert (found.better, found.basis, found.a, found.b, found.steps) == expected
    assert "\n" not in found.why
    assert found.why.startswith(f"{found.better} is better" if found.better else "n")


def digests(train: str, valid: str | None, **contract: object) -> dict[str, object]:
    return {"data": {"digest": train, "valid_digest": valid}, **contract}


REASONS = {
    "of different data; training losses 3.0000 and 2.0000": (digests("t", "v"), digests("t", "w")),
    "losses of other data 3.0000 and 2.0000": (digests("t", "v"), digests("u", "w")),
    "does not name; training losses of other": (digests("t", "v"), {}),
    "of different objectives, options or rewards; training losses 3.0000": (
        digests("t", "v", objective={"name": "dpo", "options": {}}),
        digests("t", "v", objective={"name": "dpo", "options": {"beta": "0.5"}}),
    ),
    "options or rewards; training losses 3.0000": (
        digests("t", "v", rollouts={"rewards": ["exact"]}),
        digests("t", "v", rollouts={"rewards": ["regex"]}),
    ),
    "rewards; training losses 3.0000 and 2.0000": (
        digests("t", "v", rollouts={"rewards": ["exact"], "tokens": 8}),
        digests("t", "v", rollouts={"rewards": ["exact"], "tokens": 9}),
    ),
}


@pytest.mark.parametrize("said", REASONS)
def test_no_run_is_better_by_other_data(said: str) -> None:
    a = summed(held_out=[(1, 1.0)], losses=[(1, 3.0)])
    b = summed(held_out=[(1, 2.0)], losses=[(1, 2.0)])
    found = verdict(a, b, *REASONS[said])
    assert (found.better, found.basis, found.a, found.b) == (None, "training loss", 3.0, 2.0)
    assert said in found.why and found.why.startswith("no verdict: ")
    a.held_out = []
    assert "run has no validation; " in verdict(a, b, *REASONS[said]).why


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"objective": {"name": "sft", "options": {}}, "rollouts": {"teacher": ""}}),
        ({"rollouts": {"rewards": ["a", "b"]}}, {"rollouts": {"rewards": ["b", "a"]}}),
    ],
)
def test_the_same_measure_may_be_written_in_another_way(one, other) -> None:
    a, b = summed(run="a", held_out=[(1, 1.0)]), summed(run="b", held_out=[(1, 2.0)])
    found = verdict(a, b, digests("t", "v", **one), digests("t", "v", **other))
    assert found.better == "a"


def test_a_comparison_names_each_field_and_trusts_no_other_held_out_rows(tmp_path: Path) -> None:
    contract = {"adapter": {"rank": 4, "alpha": 8}, "data": {"valid_digest": "x"}, "old": 1}
    contract["rollouts"] = {"answers": 2, "updates": 1}
    other = {"adapter": {"rank": 8, "alpha": 8}, "data": {"valid_digest": "y"}}
    a = make_run(tmp_path / "a", whole(held_out=1.0), contract)
    b = make_run(tmp_path / "b", whole([3.0, 2.0, 1.0, 0.5], held_out=9.0), other)
    found = compare(a, b)
    assert [(each.field, each.a, each.b) for each in found.differences or ()] == [
        ("adapter.rank", 4, 8),
        ("data.valid_digest", "x", "y"),
        ("old", 1, None),
        ("rollouts.answers", 2, None),
        ("rollouts.updates", 1, None),
    ]
    assert (found.verdict.better, found.verdict.basis) == (None, "training loss")
    assert "of different data" in found.verdict.why
    assert compare(a, a).differences == []


def test_best_adapters_are_compared_though_they_are_of_the_last_steps(tmp_path: Path) -> None:
    """`--load-best-at-end`: both runs were best at the end, and one is longer."""
    data = {"data": {"valid_digest": "v"}}
    events = [start(4), Validation(0, 5.0), step(1, 4.0), Validation(1, 2.0)]
    ends = ([RunEnd(1, "done", 1.0)], [step(2, 3.0), Validation(2, 1.0), RunEnd(2, "done", 2.0)])
    runs = [
        make_run(tmp_path / name, [*events, *end], data)
        for name, end in zip("ab", ends, strict=True)
    ]
    for run, last in zip(runs, (1, 2), strict=True):
        (run / "vox_adapter.json").write_text(json.dumps({"step": last, "last_step": last}))
    found = compare(*runs).verdict
    assert (found.better, found.steps) == (None, (1, 1)), "the last common step"
    for run in runs:
        plan = json.loads((run / "plan.json").read_text())
        settings = {"settings": {"load_best_at_end": True}}
        (run / "plan.json").write_text(json.dumps(plan | settings))
    found = compare(*runs).verdict
    assert (found.better, found.a, found.b, found.steps) == (str(runs[1]), 2.0, 1.0, (1, 2))


PLANS = {
    "gone": lambda path: None,
    "no JSON": lambda path: path.write_text("{"),
    "no contract": lambda path: path.write_text("{}"),
    "a list": lambda path: path.write_text('{"contract": []}'),
    "brackets without end": lambda path: path.write_text("[" * 100_000),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_cannot_be_read_leaves_the_curves(case: str, tmp_path: Path) -> None:
    a, b = (make_run(tmp_path / name, whole()) for name in "ab")
    (a / "plan.json").unlink()
    PLANS[case](a / "plan.json")
    found = compare(a, b)
    assert found.differences is None
    assert (found.verdict.better, found.verdict.basis) == (None, "training loss")


def test_following_ends_with_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [start(), step(1, 4.0)])
    events = whole()[3:]
    seen: list[int] = []

    def wait(_seconds: float) -> None:
        with (run / "telemetry.jsonl").open("a") as file:
            file.write(text_of([events.pop(0)]))

    with worked_in(run):
        for told in follow(run, wait):
            seen.append(len(told))
            assert read_run(run).status == ("done" if not events else "running")
    assert seen == [2, *[1] * 5]
    assert read_run(run).losses == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]


def test_following_ends_when_the_process_is_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [start(), step(1, 4.0)])
    with worked_in(run):
        looks = follow(run, lambda _seconds: None)
        assert [len(next(looks)), len(next(looks))] == [2, 0]
    assert [*looks] == [[]]
    assert read_run(run).status == "died"


def test_following_one_that_has_told_nothing_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [])
    (run / "telemetry.jsonl").unlink()
    with worked_in(run):
        looks = follow(run, lambda _seconds: None)
        assert next(looks) == []
        (run / "telemetry.jsonl").write_text(text_of(whole()))
        assert len(next(looks)) == 8
        assert list(looks) == []


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["a", "$\\frac$", "_hidden"]
    runs = [make_run(tmp_path / name, whole()) for name in names]
    runs.append(make_run(tmp_path / "empty", []))
    out = tmp_path / "f.png"
    assert [len(plot(runs, out)) for _ in range(2)] == [4, 4], "its own picture is replaced"
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    handles = plotting._figure([read_run(run) for run in runs]).axes[0].get_legend().get_texts()
    assert [each.get_text() for each in handles][::2] == names


def test_a_picture_of_nothing_and_one_that_is_no_png(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [start()])
    for out, code in ((tmp_path / "f.png", "VOX-C004"), (tmp_path / "f.jpg", "VOX-C002")):
        with pytest.raises(ConfigError) as caught:
            plot([run], out)
        assert caught.value.code == code
        assert not out.exists()


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError) as caught:
        plot([make_run(tmp_path / "r", whole())], tmp_path / "f.png")
    assert caught.value.code == "VOX-C009"
    assert "pip install 'vox-ml-runs[plot]'" in caught.value.remedy
