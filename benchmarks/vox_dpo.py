"""Train with vox's DPO and its defaults, for `dpo_speed.py`.

    .venv/bin/python benchmarks/vox_dpo.py MODEL PAIRS.jsonl RESULT.json [two-pass]

RESULT gets the time, the processor seconds and the tokens of each step, as from `trl_dpo.py`, and
before them those at the start and at the end of the reference's log-probabilities. `two-pass`
scores every batch before its gradient, as backends without the capability `one-pass` do.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vox_core.config import TrainSettings, validate
from vox_core.contract import Event, StepDone
from vox_core.run import loop
from vox_core.run.learner import Learner
from vox_core.run.train import train
from vox_core.run.weighing import Scores


def main() -> None:
    model, pairs, result, *two_pass = sys.argv[1:]
    if two_pass:
        Learner._in_one_pass = Learner._in_two_passes  # type: ignore[method-assign]
    marks: list[dict[str, float]] = []

    def mark(tokens: int) -> None:
        marks.append({"time": time.time(), "cpu": time.process_time(), "tokens": tokens})

    def observe(event: Event) -> None:
        if isinstance(event, StepDone):
            mark(event.tokens)

    scored = loop.scores_of

    def timed(*given: Any) -> Scores:
        mark(0)
        scores = scored(*given)
        mark(0)
        return scores

    loop.scores_of = timed
    with tempfile.TemporaryDirectory() as scratch:
        given = {
            "model": model,
            "data": [pairs],
            "backend": "cpu",
            "objective": "dpo",
            "dtype": "bf16",
            "tune": "ignore",
            "batch_size": 8,
            "out": Path(scratch) / "run",
        }
        train(validate(TrainSettings, given), observe=observe)
    Path(result).write_text(json.dumps(marks))


if __name__ == "__main__":
    main()
