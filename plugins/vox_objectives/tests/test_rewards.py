"""Rewards: programs that end before their tests, functions without a process left behind."""

from __future__ import annotations

import os

import pytest

from vox_core.errors import ConfigError
from vox_objectives import rewards

TESTS = {"answer": "assert double(2) == 4"}


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def double(x):\n    return 2 * x", 1.0),
        ("def double(x):\n    return x", 0.0),
        ("import sys\nsys.exit(0)", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("def double(x):\n    raise SystemExit(0)", 0.0),
    ],
)
def test_a_program_is_rewarded_if_its_tests_run_to_their_end(program, reward):
    assert rewards.python(TESTS, program) == reward


def test_a_function_that_raises_is_named_with_its_line_and_the_traceback(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text("import json\n\ndef parsed(row, answer):\n    return json.loads(answer)\n")
    reward = rewards.reward_of(f"{file}:parsed")
    with pytest.raises(ValueError, match="raised JSONDecodeError") as caught:
        reward.judge({}, "no")
    reward.close()
    assert f"({file}, line 4)" in str(caught.value)
    assert "Traceback" in str(caught.value.__cause__)


def test_a_function_has_a_process_from_its_first_answer_on(tmp_path, monkeypatch):
    started = []
    popen = rewards.subprocess.Popen
    monkeypatch.setattr(
        rewards.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    file = tmp_path / "judge.py"
    file.write_text("def length(row, answer):\n    return len(answer)\n")
    reward = rewards.reward_of(f"{file}:length")
    assert [process.poll() is None for process in started] == [False]
    assert reward.judge({}, "four") == 4.0
    group = os.getpgid(started[-1].pid)
    assert group != os.getpgrp(), "Ctrl-C in a terminal would end it"
    reward.close()
    assert [process.poll() is None for process in started] == [False, False]


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ("completions, **kwargs", "(completions, **kwargs) of lists, as TRL calls it"),
        ("prompts, completions, **kwargs", "of lists, as TRL calls it"),
        ("answer", "is a function (answer)"),
        ("row, answer, *, scale", "is a function (row, answer, *, scale)"),
    ],
)
def test_a_function_with_other_parameters_is_refused_at_once(tmp_path, parameters, found):
    file = tmp_path / "judge.py"
    file.write_text(f"def judge({parameters}):\n    return 1.0\n")
    with pytest.raises(ConfigError) as caught:
        rewards.reward_of(f"{file}:judge")
    assert caught.value.code == "VOX-C004"
    assert found in caught.value.found


def test_a_callable_without_a_signature_is_a_function(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text("judge = max\n")
    rewards.reward_of(f"{file}:judge").close()
