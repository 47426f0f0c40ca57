"""Fine-tuning in transformers, PEFT and torch alone: the loop that vox is held against.

It imports nothing of vox. Documents come as token ids and weights, step by step, so that both train
the same documents in the same order; the adapter starts from a folder that PEFT can load.

    python tests/parity/reference_loop.py SPEC.json OUT.json

SPEC: model, adapter (folders), lr, warmup, clip, steps: [[[tokens, weights], ...], ...]. Without an
adapter every weight is trained; weight_decay (0 if left out) is not for norms and biases, as in
transformers' `Trainer`.
OUT: losses, and the final adapter, or model, under OUT's own name with `.adapter` for a suffix.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoModelForCausalLM


def main(spec_file: str, out_file: str) -> None:
    spec = json.loads(Path(spec_file).read_text())
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    if "adapter" in spec:
        model = PeftModel.from_pretrained(model, spec["adapter"], is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": spec.get("weight_decay", 0)},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=spec["lr"])
    total, losses = len(spec["steps"]), []
    for number, documents in enumerate(spec["steps"], start=1):
        for group in optimizer.param_groups:
            group["lr"] = spec["lr"] * schedule(number, total, spec["warmup"])
        optimizer.zero_grad()
        loss = loss_of(model, documents)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, spec["clip"])
        optimizer.step()
        losses.append(loss.item())
    model.save_pretrained(Path(out_file).with_suffix(".adapter"))
    Path(out_file).write_text(json.dumps(losses))


def loss_of(model: torch.nn.Module, documents: list) -> torch.Tensor:
    """One padded batch with an attention mask, logits everywhere, the weighted mean of the nll."""
    longest = max(len(tokens) for tokens, _ in documents)
    ids = torch.zeros(len(documents), longest, dtype=torch.long)
    mask, weights = torch.zeros_like(ids), torch.zeros(len(documents), longest)
    for row, (tokens, trained) in enumerate(documents):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        weights[row, : len(tokens)] = torch.tensor(trained)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    nll = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    targets = weights[:, 1:].flatten()
    return (nll * targets).sum() / targets.sum()


def schedule(step: int, total: int, warmup: float) -> float:
    """Linear warm-up that starts above zero, then cosine to zero after the last step."""
    rising = round(warmup * total)
    if step <= rising:
        return step / (rising + 1)
    return (1 + math.cos(math.pi * (step - 1 - rising) / (total - rising))) / 2


if __name__ == "__main__":
    main(*sys.argv[1:])
