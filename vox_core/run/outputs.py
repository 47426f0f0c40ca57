"""What a run leaves beside its checkpoints: adapter, manifest, tokenizer, model card.

Written at the end and at a stop; written again when a resumed run ends. Each file is replaced
whole, the adapter's own two first, so that a folder with an adapter always has one that loads, and
the manifest last: by its step a run is known to have ended, after which nothing goes on with it.
"""

from __future__ import annotations

from vox_core import files
from vox_core.adapter.peft import write_adapter
from vox_core.adapter.targets import linear_modules
from vox_core.contract import TrainState
from vox_core.digests import TOKENIZER_FILES
from vox_core.models import LocalModel
from vox_core.run import card, folder, resume
from vox_core.run.best import validations
from vox_core.run.folder import RunFolder
from vox_core.run.prepare import Prepared


def write(
    run: RunFolder, prepared: Prepared, state: TrainState, last: int, loss: float | None = None
) -> None:
    """Write all of it.

    Args:
        state: whose adapter it is.
        last: the last step that was taken.
        loss: the held-out loss of `state`, if that is not the last one measured.
    """
    plan, model = prepared.plan, prepared.model
    write_adapter(
        run.path,
        state.adapter,
        base=base_name(model),
        revision=model.revision if model.hub == model.id else None,
        modules=linear_modules(prepared.weights.tensors, model.model_type),
        dropout=plan.contract.adapter.dropout,
    )
    for name in TOKENIZER_FILES:
        if (source := model.tokenizer / name).is_file():
            files.write_bytes(run.path / name, source.read_bytes())
    before, after = held_out(run, last)
    after = after if loss is None else loss
    text = card.card(plan, model, step=state.step, before=before, after=after)
    files.write_text(run.path / folder.CARD, text)
    manifest = card.manifest(plan, model, state.step)
    about = {**manifest, "last_step": last, "backends": resume.backends(run)}
    files.write_json(run.path / folder.MANIFEST, about)


def held_out(run: RunFolder, last: int) -> tuple[float | None, float | None]:
    """The first and the last validation loss of the whole run up to step `last`, resumes included;
    of steps that were taken again, what was measured then."""
    losses = [each.loss for each in validations(run.telemetry, last)]
    return (losses[0], losses[-1]) if len(losses) > 1 else (None, None)


def base_name(model: LocalModel) -> str:
    """What an adapter's configuration says of its base."""
    # PEFT resolves this as a hub id or a path; a catalog id means nothing to it. A path into this
    # machine's cache means nothing elsewhere: it is the last resort.
    return model.hub or str(model.path.resolve())
