"""Rewards of rollouts: an answer against the one of its row, or a function of one's own.

    exact      the answer is the row's, without spaces around it
    regex      the row's answer, a regular expression, is found in the answer
    numeric    the last number of the answer is the last one of the row's
    json       the answer is JSON, and equal to the row's
    python     the answer, a program, and then the row's answer, its tests, run to their end
    gym        what reasoning-gym says of its own task

Each gives 1 or 0, `gym` what lies between. Programs and functions of one's own run in a process of
their own, which is ended, with the processes of its group, when it takes too long or too much
memory. A program has no variables of the environment. That is no sandbox: it has the user's files
and network, can leave its group, and can read the status that passes in its own process.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vox_core.api.rows import answer_text
from vox_core.contract import Reward
from vox_core.errors import ConfigError
from vox_objectives.rows import CHATS, asked, is_answer

SECONDS = 10.0
"""For a program."""
MEMORY = 2 << 30
"""Bytes of address space of a program."""
LOADING_SECONDS, FUNCTION_SECONDS = 120.0, 60.0
"""For a file, which may load a model; and for one answer, which it may ask a server about. A
function of lists has as much for each of its answers."""
ANSWERS = ("answer", "completion", "response", "output")
"""Fields that hold the row's answer."""

_PROCESS = str(Path(__file__).with_name("function_process.py"))
Row = Mapping[str, object]
# As the scorers `numeric`, `syntax` and `python` of `vox eval`: a test compares them.
_NUMBER = re.compile(
    r"(?:(?<!\w)[-+\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
)
_FENCED = re.compile(r"```([^\n`]*)\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(r"(\{?\.?py(thon)?[\d.]*[,}]?)?", re.IGNORECASE)


def reward_of(name: str) -> Reward:
    """Return a reward by name, or that of `FILE.py:FUNCTION`.

    Raises:
        ConfigError: C004, there is no such function.
    """
    if name not in _REWARDS:
        file, _, function = name.rpartition(":")
        return FunctionReward(Path(file), function)
    return NamedReward(_REWARDS[name])


class NamedReward(Reward):
    """A reward of this module."""

    def __init__(self, function: Callable[[Row, str], float]) -> None:
        self._function = function
        self.reads_answer = function is not gym

    def judge(self, row: Row, answer: str) -> float:
        return self._function(row, answer)


def expected(row: Row) -> str:
    """Return the row's answer: one of `ANSWERS`, as `answer_text` has it, or its last message if
    the assistant says it.

    Raises:
        ValueError: there is none.
    """
    for name in ANSWERS:
        if (text := answer_text(row.get(name))) is not None:
            return text
    for turns in (row.get(name) for name in (*CHATS, "completion")):
        if isinstance(turns, list) and turns and is_answer(turns[-1]):
            said = turns[-1].get("content", turns[-1].get("value"))
            parts = said if isinstance(said, list) else [{"text": said or ""}]
            return "".join(str(part["text"]) for part in parts)
    raise ValueError(f"the row has no answer; expected one of the fields {', '.join(ANSWERS)}")


def exact(row: Row, answer: str) -> float:
    """Return 1 if the answers are equal, without spaces around them."""
    return float(answer.strip() == expected(row).strip())


def regex(row: Row, answer: str) -> float:
    """Return 1 if the row's pattern is found in the answer."""
    try:
        return float(re.search(expected(row), answer) is not None)
    except re.error as error:
        raise ValueError(f"the row's answer is no regular expression: {error}") from error


def numeric(row: Row, answer: str) -> float:
    """Return 1 if the last numbers of both are equal."""
    wanted = _last_number(expected(row))
    if wanted is None:
        raise ValueError("the row's answer has no number")
    return float(_last_number(answer) == wanted)


def equal_json(row: Row, answer: str) -> float:
    """Return 1 if both are the same JSON value."""
    try:
        wanted = _parsed(expected(row))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the row's answer is no JSON: {error}") from error
    try:
        return float(_parsed(answer) == wanted)
    except (ValueError, RecursionError):
        return 0.0


def python(row: Row, answer: str) -> float:
    """Return 1 if the program and then the row's tests run to their end, within the limits.

    The process ends with a random status then, so that an answer which ends it before its tests
    gets nothing.
    """
    program = f"{code_of(answer)}\n\n{expected(row)}\n"
    status = 3 + secrets.randbelow(250)
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _LIMITED + _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,  # Ctrl-C is for vox, which finishes the step
    )
    try:
        process.communicate(json.dumps([program, status]).encode(), SECONDS)
    except subprocess.TimeoutExpired:
        return 0.0
    finally:
        _end(process)
    return float(process.returncode == status)


def gym(row: Row, answer: str) -> float:
    """Return reasoning-gym's score of an answer to its own task."""
    from vox_objectives.gym import score

    return score(row, answer)


class FunctionReward(Reward):
    """A function of a file, in a process of its own: `(row, answer) -> number`, or a function of
    lists for TRL, with the parameter `completions`, which is called for all answers of a step.

    Raises:
        ConfigError: C004, the file or the function is missing, the file cannot be run, or the
            function has other parameters.
    """

    reads_answer = False

    def __init__(self, file: Path, function: str) -> None:
        self._file, self._function = file.absolute(), function
        self._process: subprocess.Popen[str] | None = None
        if not file.is_file():
            raise _no_function(file, function, "there is no such file")
        fault = self._start()
        silent = self._process is None
        self.close()  # until there is something to judge
        if fault:
            raise _no_function(file, function, fault, _GUARD * silent)

    def judge(self, row: Row, answer: str) -> float | None:
        return self._rewards([row], [answer])[0]

    def judge_all(self, rows: Sequence[Row], answers: Sequence[str]) -> Iterable[float | None]:
        together = self._rewards if self._of_lists else super().judge_all
        return together(rows, answers)

    def _rewards(self, rows: Sequence[Row], answers: Sequence[str]) -> list[float | None]:
        if self._process is None and (fault := self._start()):
            raise ValueError(fault)
        prompts = [*map(asked, rows)] if self._of_lists else []
        question = {"rows": [*map(dict, rows)], "answers": answers, "prompts": prompts}
        said = self._ask(question, FUNCTION_SECONDS * len(answers))
        if "fault" in said:
            cause = RuntimeError(said["traceback"]) if "traceback" in said else None
            raise ValueError(said["fault"]) from cause
        rewards: list[float | None] = said["rewards"]
        return rewards

    def close(self) -> None:
        if process := self._process:
            self._process = None
            _end(process)

    def _start(self) -> str:
        """Start the process and return its fault; empty if it has none."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", _PROCESS, str(self._file), self._function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for vox, which finishes the step
        )
        said = self._answer(LOADING_SECONDS)
        self._of_lists, self.fields = "fields" in said, said.get("fields", ())
        return str(said.get("fault", ""))

    def _ask(self, question: Mapping[str, object], seconds: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            self.close()
            return {"fault": "ended its process"}
        return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(seconds)
        line = self._process.stdout.readline() if ready else ""
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.close()
        return {"fault": "ended its process" if ready else f"took more than {seconds:g} s"}


_LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))\n"
_PROGRAM = """
import json, os, sys

def main(program, status):
    exec(compile(program, "<answer>", "exec"), {"__name__": "__main__"})
    os._exit(status)

main(*json.load(sys.stdin))
"""


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def code_of(answer: str) -> str:
    """Return the first fenced block in Python or in no language, or all of an answer without."""
    for language, code in _FENCED.findall(answer):
        if _PYTHON.fullmatch(language.strip().partition(" ")[0]):
            return str(code)
    return answer


def _parsed(text: str) -> str:
    """Return the JSON value as a text of its own: 1 is 1.0, and not true."""
    value = json.loads(text, parse_constant=_no_constant, parse_float=_plain)
    return json.dumps(value, sort_keys=True)


def _plain(number: str) -> float:
    found = float(number)
    return int(found) if found.is_integer() else found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and those of its group."""
    with suppress(ProcessLookupError, PermissionError):  # they are gone
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


_GUARD = '; code that trains belongs under `if __name__ == "__main__":`'


def _no_function(file: Path, function: str, found: str, more: str = "") -> ConfigError:
    return ConfigError(
        "C004",
        f"there is no usable reward function {function!r}",
        where=f"--reward {file}:{function}",
        found=found,
        expected="a function (row, answer) -> number, or (completions, ...) -> numbers, as for TRL",
        remedy=f"correct the path, the name or the parameters of the function{more}",
    )


_REWARDS: dict[str, Callable[[Row, str], float]] = {
    "exact": exact,
    "regex": regex,
    "numeric": numeric,
    "json": equal_json,
    "python": python,
    "gym": gym,
}
