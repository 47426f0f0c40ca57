"""Hostile answers: each is contained, and the machine is as it was."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vox_scorers import sandbox
from vox_scorers.sandbox import Limits, NoSandbox, code_of, require_sandbox, run_python

try:
    require_sandbox()
except NoSandbox as error:
    pytestmark = pytest.mark.skip(reason=f"no sandbox here: {error}")

LIMITS = Limits(seconds=2, memory=256 << 20, processes=4)

PASSING = {
    "plain": "def f(x):\n    return x + 1",
    "standard library": "import sqlite3, hashlib, decimal, re, json, zlib\nf = (1).__add__",
    "its own files": "open('a', 'w').write('1')\nf = lambda x: int(open('a').read()) + x",
    "threads": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool:
            one = list(pool.map(int, '11'))[0]
        f = one.__add__""",
    "asyncio": "import asyncio\nasync def g(): return 1\nf = asyncio.run(g()).__add__",
    "a main part that is not run": "f = (1).__add__\nif __name__ == '__main__':\n    f = input()",
    "what it prints": "print('x' * 10_000_000)\nf = (1).__add__",
}


@pytest.mark.parametrize("name", PASSING)
def test_programs_pass_their_tests(name) -> None:
    ended = run_python(textwrap.dedent(PASSING[name]), "assert f(1) == 2", LIMITS)
    assert ended.passed, ended.why


# Each must end in an error that names what contained it; `assert not` would be a success.
CONTAINED = {
    "fork bomb": (
        "import os\nwhile True: os.fork()",
        "Resource temporarily unavailable|SIGKILL|took",
    ),
    "threads without end": (
        "import threading as t, time\nwhile True: t.Thread(target=time.sleep, args=[9]).start()",
        "can't start new thread",
    ),
    "endless loop": ("while True: pass", "took more than 2 s"),
    "endless sleep": ("import time\ntime.sleep(1000)", "took more than 2 s"),
    "signals ignored": (
        """
        import signal
        for n in range(1, 65):
            try: signal.signal(n, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass""",
        "took more than 2 s",
    ),
    "memory": ("x = []\nwhile True: x.append(bytearray(10_000_000))", "MemoryError"),
    "memory of files": (
        "import os\nwhile True:\n    for n in range(9): open(str(n), 'ab').write(bytes(1 << 20))",
        "No space left|File too large",
    ),
    "memory without a name": ("import os\nos.memfd_create('x')", "not permitted"),
    "shared memory": (
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.shmget(0, 1 << 30, 0o1600) == -1: raise OSError(ctypes.get_errno(), 'shmget')""",
        "shmget",
    ),
    "open files": ("import os\nwhile True: os.dup(0)", "Too many open files"),
    "huge output": ("import os\nwhile True: os.write(1, b'x' * 1_000_000)", "took more than 2 s"),
    "network": (
        "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
        "Address family not supported|not permitted",
    ),
    "name resolution": ("import socket\nsocket.gethostbyname('localhost')", "gaierror|Error"),
    "socket to the hypervisor": (
        "import socket\nsocket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
        "Address family not supported",
    ),
    "kill the parent": (
        "import os\nos.kill(os.getppid(), 9)\nos.kill(PARENT, 9)",
        "No such process|SIGKILL|ended",
    ),
    "kill everybody": ("import os\nos.kill(-1, 9)\nos.killpg(0, 9)\nos.kill(PARENT, 9)", ""),
    "read a host file": ("open('/etc/passwd').read()", "No such file"),
    "read the tests' folder": ("import os\nos.listdir(HERE)", "No such file"),
    "list installed packages": ("import numpy", "No module named 'numpy'"),
    "list what packages there are": (
        """
        import os
        library = os.path.dirname(os.__file__)
        found = [f'{library}/{name}-packages' for name in ('site', 'dist')]
        raise OSError([os.listdir(each) for each in found if os.path.isdir(each)])""",
        r"OSError: \[(\[\])?(, \[\])?\]",
    ),
    "proc snooping": ("open('/proc/1/environ').read()", "No such file"),
    "mount proc": (
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        os.mkdir('p')
        if libc.mount(b'proc', b'p', b'proc', 0, None): raise OSError(1, 'mount')""",
        "mount",
    ),
    "another namespace": (
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x10000000): raise OSError(ctypes.get_errno(), 'unshare')""",
        "unshare",
    ),
    "another namespace by clone": (
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        import os
        number = 56 if os.uname().machine == 'x86_64' else 220
        if libc.syscall(number, 0x10000011, 0, 0, 0, 0) == -1: raise OSError(1, 'clone')""",
        "clone",
    ),
    "trace a process": (
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(16, PARENT, 0, 0) == -1: raise OSError(ctypes.get_errno(), 'ptrace')""",
        "ptrace",
    ),
    "read the memory of another": (
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.process_vm_readv(PARENT, None, 0, None, 0, 0) == -1: raise OSError(1, 'readv')""",
        "readv",
    ),
    "start a program": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'id'])", "not permitted"),
    "symlink out": ("import os\nos.symlink(HERE, 'x')\nopen('x/judge.py').read()", "No such file"),
    "climb out": ("open('../' * 40 + 'etc/hostname').read()", "No such file"),
    "chroot out": ("import os\nos.mkdir('d')\nos.chroot('d')", "not permitted"),
    "change the standard library": (
        "import os\nopen(os.__file__, 'a').write('x')",
        "Read-only|Permission denied",
    ),
    "devices": ("import os\nos.mknod('d', 0o60666, os.makedev(254, 0))", "not permitted"),
    "environment": ("import os\nraise OSError(os.environ['SECRET'])", "KeyError"),
    "files left open": (
        """
        import os
        for n in range(64):
            try: os.fstat(n)
            except OSError: continue
            open_ = n
        raise OSError(f"the last is {open_}")""",
        "the last is [1-9]?[0-9]$",
    ),
    "outlive the parent": (
        "import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0): raise OSError('prctl')",
        "prctl",
    ),
    "end before the tests": ("import os\nos._exit(0)", "ended before its tests"),
    "leave before the tests": ("import sys\nsys.exit(0)", "SystemExit"),
    "guess the token": (
        """
        import os
        for n in range(3, 9):
            try: os.write(n, b'R' + bytes(16))
            except OSError: pass
        os._exit(0)""",
        "ended",
    ),
    "become a daemon": (
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: time.sleep(1000)
            os._exit(0)
        os._exit(0)""",
        "ended before",
    ),
    "raise the limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (99, 99))",
        "not allowed|not permitted|exceeds",
    ),
    "crash": ("import ctypes\nctypes.string_at(0)", "SIGSEGV|SIGKILL|ended"),
    "deep": ("(" * 100_000, "SyntaxError"),
    "a megabyte": ("x = '" + "a" * 1_000_000 + "'\nraise OSError(len(x))", "1000000"),
}  # fmt: skip


@pytest.fixture(scope="module")
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("name", CONTAINED)
def test_hostile_programs_are_contained(name, listening, monkeypatch) -> None:
    code, expected = CONTAINED[name]
    monkeypatch.setenv("SECRET", "it is readable")
    before = {*Path(__file__).parent.iterdir()}
    facts = f"PORT, PARENT = {listening}, {os.getpid()}\nHERE = {str(Path(__file__).parent)!r}"
    ended = run_python(textwrap.dedent(code), "", LIMITS, setup=facts)
    assert not ended.passed
    if expected:
        assert re.search(expected, ended.why), ended.why
    assert "readable" not in ended.why
    assert {*Path(__file__).parent.iterdir()} == before


def test_a_program_ends_with_the_one_that_watches_it(tmp_path) -> None:
    """Its end of the pipe is closed once the parent is killed, and long before its time is over."""
    job = tmp_path / "job.json"
    said = "import os, time\nos.write(2, b'1')\ntime.sleep(1000)"
    limits = {"seconds": 500.0, "memory": 1 << 28, "processes": 2}
    job.write_text(json.dumps({"setup": "", "answer": said, "tests": "", **limits}))
    child = Path(sandbox.__file__).with_name("sandbox_child.py")
    command = [sys.executable, "-I", "-S", str(child), str(job)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr.read(1) == b"1"
        process.kill()
        assert process.stderr.read() == b""


def test_nothing_runs_without_a_sandbox(monkeypatch, tmp_path) -> None:
    """Where a namespace cannot be entered, for one."""
    broken = (Path(sandbox.__file__).with_name("sandbox_child.py")).read_text()
    broken = broken.replace('call("unshare", NAMESPACES)', 'raise OSError("no namespaces here")')
    (tmp_path / "sandbox_child.py").write_text(broken)
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "sandbox.py"))
    with pytest.raises(NoSandbox, match="no namespaces here"):
        run_python("open('/tmp/it-ran', 'w')", "", LIMITS)


def test_code_is_the_first_fenced_block_or_everything() -> None:
    assert code_of("Sure:\n```python\nx = '```'\n```\nand\n```\ny\n```") == "x = '```'\n"
    assert code_of("```py\nx = 1") == "x = 1"
    assert code_of("x = 1") == "x = 1"
    names = ("py3", "python3", "Python 3", "python3.12", 'python title="a.py"', "JSON")
    of_notebooks = ("{python}", "{python, echo=FALSE}", "{.python .numberLines}")
    for language in (*names, *of_notebooks):
        assert code_of(f"```{language}\nx = 1\n```") == "x = 1\n", language
    for language in ("pytb", "text", "sh python", "{r}"):
        assert code_of(f"```{language}\nx\n```\n```py\ny\n```") == "y\n", language
    assert code_of("```bash\npip\n```\nThen:\n```Python\nx = 1\n```") == "x = 1\n"
