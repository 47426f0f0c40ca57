"""Generation token by token and logits, as vox's `LoadedModel` on torch.

A streamed model serves verification at any size. It is built without weights; small parameters
(norms, biases) are loaded, while each linear module and embedding gets a forward of its own that
takes rows from the files in blocks and computes in float32. An adapter is applied as the formulas
say:

    LoRA: x W^T + scale * (x A^T) B^T        DoRA: m / ||W + scale * B A||_row times that

so this path is independent of PEFT, and agreement tests both. Every forward reads all files once,
so it suits neither training nor long texts.

Shape legend: X any leading shape, I input features, O output features, P rows of a block, R rank.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core.contract import AdapterState, LoadJob, Sampling, next_token
from vox_core.weights import WeightFolder
from vox_torch.arrays import float32, float32_blocks
from vox_torch.base import fill_buffers, load_base, materialise, stored_names, without_weights
from vox_torch.inject import attach
from vox_torch.lora import fuse, fuse_decoding
from vox_torch.profile import DeviceProfile

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from vox_core.contract import Floats, Ints


def load(job: LoadJob, profile: DeviceProfile) -> TorchModel:
    """Load the model of a job; a streamed one computes in float32 on the CPU."""
    if job.streamed:
        return TorchModel(streamed_model(job.model, job.adapter), "cpu")
    model = load_base(job.model, job.dtype, profile.device, job.quant)
    if profile.prepare:
        profile.prepare(model)
    if job.adapter is not None:
        model = attach(model, job.adapter).model.eval()
        fuse(model)  # rounded as in training
        fuse_decoding(model)
    return TorchModel(model, profile.device)


class TorchModel:
    """`vox_core.contract.LoadedModel` over a torch module."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        self._model: torch.nn.Module | None = model
        self._device = device

    def logits(self, tokens_T: Ints) -> Floats:
        import torch

        with torch.inference_mode():
            out = self._forward(self._ids(tokens_T), None)
        logits_TV: Floats = out.logits[0].float().cpu().numpy()
        return logits_TV

    def generate(self, tokens_T: Ints, sampling: Sampling) -> Iterator[int]:
        import torch

        tokens = [int(token) for token in tokens_T]
        ids, cache = self._ids(tokens), None
        for _ in range(sampling.max_tokens):
            with torch.inference_mode():
                out = self._forward(ids, cache, keep=1)
            tokens.append(next_token(out.logits[0, -1].float().cpu().numpy(), sampling, tokens))
            yield tokens[-1]
            ids, cache = self._ids(tokens[-1:]), out.past_key_values

    def close(self) -> None:
        self._model = None
        gc.collect()  # break the cycles of fused layers and their forwards

    def _forward(self, ids_1T: torch.Tensor, cache: object, keep: int = 0) -> object:
        return self._model(
            input_ids=ids_1T, past_key_values=cache, use_cache=keep > 0, logits_to_keep=keep
        )

    def _ids(self, tokens: object) -> torch.Tensor:
        import torch

        return torch.as_tensor(tokens, dtype=torch.int64, device=self._device)[None]


def streamed_model(folder: Path, adapter: AdapterState | None = None) -> PreTrainedModel:
    """Build the model of `folder` so that its weights stay in the files.

    Raises:
        ModelError: M002, the files and the modules do not match one to one.
    """
    import torch

    model = without_weights(folder, torch.float32)
    weights = WeightFolder(folder)
    names = stored_names(model, weights)
    for path, module in model.named_modules():
        if _is_streamed(module):
            _stream(module, path, names, weights, adapter)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta and name in names and not _belongs_to_streamed(model, name):
            value = adapter.saved.get(name) if adapter else None
            stored = weights.read(names[name]) if value is None else value
            materialise(model, name, float32(stored))
    fill_buffers(model, weights, lambda tensor: float32(weights.read(tensor)))
    return model.eval()


def _is_streamed(module: nn.Module) -> bool:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Embedding):
        # The only supported subclasses with their own forward are those that scale.
        return type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
    return isinstance(module, nn.Linear | Conv1D)


def _belongs_to_streamed(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf == "weight" and _is_streamed(model.get_submodule(owner))


def _stream(
    module: nn.Module,
    path: str,
    names: dict[str, str],
    weights: WeightFolder,
    adapter: AdapterState | None,
) -> None:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if adapter is not None and f"{path}.weight" in adapter.saved:
        W_OI = adapter.saved[f"{path}.weight"]
        read: Callable[[], Any] = lambda: W_OI  # noqa: E731
    else:
        tensor = names[f"{path}.weight"]
        read = lambda: weights.read(tensor)  # noqa: E731
    if isinstance(module, nn.Embedding):
        module.forward = _Embedding(module, read)
    else:
        module.forward = _Linear(module, read, isinstance(module, Conv1D), adapter, path)


class _Embedding:
    """An embedding that reads the rows of the given ids, with the family's scaling."""

    def __init__(self, module: nn.Embedding, read: Callable[[], Any]) -> None:
        self._scale = getattr(module, "embed_scale", None)
        self._read = read

    def __call__(self, ids_X: torch.Tensor) -> torch.Tensor:
        rows = float32(self._read()[ids_X.cpu().numpy()])
        return rows if self._scale is None else rows * self._scale


class _Linear:
    """`x W^T + b` by blocks of rows of W, with the adapter's update."""

    def __init__(
        self,
        module: nn.Module,
        read: Callable[[], Any],
        transposed: bool,
        adapter: AdapterState | None,
        path: str,
    ) -> None:
        self._module, self._read, self._transposed = module, read, transposed
        self._adapter = adapter if adapter is not None and path in adapter.modules else None
        self._path = path

    def __call__(self, x_XI: torch.Tensor) -> torch.Tensor:
        import torch

        blocks = float32_blocks(self._read, self._transposed)
        y_XO = torch.cat([self._rows(x_XI, W_PI, block) for block, W_PI in blocks], dim=-1)
        bias = self._module.bias
        return y_XO if bias is None else y_XO + bias

    def _rows(self, x_XI: torch.Tensor, W_PI: torch.Tensor, block: slice) -> torch.Tensor:
        y_XP = x_XI @ W_PI.T
        if self._adapter is None:
            return y_XP
        module, scale = self._adapter.modules[self._path], self._adapter.scale(self._path)
        A_RI, B_PR = float32(module.A_RI), float32(module.B_OR[block])
        y_XP = y_XP + scale * ((x_XI @ A_RI.T) @ B_PR.T)
        if module.magnitude_O is None:
            return y_XP
        norms_P = (W_PI + scale * (B_PR @ A_RI)).norm(dim=1)
        return y_XP * (float32(module.magnitude_O[block]) / norms_P)
