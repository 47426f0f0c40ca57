"""Everything that is looked at before a run: data, model, contract, backend, plan.

Cheap things first, so that a typing error in a data file is told before a model is downloaded.
Nothing is written here, except what the caches of models and tokens keep.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core import bounded_json, models
from vox_core.adapter.targets import linear_modules, select_targets
from vox_core.config import TrainSettings
from vox_core.contract import ExecutionPlan, Notice, Packing, Quant
from vox_core.data.audit import Audit, require_sound
from vox_core.data.checked import unused_fields
from vox_core.data.chosen import Chosen
from vox_core.data.dataset import Dataset
from vox_core.data.dataset_cache import open_dataset
from vox_core.data.largest import assumed_dataset
from vox_core.data.row_report import Report, Side
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import StorageError
from vox_core.host import Origin, Request, Selection, choose
from vox_core.host.load import Backend
from vox_core.host.seen import Seen
from vox_core.memory import read_architecture
from vox_core.run import plan
from vox_core.run.audited import audits_of
from vox_core.run.backend import choose_for
from vox_core.run.order import in_order
from vox_core.run.rows import chosen_rows
from vox_core.run.sanity import rate_warning
from vox_core.run.sources import (
    Fetching,
    SourceFile,
    Sources,
    data_files,
    model_files,
    resolve_model,
)
from vox_core.weights import Weights, open_weights

if TYPE_CHECKING:
    from vox_core.run.tuning.answers import Answer


_FINDINGS = {"nothing to train", "nothing to train within seq_len", "mid-turn"}
"""Told by the audit, with the rows."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a run needs, checked.

    Args:
        audits: what was found of the masks; by training and validation.
        tuned: what of the plan was chosen by measuring.
        rows: what became of the rows of the data files; None where all of them are used, and
            nothing was looked for.
        seen: the machine, as it was when the backend was chosen.
    """

    model: models.LocalModel
    weights: Weights
    train: Dataset
    valid: Dataset | None
    backend: Backend
    selection: Selection
    plan: ExecutionPlan
    unused: Mapping[str, int]
    config: Mapping[str, Any]
    sources: Sources
    audits: Mapping[str, Audit] = field(default_factory=dict)
    tuned: Answer | None = None
    rows: Report | None = None
    seen: Seen | None = None

    def left_out(self, side: Side) -> dict[str, int]:
        """Reason -> rows that the policy of the data left out."""
        return self.rows.left_out(side) if self.rows else {}

    def notices(self) -> Iterator[Notice]:
        """What a person should know of the data before the run."""
        contract = self.plan.contract
        yield Notice(
            f"{_count(contract.data.rows, 'document')}, {contract.data.tokens:,} tokens, "
            f"{contract.data.trained_tokens:,} of them trained; "
            f"{_count(contract.total_steps, 'step')}"
        )
        if wrong := rate_warning(contract.optimizer.lr):
            yield wrong
        for text in self.rows.told() if self.rows else ():
            yield Notice(text)
        for text in self.model.notes:
            yield Notice(text, "warning")
        for text in self.rows.warnings() if self.rows else ():
            yield Notice(text, "warning")
        if self.tuned:
            yield Notice(f"{self.tuned}, which was measured to be the fastest here")
        for name, count in self.unused.items():
            yield Notice(f'the field "{name}" of {_rows(count)} is not used', "warning")
        for note in dict.fromkeys(
            note for data in (self.train, self.valid) if data for note in data.notes
        ):
            yield Notice(note, "warning")
        yield from self._of_rows()

    def _of_rows(self) -> Iterator[Notice]:
        """What became of rows, and what the audit warns of."""
        for what, dataset in (("training", self.train), ("validation", self.valid)):
            for reason, count in (dataset.dropped if dataset else {}).items():
                if reason not in _FINDINGS:
                    yield Notice(f"{_rows(count, what)} dropped: {reason}", "warning")
            for how, count in (dataset.truncated if dataset else {}).items():
                if how in _FINDINGS:
                    continue
                longer = f"longer than {self.plan.contract.seq_len} tokens"
                yield Notice(f"{_rows(count, what)} {longer}: {how}", "warning")
        for what, found in self.audits.items():
            for finding in found.of_level("warning"):
                yield Notice(f"{what}: {finding}", "warning")


def _rows(count: int, what: str = "") -> str:
    return _count(count, f"{what} row".strip())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def prepare(
    settings: TrainSettings,
    origin: Origin | None,
    resumed_from: str | None,
    progress: models.Progress | None,
    *,
    only_planned: bool = False,
    hashed: bool = True,
) -> Prepared:
    """Look at everything.

    Args:
        resumed_from: id of the backend of the run that is resumed.
        only_planned: nothing will be trained: where there is no data a step of whole documents is
            assumed.
        hashed: without it the model is not, and the contract's digest means nothing.

    Raises:
        InputError: the first thing that is wrong.
    """
    assumed = only_planned and not settings.data
    rows = Chosen([], []) if assumed else chosen_rows(settings)
    train_files, valid_files = rows.train, rows.valid
    # Once before a model is fetched, so that a missing backend is told in a second.
    seen, fetching = Seen(), Fetching(progress)
    choose(_request(settings, None, origin, resumed_from, settings.quant), seen=seen)
    model = resolve_model(
        settings.model,
        revision=settings.revision,
        template=settings.template,
        progress=fetching,
    )
    if fetching.happened:  # which may have taken an hour: other memory is free by now
        seen = Seen()
    weights = open_weights(model.path)
    quant = plan.settled_quant(settings.quant, weights.quant)
    request = _request(settings, model.model_type, origin, resumed_from, quant)
    backend, selection = choose_for(request, weights, seen)
    select_targets(linear_modules(weights.tensors, model.model_type), settings.targets)
    config = bounded_json.read(model.path / "config.json")
    seq_len = plan.sequence_length(settings, config)
    load = cache(lambda: load_tokenizer(model.tokenizer))
    train = (
        assumed_dataset(settings.batch_size, seq_len)
        if assumed
        else open_dataset(train_files, model.tokenizer, load, seq_len)
    )
    train = in_order(train, settings)
    valid = open_dataset(valid_files, model.tokenizer, load, seq_len) if valid_files else None
    audits = {} if assumed else audits_of(config, (train, train_files), (valid, valid_files))
    require_sound(audits)
    identity = models.identity(model) if hashed else models.unhashed(model)
    contract = plan.make_contract(settings, identity, train, valid, seq_len, quant)
    made = plan.make_plan(
        contract,
        settings,
        selection,
        weights.tensors,
        config,
        weights.quantised,
        longest=_longest(train, valid),
        packing=_packing(backend, weights, config),
    )
    unused = unused_fields([*train_files, *valid_files])
    read_from: dict[str, list[SourceFile]] = {
        "data": data_files(train_files),
        "valid": data_files(valid_files),
        **(model_files(model.path, weights.files, model.tokenizer) if hashed else {}),
    }
    return Prepared(
        model,
        weights,
        train,
        valid,
        backend,
        selection,
        made,
        unused,
        config,
        read_from,
        audits,
        rows=rows.report,
        seen=seen,
    )


def require_space(made: ExecutionPlan, settings: TrainSettings, folder: Path) -> None:
    """Refuse a run whose results would not fit on the disk.

    Raises:
        StorageError: S001.
    """
    needed, (parent, free) = space_needed(made, settings), space_free(folder)
    if free < needed:
        raise StorageError(
            "S001",
            "there is not enough room for the run",
            where=parent,
            found=f"{free / 1e6:,.0f} MB free",
            expected=f"{needed / 1e6:,.0f} MB for the adapter and its checkpoints",
            remedy="free space on that disk, or choose another one with --out",
        )


def space_needed(made: ExecutionPlan, settings: TrainSettings) -> int:
    """Bytes: adapter and two moments in each checkpoint, one more while the newest is written, and
    the adapter. Where there is validation, the best step has one of its own."""
    kept = settings.keep + (made.contract.data.valid_digest is not None)
    if settings.keep_every:
        apart = math.lcm(settings.keep_every, settings.save_every or 1)
        kept += made.contract.total_steps // apart
    return 4 * made.trainable_parameters * (3 * (kept + 1) + 1)


def space_free(folder: Path) -> tuple[Path, int]:
    """The nearest folder above that is there, and the bytes that are free on its disk."""
    parent = next(p for p in folder.absolute().parents if p.exists())
    return parent, shutil.disk_usage(parent).free


def preflight(prepared: Prepared) -> dict[str, Any]:
    """`preflight.json`: what was found before the run, and how the backend was chosen."""
    return {
        "selection": prepared.selection.to_json(),
        "data": account(prepared.train, prepared.left_out("train")),
        "valid": account(prepared.valid, prepared.left_out("valid")) if prepared.valid else None,
        "rows": prepared.rows.to_json() if prepared.rows else None,
        "audit": {what: found.to_json() for what, found in prepared.audits.items()},
    }


def _packing(backend: Backend, weights: Weights, config: Mapping[str, Any]) -> Packing:
    """End to end, unless the backend pads, as it does for a model that passes on a state."""
    manifest = backend.found.manifest
    pads = manifest is None or manifest.memory.padded_rows
    if pads or read_architecture(weights.tensors, config, weights.quantised).state is not None:
        return "rows"
    return "end-to-end"


def _longest(*datasets: Dataset | None) -> int:
    return max(data.longest for data in datasets if data)


def account(dataset: Dataset, left_out: Mapping[str, int]) -> dict[str, Any]:
    """What became of the rows.

    Args:
        left_out: reason -> rows that the policy of the data left out; none of the others below.
    """
    return {
        "rows": dataset.rows,
        "left_out": dict(left_out),
        "documents": len(dataset.documents),
        "tokens": dataset.tokens,
        "trained_tokens": dataset.trained_tokens,
        "dropped": dict(dataset.dropped),
        "truncated": dict(dataset.truncated),
    }


def _request(
    settings: TrainSettings,
    model_type: str | None,
    origin: Origin | None,
    resumed_from: str | None,
    quant: Quant,
) -> Request:
    return Request(
        operation="train",
        quant=quant,
        dtype=None if settings.dtype == "auto" else settings.dtype,
        method=settings.method,
        optimizer=settings.optimizer,
        model_type=model_type,
        explicit=settings.backend,
        explicit_origin=(origin or "--backend") if settings.backend else None,
        resumed_from=resumed_from,
        allow_cpu=settings.allow_cpu,
    )
