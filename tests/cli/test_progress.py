"""Both displays, fed with the events of a run."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.services import STEP, events, start
from vox_core import display as progress
from vox_core.contract import CheckpointWritten, Notice, StepDone
from vox_core.display import Display, Lines, Notebook, Pace, Terminal, display

WORDS_OF_A_RUN = [
    "cpu 0.1.0: the only usable backend",
    "training m in fp32 on a CPU, steps 1 to 3",
    "validation loss 4.0000 before training",
    "validation loss 1.0000 after step 3",
    "done after step 3, in 0:12",
]


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == "", "progress goes to stderr"
    return err.splitlines()


def steps_shown(total: int, first: int, capsys) -> list[int]:
    shown = Display(Lines())
    shown.observe(start(total, first))
    for number in range(first, total + 1):
        shown.observe(StepDone(number, 1.0, 1e-4, 1.0, 100, 40, 0.5))
    return [int(line.split("/")[0].removeprefix("step ")) for line in lines(capsys)[1:]]


def live(width: int = 100) -> tuple[Display, io.StringIO]:
    written = io.StringIO()
    return Display(Terminal(Console(file=written, force_terminal=True, width=width))), written


def test_a_quantised_base_is_named(capsys) -> None:
    Display(Lines()).observe(dataclasses.replace(start(3), quant="nf4"))
    assert lines(capsys) == ["training m in fp32, base in nf4, on a CPU, steps 1 to 3"]


def test_lines_of_a_short_run(capsys) -> None:
    shown = Display(Lines())
    for event in events(3):
        shown.observe(event)
    assert lines(capsys) == [
        *WORDS_OF_A_RUN[:3],
        "step 1/3  loss 3.6667  smoothed 3.6667  lr 1.0e-04  200 tokens/s  0:01 left",
        "step 2/3  loss 3.3333  smoothed 3.4912  lr 1.0e-04  200 tokens/s  0:00 left",
        "step 3/3  loss 3.0000  smoothed 3.3100  lr 1.0e-04  200 tokens/s  0:00 left",
        *WORDS_OF_A_RUN[3:],
    ]


def test_a_short_run_shows_every_step(capsys) -> None:
    assert steps_shown(50, 1, capsys) == [*range(1, 51)]


def test_a_long_run_shows_about_twenty_steps(capsys) -> None:
    shown = steps_shown(1000, 1, capsys)
    assert shown == [1, *range(50, 1001, 50)]


def test_a_resumed_run_shows_its_first_step(capsys) -> None:
    assert steps_shown(1000, 933, capsys) == [933, 950, 1000]


def test_a_run_whose_steps_are_all_done_does_not_train(capsys) -> None:
    Display(Lines()).observe(start(9, 10))
    assert lines(capsys) == ["all 9 steps are trained; writing the results"]


def test_warnings_and_checkpoints_have_their_lines(capsys) -> None:
    shown = Display(Lines())
    shown.observe(Notice("careful", "warning"))
    shown.observe(CheckpointWritten(7, "somewhere", 0.1))
    assert lines(capsys) == ["warning: careful", "checkpoint written after step 7"]


def test_a_transfer_is_told_in_quarters(capsys) -> None:
    shown = Lines()
    for done in range(0, 101, 5):
        shown.transfer("downloading", done * 10**6, 100 * 10**6)
    shown.transfer("converting", 0, 0)
    shown.transfer("converting", 10**6, 0)
    of = "MB of 100 MB"
    assert lines(capsys) == [
        *(f"downloading: {megabytes} {of}" for megabytes in (0, 25, 50, 75, 100)),
        "converting: 0 MB",
    ]


def test_a_transfer_that_is_over_at_once_is_not_told(capsys, monkeypatch) -> None:
    """Each by itself, however long the ones before took."""
    clock = iter([0.0, 0.9, 1.0, 1.1, 7.0, 7.9])
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    with display() as shown:
        for done in (1, 2, 3, 4):
            shown.transfer("looking at rows", done * 10**6, 4 * 10**6)
        for done in (1, 4):
            shown.transfer("mixing", done * 10**6, 0)
    assert lines(capsys) == ["looking at rows: 3 MB of 4 MB", "looking at rows: 4 MB of 4 MB"]


def test_a_loss_that_is_not_finite_leaves_the_smoothed_one() -> None:
    pace = Pace()
    told = [
        pace.describe(StepDone(number, loss, 1e-4, 1.0, 100, 40, 1.0))
        for number, loss in enumerate((float("nan"), 2.0, float("inf"), 4.0), 1)
    ]
    smoothed = [text.split("  ")[1] for text in told]
    # The mean of 2 and 4 with weights 0.9 and 1.
    assert smoothed == [f"smoothed {loss}" for loss in ("nan", "2.0000", "2.0000", "3.0526")]


def test_rewards_are_shown_with_their_standard_deviation() -> None:
    pace, step = Pace(), StepDone(1, -1e-9, 1e-4, 1.0, 100, 40, 1.0)
    pace.metrics = {"reward": 0.25, "reward_std": 0.0, "entropy": 2.0}
    assert pace.describe(step).startswith("loss 0.0000  reward 0.2500  reward_std 0.0000  lr ")
    pace.metrics = {"rewards/margins": 0.5, "rewards/chosen": 0.75}
    assert pace.describe(step).startswith("loss 0.0000  rewards/margins 0.5000  lr ")


def test_a_narrow_terminal_shows_the_step_and_its_numbers() -> None:
    shown, written = live(60)
    for event in events(3):
        shown.observe(event)
    assert "step 3/3  loss 3.0000  smoothed 3.3100" in written.getvalue()


def test_pace_is_that_of_recent_steps() -> None:
    pace = Pace()
    for number in range(1, 21):
        pace.describe(StepDone(number, 1.0, 1e-4, 1.0, 100, 40, 50.0))
    for number in range(21, 41):
        told = pace.describe(StepDone(number, 1.0, 1e-4, 1.0, 100, 40, 2.0, seconds_left=120))
    assert told.endswith("50 tokens/s  2:00 left")


def test_the_live_display_keeps_lines_above_one_bar() -> None:
    shown, written = live()
    for event in events(3):
        shown.observe(event)
    text = written.getvalue()
    for words in WORDS_OF_A_RUN:
        assert words in text
    assert "3/3" in text
    assert "loss 3.0000  smoothed 3.3100  lr 1.0e-04  200 tokens/s" in text


def test_the_live_display_shows_transfers_one_after_the_other() -> None:
    shown, written = live()
    shown.screen.transfer("downloading", 0, 0)
    shown.screen.transfer("downloading", 30 * 10**6, 30 * 10**6)
    shown.screen.transfer("converting", 5 * 10**6, 10 * 10**6)
    shown.observe(Notice("ready"))
    text = written.getvalue()
    assert "30.0/30.0 MB" in text
    assert "5.0/10.0 MB" in text
    assert text.index("downloading") < text.index("converting") < text.index("ready")


def test_the_live_display_takes_no_text_for_markup() -> None:
    shown, written = live()
    shown.observe(Notice("a [bold] path [/x]"))
    assert "a [bold] path [/x]" in written.getvalue()


def test_a_live_display_is_closed_when_its_block_fails() -> None:
    shown, written = live()
    shown.observe(start(3))
    shown.close()
    shown.observe(STEP)
    assert written.getvalue().endswith("\x1b[?25h"), "the cursor is back, and nothing follows"


SCRIPT = """
from vox_core.display import display
with display() as shown:
    print(type(shown.screen).__name__)
"""


@pytest.mark.parametrize(
    ("terminal", "term", "kind"),
    [
        (True, "xterm", "Terminal"),
        (True, "dumb", "Lines"),
        (False, "xterm", "Lines"),
    ],
)
def test_the_display_suits_stderr(terminal: bool, term: str, kind: str, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            stdout=subprocess.PIPE,
            stderr=follower if terminal else subprocess.PIPE,
            env={**os.environ, "TERM": term},
            text=True,
            check=True,
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert done.stdout.strip() == kind


def test_a_display_falls_silent_when_stderr_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for good where it is only full."""
    shown, errors = [], [OSError(errno.ENOSPC, ""), BrokenPipeError(errno.EPIPE, "")]

    def step(_screen: Lines, text: str, *_: int) -> None:
        shown.append(text)
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(Lines, "step", step)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with display() as told:
        for _ in range(5):
            told.observe(STEP)
        assert len(shown) == 2
    shown.clear()
    errors.append(OSError(errno.ENOSPC, ""))
    monkeypatch.setattr(Lines, "line", lambda self, text: self.step(text, 0, 0))
    with display() as told:
        told.observe(start(7))
        assert told._total == 7, "a line that cannot be written costs no more than itself"
    errors.append(BrokenPipeError(errno.EPIPE, ""))
    with display(by_the_way=False) as told, pytest.raises(BrokenPipeError):
        told.observe(STEP)


def test_the_display_closes_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(Lines, "close", lambda self: closed.append(True))
    with pytest.raises(KeyError), display():
        raise KeyError
    assert closed == [True]


def test_the_name_of_a_file_does_not_steer_the_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "WORTH_SECONDS", 0.0)
    with display() as shown:
        shown.transfer("reading a\x1b]0;title\x07.jsonl", 1, 2)
    told = capsys.readouterr().err
    assert "\\x1b]0;title\\x07" in told
    assert not {"\x1b", "\x07"} & {*told}


def test_a_notebook_has_one_output_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(data)

    def output(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append(data)
        return Handle()

    monkeypatch.setattr("IPython.display.display", output)
    told = Display(Notebook())
    told.screen.transfer("downloading <m>", 5 * 10**6, 10 * 10**6)
    assert shown[-1]["text/html"] == (
        '<pre>downloading &lt;m&gt;: 5 MB of 10 MB</pre><progress value="5000000" '
        'max="10000000"></progress>'
    )
    for event in events(3):
        told.observe(event)
    step = "step 3/3  loss 3.0000  smoothed 3.3100  lr 1.0e-04  200 tokens/s  0:00 left"
    lines = shown[-1]["text/plain"].splitlines()
    assert lines == [*WORDS_OF_A_RUN[:4], step, WORDS_OF_A_RUN[4]]
    assert shown[-1]["text/html"].endswith('<progress value="3" max="3"></progress>')
