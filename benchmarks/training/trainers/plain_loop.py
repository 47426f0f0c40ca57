"""transformers and PEFT in a plain loop: weights and adapter in one dtype, documents sorted by
length and padded in groups, transformers' own loss. With the method `full`, weights in float32 and
autocast to the dtype: in bfloat16 alone, most updates would be lost.

`loop` trains on the documents of each step. As `loop-sorted` it is given steps of documents of one
length, so that it pads almost nothing; its losses are those of other steps than vox's, and have a
reference of their own.

As `reference` it is what everybody's losses are held against: each document by itself, so that no
padding and no neighbour can go wrong, and with gradient checkpointing, so that a whole model in
float32 has room. Neither changes a number.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.training import documents
from benchmarks.training.task import Diary, Task
from benchmarks.training.trainers.base import adamw, attention_of, groups_by_length, learner

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

IGNORED = -100
Rows = list[tuple[list[int], list[int]]]


def train(task: Task, diary: Diary) -> None:
    dtype = "fp32" if task.method == "full" else task.dtype
    model = learner(task, dtype, adapter_as_base=True)
    model.train()
    diary.attention, diary.layout = attention_of(model), "padded rows grouped by length"
    if task.trainer == "reference":
        diary.layout = "each document by itself"
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = adamw(task, model)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for step, lr in zip(documents.read(Path(task.documents)), task.lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        loss = _backward(model, step, task)
        torch.nn.utils.clip_grad_norm_(trained, task.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        diary.step(loss.item())
    model.save_pretrained(task.out)


def _backward(model: PreTrainedModel | PeftModel, step: Rows, task: Task) -> torch.Tensor:
    """Gradients of a step; its loss."""
    total = sum(sum(weights) for _, weights in step)
    loss = torch.zeros((), device=task.device)
    mixed = task.method == "full" and task.dtype == "bf16"
    for group in _groups(step, task):
        rows = _padded([step[i] for i in group], task.device)
        with torch.autocast(task.device, torch.bfloat16, enabled=mixed):
            share = model(**rows, num_items_in_batch=total)
        share.loss.backward()
        loss += share.loss.detach()
    return loss


def _groups(step: Rows, task: Task) -> list[list[int]]:
    if task.trainer == "reference":
        return [[i] for i in range(len(step))]
    return groups_by_length([len(t) for t, _ in step], task.row_tokens, padded=True)


def _padded(rows: Rows, device: str) -> dict[str, torch.Tensor]:
    longest = max(len(tokens) for tokens, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, (tokens, weights) in enumerate(rows):
        given = torch.tensor(tokens)
        ids[row, : len(tokens)], mask[row, : len(tokens)] = given, 1
        labels[row, : len(tokens)] = torch.where(torch.tensor(weights) > 0, given, IGNORED)
    named = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in named.items()}
