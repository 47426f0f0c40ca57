"""A made-up run that is killed at every single call to the disk, and gone on with each time.

    python tests/run/killed.py FOLDER           kill it in this process, by itself (no strace)
    python tests/run/killed.py FOLDER --once    one start of the run, for strace to kill

Prints a JSON object; `broken` lists what did not hold. A start of the run clears what is left over,
goes on from the newest checkpoint, and writes one for each step through the writer thread. What it
announces, it writes to standard output, one step a line.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.run.faulty import RUN, Counted, Killing, leftovers, made_up, same, saving
from vox_core import files
from vox_core.contract import CheckpointWritten
from vox_core.errors import PlanError
from vox_core.run import checkpoint
from vox_core.run.checkpoint import CheckpointWriter, Origin

LAST = 3


def start(parent: Path, announce: int) -> None:
    """One start of the run, to its end or to its death."""
    files.remove_leftovers(parent)
    try:
        state, _ = checkpoint.load_newest(parent)
        assert same(state, made_up(state.step)), "resumed in part"
        first = state.step + 1
    except PlanError:
        first = 1

    def emit(event: object) -> None:
        assert isinstance(event, CheckpointWritten), event
        os.write(announce, f"{event.step}\n".encode())

    writer = CheckpointWriter(parent, emit, saving(), origin=Origin(**RUN))
    for step in range(first, LAST):
        writer.submit(made_up(step))
        writer.poll()
    writer.finish(made_up(LAST))
    writer.close()


def killed(parent: Path, calls: Killing) -> tuple[list[int], bool]:
    """A start that is killed: what it announced, and whether it ran to its end."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        ended = 1
        try:
            files.calls = calls
            start(parent, writing)
            ended = 0
        finally:  # and never on into what the parent does
            if ended:
                traceback.print_exc()
            os._exit(ended)
    os.close(writing)
    with os.fdopen(reading) as lines:
        announced = [int(line) for line in lines]
    _, status = os.waitpid(child, 0)
    return announced, os.waitstatus_to_exitcode(status) == 0


def faults(parent: Path, announced: int) -> list[str]:
    """What does not hold of the folder that a killed run has left."""
    found = []
    try:
        state, skipped = checkpoint.load_newest(parent)
    except PlanError as error:
        return [f"{announced} was announced: {error.what}"] if announced else []
    if bad := [*skipped, *filter(checkpoint.fault, checkpoint.numbered(parent))]:
        found.append(f"damaged: {bad}")
    if state.step < announced:
        found.append(f"{announced} was announced, and {state.step} is the newest")
    if not same(state, made_up(state.step)):
        found.append(f"step {state.step} is not what was saved")
    return found


def gone_on(parent: Path, announced: int) -> list[str]:
    """What does not hold after the run has been started again."""
    found = faults(parent, announced)
    _, ended = killed(parent, Killing(0))
    state, _ = checkpoint.load_newest(parent)
    if not ended or not same(state, made_up(LAST)):
        found.append("the resumed run did not end as the whole one")
    names = [p.name for p in checkpoint.numbered(parent)]
    if leftovers(parent) or names != [f"step-{LAST}", f"step-{LAST - 1}"]:
        found.append(f"left over: {leftovers(parent)}, {names}")
    return found


def every_call(parent: Path) -> dict[str, object]:
    """Kill the run at its first call, its second, …; and half-way through each write."""
    parent.parent.mkdir(parents=True, exist_ok=True)
    made = calls_of_a_whole_run(parent)
    kills = [(at, False) for at in range(1, len(made) + 1)]
    kills += [(at, True) for at, name in enumerate(made, 1) if name == "write"]
    broken = []
    for at, half in kills:
        shutil.rmtree(parent, ignore_errors=True)
        announced, ended = killed(parent, Killing(at, half))
        where = f"{'half-way through' if half else 'before'} call {at}, {made[at - 1]}"
        found = gone_on(parent, max(announced, default=0))
        broken += [f"{where}: {fault}" for fault in found + ["not killed"] * ended]
    return {"kills": len(kills), "kinds": sorted(set(made)), "broken": broken}


def calls_of_a_whole_run(parent: Path) -> list[str]:
    files.calls = counted = Counted()
    start(parent, os.open(os.devnull, os.O_WRONLY))
    files.calls = files.Calls()
    return counted.made


if __name__ == "__main__":
    if sys.argv[2:] == ["--once"]:
        start(Path(sys.argv[1]), 1)
    else:
        sys.stdout.write(json.dumps(every_call(Path(sys.argv[1])), indent=2))
