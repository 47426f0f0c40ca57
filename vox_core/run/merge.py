"""`vox merge`: base + adapter -> a plain Hugging Face checkpoint, proven equal.

Checks before, and the report afterwards; `merger.py` does the work. With `--quant`, the plugin that
provides the format writes the merged model in it. The output folder appears when the proof has
passed, and not before.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from vox_core import files, models
from vox_core.config import MergeSettings
from vox_core.contract import AdapterState, DType, LoadJob, Notice, Quant, WriteModelJob
from vox_core.errors import AdapterError, BackendError, StorageError
from vox_core.host import Origin, Request, choose
from vox_core.host.load import Backend
from vox_core.host.provide import write_model
from vox_core.host.seen import Seen
from vox_core.run.context import Context, Observe, ignore
from vox_core.run.dequantised_base import TrainedWeights, trained_weights
from vox_core.run.folder import CARD
from vox_core.run.hf_checkpoint import copy_bytes
from vox_core.run.merger import Merger, written_bytes
from vox_core.run.proof import Proof, distance
from vox_core.run.reference import ModelReference, resolve_reference
from vox_core.weights import Weights

MANIFEST = "vox_merge.json"


@dataclass(frozen=True, slots=True)
class Requantised:
    """What `--quant` wrote; every tensor on the disk is the merged one's quantisation.

    `distance` is that of its logits from the merged model's; None where no backend loads it.
    """

    quant: Quant
    distance: float | None


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What was written, and the proof that it is right."""

    out: Path
    base: str
    modules: int
    proof: Proof
    requantised: Requantised | None = None


def merge(
    reference: str,
    settings: MergeSettings,
    *,
    observe: Observe = ignore,
    backend_origin: Origin | None = None,
    progress: models.Progress | None = None,
) -> MergeReport:
    """Merge the adapter that `reference` names into its base.

    Raises:
        InputError: anything wrong that could be found before any work.
        ProofError: the result is not base + adapter; nothing is left of it.
        StorageError: the disk; nothing is left of it either.
    """
    out = settings.out or Path(f"{reference.rstrip('/')}-merged")
    files.require_absent(out)
    source = resolve_reference(reference, base=settings.model, progress=progress)
    if source.adapter is None:
        raise _nothing_to_merge(reference)
    if settings.quant != "none":
        write_model(WriteModelJob(source.base.path, settings.quant))  # checks, and writes nothing
    trained = trained_weights(source)
    weights = _chosen(source, trained, settings)
    _require_space(weights, trained, settings, out)
    seen = Seen()
    request = _request(source, source.adapter, settings, backend_origin)
    backend, selection = choose(request, seen=seen)
    observe(Notice(selection.why))
    with tempfile.TemporaryDirectory(prefix="vox-") as scratch, files.atomic_folder(out) as folder:
        context = Context(0, Path(scratch), observe)
        dtype = _stored(settings.dtype)
        merger = Merger(source, source.adapter, weights, trained, backend, context, dtype)
        with _plain_place(folder, settings.quant) as plain:
            proof = merger.run(plain)
            requantised = _requantised(source, settings.quant, plain, folder, merger, context, seen)
        _describe(folder, source, settings, proof, requantised)
    return MergeReport(out, source.base.id, len(source.adapter.modules), proof, requantised)


def _request(
    source: ModelReference, adapter: AdapterState, settings: MergeSettings, origin: Origin | None
) -> Request:
    return Request(
        operation="merge",
        method=adapter.method,
        model_type=source.base.model_type,
        explicit=settings.backend,
        explicit_origin=(origin or "--backend") if settings.backend else None,
        streamed=True,
    )


def _chosen(source: ModelReference, trained: Weights, settings: MergeSettings) -> Weights:
    """What the adapter is added to."""
    if settings.onto == "base":
        return source.weights
    if isinstance(trained, TrainedWeights) and settings.dtype == "auto":
        return trained.rounded()
    # A dtype that was asked for is rounded to once, after the adapter was added.
    return trained


@contextmanager
def _plain_place(folder: Path, quant: Quant) -> Iterator[Path]:
    """Where the plain merged model goes: into `folder`, or beside it until it is quantised."""
    if quant == "none":
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=files.TEMPORARY_PREFIX, dir=folder.parent) as plain:
        yield Path(plain)


def _requantised(
    source: ModelReference,
    quant: Quant,
    plain: Path,
    folder: Path,
    merger: Merger,
    context: Context,
    seen: Seen,
) -> Requantised | None:
    if quant == "none":
        return None
    context.emit(Notice(f"quantising the merged model to {quant}"))
    write_model(WriteModelJob(plain, quant, folder))
    backend = _reader(source, quant, seen)
    if backend is None:
        return Requantised(quant, None)
    job = LoadJob(model=folder, dtype="fp32", quant=quant)
    return Requantised(quant, distance(merger.logits_of(backend, job), merger.logits(plain)))


def _reader(source: ModelReference, quant: Quant, seen: Seen) -> Backend | None:
    """An installed backend that loads this quantisation."""
    request = Request(operation="load", quant=quant, model_type=source.base.model_type)
    try:
        return choose(request, seen=seen)[0]
    except BackendError:
        return None


def _describe(
    folder: Path,
    source: ModelReference,
    settings: MergeSettings,
    proof: Proof,
    requantised: Requantised | None,
) -> None:
    """The model card and the record of the merge, beside the weights."""
    files.write_text(folder / CARD, _card(source.base))
    record = {
        "base": source.manifest.get("base"),
        "onto": settings.onto,
        "proof": asdict(proof),
        "requantised": asdict(requantised) if requantised else None,
    }
    files.write_json(folder / MANIFEST, record)


def _card(base: models.LocalModel) -> str:
    """A model card with the base's licence, which on the hub stands in the card alone."""
    licence = f"license: {base.licence.lower()}\n" if base.licence else ""
    return (
        f"---\nbase_model: {base.hub or base.id}\n{licence}"
        "pipeline_tag: text-generation\ntags: [vox]\n---\n\n"
        f"# {base.id}, fine-tuned\n\nAn adapter merged into {base.id} by vox. `{MANIFEST}` says "
        "how far the logits are\nfrom base + adapter, and how much of the adapter survives.\n"
    )


def _stored(choice: str) -> DType | None:
    kinds: dict[str, DType] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    return kinds.get(choice)


def space_needed(
    weights: Weights, trained: Weights, dtype: DType | None = None, quant: Quant = "none"
) -> int:
    """Bytes for the result, and for what lies beside it at one time: a plain copy that the proof
    computes with, or else the quantised model, which is smaller than the plain one.

    Args:
        weights: what the adapter is added to; `trained`: what it was trained on.
        dtype: what is stored; None keeps each tensor's own.
        quant: what the result is quantised to.
    """
    merged = written_bytes(weights, dtype)
    copies = [copy_bytes(each) for each in (weights, trained)]
    return merged + max([*copies, merged if quant != "none" else 0])


def _require_space(weights: Weights, trained: Weights, settings: MergeSettings, out: Path) -> None:
    needed = space_needed(weights, trained, _stored(settings.dtype), settings.quant)
    parent = next(p for p in out.absolute().parents if p.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise StorageError(
            "S001",
            "there is not enough room for the merged model",
            where=parent,
            found=f"{free / 1e6:,.0f} MB free",
            expected=f"{needed / 1e6:,.0f} MB",
            remedy="free space on that disk, or choose another one with --out",
        )


def _nothing_to_merge(reference: str) -> AdapterError:
    return AdapterError(
        "A001",
        "there is no adapter to merge",
        where=reference,
        found="a base model",
        expected="a run folder of `vox train`, or a folder saved by PEFT",
        remedy="vox merge RUN",
    )
