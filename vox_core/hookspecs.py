"""The hook specifications that plugins implement.

A backend implements `vox_train`, `vox_merge` and `vox_load`; a plugin that provides a name at an
extension point implements its hook (`vox_write_model`: `model-formats`). The core selects one
plugin first, registers only that one and then calls, so `firstresult` describes a return value and
never arbitrates. `vox_advise` is called in every plugin that has it, before a run, in vox's own
process: its `VoxError` ends the command, and any other failure is a warning. `vox_event` and
`vox_doctor` are called in every plugin that has them, each in a child process; a failure is
reported once and affects nothing else.

    from vox_core.hookspecs import hookimpl

    class Backend:
        @hookimpl
        def vox_train(self, job, context): ...

Hooks raise errors for users as `vox_core.errors.VoxError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from vox_core.config import Section
    from vox_core.contract import (
        Advice,
        Check,
        Evaluator,
        Event,
        Ints,
        LaunchJob,
        LaunchResult,
        LoadJob,
        MergeJob,
        MergeResult,
        Model,
        Objective,
        ObjectiveSpec,
        Reward,
        RowStream,
        RunContext,
        Trainer,
        TrainJob,
        WriteModelJob,
    )

PROJECT = "vox"
ENTRY_POINTS = "vox_core.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """Signatures that every implementation is checked against when it is loaded."""

    @hookspec(firstresult=True)
    def vox_train(self, job: TrainJob, context: RunContext) -> Trainer:  # type: ignore[empty-body]
        """Load a base model for training; the core adds what learns, and drives it."""

    @hookspec(firstresult=True)
    def vox_merge(self, job: MergeJob, context: RunContext) -> MergeResult:  # type: ignore[empty-body]
        """Compute `W + scale * B @ A` (float32, rounded once to the job's dtype) per target."""

    @hookspec(firstresult=True)
    def vox_load(self, job: LoadJob, context: RunContext) -> Model:  # type: ignore[empty-body]
        """Load a base model for generation, scores and logits."""

    @hookspec(firstresult=True)
    def vox_objective(self, spec: ObjectiveSpec) -> Objective:  # type: ignore[empty-body]
        """Return the objective of a name declared in `objectives`, with its options checked."""

    @hookspec(firstresult=True)
    def vox_reward(self, name: str) -> Reward:  # type: ignore[empty-body]
        """Return a reward of a name declared in `rewards`. `FILE.py:FUNCTION` is declared by the
        plugin that runs functions, and is called with the file and the function."""

    @hookspec(firstresult=True)
    def vox_settings(self, section: str) -> type[Section]:  # type: ignore[empty-body]
        """Return the settings of a section of `vox.toml` named in `settings`."""

    @hookspec(firstresult=True)
    def vox_evaluator(self, suites: Sequence[Path]) -> Evaluator:  # type: ignore[empty-body]
        """Read suites, check them, and return what evaluates the model that is trained."""

    @hookspec(firstresult=True)
    def vox_open_rows(self, reference: str) -> RowStream:  # type: ignore[empty-body]
        """Open a data file of a suffix, or a data set of a scheme, named in `row-sources`."""

    @hookspec(firstresult=True)
    def vox_near_duplicates(  # type: ignore[empty-body]
        self, texts: Iterable[str], count: int, threshold: float
    ) -> Ints:
        """Find near-duplicate texts: int64 (P, 2), each a text and an earlier one. `threshold` is a
        Jaccard similarity."""

    @hookspec(firstresult=True)
    def vox_write_model(self, job: WriteModelJob) -> None:
        """Write a model in the format `job.format`, and verify the result."""

    @hookspec(firstresult=True)
    def vox_launch(self, job: LaunchJob, settings: object) -> LaunchResult:  # type: ignore[empty-body]
        """Start the ranks of a run by a launcher named in `launchers`, and wait until all of them
        have recorded their end; VoxError if one failed. `settings` are the command's
        `TrainSettings`."""

    @hookspec(firstresult=True)
    def vox_write_job(  # type: ignore[empty-body]
        self, kind: str, job: LaunchJob, settings: object, image: str | None
    ) -> str:
        """Write a job of a kind named in `job-formats` that runs a command elsewhere. `settings`
        are the command's `TrainSettings`; `image` is a container image that has vox."""

    @hookspec
    def vox_advise(self, plan: object, tell: Callable[[str], None]) -> Advice:  # type: ignore[empty-body]
        """Advise on a planned run: notices, faster settings, or a refusal.

        `plan` is a `vox_core.api.plans.RunPlan`, whose type this module cannot import; `tell` shows
        a line to the user at once.
        """

    @hookspec(firstresult=True)
    def vox_plan_run(
        self,
        settings: object,
        progress: Callable[[str, int, int], None] | None,
        tell: Callable[[str], None],
    ) -> object:
        """Plan what `vox train` would do under these `TrainSettings`; the result of `vox.plan`."""

    @hookspec
    def vox_event(self, event: Event) -> None:
        """Observe a run."""

    @hookspec
    def vox_doctor(self) -> Iterable[Check]:  # type: ignore[empty-body]
        """Check what works on this machine, with a remedy for the rest."""
