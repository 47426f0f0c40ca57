"""Rewards: programs that end before their tests, functions without a process left behind."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from vox_core.errors import ConfigError
from vox_objectives import rewards
from vox_testing.tiny import make_model

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


STATUS = r"""
import os, re
os._exit(int(re.findall(rb"\d+", open("/proc/self/cmdline", "rb").read())[-1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_program_finds_no_status_in_its_command_line(monkeypatch):
    monkeypatch.setattr(rewards.secrets, "randbelow", lambda _: 0)
    monkeypatch.setattr(rewards, "_PROGRAM", rewards._PROGRAM + "# 3")  # the number of the status
    assert rewards.python(TESTS, STATUS) == 1.0  # the attack works where the status is there
    monkeypatch.undo()
    assert rewards.python(TESTS, STATUS) == 0.0


def test_a_program_has_no_variables_of_the_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    tests = {"answer": "import os; assert 'HF_TOKEN' not in os.environ"}
    assert rewards.python(tests, "") == 1.0


def test_a_file_that_does_not_end_loading_is_told_where_such_code_belongs(tmp_path, monkeypatch):
    (file := tmp_path / "mine.py").write_text(
        "import time\ntime.sleep(600)\ndef f(row, answer): 0\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(rewards, "LOADING_SECONDS", 0.1)
        with pytest.raises(ConfigError, match="took more than") as caught:
            rewards.FunctionReward(file, "f")
    assert '`if __name__ == "__main__":`' in caught.value.remedy
    file.write_text("def g(row, answer): return 0\n")
    for path in (file, tmp_path / "none.py"):
        with pytest.raises(ConfigError, match="no usable reward function") as caught:
            rewards.FunctionReward(path, "f")
        assert "__main__" not in caught.value.remedy


@pytest.mark.parametrize("ends", [True, False])
def test_a_program_leaves_no_process(tmp_path, monkeypatch, ends):
    """Whether it ends by itself or is ended: its child holds a pipe as long as it lives."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def take_too_long(process, program=None, seconds=None):
        if program is None:
            return process.wait()
        process.stdin.write(program)
        process.stdin.close()
        assert select.select([reader], [], [], 60)[0]  # it has started
        raise subprocess.TimeoutExpired(process.args, seconds)

    if not ends:
        monkeypatch.setattr(subprocess.Popen, "communicate", take_too_long)
    program = f"""
import subprocess, time
with open({str(pipe)!r}, "w") as writer:
    subprocess.Popen(["sleep", "600"], stdout=writer)
    print("started", file=writer, flush=True)
time.sleep({0 if ends else 600})
"""
    assert rewards.python({"answer": ""}, program) == float(ends)
    os.set_blocking(reader, True)
    with os.fdopen(reader) as heard:
        assert heard.read() == "started\n"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        *(("10-5", "5"), (".5", "0.5"), ("so 3-3", "3"), ("1,2,3", "3"), ("\u22127", "-7")),
        *(("1,234.", "1234"), ("-2e3", "-2000"), ("none", "1"), ("x-1", "-1")),
    ],
)
def test_numeric_is_the_scorer_of_vox_eval(answer, right):
    scorers = pytest.importorskip("vox_eval.scorers")
    score = scorers.last_number(answer) == scorers.last_number(right)
    assert rewards.numeric({"answer": right}, answer) == float(score)


@pytest.mark.parametrize(
    "answer",
    [
        *("x = 1", "```py\nx = 1", "```Python 3\nx = 1\n```", "```{python}\nx = 1\n```"),
        "```bash\npip\n```\nThen:\n```python3\nx = 1\n```",
    ],
)
def test_the_program_of_an_answer_is_that_of_vox_eval(answer):
    sandbox = pytest.importorskip("vox_scorers.sandbox")
    assert rewards.code_of(answer).strip() == sandbox.code_of(answer).strip() == "x = 1"
    assert rewards.python({"answer": "assert x == 1"}, answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "wanted", "reward"),
    [
        *(
            ("1.0", "1", 1.0),
            ("[1e2]", "[100]", 1.0),
            ('{"b": 2, "a": 1}', '{"a": 1, "b": 2}', 1.0),
        ),
        *(("true", "1", 0.0), ("[0]", "[false]", 0.0), ("1e999", "1e999", 1.0)),
        ("9007199254740993", "9007199254740992", 0.0),
    ],
)
def test_json_compares_values_and_their_types(answer, wanted, reward):
    assert rewards.equal_json({"answer": wanted}, answer) == reward


TURNS = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
SAID = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]
PARTS = [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]


@pytest.mark.parametrize(
    "row",
    [
        *({"messages": TURNS}, {"turns": TURNS}, {"conversations": SAID}, {"messages": SAID}),
        *({"prompt": "Hi?", "completion": TURNS[1:]}, {"prompt": "Hi?", "response": "Yes."}),
        {"messages": [TURNS[0], {"role": "assistant", "content": PARTS}]},
        {"messages": TURNS, "answer": "Yes."},
    ],
)
def test_the_answer_of_a_row_is_found_in_every_form(row):
    assert rewards.expected(row) == "Yes."


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        *((7, "7"), (7.5, "7.5"), (False, "false"), ([1, "a"], '[1, "a"]'), (["é"], '["é"]')),
        *(
            ({"name": "Ann"}, '{"name": "Ann"}'),
            ([{"name": "Ann"}], '[{"name": "Ann"}]'),
            ([], "[]"),
        ),
    ],
)
def test_an_answer_that_is_no_text_is_its_json(answer, text):
    assert rewards.expected({"answer": answer, "completion": "other"}) == text


@pytest.mark.parametrize("answer", ["[" * 100_000, "no", "[Infinity]", ""])
def test_an_answer_that_is_no_json_gets_nothing(answer):
    assert rewards.equal_json({"answer": "{}"}, answer) == 0.0
    with pytest.raises(ValueError, match="the row's answer is no JSON"):
        rewards.equal_json({"answer": answer}, "{}")


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
        ("prompts, **kwargs", "is a function (prompts, **kwargs)"),
        ("answer", "is a function (answer)"),
        ("row, answer, *, scale", "is a function (row, answer, *, scale)"),
        ("completions, /", "is a function (completions, /)"),
        ("completions, completion_ids, **kw", "needs completion_ids, which vox does not have"),
    ],
)
def test_a_function_with_other_parameters_is_refused_at_once(tmp_path, parameters, found):
    file = tmp_path / "judge.py"
    file.write_text(f"def judge({parameters}):\n    return 1.0\n")
    with pytest.raises(ConfigError) as caught:
        rewards.reward_of(f"{file}:judge")
    assert caught.value.code == "VOX-C004"
    assert found in caught.value.found


@pytest.mark.parametrize(
    ("row", "called"),
    [
        (
            {"prompt": "Hi?", "truth": 4, "completion": "no"},
            {"prompts": ["Hi?"], "completions": ["four"], "truth": [4]},
        ),
        (
            {"prompt": TURNS[:1]},
            {
                "prompts": [TURNS[:1]],
                "completions": [[{"role": "assistant", "content": "four"}]],
            },
        ),
        (
            {"messages": TURNS},
            {
                "prompts": [TURNS[:1]],
                "completions": [[{"role": "assistant", "content": "four"}]],
                "messages": [TURNS],
            },
        ),
        (
            {"conversations": SAID},
            {
                "prompts": [SAID[:1]],
                "completions": [[{"role": "assistant", "content": "four"}]],
                "conversations": [SAID],
            },
        ),
        (
            {"instruction": "Add", "input": "3, 4"},
            {
                "prompts": ["Add\n\n3, 4"],
                "completions": ["four"],
                "instruction": ["Add"],
                "input": ["3, 4"],
            },
        ),
    ],
)
def test_a_function_of_lists_is_called_as_trl_does(tmp_path, row, called):
    file, log = tmp_path / "judge.py", tmp_path / "log.jsonl"
    file.write_text(
        "import json\n\n"
        "def log(given):\n"
        f"    with open({str(log)!r}, 'a') as file:\n"
        "        file.write(json.dumps(given) + chr(10))\n\n"
        "def with_all(completions, **kwargs):\n"
        "    log({'completions': completions, **kwargs})\n"
        "    return [0.5]\n\n"
        "def with_few(prompts, completions):\n"
        "    log({'prompts': prompts, 'completions': completions})\n"
        "    return (1,)\n"
    )
    found = []
    for name in ("with_all", "with_few"):
        judge = rewards.reward_of(f"{file}:{name}")
        found.append(judge.judge(row, "four"))
        judge.close()
    assert found == [0.5, 1.0]
    every, few = map(json.loads, log.read_text().splitlines())
    assert every == called
    assert few == {name: called[name] for name in ("prompts", "completions")}


def test_a_function_of_lists_sees_the_answers_together_and_another_one_by_one(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text(
        "def longest(prompts, completions, size, **others):\n"
        "    most = max(map(len, completions))\n"
        "    return [len(c) / most if n else None for c, n in zip(completions, size)]\n\n"
        "def level(row, answer):\n"
        "    return row['size']\n"
    )
    rows = [
        {"prompt": "Hi?", "size": 1},
        {"prompt": "Hi?", "size": None},
        {"prompt": "Ho?", "size": 2},
    ]
    together, apart = (rewards.reward_of(f"{file}:{name}") for name in ("longest", "level"))
    assert together.judge_all(rows, ["ab", "", "abcd"]) == [0.5, None, 1.0]
    judged = iter(apart.judge_all(rows, ["ab", "", "abcd"]))
    assert next(judged) == 1.0
    with pytest.raises(ValueError, match="returned None, which is no number"):
        next(judged)
    together.close()
    apart.close()


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("(completions, truth): return [1.0]", "missing 1 required positional argument: 'truth'"),
        (
            "(completions): return [1.0, 2.0]",
            "returned [1.0, 2.0], expected a list with a number",
        ),
        ("(completions): return ['1']", "returned '1', which is no number"),
        ("(completions): return 1.0", "returned 1.0, expected a list with a number"),
    ],
)
def test_a_function_of_lists_that_fails_is_said(tmp_path, code, fault):
    file = tmp_path / "judge.py"
    file.write_text(f"def judge{code}\n")
    judge = rewards.reward_of(f"{file}:judge")
    with pytest.raises(ValueError, match=re.escape(fault)) as caught:
        judge.judge({"prompt": "Hi?"}, "four")
    judge.close()
    assert "<string>" not in str(caught.value)


def test_a_name_without_a_file_is_refused():
    with pytest.raises(ConfigError, match="there is no such file"):
        rewards.reward_of("file")


@pytest.mark.parametrize("parameters", ["answer, row, scale=2", "row, answer, /, scale=2"])
def test_row_and_answer_are_given_by_their_names(tmp_path, parameters):
    file = tmp_path / "judge.py"
    file.write_text(f"def judge({parameters}):\n    return scale * len(answer) + row['n']\n")
    judge = rewards.reward_of(f"{file}:judge")
    assert judge.judge({"prompt": "Hi?", "n": 1}, "four") == 9.0
    judge.close()


def test_a_callable_without_a_signature_is_a_function(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text("judge = max\n")
    judge = rewards.reward_of(f"{file}:judge")
    with pytest.raises(ValueError, match="not supported between instances of 'str' and 'dict'"):
        judge.judge({"prompt": "Hi?"}, "four")
    judge.close()


@pytest.mark.parametrize(
    ("returned", "reward"),
    [("numpy.float32(0.5)", 0.5), ("numpy.bool_(True)", 1.0), ("True", 1.0), ("2", 2.0)],
)
def test_a_reward_may_be_any_number(tmp_path, returned, reward):
    file = tmp_path / "judge.py"
    file.write_text(f"import numpy\n\ndef judge(row, answer):\n    return {returned}\n")
    judge = rewards.reward_of(f"{file}:judge")
    assert judge.judge({}, "") == reward
    judge.close()


def test_a_function_of_lists_may_leave_an_answer_to_others_and_names_its_fields(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text(
        "def judge(prompts, completions, truth, *, unit, scale=1, **others):\n    return [None]\n"
    )
    judge = rewards.reward_of(f"{file}:judge")
    assert judge.fields == ["truth", "unit"]
    assert judge.judge({"prompt": "Hi?", "truth": 1, "unit": "m"}, "four") is None
    judge.close()


@pytest.mark.parametrize(
    "code",
    [
        "(row, answer):\n    async with GATE:\n        return await asyncio.sleep(0.001, 0.5)",
        "(completions):\n    async def one(_):\n        async with GATE:\n"
        "            return await asyncio.sleep(0.001, 0.5)\n"
        "    return await asyncio.gather(*map(one, completions))",
    ],
)
def test_coroutines_are_awaited_in_one_loop(tmp_path, code):
    file = tmp_path / "judge.py"
    file.write_text(f"import asyncio\nGATE = asyncio.Semaphore(1)\n\nasync def judge{code}\n")
    judge = rewards.reward_of(f"{file}:judge")
    row = {"prompt": "Hi?"}
    for _ in range(2):
        assert [*judge.judge_all([row, row], ["four", "more"])] == [0.5, 0.5]
    judge.close()


def test_the_guides_reward_model(tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    folder = make_model("llama", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = LlamaConfig.from_pretrained(folder, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    guide = (Path(__file__).resolve().parents[3] / "docs/guide/reinforcement.md").read_text("utf-8")
    code = next(c for c in re.findall(r"```python\n(.*?)```", guide, re.S) if "# judge.py" in c)
    (tmp_path / "judge.py").write_text(code.replace("me/reward-model", str(folder)))
    judge = rewards.reward_of(f"{tmp_path / 'judge.py'}:preferred")
    rows = [{"prompt": "Which?"}, {"prompt": "Who?"}]
    first, second = judge.judge_all(rows, ["This one.", "She."])
    assert first != second
    assert judge.judge(rows[1], "She.") == pytest.approx(
        second, abs=1e-5
    )  # float32, without padding
    judge.close()


def test_a_function_has_its_own_time_and_is_ended_before_the_training(tmp_path, monkeypatch):
    file = tmp_path / "judge.py"
    file.write_text(
        "import time\nfrom pathlib import Path\n\n"
        "def judge(row, answer):\n    time.sleep(row['s'])\n"
        "    return int(Path('/proc/self/oom_score_adj').read_text())\n"
    )
    judge = rewards.reward_of(f"{file}:judge")
    monkeypatch.setattr(rewards, "SECONDS", 0.0)
    if sys.platform == "linux":
        assert judge.judge({"s": 0}, "") == 1000
    monkeypatch.setattr(rewards, "FUNCTION_SECONDS", 0.1)
    with pytest.raises(ValueError, match=r"took more than 0.1 s"):
        judge.judge({"s": 600}, "")
    judge.close()


@pytest.mark.parametrize("returned", ["None", "'1'", "[1.0]", "1j"])
def test_a_reward_that_is_no_number_is_refused(tmp_path, returned):
    file = tmp_path / "judge.py"
    file.write_text(f"def judge(row, answer):\n    return {returned}\n")
    judge = rewards.reward_of(f"{file}:judge")
    with pytest.raises(ValueError, match="which is no number"):
        judge.judge({}, "")
    judge.close()


def test_a_function_imports_the_files_beside_its_own_and_no_others(tmp_path, monkeypatch):
    (tmp_path / "beside_judge.py").write_text("def length(text):\n    return len(text)\n")
    file = tmp_path / "judge.py"
    file.write_text(
        "from beside_judge import length\n\ndef judge(row, answer):\n    return length(answer)\n"
    )
    judge = rewards.reward_of(f"{file}:judge")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/resource.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path / "here")
    assert judge.judge({}, "four") == 4.0
    judge.close()
