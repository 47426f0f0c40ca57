"""The process of a reward function: a JSON object a line, in and out. Imports nothing of vox. Where
memory runs out, Linux ends it before the training.

    python -P function_process.py FILE.py FUNCTION

    out    {}, for a function of lists {"fields": ["truth"]}, or {"fault": "…"}
    in     {"rows": [{"…": …}], "answers": ["…"], "prompts": ["…"]}
    out    {"rewards": [1.0, null]}, or {"fault": "…", "traceback": "…"}
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, object]]
OWN = ("prompts", "completions")
"""What TRL gives to a function of lists, beside the fields of the rows."""
MISSING = (
    "completion_ids", "prompt_ids", "trainer_state", "environments", "log_extra", "log_metric"
)  # fmt: skip
"""What TRL gives, and vox does not have."""


class WrongResult(Exception):
    """A function returned what cannot be its answers' rewards."""


def main(file: str, name: str) -> int:
    with suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text("1000")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints is no answer
    sys.path.insert(0, str(Path(file).parent))  # as Python does for a script

    def tell(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        function = runpy.run_path(file).get(name)
    except BaseException as error:  # noqa: BLE001 (a file may raise anything)
        tell(fault=f"cannot be loaded: {type(error).__name__}: {error}")
        return 1
    if not callable(function):
        tell(fault="no function of that name in the file")
        return 1
    judge = Judge(function)
    if fault := judge.fault():
        tell(fault=fault)
        return 1
    tell(**({"fields": judge.required()} if judge.of_lists else {}))
    with judge.runner:
        for line in sys.stdin:
            try:
                tell(rewards=judge.rewards(**json.loads(line)))
            except WrongResult as error:
                tell(fault=str(error))
            except Exception as error:  # noqa: BLE001 (a function may raise anything)
                tell(fault=described(error, file), traceback=traceback.format_exc())
    return 0


class Judge:
    """A function `(row, answer) -> number`, or one of lists for TRL, with the parameter
    `completions`; either may be a coroutine."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._parameters: Mapping[str, inspect.Parameter] = {}
        with suppress(ValueError):  # of a function written in C
            self._parameters = inspect.signature(function).parameters
        self.of_lists = "completions" in self._parameters
        self.runner = asyncio.Runner()  # one loop, which clients and locks of the file belong to

    def fault(self) -> str:
        """Say why the function cannot be called, if so."""
        if not self._parameters:
            return ""
        signature = inspect.signature(self._function)
        try:
            if not self.of_lists:
                signature.bind({}, "")
            elif missing := [name for name in self.required() if name in MISSING]:
                return f"needs {missing[0]}, which vox does not have"
            else:
                given = [*self.required(), *(name for name in OWN if name in self._parameters)]
                signature.bind(**dict.fromkeys(given))
        except TypeError:
            return f"is a function {signature}"
        return ""

    def required(self) -> list[str]:
        """Return the fields of a row without which the function cannot be called."""
        anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = (it for it in self._parameters.values() if it.kind not in anything)
        return [it.name for it in named if it.default is it.empty and it.name not in OWN]

    def rewards(
        self, rows: Rows, answers: Sequence[str], prompts: Sequence[object]
    ) -> list[float | None]:
        if self.of_lists:
            return [self._number(each) for each in self._by_lists(rows, answers, prompts)]
        pairs = zip(rows, answers, strict=True)
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        if {"row", "answer"} <= {it.name for it in self._parameters.values() if it.kind is either}:
            return [self._number(self._called(row=row, answer=answer)) for row, answer in pairs]
        return [self._number(self._called(row, answer)) for row, answer in pairs]

    def _by_lists(self, rows: Rows, answers: Sequence[str], prompts: Sequence[object]) -> Any:
        """Call the function as TRL does for the answers of a step."""
        said = [
            [{"role": "assistant", "content": answer}] if isinstance(prompt, list) else answer
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        taken = {*self._parameters}
        if any(it.kind is it.VAR_KEYWORD for it in self._parameters.values()):
            taken |= {*columns, *OWN} - {"prompt", "completion"}
        given = {**columns, "prompts": prompts, "completions": said}
        found = self._called(**{name: it for name, it in given.items() if name in taken})
        if not hasattr(found, "__len__") or len(found) != len(answers):
            wanted = f"a list with a number for each of {len(answers)}"
            raise WrongResult(f"returned {found!r:.40}, expected {wanted}")
        return found

    def _called(self, *given: object, **named: object) -> Any:
        said = self._function(*given, **named)
        return self.runner.run(said) if inspect.iscoroutine(said) else said

    def _number(self, reward: Any) -> float | None:
        """Return NumPy's and torch's numbers as a float, and None for an answer that TRL's
        functions leave to others."""
        if reward is None and self.of_lists:
            return None
        if not hasattr(reward, "__float__"):
            raise WrongResult(f"returned {reward!r:.40}, which is no number")
        return float(reward)


def described(error: Exception, file: str) -> str:
    frames = [it for it in traceback.extract_tb(error.__traceback__) if it.filename != __file__]
    last = ([it for it in frames if it.filename == file] or frames)[-1:]
    at = "".join(f" ({it.filename}, line {it.lineno})" for it in last)
    return f"raised {type(error).__name__}: {error}{at}"


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
