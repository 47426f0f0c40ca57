"""Run a program in this process group, and end the group when standard input closes.

    python minder.py COMMAND ARGUMENT...

`keeper.py` holds the other end of standard input: however vox ends, `kill -9` included, the kernel
closes it, and neither the program nor a process that it started stays behind. Standard library
only, because it runs outside of vox's environment (`python -I`).
"""

import os
import signal
import subprocess
import sys
import threading

GRACE = 10.0
"""Seconds from SIGTERM to SIGKILL."""


def main() -> None:
    """Run the command; the last line on standard output is its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # a handler is not inherited, SIG_IGN would be
    try:
        program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    except OSError as error:
        print(error, flush=True)  # noqa: T201
        return
    threading.Thread(target=_end_with_input, args=[program], daemon=True).start()
    print(f"exit status {program.wait()}", flush=True)  # noqa: T201
    os.killpg(0, signal.SIGKILL)


def _end_with_input(program: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    try:
        program.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
