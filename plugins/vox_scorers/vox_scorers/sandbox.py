"""Run a model's Python code against tests, apart from the host; or not at all.

A program runs in Linux namespaces of its own and under a filter of system calls (sandbox_child.py):
no network; a file system in memory, with the standard library to read and 16 MiB to write; no
other processes, programs, devices, or variables of the environment. Time is limited as a whole;
memory, CPU time, open files and file size for each process; and so is the number of processes. What
it can still learn is the version of the kernel, the time, and the number of CPUs and their load.

The tests are part of the same program. Ending it, or raising, does not pass them; an answer made to
deceive its tests, such as an object that equals every other, may.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from vox_core.api.host import Failed, run

_SHOWN = 1000
"""Characters of a traceback's end in the words of a score."""
_GRACE = 20.0
"""Seconds to start and to end the sandbox."""
_FENCED = re.compile(r"```([^\n`]*)\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_LANGUAGE = re.compile(r"(\{?\.?py(thon)?[\d.]*[,}]?|json)?", re.IGNORECASE)
_SELF_CHECK = """
import os, socket
assert os.getpid() == 1 and {*os.environ} <= {"LC_CTYPE"} and not os.listdir(os.curdir)
for call in (lambda: socket.socket(), lambda: os.listdir("/proc"), lambda: os.execv("/", ["/"])):
    try:
        call()
    except OSError:
        continue
    raise AssertionError("the sandbox is open")
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program.

    Args:
        seconds: from its start to its end.
        memory: bytes of address space of each process.
        processes: at once, threads included.
    """

    seconds: float = 10.0
    memory: int = 512 << 20
    processes: int = 8


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a program with its tests.

    Args:
        passed: all its tests ran, and none raised.
        why: else the end of its traceback, or the limit that it exceeded.
    """

    passed: bool
    why: str


class NoSandbox(RuntimeError):
    """Programs cannot be run apart from the host here; the text says why."""


def code_of(answer: str) -> str:
    """Return the first fenced block of an answer in Python, JSON or no language, or all of an
    answer without one."""
    for language, code in _FENCED.findall(answer):
        if _LANGUAGE.fullmatch(language.strip().partition(" ")[0]):
            return str(code)
    return answer


def run_python(answer: str, tests: str, limits: Limits, setup: str = "") -> Ended:
    """Run `setup`, `answer` and `tests`, in this order, in one module that is not `__main__`.

    Raises:
        NoSandbox: nothing ran.
    """
    with tempfile.TemporaryDirectory(prefix="vox-") as scratch:
        job = Path(scratch, "job.json")
        content = {"setup": setup, "answer": answer, "tests": tests, **asdict(limits)}
        job.write_text(json.dumps(content), encoding="utf-8")
        child = str(Path(__file__).with_name("sandbox_child.py"))
        command = [shutil.which("env") or "env", "-i", sys.executable, "-I", "-S", child, str(job)]
        try:
            ended = run(command, limits.seconds + _GRACE)
        except (Failed, OSError) as error:
            raise NoSandbox(str(error)) from error
    said = ended.stderr.decode(errors="replace").strip()
    if ended.returncode:
        raise NoSandbox(said.rpartition("\n")[2] or f"status {ended.returncode}")
    found = json.loads(ended.stdout)
    if found["passed"]:
        return Ended(True, "passed")
    return Ended(False, found["ended"] or said[-_SHOWN:] or "ended before its tests did")


@cache
def require_sandbox() -> None:
    """Try whether programs can be run apart from the host.

    Raises:
        NoSandbox: why not.
    """
    if sys.platform != "linux":
        raise NoSandbox(f"it needs Linux, and this is {sys.platform}")
    if not (ended := run_python("", _SELF_CHECK, Limits())).passed:
        raise NoSandbox(ended.why.rpartition("\n")[2])
