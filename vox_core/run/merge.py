"""`vox merge`: base + adapter -> a plain Hugging Face checkpoint, proven equal.

Shard by shard and tensor by tensor: names, shards, index and dtypes are the base's; tensors that
the adapter does not touch are copied. The backend computes the changed ones, only this module
writes. The output folder appears when the proof has passed, and not before.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core import files, models
from vox_core.adapter.merged import is_merged
from vox_core.adapter.targets import linear_modules
from vox_core.config import MergeSettings
from vox_core.contract import (
    AdapterState,
    DType,
    LoadJob,
    MergeJob,
    MergeTarget,
    ModuleShape,
    Notice,
)
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import AdapterError, ModelError, PluginError, StorageError
from vox_core.host import Origin, Request, choose
from vox_core.host.load import Backend
from vox_core.run.context import Context, Observe, ignore
from vox_core.run.folder import CARD
from vox_core.run.locate import Source, locate
from vox_core.run.proof import TOLERANCE, Proof, not_merged, probe_tokens, prove
from vox_core.weights import STORED_AS, numpy_dtype, write_safetensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.contract import Floats, Ints

MANIFEST = "vox_merge.json"
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "LICENCE*", "NOTICE*")
_NOT_COPIED = {"vox_adapter.json", MANIFEST}


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What was written, and the proof that it is right."""

    out: Path
    base: str
    modules: int
    proof: Proof


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
    source = locate(reference, base=settings.model, progress=progress)
    if source.adapter is None:
        raise _nothing_to_merge(reference)
    _require_space(source, out)
    request = Request(
        operation="merge",
        method=source.adapter.method,
        model_type=source.base.model_type,
        explicit=settings.backend,
        explicit_origin=(backend_origin or "--backend") if settings.backend else None,
        streamed=True,
    )
    backend, selection = choose(request)
    observe(Notice(selection.why))
    with tempfile.TemporaryDirectory(prefix="vox-") as scratch, files.atomic_folder(out) as folder:
        context = Context(0, Path(scratch), observe)
        merger = _Merger(source, source.adapter, backend, context, _stored(settings.dtype))
        proof = merger.run(folder)
        files.write_json(
            folder / MANIFEST, {"base": source.manifest.get("base"), "proof": asdict(proof)}
        )
    return MergeReport(out, source.base.id, len(source.adapter.modules), proof)


class _Merger:
    """One merge, into a folder that nobody sees yet."""

    def __init__(
        self,
        source: Source,
        adapter: AdapterState,
        backend: Backend,
        context: Context,
        dtype: DType | None,
    ) -> None:
        self._source, self._adapter, self._dtype = source, adapter, dtype
        self._backend, self._context = backend, context
        self._targets = {target.shape.tensor: target for target in _targets(source, adapter)}
        _require_plain(source, self._targets)

    def run(self, folder: Path) -> Proof:
        self._context.emit(
            Notice(f"merging {len(self._targets)} tensors into {self._source.base.id}")
        )
        for file in self._source.weights.files:
            self._write_shard(folder, file)
        if self._source.weights.index is not None:
            files.write_json(folder / "model.safetensors.index.json", self._source.weights.index)
        _copy_companions(self._source.base.path, folder)
        files.write_text(folder / CARD, _card(self._source.base))
        if self._dtype:
            _declare_dtype(folder / "config.json", self._dtype)
        self._context.emit(Notice("proving the merged model against base + adapter"))
        return self._prove(folder)

    def _write_shard(self, folder: Path, file: str) -> None:
        weights = self._source.weights
        names = [name for name in weights.tensors if weights.file_of(name) == file]
        specs = {name: (self._stored_as(name), weights.tensors[name].shape) for name in names}
        try:
            write_safetensors(folder / file, specs, self._tensors(names))
        except ValueError as error:
            raise PluginError(
                "X001",
                "a plugin gave other tensors than it was asked for",
                where=f"vox_merge of backend {self._backend.id}",
                found=error,
                remedy="merge with another backend, with --backend, and report this to its authors",
            ) from error

    def _tensors(self, names: list[str]) -> Iterator[tuple[str, NDArray[Any]]]:
        """Each tensor of a shard in its turn: merged if the adapter touches it, else the base's."""
        changed = tuple(self._targets[name] for name in names if name in self._targets)
        job = MergeJob(self._adapter, changed, self._source.weights.read, self._dtype)
        merged = self._backend.merge(job, self._context).tensors
        for name in names:
            if name in self._targets:
                yield self._checked(*next(merged))
            else:
                yield self._unchanged(name)

    def _checked(self, name: str, merged: NDArray[Any]) -> tuple[str, NDArray[Any]]:
        """A merged tensor, held against base + update on some of its rows."""
        target = self._targets.get(name)
        if target is None:  # `write_safetensors` says which one was due
            return name, merged
        if target.path in self._adapter.saved:
            return name, merged
        W, dtype = self._source.weights.read(name), self._stored_as(name)
        if merged.shape == W.shape and not is_merged(
            merged, W, self._adapter, target.path, target.shape, dtype
        ):
            raise not_merged(name)
        return name, merged

    def _unchanged(self, name: str) -> tuple[str, NDArray[Any]]:
        dtype = numpy_dtype(self._stored_as(name))
        return name, self._source.weights.read(name).astype(dtype, copy=False)

    def _stored_as(self, name: str) -> str:
        """The dtype a tensor is written in: what was asked for, if it is a matter of rounding."""
        own = self._source.weights.tensors[name].dtype
        return STORED_AS[self._dtype] if self._dtype and own in TOLERANCE else own

    def _prove(self, folder: Path) -> Proof:
        base = self._source.base.path
        tokens_T = probe_tokens(load_tokenizer(base))
        return prove(
            self._logits(base, None, tokens_T),
            self._logits(base, self._adapter, tokens_T),
            self._logits(folder, None, tokens_T),
            dtype=max(map(self._stored_as, self._targets), key=_coarseness),
            layers=len(linear_modules(self._source.weights.tensors, self._source.base.model_type)),
        )

    def _logits(self, folder: Path, adapter: AdapterState | None, tokens_T: Ints) -> Floats:
        job = LoadJob(model=folder, dtype="fp32", adapter=adapter, streamed=True)
        model = self._backend.load(job, self._context)
        try:
            return model.logits(tokens_T)
        finally:
            model.close()


def _targets(source: Source, adapter: AdapterState) -> Iterator[MergeTarget]:
    for path in adapter.modules:
        yield MergeTarget(path, source.modules[path])
    for name, value in adapter.saved.items():
        yield MergeTarget(
            name, ModuleShape(source.parameters[name], value.shape[0], value.shape[-1])
        )


def _require_plain(source: Source, targets: Mapping[str, MergeTarget]) -> None:
    dtypes = {name: source.weights.tensors[name].dtype for name in targets}
    if faults := [f"{name}: {dtype}" for name, dtype in dtypes.items() if dtype not in TOLERANCE]:
        raise ModelError(
            "M002",
            "the base model's weights are quantised, and an adapter cannot be added to them",
            where=source.base.path,
            expected=f"weights in one of {', '.join(TOLERANCE)}",
            faults=faults,
            remedy="name the full-precision base with --model",
        )


def _coarseness(dtype: str) -> int:
    return ("F32", "F16", "BF16").index(dtype)


def _card(base: models.LocalModel) -> str:
    """A model card with the base's licence, which on the hub stands in the card alone."""
    licence = f"license: {base.licence.lower()}\n" if base.licence else ""
    return (
        f"---\nbase_model: {base.id}\n{licence}pipeline_tag: text-generation\ntags: [vox]\n---\n\n"
        f"# {base.id}, fine-tuned\n\nAn adapter merged into {base.id} by vox; `{MANIFEST}` has the "
        "proof that the logits are those of base + adapter.\n"
    )


def _stored(choice: str) -> DType | None:
    kinds: dict[str, DType] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    return kinds.get(choice)


def _declare_dtype(path: Path, dtype: DType) -> None:
    """Let the configuration say what the weights are stored in, where it says anything."""
    config = json.loads(path.read_bytes())
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    said = {key: names[dtype] for key in ("dtype", "torch_dtype") if key in config}
    files.write_json(path, {**config, **(said or {"dtype": names[dtype]})})


def _copy_companions(base: Path, folder: Path) -> None:
    """Configuration, tokenizer, chat template and licence: everything small that is not weights."""
    for pattern in _COPIED:
        for file in base.glob(pattern):
            if file.name not in _NOT_COPIED and not file.name.endswith(".index.json"):
                files.write_bytes(folder / file.name, file.read_bytes())


def _require_space(source: Source, out: Path) -> None:
    needed = sum((source.base.path / name).stat().st_size for name in source.weights.files)
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
