"""Run an answer and its tests without the host: the program that `sandbox.run_python` starts.

    python -I -S sandbox_child.py JOB.json

It prints `{"passed": …, "ended": …}` and exits with 0, or exits with another status if the sandbox
cannot be built; then nothing of the answer ran. In order: import what the standard library has in
C, enter new namespaces, make a file system with the standard library alone, set limits, give up
all capabilities, fork; the child installs a filter of system calls and runs the answer as process 1
of its namespace, so that all its descendants end with it.

This file needs the standard library alone, and Linux. It imports nothing of vox, whose files the
answer would see.
"""

import ctypes
import importlib
import json
import linecache
import os
import resource
import secrets
import select
import signal
import socket
import struct
import sys
import sysconfig
import traceback
import types
from pathlib import Path
from typing import Any

NOBODY = 65534
"""User on the host if this one is root, whose processes have no limit."""
USER = 1000
"""The same user within."""
# User, mount, cgroup, UTS, IPC, PID and network namespaces (linux/sched.h).
NAMESPACES = 0x7E020000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT = 1, 2, 4, 8, 32
BIND, REC, PRIVATE = 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2
ROOT = "/tmp"
"""Mount point of the new root, in a mount namespace of its own."""
HOME = "/home"
FILES = 16 << 20
"""Bytes of the file system, and of each file."""
NOT_LOADED = "_test", "_ctypes_test", "xx", "_tkinter", "_curses", "nis", "ossaudio", "spwd", "read"

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
# linux/audit.h and the kernel's tables of system calls.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {  # name: numbers on x86_64 and aarch64
    "add_key": (248, 217), "bpf": (321, 280), "execve": (59, 221), "execveat": (322, 281),
    "io_uring_setup": (425, 425), "keyctl": (250, 219), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "mount": (165, 40), "mq_open": (240, 180), "msgget": (68, 186),
    "perf_event_open": (298, 241), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "ptrace": (101, 117), "request_key": (249, 218), "semget": (64, 190), "setns": (308, 268),
    "shmget": (29, 194), "unshare": (272, 97), "userfaultfd": (323, 282),
}  # fmt: skip
CLONE, CLONE3, SOCKET, PRCTL, PIVOT_ROOT = (56, 220), (435, 435), (41, 198), (157, 167), (155, 41)

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """Call a function of libc that gives -1 for a failure."""
    given = [each.encode() if isinstance(each, str) else each for each in arguments]
    if getattr(libc, name)(*given) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def load_extensions() -> None:
    """Import the modules in C: their libraries do not exist within."""
    folder = Path(sysconfig.get_path("platstdlib"), "lib-dynload")
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not file.name.startswith(NOT_LOADED):
            try:
                importlib.import_module(file.name.partition(".")[0])
            except ImportError:  # a library that is not installed
                continue


def enter() -> None:
    """Enter new namespaces, with the working folder as it was."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
    user, group = os.geteuid(), os.getegid()
    call("unshare", NAMESPACES)
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{USER} {user} 1"),
        ("gid_map", f"{USER} {group} 1"),
    ):
        Path("/proc/self", file).write_text(text)
    socket.sethostname("sandbox")


def make_root(library: str, machine: int) -> None:
    """Make a file system with the working folder as `library`, and nothing else of the host's."""
    call("mount", "none", "/", None, REC | PRIVATE, None)
    options = f"size={FILES},nr_inodes=1024,mode=755"
    call("mount", "none", ROOT, "tmpfs", NOSUID | NODEV | NOEXEC, options)
    inside = ROOT + library
    Path(inside).mkdir(parents=True)
    Path(ROOT + HOME).mkdir()
    call("mount", ".", inside, None, BIND | REC, None)
    kept = os.statvfs(inside).f_flag & (NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME)
    call("mount", None, inside, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV | kept, None)
    for packages in ("site-packages", "dist-packages"):
        if (hidden := Path(inside, packages)).is_dir():
            call("mount", "none", str(hidden), "tmpfs", RDONLY | NOSUID | NODEV | NOEXEC, "size=4k")
    os.chdir(ROOT)
    call("syscall", PIVOT_ROOT[machine], b".", b".")
    call("umount2", ".", MNT_DETACH)
    os.chdir(HOME)
    sys.path[:] = [library]
    sys.path_importer_cache.clear()


def limit(job: dict[str, Any]) -> None:
    """Set the limits of each process, and give up all capabilities."""
    for name, most in {
        "AS": job["memory"],
        "CPU": int(job["seconds"]) + 1,
        "FSIZE": FILES,
        "NOFILE": 64,
        "NPROC": job["processes"] + 1,  # this one, too
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        both = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (both, both))
    version_3 = struct.pack("II", 0x20080522, 0)
    call("capset", version_3, bytes(24))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def refuse_calls(machine: int, architecture: int) -> None:
    """Install a filter of system calls that neither namespaces nor limits contain (seccomp(2)).

    Memory without a limit of its own, sockets other than Unix ones (those of virtual machines know
    no namespaces), further namespaces, programs, debuggers, and a child that survives its parent.
    """
    denied, allowed = ERRNO | EPERM, ALLOW
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    # Calls of x32, on x86_64.
    code += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    for numbers in CALLS.values():
        code += [(EQUAL, 0, 1, numbers[machine]), (RETURN, 0, 0, denied)]
    # Its flags are out of a filter's reach; libc takes clone instead.
    code += [(EQUAL, 0, 1, CLONE3[machine]), (RETURN, 0, 0, ERRNO | ENOSYS)]
    for numbers, test, value, then, otherwise in (
        (CLONE, ANY_BIT, NAMESPACES, denied, allowed),
        (SOCKET, EQUAL, socket.AF_UNIX, allowed, ERRNO | EAFNOSUPPORT),
        (PRCTL, EQUAL, PR_SET_PDEATHSIG, denied, allowed),
    ):
        code += [(EQUAL, 0, 4, numbers[machine]), (LOAD, 0, 0, 16), (test, 0, 1, value)]
        code += [(RETURN, 0, 0, then), (RETURN, 0, 0, otherwise)]
    code.append((RETURN, 0, 0, allowed))
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters))
    call("prctl", PR_SET_SECCOMP, 2, program, 0, 0)


def run(name: str, source: str, module: types.ModuleType) -> None:
    """Run source code, with its lines for tracebacks."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), vars(module))


def run_answer(job: dict[str, Any], told: int, token: bytes) -> None:
    """Run the answer and its tests; tell `token` if they end without an exception."""
    module = types.ModuleType("answer")
    sys.modules.setdefault("answer", module)
    try:
        for name in ("setup", "answer", "tests"):
            run(f"{name}.py", job[name], module)
    except SystemExit:
        sys.stderr.write("SystemExit: the program ended before its tests did\n")
    except BaseException as error:  # noqa: BLE001 - whatever an answer raises
        # Without the frames of this file.
        own = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, own and own.tb_next)
    else:
        os.write(told, token)


def child(
    job: dict[str, Any], told: int, alive: int, token: bytes, machine: int, architecture: int
) -> None:
    """Be process 1 of the namespace: contain the answer for good, and run it."""
    os.setsid()  # its signals to "all of my group" stay within
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([alive], [], [], 0)[0]:  # the parent ended before it could take this one along
        return
    os.dup2(2, 1)
    os.closerange(3, told)
    os.closerange(told + 1, 64)
    refuse_calls(machine, architecture)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    os.write(told, b"R")
    run_answer(job, told, token)
    sys.stderr.flush()


def watch(pid: int, heard: int, seconds: float, token: bytes) -> dict[str, object]:
    """Wait for process 1, no longer than `seconds`, and return how it ended."""
    in_time = signal.sigtimedwait([signal.SIGCHLD], seconds)
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = os.read(heard, 4096) if select.select([heard], [], [], 0)[0] else b""
    if not said.startswith(b"R"):
        raise OSError("the filter of system calls cannot be installed")
    if in_time is None:
        return {"passed": False, "ended": f"took more than {seconds:g} s"}
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else ""
    return {"passed": said == b"R" + token, "ended": ended}


def main(path: str) -> None:
    """Run the job in a file."""
    job = json.loads(Path(path).read_text("utf-8"))
    name = os.uname().machine
    architecture, machine = ARCHITECTURES[name], [*ARCHITECTURES].index(name)
    load_extensions()
    os.chdir(library := sysconfig.get_path("stdlib"))
    enter()
    make_root(library, machine)
    limit(job)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    (heard, told), (alive, kept), token = os.pipe(), os.pipe(), secrets.token_bytes(16)
    if (pid := os.fork()) == 0:
        try:
            os.close(kept)
            child(job, told, alive, token, machine, architecture)
        finally:
            os._exit(0)
    os.close(told)
    sys.stdout.write(json.dumps(watch(pid, heard, job["seconds"], token)))


if __name__ == "__main__":
    main(sys.argv[1])
