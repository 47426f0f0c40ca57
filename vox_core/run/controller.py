"""What follows from the events of a run: stopping, the best step, skipped steps, warnings.

Nothing here trains or writes a checkpoint. All that decides is a function of what was measured, so
a resumed run decides as the uninterrupted one.

A step whose loss or gradient is not finite is logged with its rows, and several in a row end the
run:

    bad_batches.jsonl    {"step", "loss", "grad_norm", "documents": [{"document", "file", "line"}]}

`document` counts from 0 in the data set, `line` from 1 in its file. A number that is not finite is
the text "nan", "inf" or "-inf". Steps that a resumed run takes again are logged again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core import files
from vox_core.contract import CheckpointWritten, Event, Notice, StepSkipped, TrainState
from vox_core.data.batching import documents_in_step
from vox_core.errors import StorageError, TrainingError, command
from vox_core.run import checkpoint, sources
from vox_core.run.checkpoint_writer import LOWER_RATE
from vox_core.run.folder import BAD_BATCHES, numbered
from vox_core.run.plan import vocabulary_size
from vox_core.run.progress import Progress
from vox_core.run.sanity import LossWatch

if TYPE_CHECKING:
    from vox_core.run.run_plan import RunPlan

SHOWN = 3
"""Rows of a skipped step that its warning names."""


class RunController:
    """Follows the events of a run.

    Args:
        progress: what was measured until now; it hears of an event before this does.
        interrupted: whether a signal asked for the end.
        out_of_time: whether `--max-time` is over.

    Attributes:
        settle: waits for a checkpoint that is under way. For the caller to set.
    """

    def __init__(
        self,
        plan: RunPlan,
        progress: Progress,
        interrupted: Callable[[], bool],
        out_of_time: Callable[[], bool],
    ) -> None:
        self._plan, self._progress = plan, progress
        self._interrupted, self._out_of_time = interrupted, out_of_time
        vocabulary = vocabulary_size(plan.inputs.config, plan.inputs.weights.tensors)
        ordered = plan.contract.order.curriculum != "none"
        self._losses = LossWatch(vocabulary, progress, ordered=ordered)
        self._reported: set[Path] = set()
        self.settle: Callable[[], None] = lambda: None

    def __call__(self, event: Event) -> Iterator[Notice]:
        """What follows from the event; T001 if too many steps in a row were not finite."""
        if self._plan.inputs.objective is None:  # another loss has another scale
            yield from self._losses(event)
        if isinstance(event, StepSkipped):
            yield from self._skipped(event)
        elif isinstance(event, CheckpointWritten):
            yield from self._changed_files()

    def stop_requested(self) -> bool:
        return self._interrupted() or self._out_of_time() or self._progress.exhausted

    def at_end(self, state: TrainState, *, stopped: bool) -> tuple[TrainState, list[Notice]]:
        """State to write of a run that ends with `state`, and what to say of the end.

        With `--load-best-at-end` it is the best step's, unless the run was stopped before its end.
        """
        notices = [*self._losses.at_end()] if self._plan.inputs.objective is None else []
        if stopped:
            notices += self._why_stopped()
        step = self._progress.best_step
        unfinished = stopped and not self._progress.exhausted
        if unfinished or not self._plan.settings.load_best_at_end or step in (None, state.step):
            return state, notices
        what = "model" if state.adapter.method == "full" else "adapter"
        if best := checkpoint.load_step(self._plan.run.checkpoints, step or 0):
            notice = Notice(f"the {what} is that of the best step: {self._best()}")
            return best, [*notices, notice]
        text = f"the checkpoint of the best step, {step}, is missing or damaged"
        notice = Notice(f"{text}: the {what} is that of the last step", "warning")
        return state, [*notices, notice]

    def _why_stopped(self) -> Iterator[Notice]:
        """Why the run stopped before its last step; nothing if a signal stopped it."""
        since = self._progress.since_best
        if self._progress.exhausted:
            yield Notice(
                f"early stopping: no better held-out loss in {since} "
                f"{'validation' if since == 1 else 'validations'}; the best was {self._best()}"
            )
        elif self._out_of_time() and not self._interrupted():
            yield Notice("stopped: the time of --max-time is over")

    def _best(self) -> str:
        return f"{self._progress.best_loss:.4f} after step {self._progress.best_step}"

    def _changed_files(self) -> Iterator[Notice]:
        for path in sources.changed(self._plan.sources):
            if path not in self._reported:
                self._reported.add(path)
                yield Notice(
                    f"{path} has changed since it was read; this run goes on with what was read, "
                    "and cannot be resumed unless the file is as it was",
                    "warning",
                )

    def _skipped(self, event: StepSkipped) -> Iterator[Notice]:
        documents = self._documents(event.step)
        places = [f"{each['file']}:{each['line']}" for each in documents]
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        rows = ", ".join(places[:SHOWN])
        text = f"step {event.step} was not applied: {_fault(event)}; rows {rows}{more}"
        yield Notice(text, "warning")
        numbers = {"loss": _plain(event.loss), "grad_norm": _plain(event.grad_norm)}
        line = {"step": event.step, **numbers, "documents": documents}
        path = self._plan.run.path / BAD_BATCHES
        try:
            files.append(path, json.dumps(line, ensure_ascii=False).encode() + b"\n")
        except StorageError as error:
            yield Notice(f"{path.name} cannot be written: {error.what}", "warning")
        if self._progress.skipped_in_a_row >= self._plan.settings.max_bad_steps:
            raise self._too_many(event, path)

    def _documents(self, step: int) -> list[dict[str, Any]]:
        dataset, contract = self._plan.data.train, self._plan.contract
        found = documents_in_step(dataset, contract.batch_size, contract.seed, step)
        some = ((index, dataset[index]) for index in found.tolist())
        return [{"document": n, "file": str(d.source), "line": d.line} for n, d in some]

    def _too_many(self, event: StepSkipped, path: Path) -> TrainingError:
        self.settle()
        there = [*numbered(self._plan.run.checkpoints), "none yet"]
        count = self._progress.skipped_in_a_row
        going_on = command("vox", "train", "--resume", self._plan.run.path, *LOWER_RATE)
        return TrainingError(
            "T001",
            f"{count} steps in a row were not finite"
            if count > 1
            else "the loss or the gradient of a step is not finite",
            where=path,
            found=f"{_fault(event)}; the last good checkpoint is {there[0]}",
            remedy=f"look at these rows; go on with {going_on}, or train again with a lower --lr, "
            "or with --dtype fp32",
        )


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _fault(event: StepSkipped) -> str:
    if event.loss is not None and math.isfinite(event.loss):
        return f"the gradient norm is {event.grad_norm}, the loss {event.loss:.4g}"
    return f"the loss is {event.loss}"
