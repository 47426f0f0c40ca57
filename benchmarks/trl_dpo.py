"""Train with TRL's DPOTrainer and its defaults, for `dpo_speed.py`.

    ENV/bin/python benchmarks/trl_dpo.py MODEL PAIRS.jsonl RESULT.json [best]

It imports nothing of vox: ENV has TRL and PEFT. The adapter is vox's default; everything else is
TRL's default: 8 pairs a step, bfloat16, gradient checkpointing, padding to the longest answer, the
reference by disabling the adapter in each step. At its best it has weights in bfloat16, no gradient
checkpointing, and the reference computed before the first step; it keeps autocast, without which it
was slower. RESULT gets the time, the processor seconds and the tokens, without padding, of each
step; at its best, before them those at the start and at the end of the reference's
log-probabilities.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer


class Clock(TrainerCallback):
    """Record when a step ends, and how many tokens it had."""

    def __init__(self, before: bool) -> None:
        self.tokens, self.before = 0, before
        self.steps: list[dict[str, float]] = []

    def mark(self) -> None:
        self.steps.append({"time": time.time(), "cpu": time.process_time(), "tokens": self.tokens})
        self.tokens = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.before:  # the reference has been computed
            self.tokens = 0
            self.mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.mark()


def main() -> None:
    model, pairs, result, *best = sys.argv[1:]
    settings: dict[str, Any] = {
        "gradient_checkpointing": False,
        "precompute_ref_log_probs": True,
    }
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    clock = Clock(bool(best))
    if best:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        given = {"model": base, "processing_class": AutoTokenizer.from_pretrained(model)}
        clock.mark()
    else:
        given = {"model": model}

    class Counting(DPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            clock.tokens += int(inputs["attention_mask"].sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

    with tempfile.TemporaryDirectory() as scratch:
        trainer = Counting(
            **given,
            peft_config=lora,
            args=DPOConfig(
                output_dir=scratch,
                num_train_epochs=1,
                use_cpu=True,
                dataloader_pin_memory=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                **(settings if best else {}),
            ),
            train_dataset=load_dataset("json", data_files=pairs, split="train", cache_dir=scratch),
            callbacks=[clock],
        )
        trainer.train()
    Path(result).write_text(json.dumps(clock.steps))


if __name__ == "__main__":
    main()
