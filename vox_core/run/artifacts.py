"""Write a run's results: adapter or model, manifest, tokenizer, model card, report.

Written at the end and at a stop; written again when a resumed run ends. Each file is replaced
whole, the adapter's own two first, so that a folder with an adapter always has one that loads, and
the manifest last: its step marks a run that has ended, after which nothing goes on with it.
A probe of another adapter is removed before.

    vox_adapter.json    for programs
    probe.json          what the adapter computes, for those who load it
    README.md           for people: the model card
    model/              with the method `full`: a plain checkpoint, instead of adapter and tokenizer
"""

from __future__ import annotations

import platform
import tempfile
import uuid
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from vox_core import files
from vox_core.adapter.peft import write_adapter
from vox_core.adapter.targets import linear_modules, tied_head
from vox_core.contract import ExecutionPlan, FineTuneContract, Optimizer, RunEnd, TrainState
from vox_core.digests import CONFIG_FILE, TOKENIZER_FILES
from vox_core.errors import InputError, StorageError, command
from vox_core.models import LocalModel
from vox_core.run import checkpoint
from vox_core.run.controller import has_learned
from vox_core.run.folder import CARD, MANIFEST, MODEL, PROBE
from vox_core.run.hf_checkpoint import (
    Tensors,
    as_stored,
    copy_tokenizer,
    declare_dtype,
    write_checkpoint,
)
from vox_core.run.load_proof import take_probe
from vox_core.run.plan import data_size, has_tied_head
from vox_core.run.resume import last_step
from vox_core.text import losses
from vox_core.weights import numpy_dtype

if TYPE_CHECKING:
    from vox_core.host.load import Backend
    from vox_core.run.inputs import RunInputs
    from vox_core.run.loop import Trained
    from vox_core.run.progress import Progress
    from vox_core.run.run_plan import RunPlan
    from vox_core.run.session import Session

_OPTIMIZERS: dict[Optimizer, str] = {"adamw": "AdamW", "adamw-8bit": "AdamW with moments in 8 bits"}
PROBED = "result"
"""Name of the written adapter in a trainer, if it is not that of the last step."""
_OF_THE_CORE = ("vox-ml", "numpy", "transformers", "tokenizers")


@dataclass(frozen=True, slots=True)
class TrainReport:
    """Result of a run. Losses are None where nothing was measured.

    Args:
        seconds: from the start of planning to the last write.
        startup_seconds: from the start of planning to the end of the first step.
        best_step, best_loss: the best validation after a step.
        rewarded: losses of validations are negative mean rewards.
        adapter_step: the step whose adapter, or model, was written.
        model: the checkpoint, with the method `full`.
        rows: of one epoch.
        epochs: passes over them; None where --max-steps has set the length.
        lr: peak learning rate.
        learned: False if the gradient was zero in every step.
        warnings: those of this command, in order.
    """

    run: Path
    stopped: bool
    steps: int
    total_steps: int
    seconds: float
    startup_seconds: float | None = None
    loss: float | None = None
    valid_before: float | None = None
    valid_after: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    rewarded: bool = False
    adapter_step: int | None = None
    model: Path | None = None
    rows: int | None = None
    epochs: float | None = None
    lr: float | None = None
    objective: str = "sft"
    learned: bool = True
    warnings: tuple[str, ...] = ()


def write_artifacts(session: Session, result: Trained) -> TrainReport:
    """Write all of it, and end the run."""
    plan, last = session.plan, result.state.step
    state, notices = session.controller.at_end(result.state, stopped=result.stopped)
    for notice in notices:
        session.emit(notice)
    report = report_of(session, result, state.step)
    made, model, run = plan.execution, plan.inputs.model, plan.run.path
    measured = report.best_loss if state.step == session.progress.best_step else report.valid_after
    about = card(plan, state.step, report.valid_before, measured)
    if state.adapter.method == "full":
        with files.atomic_folder(run / MODEL, replace=True) as folder:
            _write_model(folder, plan.inputs, made, state)
            files.write_text(folder / CARD, about)
    else:
        (run / PROBE).unlink(missing_ok=True)
        _write_adapter(run, plan.inputs, made, state)
        _write_tokenizer(run, model)
        _write_probe(session, result, state)
    files.write_text(run / CARD, about)
    used = checkpoint.origin(plan.run.checkpoints, last).backends
    steps = {"last_step": last, "backends": [each.model_dump() for each in used]}
    files.write_json(run / MANIFEST, {**manifest(plan.inputs, made, state.step), **steps})
    session.emit(RunEnd(last, "stopped" if report.stopped else "done", session.elapsed()))
    # The model of the method `full` is there only now.
    return replace(
        report,
        seconds=session.elapsed(),
        model=plan.run.model,
        learned=has_learned(result.state),
        warnings=tuple(session.warnings),
    )


def report_of(session: Session, result: Trained, adapter_step: int | None = None) -> TrainReport:
    """Return what a run has come to, before its results are written.

    Args:
        adapter_step: the step whose adapter, or model, will be.
    """
    plan, progress = session.plan, session.progress
    return replace(
        _report(plan, progress, result.state.step),
        stopped=result.stopped and not progress.exhausted,
        seconds=session.elapsed(),
        startup_seconds=session.metrics.startup_seconds,
        loss=progress.losses[-1] if progress.losses else None,
        best_step=progress.best_step,
        best_loss=None if progress.best_step is None else progress.best_loss,
        adapter_step=adapter_step,
        rows=plan.contract.data.rows,
        epochs=None if plan.settings.max_steps else plan.settings.epochs,
        lr=plan.contract.optimizer.lr,
    )


def _write_probe(session: Session, result: Trained, state: TrainState) -> None:
    plan, name = session.plan, result.learner
    if state is not result.state:  # the best step's, read from a checkpoint
        name = PROBED
        result.trainer.add_adapter(PROBED, state.adapter)
    rows = (document.tokens_T.tolist() for document in plan.data.valid or plan.data.train)
    if probe := take_probe(result.trainer, name, state.adapter, rows, plan.execution):
        files.write_json(plan.run.path / PROBE, probe.model_dump(mode="json"))


def report_of_ended(plan: RunPlan) -> TrainReport:
    """Of a run that had finished before this command."""
    last = last_step(plan.run)
    assert plan.previous is not None
    return replace(_report(plan, plan.previous.progress_at(last), last), model=plan.run.model)


def _report(plan: RunPlan, progress: Progress, steps: int) -> TrainReport:
    before, after = progress.first_and_last
    return TrainReport(
        run=plan.run.path,
        stopped=False,
        steps=steps,
        total_steps=plan.contract.total_steps,
        seconds=0.0,
        valid_before=before,
        valid_after=after,
        rewarded=bool(plan.contract.rollouts.rewards),
        objective=plan.contract.objective.name,
    )


def emergency_save(error: StorageError, plan: RunPlan, state: TrainState) -> StorageError:
    """Write the adapter or model of a run whose last checkpoint cannot be written, in the first
    folder that takes it: hours of training are in it, and it is a third of a checkpoint.

    Returns:
        `error`, with the place, or that there is none.
    """
    kind = "model" if state.adapter.method == "full" else "adapter"
    name = f"vox-{kind}-{plan.run.path.resolve().name}-{uuid.uuid4().hex[:8]}"
    fault = f"the {kind} after step {state.step} could be kept nowhere"
    for parent in (plan.run.path, Path(tempfile.gettempdir()), Path.cwd()):
        try:
            with files.atomic_folder(parent / name) as folder:
                if kind == "model":
                    _write_model(folder, plan.inputs, plan.execution, state)
                else:  # no manifest names the base
                    _write_adapter(folder, plan.inputs, plan.execution, state, by_path=True)
        except (StorageError, InputError):
            continue
        fault = f"the {kind} after step {state.step} is kept in {parent / name}"
        break
    resume = command("vox", "train", "--resume", plan.run.path)
    remedy = f"see that the disk works and has space, and go on with {resume}"
    return error.but(faults=[*error.faults, fault], remedy=remedy)


def write_adapter_folder(
    folder: Path, inputs: RunInputs, plan: ExecutionPlan, state: TrainState
) -> None:
    """Write adapter, tokenizer and manifest, for an adapter without a run."""
    _write_adapter(folder, inputs, plan, state)
    _write_tokenizer(folder, inputs.model)
    files.write_json(folder / MANIFEST, manifest(inputs, plan, state.step))


def _write_tokenizer(folder: Path, model: LocalModel) -> None:
    for name in TOKENIZER_FILES:
        if (source := model.tokenizer / name).is_file():
            files.write_bytes(folder / name, source.read_bytes())


def _write_adapter(
    folder: Path,
    inputs: RunInputs,
    plan: ExecutionPlan,
    state: TrainState,
    *,
    by_path: bool = False,
) -> None:
    model = inputs.model
    write_adapter(
        folder,
        state.adapter,
        base=str(model.path) if by_path else base_name(model),
        revision=model.revision if model.hub == model.id and not by_path else None,
        modules=linear_modules(inputs.weights.tensors, model.model_type),
        dropout=plan.contract.adapter.dropout,
    )


def _write_model(folder: Path, inputs: RunInputs, plan: ExecutionPlan, state: TrainState) -> None:
    """Write a plain checkpoint in the dtype that the run computed in, tensor by tensor, in the
    base's shards."""
    weights = as_stored(inputs.weights, plan.dtype)
    parameters = {tensor: name for name, tensor in plan.saved.items()}
    if has_tied_head(inputs.config):  # which some files store twice
        pairs = tied_head(weights.tensors, inputs.model.model_type).items()
        parameters |= {head: parameters[token] for head, token in pairs if token in parameters}

    def tensors(names: list[str]) -> Tensors:
        for name in names:
            if name in parameters:
                dtype = numpy_dtype(weights.tensors[name].dtype)
                yield name, state.adapter.saved[parameters[name]].astype(dtype, copy=False)
            else:
                yield name, weights.read(name)

    write_checkpoint(folder, weights, tensors)
    copy_tokenizer(inputs.model.templated, folder)
    declare_dtype(folder / CONFIG_FILE, plan.dtype)


def base_name(model: LocalModel) -> str:
    """Return the base model's name for an adapter's configuration."""
    # PEFT resolves this as a hub id or a path; a catalog id means nothing to it. A path into this
    # machine's cache means nothing elsewhere: it is the last resort.
    return model.hub or str(model.path.resolve())


def manifest(inputs: RunInputs, plan: ExecutionPlan, step: int) -> dict[str, Any]:
    """`vox_adapter.json`: the adapter, its base model, its data and the software that made it."""
    contract, model = plan.contract, inputs.model
    return {
        "format": "vox-adapter/1",
        "contract": contract.digest,
        "step": step,
        "quant": contract.quant,
        "base": {
            "id": model.id,
            "hub": model.hub,
            "path": str(model.path.resolve()),
            "revision": model.revision,
            "model_type": model.model_type,
            "weights_digest": contract.model.weights_digest,
            "tokenizer_digest": contract.model.tokenizer_digest,
            "licence": model.licence,
        },
        "data": {"digest": contract.data.digest, "valid_digest": contract.data.valid_digest},
        "backend": {"id": plan.backend, "version": plan.backend_version, "dtype": plan.dtype},
        "versions": versions(inputs.backend),
    }


def versions(backend: Backend) -> dict[str, str]:
    """Python and the installed distributions that can change a result: the core's libraries, the
    backend, and what its manifest requires."""
    found, plugin = {"python": platform.python_version()}, backend.found
    required = (Requirement(each).name for each in backend.manifest.requires.distributions)
    for name in dict.fromkeys((*_OF_THE_CORE, plugin.distribution, *required)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def card(run: RunPlan, step: int, before: float | None, after: float | None) -> str:
    """The model card, with the metadata block that the Hugging Face hub reads."""
    plan, model, teacher = run.execution, run.inputs.model, run.settings.teacher
    contract, adapter, optimizer = plan.contract, plan.contract.adapter, plan.contract.optimizer
    whole, rewarded = adapter.method == "full", bool(contract.rollouts.rewards)
    kind = f"rank {adapter.rank}, alpha {adapter.alpha:g}, {len(plan.modules)} modules, "
    validated = losses(before, after, rewarded=rewarded)
    rows = {
        "base model": f"{model.id} ({model.model_type})",
        "objective": _objective(contract),
        **({"teacher": teacher} if teacher else {}),
        "method": f"{adapter.method}, {'' if whole else kind}{run.trained_elements:,} parameters",
        "data": data_size(contract),
        "steps": f"{step} of {contract.total_steps}, batch size {contract.batch_size}",
        "optimizer": f"{_OPTIMIZERS[optimizer.name]}, "
        f"peak rate {optimizer.lr:g}, {optimizer.schedule}",
        "seed": str(contract.seed),
        "backend": f"{plan.backend} {plan.backend_version}, {plan.dtype}",
        "quantisation of the base": contract.quant,
        f"validation {'reward' if rewarded else 'loss'}": validated or "not measured",
        "contract": f"`{contract.digest}`",
    }
    weights = model.converted and _CONVERTED.format(model=model, sha256=(model.revision or "")[:12])
    # The weights that were trained on, where the base was quantised.
    onto = "" if contract.quant == "none" else " --onto trained-base"
    library, tags = ("transformers", ["vox"]) if whole else ("peft", ["lora", "vox"])
    return _CARD.format(
        head=model.card_head(model.hub or model.id, library_name=library, tags=tags),
        title=f"{model.id}, fine-tuned" if whole else f"Adapter for {model.id}",
        table="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        use=_USE_MODEL if whole else _USE_ADAPTER.format(onto=onto, weights=weights or ""),
    )


def _objective(contract: FineTuneContract) -> str:
    spec, rollouts = contract.objective, contract.rollouts
    parts = [spec.name, *(f"{name}={value}" for name, value in sorted(spec.options.items()))]
    parts += [f"reward {each.rpartition(' ')[0] or each}" for each in rollouts.rewards]
    if rollouts.answers:
        parts.append(
            f"{rollouts.answers} answers to a prompt, up to {rollouts.tokens} tokens, "
            f"temperature {rollouts.temperature:g}"
        )
    return ", ".join(parts)


_CARD = """\
{head}
# {title}

Trained with vox.

| | |
|---|---|
{table}

## Use it

{use}"""

_USE_ADAPTER = """\
    vox chat .
    vox merge .{onto}

or with PEFT:

    from peft import AutoPeftModelForCausalLM
    model = AutoPeftModelForCausalLM.from_pretrained(".")
{weights}
`vox_adapter.json` holds the digests of base model and data. `plan.json` holds every setting.
"""

_USE_MODEL = """\
    vox chat RUN

or with transformers, from the run's folder `model`:

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("RUN/model")
"""

_CONVERTED = """
The adapter was trained on the weights of `{model.id}` in vox's catalog (SHA-256 {sha256}…),
a quantised conversion of {model.hub}, whose own weights differ. vox loads the
weights of the catalog, `AutoPeftModel` those of the hub. `vox model pull {model.id}` names the
folder of the weights to give to PEFT.
"""
