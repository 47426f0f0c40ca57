"""`vox merge`: base + adapter -> a plain Hugging Face checkpoint, proven equal.

Shard by shard and tensor by tensor: names, shards and dtypes are the base's; tensors that the
adapter does not touch are copied. The backend computes the changed ones, and each is checked
against base + update before it is written. With `--quant`, the plugin that provides the format
writes the merged model in it. The output folder appears when the proof has passed, and not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core import files, models
from vox_core.config import MergeSettings
from vox_core.contract import (
    AdapterState,
    DType,
    Floats,
    LoadJob,
    MergeJob,
    MergeTarget,
    ModuleShape,
    Notice,
    Quant,
    WriteModelJob,
)
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import AdapterError, BackendError, ModelError, PluginError
from vox_core.host import Request, choose
from vox_core.host.load import Backend, Context, Observe, ignore, write_model
from vox_core.host.select import Seen
from vox_core.run.folder import CARD, RunFolder, run_meant
from vox_core.run.hf_checkpoint import (
    as_stored,
    copy_tokenizer,
    declare_dtype,
    plain_copy,
    trained_weights,
    write_checkpoint,
)
from vox_core.run.proof import (
    ROUNDOFF,
    Proof,
    distance,
    probe_logits,
    probe_tokens,
    prove,
    require_merged,
)
from vox_core.run.reference import (
    ModelReference,
    adapter_path,
    promoted,
    resolve_reference,
)
from vox_core.weights import WeightFolder, Weights

if TYPE_CHECKING:
    from numpy.typing import NDArray


MERGED = "vox_merge.json"


@dataclass(frozen=True, slots=True)
class Requantised:
    """Result of `--quant`; each tensor on disk is the quantised merged tensor.

    `distance` is that of its logits from the merged model's; None where no backend loads it.
    """

    quant: Quant
    distance: float | None


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Result of a merge, with its verification."""

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
    progress: models.Progress | None = None,
) -> MergeReport:
    """Merge the adapter that `reference` names into its base.

    Raises:
        InputError: anything wrong that could be found before any work.
        ProofError: the result is not base + adapter; nothing is left of it.
        StorageError: the disk; nothing is left of it either.
    """
    out = settings.out or files.default_out(reference, "merged")
    files.require_absent(out)
    folder = adapter_path(reference, progress)
    if not folder.exists() and not promoted(reference):  # else it would be fetched as a model
        raise _nothing_to_merge(reference, "no such folder")
    source = resolve_reference(str(folder), base=settings.model, progress=progress)
    if source.adapter is None:
        if model := RunFolder(Path(reference)).model:
            raise _merged_already(reference, model)
        raise _nothing_to_merge(reference, "a base model")
    if settings.quant != "none":
        write_model(WriteModelJob(source.base.path, settings.quant))  # checks, and writes nothing
    trained, dtype = trained_weights(source), None if settings.dtype == "auto" else settings.dtype
    onto = _onto(source, trained, settings)
    files.require_space(out, space_needed(onto, trained, dtype, settings.quant), "the merged model")
    request = Request(
        operation="merge",
        method=source.adapter.method,
        model_type=source.base.model_type,
        explicit=settings.backend,
        streamed=True,
    )
    seen = Seen()
    backend, selection = choose(request, seen=seen)
    observe(Notice(selection.why))
    with files.atomic_folder(out) as folder, ExitStack() as stack:
        merger = _Merger(source, source.adapter, onto, trained, backend, Context(observe), dtype)
        quantised = settings.quant != "none"
        plain = stack.enter_context(files.folder_beside(folder)) if quantised else folder
        proof = merger.run(plain)
        requantised = merger.requantise(plain, folder, settings.quant, seen) if quantised else None
        files.write_text(folder / CARD, _card(source.base))
        record = {
            "base": source.manifest.get("base"),
            "onto": settings.onto,
            "proof": asdict(proof),
            "requantised": asdict(requantised) if requantised else None,
        }
        files.write_json(folder / MERGED, record)
    return MergeReport(out, source.base.id, len(source.adapter.modules), proof, requantised)


def _onto(source: ModelReference, trained: Weights, settings: MergeSettings) -> Weights:
    """Return the weights that the adapter is added to."""
    if settings.onto == "base":
        return source.weights
    if settings.dtype != "auto":  # rounded to that once, after the adapter was added
        return trained
    rounded = trained_weights(source, exact=False)
    return trained if rounded.tensors == trained.tensors else rounded


@dataclass
class _Merger:
    """Merges tensor by tensor into a temporary folder.

    Args:
        onto: what the adapter is added to: the base's own weights, or `trained`.
        trained: what it was trained on.
        dtype: what to store; None keeps each tensor's own.
    """

    source: ModelReference
    adapter: AdapterState
    onto: Weights
    trained: Weights
    backend: Backend
    context: Context
    dtype: DType | None

    def __post_init__(self) -> None:
        self.stored = as_stored(self.onto, self.dtype)
        self.targets = {each.shape.tensor: each for each in _targets(self.source, self.adapter)}
        self.context.emit(Notice("loading the tokenizer …"))
        self.probe_T = probe_tokens(load_tokenizer(self.source.base.path))

    def run(self, folder: Path) -> Proof:
        """Write the merged checkpoint into `folder`, and prove it."""
        base, emit = self.source.base, self.context.emit
        emit(Notice(f"merging {len(self.targets)} tensors into {base.id}"))
        try:
            write_checkpoint(folder, self.stored, self._tensors)
        except ValueError as error:
            raise PluginError(
                "X001",
                "a plugin gave other tensors than it was asked for",
                where=f"vox_merge of backend {self.backend.id}",
                found=error,
                remedy="merge with another backend, with --backend, and report this to its authors",
            ) from error
        copy_tokenizer(base.templated, folder)
        if self.dtype:
            declare_dtype(folder / "config.json", self.dtype)
        emit(Notice("verifying the merged model against base + adapter"))
        return self._prove(folder)

    def requantise(self, plain: Path, folder: Path, quant: Quant, seen: Seen) -> Requantised:
        """Write the merged checkpoint `plain` quantised into `folder`."""
        self.context.emit(Notice(f"quantising the merged model to {quant}"))
        write_model(WriteModelJob(plain, quant, folder))
        request = Request(operation="load", quant=quant, model_type=self.source.base.model_type)
        try:
            backend = choose(request, seen=seen)[0]
        except BackendError:
            return Requantised(quant, None)
        job = LoadJob(model=folder, dtype="fp32", quant=quant)
        found_TV = probe_logits(backend, job, self.context, self.probe_T)
        return Requantised(quant, distance(found_TV, self._logits(plain)))

    def _tensors(self, names: list[str]) -> Iterator[tuple[str, NDArray[Any]]]:
        """Each tensor of a shard in its turn: merged if the adapter touches it, else the base's."""
        changed = tuple(self.targets[name] for name in names if name in self.targets)
        job = MergeJob(self.adapter, changed, self.onto.read, self.dtype)
        merged = self.backend.merge(job, self.context).tensors
        for name in names:
            if name not in self.targets:
                yield name, self.stored.read(name)
                continue
            if (found := next(merged, None)) is None:
                raise ValueError(f"vox_merge ends before {name}")
            given, tensor = found
            if given in self.targets:  # else `write_safetensors` says which one was due
                W, dtype = self.onto.read(given), self.stored.tensors[given].dtype
                require_merged(tensor, W, self.adapter, self.targets[given], dtype)
            yield given, tensor

    def _prove(self, folder: Path) -> Proof:
        dtypes = {self.stored.tensors[name].dtype for name in self.targets}
        merged_TV = self._logits(folder)
        with plain_copy(self.onto, folder) as base:
            proof = prove(
                self._logits(base),
                self._logits(base, self.adapter),
                merged_TV,
                dtype=max(dtypes, key=ROUNDOFF.__getitem__),
                layers=len(self.source.modules),
            )
        if self.source.quant == "none":
            return proof
        if self.trained is self.onto:
            return replace(proof, from_trained=proof.relative)
        with plain_copy(self.trained, folder) as base:
            apart = distance(merged_TV, self._logits(base, self.adapter))
        return replace(proof, from_trained=apart)

    def _logits(self, folder: Path, adapter: AdapterState | None = None) -> Floats:
        """float32 logits (T, V) of a plain folder on the text of the proof."""
        job = LoadJob(model=folder, dtype="fp32", streamed=True)
        return probe_logits(self.backend, job, self.context, self.probe_T, adapter)


def _targets(source: ModelReference, adapter: AdapterState) -> list[MergeTarget]:
    targets = [MergeTarget(path, source.modules[path]) for path in adapter.modules]
    for name, value in adapter.saved.items():
        shape = ModuleShape(source.parameters[name], value.shape[0], value.shape[-1])
        targets.append(MergeTarget(name, shape))
    dtypes = {t.shape.tensor: source.weights.tensors[t.shape.tensor].dtype for t in targets}
    if faults := [f"{name}: {dtype}" for name, dtype in dtypes.items() if dtype not in ROUNDOFF]:
        raise ModelError(
            "M002",
            "the base model's weights are quantised, and an adapter cannot be added to them",
            where=source.base.path,
            expected=f"weights in one of {', '.join(ROUNDOFF)}",
            faults=faults,
            remedy="name the full-precision base with --model",
        )
    return targets


def _card(base: models.LocalModel) -> str:
    """A model card with the base's licence, which on the hub stands in the card alone."""
    return (
        f"{base.card_head(base.hub or base.id, tags=['vox'])}\n# {base.id}, fine-tuned\n\n"
        f"An adapter merged into {base.id} by vox. `{MERGED}` says how far the logits are from\n"
        "base + adapter, and how much of the adapter survives.\n\n## Use it\n\n    vox chat .\n"
    )


def space_needed(
    weights: Weights, trained: Weights, dtype: DType | None = None, quant: Quant = "none"
) -> int:
    """Bytes for the result, and for what lies beside it at one time: a plain copy that the proof
    computes with, or else the quantised model, which is smaller than the plain one.

    Args:
        weights: what the adapter is added to; `trained`: what it was trained on.
        dtype: what is stored; None keeps each tensor's own.
    """
    merged = as_stored(weights, dtype).nbytes
    copies = [each.nbytes for each in (weights, trained) if not isinstance(each, WeightFolder)]
    return merged + max([0, *copies, merged if quant != "none" else 0])


def _nothing_to_merge(reference: str, found: str) -> AdapterError:
    return AdapterError(
        "A001",
        "there is no adapter to merge",
        where=reference,
        found=found,
        expected="a run of `vox train`, a folder saved by PEFT or mlx-lm, or an adapter on the hub",
        remedy=f"{run_meant(reference)}vox runs list shows the runs",
    )


def _merged_already(reference: str, model: Path) -> AdapterError:
    return _nothing_to_merge(reference, "a run with --method full").but(
        what="there is nothing to merge: the run trained the model's own weights",
        expected="a run that trained an adapter",
        remedy=f"use its checkpoint as it is: {model}",
    )
