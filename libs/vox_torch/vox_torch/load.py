"""Generation token by token and logits, as vox's `LoadedModel` on torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vox_core.contract import LoadJob, Sampling, next_token
from vox_torch.base import load_base
from vox_torch.inject import attach
from vox_torch.lora import fuse, fuse_decoding
from vox_torch.profile import DeviceProfile
from vox_torch.stream import streamed_model

if TYPE_CHECKING:
    import torch

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
