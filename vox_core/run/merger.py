"""One merge: shards, tensors, and the proof, in a folder that nobody sees yet.

Shard by shard and tensor by tensor: names, shards, index and dtypes are the base's; tensors that
the adapter does not touch are copied. The backend computes the changed ones, and each is checked
against base + update before it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core import files
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
from vox_core.errors import ModelError, PluginError
from vox_core.host.load import Backend
from vox_core.run.context import Context
from vox_core.run.hf_checkpoint import (
    copy_companions,
    copy_tokenizer,
    declare_dtype,
    plain_copy,
    write_shards,
)
from vox_core.run.proof import (
    TOLERANCE,
    Proof,
    distance,
    is_merged,
    not_merged,
    probe_logits,
    probe_tokens,
    prove,
)
from vox_core.run.reference import ModelReference
from vox_core.weights import INDEX, STORED_AS, Spec, Weights, numpy_dtype, stored_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.contract import Floats, Ints


class Merger:
    """One merge.

    Args:
        weights: what the adapter is added to: the base's own, or `trained`.
        trained: what it was trained on.
        dtype: what to store; None keeps each tensor's own.

    Raises:
        ModelError: M002, the weights are quantised in a way that has no plain view.
    """

    def __init__(
        self,
        source: ModelReference,
        adapter: AdapterState,
        weights: Weights,
        trained: Weights,
        backend: Backend,
        context: Context,
        dtype: DType | None,
    ) -> None:
        self._source, self._adapter, self._dtype = source, adapter, dtype
        self._weights, self._trained = weights, trained
        self._backend, self._context = backend, context
        self._targets = {target.shape.tensor: target for target in _targets(source, adapter)}
        _require_plain(source, self._targets)
        self._probe_T: Ints = probe_tokens(load_tokenizer(source.base.path))

    def run(self, folder: Path) -> Proof:
        """Write the merged checkpoint into `folder`, and prove it.

        Raises:
            ProofError: the result is not base + adapter.
            PluginError: the backend gave something else than it was asked for.
        """
        self._context.emit(
            Notice(f"merging {len(self._targets)} tensors into {self._source.base.id}")
        )
        self._write(folder)
        if self._weights.index is not None:
            files.write_json(folder / INDEX, self._weights.index)
        copy_companions(self._source.base.path, folder)
        copy_tokenizer(self._source.base.templated, folder)
        if self._dtype:
            declare_dtype(folder / "config.json", self._dtype)
        self._context.emit(Notice("verifying the merged model against base + adapter"))
        return self._prove(folder)

    def logits(self, folder: Path, adapter: AdapterState | None = None) -> Floats:
        """float32 logits (T, V) of a plain folder on the text of the proof."""
        job = LoadJob(model=folder, dtype="fp32", adapter=adapter, streamed=True)
        return self.logits_of(self._backend, job)

    def logits_of(self, backend: Backend, job: LoadJob) -> Floats:
        """The same of what `job` loads, by any backend."""
        return probe_logits(backend, job, self._context, self._probe_T)

    def _write(self, folder: Path) -> None:
        try:
            write_shards(folder, self._weights, self._spec, self._tensors)
        except ValueError as error:
            raise PluginError(
                "X001",
                "a plugin gave other tensors than it was asked for",
                where=f"vox_merge of backend {self._backend.id}",
                found=error,
                remedy="merge with another backend, with --backend, and report this to its authors",
            ) from error

    def _spec(self, name: str) -> dict[str, Spec]:
        return {name: (self._stored_as(name), self._weights.tensors[name].shape)}

    def _tensors(self, names: list[str]) -> Iterator[tuple[str, NDArray[Any]]]:
        """Each tensor of a shard in its turn: merged if the adapter touches it, else the base's."""
        changed = tuple(self._targets[name] for name in names if name in self._targets)
        job = MergeJob(self._adapter, changed, self._weights.read, self._dtype)
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
        W, dtype = self._weights.read(name), self._stored_as(name)
        if (saved := self._adapter.saved.get(target.path)) is not None:
            expected = saved.astype(numpy_dtype(dtype))
            if merged.shape == expected.shape and (merged != expected).any():
                raise not_merged(name)
            return name, merged
        if merged.shape == W.shape and not is_merged(
            merged, W, self._adapter, target.path, target.shape, dtype
        ):
            raise not_merged(name)
        return name, merged

    def _unchanged(self, name: str) -> tuple[str, NDArray[Any]]:
        dtype = numpy_dtype(self._stored_as(name))
        return name, self._weights.read(name).astype(dtype, copy=False)

    def _stored_as(self, name: str) -> str:
        return stored_as(self._weights.tensors[name].dtype, self._dtype)

    def _prove(self, folder: Path) -> Proof:
        merged_TV = self.logits(folder)
        with plain_copy(self._weights, folder) as base:
            proof = prove(
                self.logits(base),
                self.logits(base, self._adapter),
                merged_TV,
                dtype=max(map(self._stored_as, self._targets), key=_coarseness),
                layers=len(self._source.modules),
            )
        return replace(proof, from_trained=self._from_trained(proof, folder, merged_TV))

    def _from_trained(self, proof: Proof, folder: Path, merged_TV: Floats) -> float | None:
        """How far the merged model is from the adapter on the weights that it was trained on."""
        if self._source.quant == "none":
            return None
        if self._trained is self._weights:
            return proof.relative
        with plain_copy(self._trained, folder) as base:
            return distance(merged_TV, self.logits(base, self._adapter))


def stored_as(own: str, dtype: DType | None) -> str:
    """The dtype a tensor is written in: what was asked for, if it is a matter of rounding."""
    return STORED_AS[dtype] if dtype and own in TOLERANCE else own


def written_bytes(weights: Weights, dtype: DType | None) -> int:
    """What the tensors of a merged model come to, in the dtypes that they are written in."""
    return sum(
        info.nbytes
        if (written := stored_as(info.dtype, dtype)) == info.dtype
        else stored_bytes(written, info.shape)
        for info in weights.tensors.values()
    )


def _targets(source: ModelReference, adapter: AdapterState) -> Iterator[MergeTarget]:
    for path in adapter.modules:
        yield MergeTarget(path, source.modules[path])
    for name, value in adapter.saved.items():
        yield MergeTarget(
            name, ModuleShape(source.parameters[name], value.shape[0], value.shape[-1])
        )


def _require_plain(source: ModelReference, targets: Mapping[str, MergeTarget]) -> None:
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
