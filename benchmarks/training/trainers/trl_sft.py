"""TRL's SFTTrainer, at its defaults and at its best.

    trl        float32 weights, bf16 autocast where the cell is bf16, gradient checkpointing,
               padded batches of eight: what `SFTConfig()` gives
    trl-best   weights and adapter in the cell's dtype, no autocast, no gradient checkpointing,
               padding-free rows: what `packing_strategy="bfd"` gives; on a GPU without flash
               attention padded ones, grouped by length, which are faster there

TRL packs a whole data set, across the steps; the documents of a step have to stay those of the
step, so each step's are put into rows here, and TRL's own collator lays them end to end as it does
with packed ones, or pads them. `max_length` is off (its default of 1024 would cut documents), and
the learning rates are given from outside.

TRL is no part of the environment that types are checked in, and comes in by name.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, TrainerCallback

from benchmarks.training import documents
from benchmarks.training.task import Diary, Task
from benchmarks.training.trainers.base import (
    adamw,
    attention_of,
    cut_to,
    groups_by_length,
    learner,
    padding_free,
)

PER_DEVICE = 8
"""TRL's default `per_device_train_batch_size`."""


def train(task: Task, diary: Diary) -> None:
    best = task.trainer == "trl-best"
    steps = documents.read(Path(task.documents))
    batches, per_step = _batches([[len(t) for t, _ in s] for s in steps], task, best)
    # TRL's default weights are float32, whatever it computes in.
    model = learner(task, task.dtype if best else "fp32", adapter_as_base=best)
    diary.attention, diary.layout = attention_of(model), _layout(task, best)
    optimizer = adamw(task, model)
    rates = [lr / task.lrs[0] for lr in task.lrs]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rates[min(i, len(rates) - 1)])
    trainer = _trainer_class(batches)(
        model=model,
        args=_config(task, best, per_step),
        train_dataset=_dataset(steps),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        optimizers=(optimizer, schedule),
        callbacks=[_Losses(diary)],
    )
    trainer.train()
    trainer.save_model(task.out)


def _config(task: Task, best: bool, per_step: int) -> Any:
    given: dict[str, Any] = {
        "output_dir": task.out,
        "max_steps": len(task.lrs),
        "per_device_train_batch_size": PER_DEVICE,
        "gradient_accumulation_steps": per_step,
        "max_grad_norm": task.optimizer.clip,
        "max_length": None,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": task.device == "cpu",
        "bf16": task.dtype == "bf16" and not best,
        "seed": task.seed,
    }
    if best:
        given |= {"padding_free": padding_free(task), "gradient_checkpointing": False}
    return importlib.import_module("trl").SFTConfig(**given)


def _batches(steps: list[list[int]], task: Task, best: bool) -> tuple[list[list[int]], int]:
    """Rows of the data set in each forward pass, and how many of those make a step.

    transformers accumulates the same number of passes in every step; the step that needs most says
    how many.
    """
    if not best:
        cut = [[s[i : i + PER_DEVICE] for i in range(0, len(s), PER_DEVICE)] for s in _rows(steps)]
        return [group for groups in cut for group in groups], len(cut[0])
    padded, batches = not padding_free(task), []
    fitting = [groups_by_length(s, task.row_tokens, padded=padded) for s in steps]
    most = max(map(len, fitting))
    for lengths, rows, groups in zip(steps, _rows(steps), fitting, strict=True):
        even = cut_to(groups, most) if padded else _evenly(lengths, most)
        batches += [[rows[i] for i in group] for group in even]
    return batches, most


def _layout(task: Task, best: bool) -> str:
    if not best:
        return f"padded batches of {PER_DEVICE}"
    return "padding-free rows" if padding_free(task) else "padded rows grouped by length"


def _rows(steps: list[list[int]]) -> list[list[int]]:
    rows = iter(range(sum(map(len, steps))))
    return [[next(rows) for _ in step] for step in steps]


def _evenly(lengths: list[int], count: int) -> list[list[int]]:
    """The documents in `count` groups of about as many tokens, longest first into the emptiest."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        min(groups, key=lambda g: sum(lengths[i] for i in g)).append(index)
    return groups


def _dataset(steps: list[list[tuple[list[int], list[int]]]]) -> Any:
    rows = [
        {"input_ids": tokens, "labels": [t if w else -100 for t, w in zip(tokens, weights)]}  # noqa: B905
        for step in steps
        for tokens, weights in step
    ]
    return importlib.import_module("datasets").Dataset.from_list(rows)


def _trainer_class(batches: list[list[int]]) -> Any:
    """SFTTrainer, given its documents step by step instead of in an order of its own."""

    class Ordered(importlib.import_module("trl").SFTTrainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(
                self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator
            )
            return self.accelerator.prepare(loader)

    return Ordered


class _Losses(TrainerCallback):
    """Writes down what the trainer logs after each step."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if "loss" in logs:
            self._diary.step(logs["loss"])
