"""mlx-lm's own training functions, with the BLAS that vox gives MLX.

`linear_to_lora_layers` and `train` are mlx-lm's. Its default loss also trains one pad token of each
padded row and averages micro-batches without weights, its Adam corrects no bias, and nothing clips:
all four are set right through the arguments that it has for them, or the losses would be others'.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.training import documents
from benchmarks.training.task import Diary, Task
from benchmarks.training.trainers.base import groups_by_length
from vox_mlx.blas import load_blas

if TYPE_CHECKING:
    import mlx.core as mx

_PAD_TO = 32
"""mlx-lm pads rows to a multiple of this."""


def train(task: Task, diary: Diary) -> None:
    # On a CPU, mx.compile calls the C++ compiler for every new shape: minutes, and no gain.
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
    load_blas()
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.trainer import TrainingArgs
    from mlx_lm.tuner.trainer import train as mlx_train

    class Callback(_Losses, TrainingCallback):
        """mlx-lm's class, imported no earlier than here."""

    model = _adapted(task)
    diary.attention, diary.layout = "mlx", "padded rows grouped by length"
    steps = [_step(step, task) for step in documents.read(Path(task.documents))]
    most = max(map(len, steps))
    batches = [batch for step in steps for batch in _filled(step, most)]
    arguments = TrainingArgs(
        batch_size=1,
        iters=len(batches),
        steps_per_report=1,
        steps_per_save=len(batches) + 1,
        grad_accumulation_steps=most,
        adapter_file=str(Path(task.out) / "adapters.safetensors"),
    )
    mlx_train(
        model,
        _optimizer(task),
        None,
        args=arguments,
        loss=_loss(most),
        iterate_batches=lambda **_: iter(batches),
        training_callback=Callback(diary, most),
    )


def _adapted(task: Task) -> Any:
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = load(task.model)[0]
    model.set_dtype(mx.float32 if task.dtype == "fp32" else mx.bfloat16)
    model.freeze()
    config = {"rank": task.rank, "scale": task.alpha / task.rank, "dropout": 0.0}
    keys = json.loads((Path(task.adapter) / "adapter_config.json").read_text())["target_modules"]
    names = {n for n, _ in model.layers[0].named_modules() if n.rpartition(".")[2] in keys}
    linear_to_lora_layers(model, len(model.layers), {**config, "keys": names})
    _fill(model, Path(task.adapter))
    return model


def _fill(model: Any, adapter: Path) -> None:
    """PEFT stores A as (r, in) and B as (out, r); mlx-lm has both the other way round."""
    import mlx.core as mx

    values = []
    stored: Any = mx.load(str(adapter / "adapter_model.safetensors"))
    for name, value in stored.items():
        path = name.removeprefix("base_model.model.")
        path = path.replace("lora_A.weight", "lora_a").replace("lora_B.weight", "lora_b")
        values.append((path, value.T))
    model.load_weights(values, strict=False)
    mx.eval(model.parameters())


def _optimizer(task: Task) -> Any:
    import mlx.core as mx
    from mlx import optimizers

    class Clipped(optimizers.AdamW):
        def update(self, model: Any, gradients: Any) -> None:
            if task.optimizer.clip:
                gradients, _ = optimizers.clip_grad_norm(  # type: ignore[no-untyped-call]
                    gradients, task.optimizer.clip
                )
            super().update(model, gradients)

    spec, rates = task.optimizer, mx.array(task.lrs)
    return Clipped(
        lambda step: rates[mx.minimum(step, len(task.lrs) - 1)],
        betas=[spec.beta1, spec.beta2],
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        bias_correction=True,
    )


def _step(step: list[tuple[list[int], list[int]]], task: Task) -> list[tuple[mx.array, mx.array]]:
    """A step's documents, padded in groups: tokens, and weights divided by the step's total."""
    import mlx.core as mx
    import numpy as np

    total, batches = sum(sum(w) for _, w in step), []
    for group in groups_by_length([len(t) for t, _ in step], task.row_tokens, padded=True):
        longest = max(len(step[i][0]) for i in group)
        length = 1 + _PAD_TO * ((longest + _PAD_TO - 1) // _PAD_TO)
        tokens = np.zeros((len(group), length), np.int32)
        weights = np.zeros((len(group), length), np.float32)
        for row, index in enumerate(group):
            given, trained = step[index]
            tokens[row, : len(given)], weights[row, : len(given)] = given, trained
        batches.append((mx.array(tokens), mx.array(weights / total)))
    return batches


def _filled(step: list[tuple[mx.array, mx.array]], count: int) -> Iterator[tuple[Any, Any]]:
    """`count` micro-batches, as mlx-lm accumulates the same number each step: the last ones empty,
    which costs next to nothing."""
    import mlx.core as mx

    yield from step
    for _ in range(count - len(step)):
        yield mx.zeros((1, 2), mx.int32), mx.zeros((1, 2))


def _loss(micro_batches: int) -> Any:
    """The share of a micro-batch in the step's loss; mlx-lm divides the sum of gradients again."""
    import mlx.core as mx
    from mlx import nn

    def loss(model: Any, tokens: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
        nll = nn.losses.cross_entropy(model(tokens[:, :-1]).astype(mx.float32), tokens[:, 1:])
        return micro_batches * (nll * weights[:, 1:]).sum(), (weights > 0).sum()

    return loss


class _Losses:
    """Adds the shares up, and writes each step down."""

    def __init__(self, diary: Diary, micro_batches: int) -> None:
        self._diary, self._count = diary, micro_batches
        self._shares: list[float] = []

    def on_train_loss_report(self, info: dict[str, float]) -> None:
        self._shares.append(info["train_loss"] / self._count)
        if len(self._shares) == self._count:
            self._diary.step(sum(self._shares))
            self._shares = []

    def on_val_loss_report(self, info: dict[str, float]) -> None:
        """There is no validation."""
