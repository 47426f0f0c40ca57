"""Weights & Biases for vox: send the curves of each run to wandb.ai, or keep them in `RUN/wandb`.

    wandb login
    vox train --data train.jsonl

vox runs this plugin in its own process and sends it one event after another; a process of W&B's
uploads in the background. W&B's environment variables (`WANDB_PROJECT`, `WANDB_MODE`, ...) are the
settings. Without an API key or a connection, the run is written offline, and a line on stderr has
the command that uploads it. `RUN/wandb/run-id` holds the id, by which a resumed run goes on.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vox_core.api.runs import PLAN, RunFolder
from vox_core.api.tracking import Tracker
from vox_core.contract import Outcome, RunStart

STEP = "train/global_step"
"""The x-axis of all curves, as with transformers. W&B's own step cannot go back, as a resumed run's
does, and a checkpoint's time comes after the next step."""
TIMEOUT_S = 6
"""For the connection and for the last upload, each within one `vox_event`, which may take 10."""
_NO_FACTS = ("run", "first_step")
_EXIT_CODES: dict[Outcome, int] = {"done": 0, "stopped": 255, "failed": 1}
"""W&B's states: finished, killed, failed."""


class Curves:
    """A run in W&B, from the start or resume of vox's run until `close`."""

    def __init__(self, start: RunStart) -> None:
        self._id = Path(start.run) / "wandb" / "run-id"
        self._run = self._online_or_offline(start)
        atexit.register(self._run.finish, exit_code=1)  # without a `RunEnd`, vox was killed
        self._run.define_metric("*", step_metric=STEP)
        if not self._run.disabled:
            self._id.parent.mkdir(exist_ok=True)
            self._id.write_text(self._run.id)
            _say(f"offline; upload with: {self._upload()}" if self._run.offline else self._run.url)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Send scalars of a step; do not wait for the upload."""
        self._run.log({STEP: step, **values})

    def close(self, outcome: Outcome) -> None:
        """End the run in W&B, and say so if it could not upload everything."""
        atexit.unregister(self._run.finish)
        try:
            self._run.finish(exit_code=_EXIT_CODES[outcome])
        except TimeoutError:
            _say(f"the upload takes longer than {TIMEOUT_S} s; finish it with: {self._upload()}")

    def _online_or_offline(self, start: RunStart) -> Any:
        import wandb

        given = _arguments(start)
        if self._id.is_file() and "WANDB_RUN_ID" not in os.environ:
            given["id"] = self._id.read_text()
        try:
            return wandb.init(**given)
        except wandb.Error as error:
            _say(" ".join(str(error).split()))
            return wandb.init(**given, mode="offline")

    def _upload(self) -> str:
        """Return the command that uploads the run, with all its parts if it was resumed."""
        folder, run = Path(self._run.dir).parents[1], self._run
        kind, online = ("offline-run", []) if run.offline else ("run", ["--include-online"])
        parts = sorted(str(file.parent) for file in folder.glob(f"{kind}-*/run-{run.id}.wandb"))
        return shlex.join(["wandb", "sync", *online, *parts])


def _prepare() -> None:
    """Import wandb and start its process, which take seconds on a cold disk."""
    import wandb

    del sys.argv[1:]  # W&B records the command, which here is vox's request with its paths
    wandb.setup(
        wandb.Settings(
            console="off",
            silent=True,
            init_timeout=TIMEOUT_S,
            finish_timeout=TIMEOUT_S,
            finish_timeout_raises=True,
            x_stats_pid=os.getppid(),  # draw the CPU and memory of the run, not of this process
        )
    )


def _arguments(start: RunStart) -> dict[str, Any]:
    """Return the arguments of `wandb.init`, but for those that environment variables give."""
    folder = RunFolder(Path(start.run).resolve())
    given = {"project": "vox", "name": folder.path.name, "dir": folder.path, "resume": "allow"}
    facts = {name: value for name, value in asdict(start).items() if name not in _NO_FACTS}
    return {
        **{name: given[name] for name in given if f"WANDB_{name.upper()}" not in os.environ},
        "config": {**folder.read(PLAN)["contract"], **facts},
        "allow_val_change": True,  # by `--allow-change`
    }


def _say(text: str) -> None:
    over = "\r\x1b[2K" if sys.stderr.isatty() else ""  # the progress bar, which is drawn again
    sys.stderr.write(f"{over}wandb: {text}\n")
    sys.stderr.flush()


observer = Tracker(Curves, _prepare)
