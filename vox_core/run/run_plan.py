"""Plan a run: everything that can be refused is refused here, and nothing is written.

    settings -> previous run -> inputs -> data sets -> plan

`vox train` goes on from here and `vox plan` stops here, so what can be planned can be begun.

`with_advice` applies the advice of plugins (`vox_advise`). Every installed plugin that names the
hook in its manifest is imported and called, in the order of ids. The first value of a knob wins,
the first refusal too; notices add up. A plugin that cannot be loaded or that raises costs the run
one warning. A `VoxError` is an error for the user and ends the command.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core import files, models
from vox_core.adapter.targets import leaf_names
from vox_core.config import TrainSettings
from vox_core.contract import Advice, ExecutionPlan, FineTuneContract, ModelIdentity, Notice, World
from vox_core.data.checked import unused_fields
from vox_core.data.formats import is_remote
from vox_core.data.rows import learns_from_answers
from vox_core.errors import BackendError, ConfigError, OutputError, PlanError, VoxError, command
from vox_core.host.discover import Found
from vox_core.host.load import (
    format_error,
    load_plugin,
    no_provider,
    providers,
    require_example_each,
)
from vox_core.run import folder, plan, resume
from vox_core.run.controller import rate_warning
from vox_core.run.folder import RunFolder
from vox_core.run.inputs import Datasets, RunInputs, build_datasets, read_inputs
from vox_core.run.reference import Sources, data_files, model_files
from vox_core.run.resume import PinnedPlan, PreviousRun
from vox_core.run.start import require_same_adapter, starting_adapter
from vox_core.text import counted
from vox_core.weights import STORED_AS, numpy_dtype

if TYPE_CHECKING:
    from vox_core.data.chosen import Side
    from vox_core.data.dataset import Dataset


_CUTS = {"whole turns": "cut to whole turns", "split": "split into several examples"}


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run that may begin, or go on.

    Args:
        settings: those given; with `--resume`, over the run's own.
        previous: the run that is gone on with; None for a new one.
        changes: what differs from the previous run, and may; in words.
        ended: how it has ended already, where `--resume auto` finds nothing left to do.
        pinned: the digest of the plan that it was held against.
    """

    settings: TrainSettings
    run: RunFolder
    previous: PreviousRun | None
    inputs: RunInputs
    data: Datasets
    execution: ExecutionPlan
    sources: Sources
    changes: tuple[str, ...] = ()
    ended: str | None = None
    pinned: str | None = None
    advice: Advice = field(default_factory=Advice)

    @property
    def contract(self) -> FineTuneContract:
        return self.execution.contract

    @property
    def trained_elements(self) -> int:
        """Number of parameters that are trained, whole tensors included."""
        tensors, made = self.inputs.weights.tensors, self.execution
        whole = sum(math.prod(tensors[name].shape) for name in made.saved.values())
        return made.trainable_parameters + whole

    @property
    def fresh(self) -> bool:
        return self.previous is None

    def left_out(self, side: Side) -> dict[str, int]:
        """Reason -> rows that the data filters left out."""
        return self.inputs.rows.report.left_out(side)

    def notices(self) -> Iterator[Notice]:
        """Yield notices and warnings about data and settings."""
        rows, data, contract = self.inputs.rows, self.data, self.contract
        yield Notice(f"{plan.data_size(contract)}; {counted(contract.total_steps, 'step')}")
        if wrong := rate_warning(contract.optimizer.lr, contract.adapter.method):
            yield wrong
        if experts := plan.find_experts(self.inputs.config, self.inputs.weights.tensors):
            adapted = ", ".join(leaf_names(self.execution.modules))
            yield Notice(f"{experts}: the adapter is on {adapted}, and not on experts")
        yield from map(Notice, rows.report.told())
        for what, side in (("training row", data.train), ("validation row", data.valid)):
            if side and (lost := side.stats.dropped["preference pair"]):
                yield Notice(f"{counted(lost, what)} dropped: preference pair", "warning")
            for how, count in (side.stats.truncated if side else {}).items():
                if cut := _CUTS.get(how):
                    text = f"{counted(count, what)} longer than {contract.seq_len} tokens: {cut}"
                    yield Notice(text, "info" if how == "split" else "warning")
        yield from (Notice(text, "warning") for text in self._warnings())

    def _warnings(self) -> Iterator[str]:
        rows, data = self.inputs.rows, self.data
        yield from self.inputs.model.notes
        yield from rows.report.warnings()
        if self.inputs.objective is None:  # which may read any field, as may a reward
            for name, count in unused_fields([*rows.train, *rows.valid]).items():
                yield f'the field "{name}" of {counted(count, "row")} is not used'
        yield from self._odd_settings()
        yield from dict.fromkeys((*data.train.notes, *(data.valid.notes if data.valid else ())))
        for what, found in data.audits.items():
            yield from (f"{what}: {finding}" for finding in found.of_level("warning"))

    def _odd_settings(self) -> Iterator[str]:
        every, temperature = self.settings.eval_every, self.settings.rollout_temperature
        if every and self.data.valid is None and self.inputs.evaluator is None:
            yield f"--eval-every {every} evaluates nothing: add --valid or --eval-suite"
        if learns_from_answers(self.inputs.objective) and temperature != 1:
            yield (
                f"--rollout-temperature {temperature:g} samples from another distribution than the "
                "one that is trained: log-probabilities are those at temperature 1 (TRL divides "
                "the logits by the temperature in training, too)"
            )

    def preflight(self) -> dict[str, Any]:
        """`preflight.json`: what was found before the run, and how the backend was chosen."""
        valid = self.data.valid
        return {
            "selection": self.inputs.selection.to_json(),
            "data": account(self.data.train, self.left_out("train")),
            "valid": account(valid, self.left_out("valid")) if valid else None,
            "rows": self.inputs.rows.report.to_json(),
            "audit": {what: found.to_json() for what, found in self.data.audits.items()},
        }


def plan_run(
    settings: TrainSettings,
    progress: models.Progress | None = None,
    *,
    tell: Callable[[str], None] = lambda _: None,
    only_planned: bool = False,
    hashed: bool = True,
    pinned: PinnedPlan | None = None,
    world: World = World(),  # noqa: B008 (frozen)
) -> RunPlan:
    """Plan a run, its folder first.

    Args:
        tell: receives what a user should know, as text.
        only_planned: nothing will be trained: where there is no data a step of whole documents is
            assumed.
        hashed: without it the model is not, and the contract's digest means nothing. A run that
            is resumed is hashed all the same, to see that it is still the run that it was.
        world: ranks above 0 write nothing, so they may find the folder that rank 0 has begun.

    Raises:
        InputError: the first thing that is wrong.
        StorageError: S001, the results would not fit on the disk.
    """
    auto, refresh = settings.resume == "auto", settings.tune == "refresh"
    _require_apart(settings)
    previous = resume.load_previous(settings)
    settings = resume.merge_settings(settings, previous)
    if refresh:
        _require_measurable(settings, only_planned, goes_on=previous is not None and not auto)
    start = starting_adapter(settings, progress)
    settings = start.adopted(settings) if start else settings
    run = RunFolder(Path(settings.resume or settings.out or folder.default_path(settings.model)))
    if world.leads and (settings.resume or settings.out):
        folder.require_free(run)
        if previous is None and not auto:
            _require_new(run)
    if previous and refresh:  # with --resume auto: the command that began the run
        tell("nothing is measured for --tune refresh: a run that goes on is cut as it began")
    if previous and not auto and not {"epochs", "max-steps"} & {*settings.allow_change}:
        previous.require_unfinished(previous.plan["contract"]["total_steps"], settings.patience)
    inputs = read_inputs(
        pinned.asked(settings) if pinned else settings,
        previous.backend if previous else None,
        progress,
        only_planned=only_planned and not previous,
        start=start,
    )
    data = build_datasets(settings, inputs, progress)
    hashed, model, weights = hashed or previous is not None, inputs.model, inputs.weights
    unhashed = ModelIdentity(model.revision, model.model_type, "", "")
    identity = models.identity(model) if hashed else unhashed
    execution = plan.make_plan(settings, inputs, data, identity)
    if start:
        require_same_adapter(start.adapter, execution, start.name)
    sources: Sources = {
        "data": data_files(inputs.rows.train),
        "valid": data_files(inputs.rows.valid),
        **(model_files(model.path, weights.files, model.tokenizer) if hashed else {}),
    }
    made = RunPlan(settings, run, previous, inputs, data, execution, sources)
    if pinned:
        pinned.require(made)
        made = replace(made, pinned=pinned.digest)
        if not previous:
            made = pinned.applied(made)
    _require_validated(settings, data)
    _require_shared(made, max(world.size, settings.processes))
    _require_sharding(made, max(world.size, settings.processes))
    if previous:
        made = _going_on(made, previous, auto=auto)
    files.require_space(run.path, space_needed(made), "the run, its result and checkpoints")
    return made


def _going_on(made: RunPlan, previous: PreviousRun, *, auto: bool) -> RunPlan:
    """Refuse another run than the one that is there; cut it as it was."""
    then, settings, total = previous.plan, made.settings, made.contract.total_steps
    changes = resume.require_same(made.execution, then, made.sources, settings.allow_change)
    if not auto:
        previous.require_unfinished(total, settings.patience)
    ended = previous.ended(total, settings.patience)
    if not ended:
        previous.require_checkpoints(total)
    execution = made.execution
    if then["backend"] == execution.backend:  # with the knobs that it had
        tuning, packing = then["tuning"], then["packing"]
        execution = replace(execution, tuning=tuning, packing=packing)
    return replace(made, execution=execution, changes=changes, ended=ended)


# --- rows and disk ----------------------------------------------------------------------------


def account(dataset: Dataset, left_out: Mapping[str, int]) -> dict[str, Any]:
    """Count the rows of a data set: used, left out, dropped, truncated.

    Args:
        left_out: reason -> rows that the data filters left out; none of the others below.
    """
    return {
        "rows": dataset.stats.rows,
        "left_out": dict(left_out),
        "documents": len(dataset),
        "tokens": dataset.tokens,
        "trained_tokens": dataset.trained_tokens,
        "dropped": dict(dataset.stats.dropped),
        "truncated": dict(dataset.stats.truncated),
    }


def space_needed(run: RunPlan) -> int:
    """Bytes: values and two moments in each checkpoint, one more while the newest is written, and
    the result; with the method `full` that is a whole model, and the one before it while it is
    replaced. Where there is validation, the best step has a checkpoint of its own. The checkpoints
    that a resumed run has already are no further need."""
    settings, made = run.settings, run.execution
    kept = settings.keep + (made.contract.data.valid_digest is not None)
    if settings.keep_every:
        apart = math.lcm(settings.keep_every, settings.save_every or 1)
        kept += made.contract.total_steps // apart
    checkpoints = 4 * run.trained_elements * 3 * (kept + 1)
    if run.previous:
        there = (each for each in run.run.checkpoints.rglob("*") if each.is_file())
        checkpoints = max(0, checkpoints - sum(each.stat().st_size for each in there))
    if made.contract.adapter.method != "full":
        return checkpoints + 4 * run.trained_elements
    every = sum(math.prod(info.shape) for info in run.inputs.weights.tensors.values())
    return checkpoints + 2 * every * numpy_dtype(STORED_AS[made.dtype]).itemsize


# --- what is refused --------------------------------------------------------------------------


def _require_apart(settings: TrainSettings) -> None:
    """Refuse to write where data or model lie (O004)."""
    if settings.out is None:
        return
    named = [("--data", path) for path in settings.data]
    named += [("--valid", settings.valid)] if settings.valid else []
    named += [("--model", model)] if (model := Path(settings.model)).exists() else []
    files.require_apart(settings.out, [each for each in named if not is_remote(each[1])])


def _require_new(run: RunFolder) -> None:
    """Refuse a folder that is there, and name the run in it (O001)."""
    if (run.path / folder.PLAN).is_file():
        previous = PreviousRun(run, resume.plan_of(run))
        how = previous.ended(previous.plan["contract"]["total_steps"], 0)
        do = f"use it: {command('vox', 'chat', run.path)}"
        if how is None:
            do = f"go on with it: {command('vox', 'train', '--resume', run.path)}"
        raise OutputError(
            "O001",
            "the output path exists",
            where=run.path,
            found=f"a run, finished: {how}" if how else "a run",
            remedy=f"{do}; or choose another folder with --out",
        )
    files.require_absent(run.path)


def _require_measurable(settings: TrainSettings, only_planned: bool, *, goes_on: bool) -> None:
    """Refuse to measure without a plugin (B013), for a resumed run, or without documents (C004)."""
    where = "--tune refresh"
    if not providers("hooks", "vox_advise"):
        missing, what = no_provider("hooks", "vox_advise"), "no plugin measures what is fastest"
        raise BackendError("B013", what, where=where, found=missing.found, remedy=missing.remedy)
    if goes_on:
        what = "a resumed run is cut as it began, whatever is measured"
        remedy = "leave out --tune, or measure with vox plan --tune refresh for the next run"
        raise ConfigError("C004", what, where=where, remedy=remedy)
    if only_planned and not settings.data:
        what = "what is fastest is measured on the run's own documents"
        remedy = "add --data, or leave out --tune refresh"
        raise ConfigError("C004", what, where=where, found="no --data", remedy=remedy)


def _require_shared(run: RunPlan, processes: int) -> None:
    """Refuse processes that the backend does not have (P001), or without an example (C004)."""
    if processes == 1:
        return
    examples = min(run.contract.batch_size, run.contract.data.rows)
    able = run.inputs.backend.manifest.capabilities.distributed
    if run.settings.launcher not in able:
        raise PlanError(
            "P001",
            f"backend {run.inputs.backend.id!r} does not train in several processes that "
            f"{run.settings.launcher!r} starts",
            where=f"--processes {processes}",
            found=f"its launchers: {', '.join(able) or 'none'}",
            remedy="choose another --backend or --launcher, or leave out --processes",
        )
    require_example_each(processes, examples)


def _require_sharding(run: RunPlan, processes: int) -> None:
    """Refuse a base that cannot be split among the processes (P001), or a single process (C004)."""
    if not run.settings.shard:
        return
    if processes == 1:
        what = "there is one process, and --shard splits the base model among several"
        remedy = "add --processes N, or leave out --shard"
        raise ConfigError("C004", what, where="--shard", remedy=remedy)
    backend, adapter, objective = run.inputs.backend, run.contract.adapter, run.inputs.objective
    whole, optimizer = adapter.method == "full", run.contract.optimizer.name
    reasons = {
        f"backend {backend.id!r}": not backend.manifest.capabilities.sharding,
        f"a base quantised to {run.contract.quant}": run.contract.quant != "none",
        "--method dora": adapter.method == "dora",
        "--modules-to-save": bool(adapter.modules_to_save),
        # It tries scales, each a backward.
        "--dtype fp16, with --method full": whole and run.execution.dtype == "fp16",
        # Its blocks would lie across parts.
        f"--optimizer {optimizer}, with --method full": whole and optimizer != "adamw",
        "an objective with a reference model, with --method full": whole
        and objective is not None
        and "reference" in objective.needs,
    }
    if faults := [name for name, holds in reasons.items() if holds]:
        raise PlanError(
            "P001",
            "the base model cannot be split among the processes",
            where="--shard",
            expected="a base without quantisation, --method lora, rslora or full, and a backend "
            "with the capability `sharding`, such as cpu",
            faults=faults,
            remedy="change these settings, or leave out --shard",
        )


def _require_validated(settings: TrainSettings, data: Datasets) -> None:
    """Refuse to wait for a better validation where there is none (C004)."""
    flags = {"--patience": settings.patience, "--load-best-at-end": settings.load_best_at_end}
    asked = next((flag for flag, value in flags.items() if value), None)
    if asked is None or not settings.data or (data.valid and settings.eval_every):
        return
    raise ConfigError(
        "C004",
        f"{asked} needs validations on the way",
        where=asked,
        found="no --eval-every" if data.valid else "no held-out rows",
        expected="held-out rows (--valid), and --eval-every N",
        remedy=f"add what is missing, or leave out {asked}",
    )


Tell = Callable[[str], None]


def with_advice(plan: RunPlan, tell: Tell) -> RunPlan:
    """The same run with what plugins advise.

    A run that goes on, or that follows a pinned plan, keeps its micro-batches and knobs.

    Args:
        tell: receives what a plugin reports while it works, such as measurements.

    Raises:
        VoxError: a plugin's error for the user. A refusal is not raised: it is in `advice`.
    """
    made = plan.execution
    plugins = providers("hooks", "vox_advise", plan.inputs.seen.plugins)
    advice = _merged([_ask(each, plan, tell) for each in plugins])
    if plan.fresh and plan.pinned is None and plan.settings.tune != "ignore":
        tokens = advice.micro_batch_tokens
        if tokens is None or fixed_micro_batch(plan.settings, made):
            tokens = made.micro_batch_tokens
        made = replace(made, micro_batch_tokens=tokens, tuning={**made.tuning, **advice.tuning})
    return replace(plan, execution=made, advice=advice)


def fixed_micro_batch(settings: TrainSettings, plan: ExecutionPlan) -> bool:
    """Whether `micro_batch_tokens` must stay: the user set them, or other micro-batches would draw
    another dropout."""
    return "micro_batch_tokens" in settings.model_fields_set or plan.contract.adapter.dropout > 0


def _merged(every: Sequence[Advice]) -> Advice:
    return Advice(
        notices=tuple(notice for each in every for notice in each.notices),
        micro_batch_tokens=next((t for each in every if (t := each.micro_batch_tokens)), None),
        tuning={name: value for each in reversed(every) for name, value in each.tuning.items()},
        refusal=next((each.refusal for each in every if each.refusal), None),
    )


def _ask(plugin: Found, plan: RunPlan, tell: Tell) -> Advice:
    try:
        hook = load_plugin(plugin).hook.vox_advise
    except BackendError as error:
        return _fault(plugin, str(error.found))
    try:
        answers = hook(plan=plan, tell=tell)
    except VoxError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything
        return _fault(plugin, f"vox_advise: {format_error(error)}")
    if len(answers) != 1 or not isinstance(answers[0], Advice):
        return _fault(plugin, f"vox_advise gave {answers!r}, expected one Advice")
    notices: Sequence[object] = answers[0].notices
    if odd := [each for each in notices if not isinstance(each, Notice)]:
        return _fault(plugin, f"notices with {odd[0]!r}, expected a Notice")
    refusal: object = answers[0].refusal
    if refusal and not isinstance(refusal, VoxError):
        return _fault(plugin, f"refusal {refusal!r}, expected a PlanError")
    tokens = answers[0].micro_batch_tokens
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        return _fault(plugin, f"micro_batch_tokens {tokens!r}, expected a number above 0")
    return answers[0]


def _fault(plugin: Found, why: str) -> Advice:
    text = f"plugin {plugin.id!r} gives no advice: {why}; see `vox plugin doctor {plugin.id}`"
    return Advice((Notice(text, "warning"),))
