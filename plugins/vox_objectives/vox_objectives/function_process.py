"""The process of a reward function: a JSON object a line, in and out. Imports nothing of vox, since
its memory is limited.

    python -P function_process.py FILE.py FUNCTION BYTES

    out    {}, for a function of lists {"fields": ["truth"]}, or {"fault": "…"}
    in     {"rows": [{"…": …}], "answers": ["…"], "prompts": ["…"]}
    out    {"rewards": [1.0, null]}, or {"fault": "…", "traceback": "…"}
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

OWN = ("prompts", "completions")
"""Arguments of a function of lists that are no fields of the rows."""


class WrongResult(Exception):
    """A function returned what cannot be its answers' rewards."""


def main(file: str, name: str, memory: str) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints is no answer
    sys.path.insert(0, str(Path(file).parent))  # as Python does for a script

    def tell(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        function: Any = runpy.run_path(file).get(name)
    except BaseException as error:  # noqa: BLE001 (a file may raise anything)
        tell(fault=f"cannot be loaded: {type(error).__name__}: {error}")
        return 1
    parameters = parameters_of(function)
    of_lists = "completions" in parameters
    if fault := fault_of(function, of_lists):
        tell(fault=fault)
        return 1
    tell(**({"fields": required(parameters)} if of_lists else {}))
    for line in sys.stdin:
        question = json.loads(line)
        try:
            call = by_lists if of_lists else one_by_one
            found = awaited(call(function, parameters, **question))
            tell(rewards=[number(each, of_lists) for each in found])
        except WrongResult as error:
            tell(fault=str(error))
        except Exception as error:  # noqa: BLE001 (a function may raise anything)
            tell(fault=described(error, file), traceback=traceback.format_exc())
    return 0


def parameters_of(function: object) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters if callable(function) else {}
    except ValueError:  # of a function written in C
        return {}


def fault_of(function: object, of_lists: bool) -> str:
    if not callable(function):
        return "no function of that name in the file"
    try:
        signature = inspect.signature(function)
        if not of_lists:
            signature.bind({}, "")
    except ValueError:
        return ""
    except TypeError:
        return f"is a function {signature}"
    return ""


def required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the fields of a row without which the function cannot be called."""
    anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [n for n, it in parameters.items() if n not in OWN and it.kind not in anything]
    return [name for name in needed if parameters[name].default is inspect.Parameter.empty]


def one_by_one(
    function: Callable[..., Any],
    _parameters: object,
    rows: Sequence[Mapping[str, object]],
    answers: Sequence[str],
    prompts: object,
) -> list[object]:
    return [awaited(function(row, answer)) for row, answer in zip(rows, answers, strict=True)]


def by_lists(
    function: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    rows: Sequence[Mapping[str, object]],
    answers: Sequence[str],
    prompts: Sequence[object],
) -> Any:
    """Call the function as TRL does for the answers of a step."""
    said = [
        [{"role": "assistant", "content": answer}] if isinstance(prompt, list) else answer
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    given = {**columns, "prompts": prompts, "completions": said}
    taken = {*parameters}
    if any(it.kind is it.VAR_KEYWORD for it in parameters.values()):
        taken = {*given} - {"prompt", "completion"}
    found = awaited(function(**{name: it for name, it in given.items() if name in taken}))
    if not hasattr(found, "__len__") or len(found) != len(answers):
        wanted = f"a list with a number for each of {len(answers)}"
        raise WrongResult(f"returned {found!r:.40}, expected {wanted}")
    return found


def awaited(said: Any) -> Any:
    return asyncio.run(said) if inspect.iscoroutine(said) else said


def number(reward: Any, of_lists: bool) -> float | None:
    """Return NumPy's and torch's numbers as a float, and None for an answer that TRL's functions
    leave to others."""
    if reward is None and of_lists:
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
