"""A loaded model on torch: scores, logits and generation, with adapters by name.

A streamed model serves verification at any size. It is built without weights; small parameters
(norms, biases) are loaded, while each linear module and embedding gets a forward of its own that
takes rows from the files in blocks and computes in float32. An adapter is applied as the formulas
say:

    LoRA: x W^T + scale * (x A^T) B^T        DoRA: m / ||W + scale * B A||_row times that

so this path is independent of PEFT, and agreement tests both. Every forward reads all files once,
so it suits neither training nor long texts.

This module imports torch; import it lazily.

Shape legend: X any leading shape, I input features, O output features, P rows of a block, R rank.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vox_core.contract import AdapterState, Batch, Floats, Ints, LoadJob, Model
from vox_torch.arrays import float32, float32_blocks
from vox_torch.attention import DOCUMENTS
from vox_torch.base import fill_buffers, load_base, materialise, stored_names, without_weights
from vox_torch.experts import model_weights, read_by_expert
from vox_torch.forward import Loss, Together
from vox_torch.inject import Adapters, only_adapter_dropout, require_linear
from vox_torch.libraries import import_bitsandbytes
from vox_torch.lora import fuse
from vox_torch.lora_rows import RowAdapters, Shares
from vox_torch.memory import enough_memory
from vox_torch.prepacked import prepack
from vox_torch.profile import DeviceProfile
from vox_torch.running import RunningBatch
from vox_torch.trial import loss_of

SMALLER = "use a smaller base"
_QUANTISED = f"{SMALLER}, such as with --quant nf4"


def load(job: LoadJob, profile: DeviceProfile) -> TorchModel:
    """Load the model of a job; a streamed one computes in float32 on the CPU."""
    import_bitsandbytes()  # or PEFT imports it, with its warnings
    if job.streamed:
        return TorchModel(Streamed(job.model), "cpu")
    with enough_memory(profile.device, _QUANTISED if job.quant == "none" else SMALLER):
        base = load_base(job.model, job.dtype, profile.device, job.quant)
        if profile.prepare:
            profile.prepare(base)
        if profile.device == "cpu":
            prepack(base)
    return TorchModel(Adapters(base), profile.device)


class TorchModel(Model):
    """`vox_core.contract.Model` over a transformers model.

    Attributes:
        answer_limit: the flag that bounds an answer's tokens.
        smaller: advice to use less memory for the base.
    """

    answer_limit = "--max-tokens"
    smaller = _QUANTISED

    def __init__(self, adapters: Adapters | Streamed, device: str) -> None:
        self._adapters, self._device = adapters, device
        self._own_attention = adapters.base.config._attn_implementation
        self._dropout: bool | None = None  # until the modes of all modules are set
        self._loss: Loss | None = None
        self._batch: RunningBatch | None = None
        self._by_row: RowAdapters | None = None

    def add_adapter(self, name: str, adapter: AdapterState) -> None:
        self._adapters.add(name, adapter)
        self._modules_changed()

    def remove_adapter(self, name: str) -> None:
        self._adapters.remove(name)
        self._modules_changed()

    def log_probs(
        self, batch: Batch, adapter: str | None = None, seed: int | None = None
    ) -> Floats:
        loss = self._scoring(adapter)
        with torch.inference_mode():
            return loss.log_probs(batch, once=True).spread(len(batch.tokens_T))

    def logits(self, tokens_T: Ints, adapter: str | None = None, first: int = 0) -> Floats:
        self._set_up(adapter)
        count = len(tokens_T) - first
        assert count > 0, "no position is left"
        with self._generating(), torch.inference_mode():
            out = self._adapters.base(
                input_ids=self._ids(tokens_T), use_cache=False, logits_to_keep=count
            )
        logits_KV: Floats = out.logits[0, -count:].float().cpu().numpy()
        return logits_KV

    def logits_all(
        self, documents: Sequence[tuple[Ints, int]], adapter: str | None = None
    ) -> list[Floats]:
        loss = self._scoring(adapter)
        if not isinstance(loss, Together):
            return super().logits_all(documents, adapter)
        lengths = np.array([len(tokens_T) for tokens_T, _ in documents])
        tokens_T = np.concatenate([tokens_T for tokens_T, _ in documents])
        scored_T = np.concatenate([np.arange(len(each)) >= first for each, first in documents])
        none_T, starts_D = np.zeros(len(tokens_T), np.float32), lengths.cumsum() - lengths
        with self._generating(), torch.inference_mode():
            hidden_KH = loss.hidden(Batch(tokens_T, tokens_T, none_T, starts_D, scored_T))
            logits_KV = loss.logits(hidden_KH[None])[0].float().cpu().numpy()
        counts = [len(tokens_T) - first for tokens_T, first in documents]
        return np.split(logits_KV, np.cumsum(counts)[:-1])

    def insert(self, row: int, tokens_T: Ints, adapter: str | None = None) -> None:
        self._select(None)
        with self._generating():
            self._running().insert(row, tokens_T, self._adapters.key(adapter))

    def advance(self, tokens: Mapping[int, int]) -> Mapping[int, Floats]:
        self._select(None)
        with self._generating():
            return self._running().advance(tokens)

    def reuse(self, row: int, source: int, count: int) -> bool:
        with self._generating():
            return self._running().reuse(row, source, count)

    def remove(self, row: int) -> None:
        self._running().remove(row)

    def close(self) -> None:
        for name in ("_adapters", "_loss", "_batch", "_by_row"):
            vars(self).pop(name, None)  # a second call finds nothing
        gc.collect()  # break the cycles of fused layers and their forwards

    def _modules_changed(self) -> None:
        """Fuse the adapters, rounded as in training."""
        self._dropout = None
        self._read_again()
        fuse(self._adapters.base)

    def _read_again(self) -> None:
        """Let the running batch read the adapters again."""
        if self._by_row is not None:
            self._by_row.forget()

    def _scoring(self, adapter: str | None) -> Loss:
        """Set up to score documents; return their layout."""
        if self._loss is None:
            self._set_up(adapter)
            streamed = isinstance(self._adapters, Streamed)
            self._loss = loss_of(self._adapters.base, self._device, rows=streamed)[0]
        self._set_up(adapter, documents=True)
        return self._loss

    def _set_up(
        self, adapter: str | None, *, documents: bool = False, dropout: bool = False
    ) -> None:
        """Select adapter, attention and dropout for a computation.

        Args:
            documents: documents are scored, in the layout of `self._loss`.
        """
        self._select(adapter, dropout)
        if documents and self._by_row is not None:
            self._by_row.release()
        base = self._adapters.base
        together = documents and isinstance(self._loss, Together)
        attention = DOCUMENTS if together else self._own_attention
        if base.config._attn_implementation != attention:
            base.set_attn_implementation(attention)

    def _select(self, adapter: str | None, dropout: bool = False) -> None:
        self._adapters.select(adapter)
        if dropout != self._dropout:
            self._adapters.base.eval()
            if dropout:
                only_adapter_dropout(self._adapters.base)
            self._dropout = dropout

    def _generating(self) -> AbstractContextManager[None]:
        remedy = f"shorten prompts, lower {self.answer_limit}, or {self.smaller}"
        return enough_memory(self._device, remedy)

    def _running(self) -> RunningBatch:
        if self._batch is None:
            base, own = self._adapters.base, self._own_attention
            if isinstance(self._adapters, Streamed):
                reason = "its weights are read from the files"
                self._batch = RunningBatch(base, self._adapters, self._device, own, reason)
            else:
                self._by_row = RowAdapters(base)
                self._batch = RunningBatch(base, self._by_row, self._device, own)
        return self._batch

    def _ids(self, tokens: object) -> torch.Tensor:
        return torch.as_tensor(tokens, dtype=torch.int64, device=self._device)[None]


class Streamed:
    """A base model whose weights stay in the files, with adapters by name.

    Raises:
        ModelError: M002, the files and the modules do not match one to one.
    """

    def __init__(self, folder: Path) -> None:
        self.base = without_weights(folder, torch.float32)
        self._weights = model_weights(self.base, folder)
        self._tensors = stored_names(self.base, self._weights)
        self._adapters: dict[str, AdapterState] = {}
        self._selected: AdapterState | None = None
        for path, module in self.base.named_modules():
            if _is_streamed(path, module):
                module.forward = self._forward(module, path)
        read_by_expert(self.base, self._weights)
        self._small = {
            name: float32(self._weights.read(self._tensors[name]))
            for name, parameter in self.base.named_parameters()
            if parameter.is_meta and name in self._tensors and not self._is_streamed(name)
        }
        for name, value in self._small.items():
            materialise(self.base, name, value)
        read = self._weights.read
        fill_buffers(self.base, self._weights, lambda tensor: float32(read(tensor)))
        self.base.eval()

    def __len__(self) -> int:
        return len(self._adapters)

    def add(self, name: str, state: AdapterState) -> None:
        """Add an adapter.

        Raises:
            AdapterError: A002, it names modules that the base has not got.
        """
        require_linear(self.base, state)
        self._adapters[name] = state

    def remove(self, name: str) -> None:
        """Remove an adapter; the base is selected."""
        self.select(None)
        del self._adapters[name]

    def key(self, name: str | None) -> str | None:
        """Return `name`, as `Adapters.key` returns PEFT's."""
        return name

    def group(self, name: str | None) -> str | None:
        """Return an adapter's group in a running batch: each is computed on its own."""
        return name

    def pack(self) -> None:
        """Its weights are not in memory."""

    @contextmanager
    def computing(self, *shares: Shares) -> Iterator[None]:
        """Compute with one adapter within the context."""
        self.select(shares[0][0][0])
        yield

    def select(self, name: str | None) -> None:
        """Compute with an adapter from here on, or with the base alone."""
        self._selected = None if name is None else self._adapters[name]
        saved = self._selected.saved if self._selected else {}
        for path, stored in self._small.items():
            value = float32(saved[path]) if path in saved else stored
            self.base.get_parameter(path).data = value

    def _forward(self, module: nn.Module, path: str) -> Callable[..., torch.Tensor]:
        from transformers.pytorch_utils import Conv1D

        name = f"{path}.weight"

        def read() -> Any:
            saved = self._selected.saved if self._selected else {}
            return saved[name] if name in saved else self._weights.read(self._tensors[name])

        if isinstance(module, nn.Embedding):
            return _Embedding(module, read)
        selected = lambda: self._selected  # noqa: E731
        return _Linear(module, read, isinstance(module, Conv1D), selected, path)

    def _is_streamed(self, parameter: str) -> bool:
        owner, _, leaf = parameter.rpartition(".")
        return leaf == "weight" and _is_streamed(owner, self.base.get_submodule(owner))


def _is_streamed(path: str, module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    if path.endswith(".dt_proj"):  # Mamba multiplies with the weight itself
        return False
    if isinstance(module, nn.Embedding):
        # The only supported subclasses with their own forward are those that scale.
        return type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
    # Routers may be linear layers that return what they chose.
    return type(module).forward is nn.Linear.forward or isinstance(module, Conv1D)


class _Embedding:
    """An embedding that reads the rows of the given ids, with the family's scaling."""

    def __init__(self, module: nn.Embedding, read: Callable[[], Any]) -> None:
        self._scale = getattr(module, "embed_scale", None)
        self._read = read

    def __call__(self, ids_X: torch.Tensor) -> torch.Tensor:
        rows = float32(self._read()[ids_X.cpu().numpy()])
        return rows if self._scale is None else rows * self._scale


class _Linear:
    """`x W^T + b` by blocks of rows of W, with the selected adapter's update."""

    def __init__(
        self,
        module: nn.Module,
        read: Callable[[], Any],
        transposed: bool,
        selected: Callable[[], AdapterState | None],
        path: str,
    ) -> None:
        self._module, self._read, self._transposed = module, read, transposed
        self._selected, self._path = selected, path

    def __call__(self, x_XI: torch.Tensor) -> torch.Tensor:
        blocks = float32_blocks(self._read, self._transposed)
        y_XO = torch.cat([self._rows(x_XI, W_PI, block) for block, W_PI in blocks], dim=-1)
        bias = self._module.bias
        return y_XO if bias is None else y_XO + bias

    def _rows(self, x_XI: torch.Tensor, W_PI: torch.Tensor, block: slice) -> torch.Tensor:
        y_XP = x_XI @ W_PI.T
        adapter = self._selected()
        if adapter is None or self._path not in adapter.modules:
            return y_XP
        module, scale = adapter.modules[self._path], adapter.scale(self._path)
        A_RI, B_PR = float32(module.A_RI), float32(module.B_OR[block])
        y_XP = y_XP + scale * ((x_XI @ A_RI.T) @ B_PR.T)
        if module.magnitude_O is None:
            return y_XP
        norms_P = (W_PI + scale * (B_PR @ A_RI)).norm(dim=1)
        return y_XP * (float32(module.magnitude_O[block]) / norms_P)
