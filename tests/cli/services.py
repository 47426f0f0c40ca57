"""Stand-ins for the services that a command calls: they record the call and answer at once.

The real ones are tested where they live; here it is the command that is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vox_core.contract import Event, Notice, RunEnd, RunStart, StepDone, Validation
from vox_core.run.artifacts import TrainReport
from vox_core.run.generate import Finish
from vox_core.run.load import Answer, Question, Reply
from vox_core.run.merge import MergeReport
from vox_core.run.proof import Proof
from vox_core.run.sampling import Sampling
from vox_core.run.session import StoppedAtOnce

STEP = StepDone(1, loss=2.5, lr=1e-4, grad_norm=1, tokens=100, trained_tokens=40, seconds=0.5)
WHY = "cpu 0.1.0: the only usable backend"


def start(total_steps: int, first_step: int = 1) -> RunStart:
    return RunStart(
        "run", "m", "cpu", "a CPU", "fp32", "0" * 64, first_step, total_steps, 8, 99, 40
    )


def events(total_steps: int) -> Iterator[Event]:
    """What a run with validation emits."""
    yield Notice(WHY)
    yield start(total_steps)
    yield Validation(0, 4.0)
    for number in range(1, total_steps + 1):
        left, loss = 0.5 * (total_steps - number), 4.0 - number / total_steps
        yield StepDone(number, loss, 1e-4, 1.0, 100, 40, 0.5, seconds_left=left)
    yield Validation(total_steps, 1.0)
    yield RunEnd(total_steps, "done", 12.0)


@dataclass
class Training:
    """`vox_core.run.train.train`."""

    stopped: bool = False
    at_once: StoppedAtOnce | None = None
    report: dict[str, Any] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self, settings: Any, *, observe: Callable[[Event], None], **rest: Any
    ) -> TrainReport:
        if self.at_once:
            raise self.at_once
        self.calls.append({"settings": settings, **rest})
        for event in events(3):
            observe(event)
        named = None if settings.resume == "auto" else settings.resume
        run = named or settings.out or Path("runs/m")
        steps = 2 if self.stopped else 3
        report = TrainReport(run, self.stopped, steps, 3, 12.0, 4.25, 3.0, 4.0, 1.0)
        return replace(report, **self.report)


@dataclass
class Merging:
    """`vox_core.run.merge.merge`."""

    calls: list[tuple[str, Any]] = field(default_factory=list)

    def __call__(self, reference: str, settings: Any, *, observe: Any, **_: Any) -> MergeReport:
        self.calls.append((reference, settings))
        observe(Notice("proving"))
        proof = Proof("bf16", 1e-4, 1e-2, 0.3, 0.83, 1e-3, 32)
        return MergeReport(settings.out or Path(f"{reference}-merged"), "m", 14, proof)


@dataclass
class Voice:
    """`vox_core.run.load.open_model`, and the model that it opens.

    It answers with how many messages it was given and the last of them. `interrupted` answers are
    cut by Ctrl-C after their first piece.
    """

    interrupted: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)
    title: str = "m"
    conversations: list[list[dict[str, str]]] = field(default_factory=list)

    @contextmanager
    def __call__(
        self, reference: str, settings: Any, *, observe: Any, progress: Any, **_: Any
    ) -> Iterator[Voice]:
        self.calls.append((reference, settings))
        progress("downloading", 50, 100)
        observe(Notice(WHY))
        yield self

    def question(self, messages: list[dict[str, str]], row: int, settings: Any) -> Question:
        if messages not in self.conversations:
            self.conversations.append(messages)
        return Question([self.conversations.index(messages)], Sampling(row=row), ())

    def replies(self, questions: list[Question]) -> Iterator[tuple[int, Reply]]:
        """In reverse order."""
        for index, question in reversed([*enumerate(questions)]):
            messages = self.conversations[question.tokens[0]]
            answer = self.reply(messages, question.sampling.row)
            yield index, Reply("".join(answer), 7, 2, "stop")

    def identity(self) -> str:
        return "m"

    def reply(self, messages: list[dict[str, str]], row: int = 0, settings: Any = None) -> Answer:
        return Answer(7, self._pieces(messages, row))

    def stream(self, messages: list[dict[str, str]]) -> Answer:
        return self.reply(messages)

    def _pieces(
        self, messages: list[dict[str, str]], row: int
    ) -> Iterator[tuple[str, int, Finish]]:
        yield f"{len(messages)}:", 1, "length"
        if self.interrupted:
            self.interrupted -= 1
            raise KeyboardInterrupt
        yield messages[-1]["content"].upper() + " again" * row, 2, "stop"
