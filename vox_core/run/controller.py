"""React to the events of a run: early stopping, best step, skipped steps, warnings.

Nothing here trains or writes a checkpoint. All that decides is a function of what was measured, so
a resumed run decides as the uninterrupted one.

A step whose loss or gradient is not finite is logged with its rows, and several in a row end the
run:

    bad_batches.jsonl    {"step", "loss", "grad_norm", "documents": [{"document", "file", "line"}]}

`document` counts from 0 in the data set, `line` from 1 in its file. A number that is not finite is
the text "nan", "inf" or "-inf". Steps that a resumed run takes again are logged again.

Learning rates and losses that no sound run has are warned of:

    before the run    a learning rate outside 1e-7 .. 1e-2, or 3e-3 with the method `full`
    first loss        far above ln(vocabulary), or at it and an adapter is trained
    end of the run    training loss at ln(vocabulary), or higher than it began; no gradient in any
                      step, as where all answers to a prompt have the same reward

A rise is judged on the means of two windows: the first thirtieth of the steps (three at least;
about the default warm-up) and the last quarter. Their difference has to exceed five standard
errors, by the spread of the losses in the second half, and a tenth of the first mean. A run of
fewer than 20 steps, or with a curriculum, which brings difficult examples last, is not judged.
No warning stops a run. tests/run/test_sanity.py counts false alarms over random losses that neither
rise nor fall.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from vox_core import files
from vox_core.config import FULL_LR, LORA_LR
from vox_core.contract import (
    CheckpointWritten,
    Event,
    Method,
    Notice,
    StepDone,
    StepSkipped,
    TrainState,
    Validation,
)
from vox_core.data.batching import documents_in_step
from vox_core.errors import StorageError, TrainingError, command
from vox_core.run import checkpoint
from vox_core.run.checkpoint import LOWER_RATE
from vox_core.run.folder import BAD_BATCHES, ROLLOUTS, numbered
from vox_core.run.plan import vocabulary_size
from vox_core.run.progress import Progress
from vox_core.run.reference import changed_files

if TYPE_CHECKING:
    from vox_core.run.session import Session


LEAST_LR, MOST_LR, MOST_FULL_LR = 1e-7, 1e-2, 3e-3
"""Bounds on AdamW's peak rate. LoRA (arXiv:2106.09685, appendix D) and QLoRA (arXiv:2305.14314,
appendix B) train at 1e-4 to 5e-4, the quick start at 1e-3, and full fine-tuning goes down to about
1e-6; each bound is ten times beyond. Full fine-tuning at 1e-3 suits models of 0.4B and less
(alignment-handbook, recipes/smollm2/sft/config_smol.yaml), and SmolLM2 was trained from scratch at
3e-3 (arXiv:2502.02737); no recipe goes above."""

LEAST_STEPS = 20
LEAST_LOSSES, LEAST_TOKENS = 4, 64
"""Fewer steps have no last quarter, and fewer trained tokens no loss that says much of a model."""
_BEGINNING, _LEAST_BEGINNING = 30, 3
_STANDARD_ERRORS, _LEAST_RISE = 5, 0.1
_UNIFORM, _WORSE = 0.98, 1.1
"""Shares of ln(vocabulary): from the first on, a loss counts as that of a uniform guess, above the
second as worse. Random weights are at 1.08 with a tied head of 4,096 columns, 49,152 tokens."""


def rate_warning(lr: float, method: Method) -> Notice | None:
    """Return a warning about an unusual learning rate; None if it is usual."""
    most, default = (MOST_FULL_LR, FULL_LR) if method == "full" else (MOST_LR, LORA_LR)
    if LEAST_LR <= lr <= most:
        return None
    effect = "training will probably diverge" if lr > most else "next to nothing is learnt"
    return Notice(
        f"--lr {lr:g} is outside the range in which models are trained ({LEAST_LR:g} to "
        f"{most:g}): {effect}; {default:g} is the default",
        "warning",
    )


class LossWatch:
    """Follows the losses of a run.

    Args:
        vocabulary: tokens that the model predicts among.
        progress: the losses of all steps; it hears of a step before this does.
        ordered, full: the rows are in a curriculum's order; the method is `full`.
    """

    def __init__(self, vocabulary: int, progress: Progress, *, ordered: bool, full: bool) -> None:
        self._ordered, self._full, self._progress = ordered, full, progress
        self._uniform = math.log(vocabulary)
        self._first_seen = bool(progress.losses)

    def __call__(self, event: Event) -> Iterator[Notice]:
        """A warning, where the event gives reason for one."""
        if isinstance(event, StepDone | Validation) and not self._first_seen:
            self._first_seen = True
            if isinstance(event, StepDone) and event.trained_tokens < LEAST_TOKENS:
                return
            if event.loss > _WORSE * self._uniform:
                yield Notice(
                    f"the first loss, {event.loss:.2f}, is far above ln(vocabulary) = "
                    f"{self._uniform:.2f}: the model predicts worse than a uniform guess. Weights, "
                    "tokenizer or chat template do not belong together, or the backend computes "
                    "wrongly; `vox data preview` shows what is trained, and `vox generate` what "
                    "the model answers without training",
                    "warning",
                )
            elif event.loss >= _UNIFORM * self._uniform:
                found = f"the first loss, {event.loss:.2f}, is that of a uniform guess"
                needs = "" if self._full else "--method full, not an adapter, and "
                text = f"{found}: a new model needs {needs}an --lr of about 1e-3"
                yield Notice(text, "info" if self._full else "warning")

    def at_end(self) -> Iterator[Notice]:
        """A warning about the losses of all steps, where there is reason for one."""
        losses = self._progress.losses
        if len(losses) < LEAST_LOSSES:
            return
        ended = fmean(losses[-max(1, len(losses) // 4) :])
        if ended >= _UNIFORM * self._uniform:
            yield Notice(
                f"the training loss ends at {ended:.2f}, and ln(vocabulary) is "
                f"{self._uniform:.2f}: the model predicts no better than a uniform guess; do not "
                "use this run's result. If the loss began lower, lower --lr; else train longer",
                "warning",
            )
        elif (began := self._risen_from(ended)) is not None:
            yield Notice(
                f"the training loss rose from {began:.2f} to {ended:.2f} (means of the first and "
                "the last steps): the learning rate is probably too high; train again with a lower "
                "--lr",
                "warning",
            )

    def _risen_from(self, ended: float) -> float | None:
        """Mean of the first steps; None unless `ended` is above it by more than chance."""
        losses = self._progress.losses
        if self._ordered or len(losses) < LEAST_STEPS:
            return None
        first = max(_LEAST_BEGINNING, len(losses) // _BEGINNING)
        began, last = fmean(losses[:first]), len(losses) // 4
        error = stdev(losses[len(losses) // 2 :]) * math.sqrt(1 / first + 1 / last)
        margin = max(_STANDARD_ERRORS * error, _LEAST_RISE * began)
        return began if ended - began > margin else None


def has_learned(state: TrainState) -> bool:
    """Whether any step had a gradient."""
    return not state.moments or any(second.any() for _, second in state.moments.values())


SHOWN = 3
"""Rows of a skipped step that its warning names."""


class RunController:
    """Follows the events of a run, of which the session's `progress` hears before.

    Attributes:
        settle: waits for a checkpoint that is under way. For the caller to set.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._plan, self._progress = plan, progress = session.plan, session.progress
        vocabulary = vocabulary_size(plan.inputs.config, plan.inputs.weights.tensors)
        ordered = plan.contract.order.curriculum != "none"
        full = plan.contract.adapter.method == "full"
        self._losses = LossWatch(vocabulary, progress, ordered=ordered, full=full)
        self._reported: set[Path] = set()
        self.settle: Callable[[], None] = lambda: None

    def __call__(self, event: Event) -> Iterator[Notice]:
        """Yield notices about an event; raise T001 after too many non-finite steps in a row."""
        if self._plan.inputs.objective is None:  # another loss has another scale
            yield from self._losses(event)
        if isinstance(event, StepSkipped):
            yield from self._skipped(event)
        elif isinstance(event, CheckpointWritten):
            yield from self._changed_files()

    def at_end(self, state: TrainState, *, stopped: bool) -> tuple[TrainState, list[Notice]]:
        """State to write of a run that ends with `state`, and what to say of the end.

        With `--load-best-at-end` it is the best step's, unless the run was stopped before its end.
        """
        notices = [*self._losses.at_end()] if self._plan.inputs.objective is None else []
        if not has_learned(state):
            notices.append(self._nothing_learned())
        if stopped:
            notices += self._why_stopped()
        step = self._progress.best_step
        unfinished = stopped and not self._progress.exhausted
        if unfinished or not self._plan.settings.load_best_at_end or step in (None, state.step):
            return state, notices
        what = "model" if state.adapter.method == "full" else "adapter"
        if best := checkpoint.load_step(self._plan.run.checkpoints, step or 0):
            return best, [*notices, Notice(f"the {what} is that of the best step: {self._best()}")]
        text = f"the checkpoint of the best step, {step}, is missing or damaged"
        return state, [*notices, Notice(f"{text}: the {what} is that of the last step", "warning")]

    def _nothing_learned(self) -> Notice:
        text = "the gradient was zero in every step: nothing was learned"
        if self._plan.settings.reward:
            text += (
                f". All answers to a prompt had the same reward ({ROLLOUTS} has them): use prompts "
                "that the model solves some of the time, a reward with more values, or more "
                "--rollouts"
            )
        return Notice(text, "warning")

    def _why_stopped(self) -> Iterator[Notice]:
        """Why the run stopped before its last step; nothing if a signal stopped it."""
        since = self._progress.since_best
        if self._progress.exhausted:
            text = f"early stopping: no better result in {since} validation{'s' * (since != 1)}"
            yield Notice(f"{text}; the best was {self._best()}")
        elif self._session.out_of_time() and not self._session.signalled():
            yield Notice("stopped: the time of --max-time is over")

    def _best(self) -> str:
        best = self._progress.best_loss * (-1 if self._plan.contract.rollouts.rewards else 1)
        return f"{best:z.4f} after step {self._progress.best_step}"

    def _changed_files(self) -> Iterator[Notice]:
        for path in changed_files(self._plan.sources):
            if path not in self._reported:
                self._reported.add(path)
                yield Notice(
                    f"{path} has changed since it was read; this run goes on with what was read, "
                    "and cannot be resumed unless the file is as it was",
                    "warning",
                )

    def _skipped(self, event: StepSkipped) -> Iterator[Notice]:
        dataset, contract = self._plan.data.train, self._plan.contract
        found = documents_in_step(dataset, contract.batch_size, contract.seed, event.step)
        some = ((index, dataset[index]) for index in found.tolist())
        documents = [{"document": n, "file": str(d.source), "line": d.line} for n, d in some]
        places = [f"{each['file']}:{each['line']}" for each in documents]
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        rows = ", ".join(places[:SHOWN])
        text = f"step {event.step} was not applied: {_fault(event)}; rows {rows}{more}"
        yield Notice(text, "warning")
        numbers = {"loss": _plain(event.loss), "grad_norm": _plain(event.grad_norm)}
        line = {"step": event.step, **numbers, "documents": documents}
        path = self._plan.run.path / BAD_BATCHES
        try:
            if self._session.world.leads:
                files.append(path, json.dumps(line, ensure_ascii=False).encode() + b"\n")
        except StorageError as error:
            yield Notice(f"{path.name} cannot be written: {error.what}", "warning")
        if self._progress.skipped_in_a_row >= self._plan.settings.max_bad_steps:
            raise self._too_many(event, path)

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
