"""Train an adapter with TRL's trainers on given tokens, for `preference_against_trl.py`.

    ENV/bin/python benchmarks/trl_trainer.py JOB.json

It imports nothing of vox: ENV has TRL and PEFT. JOB has the folder of the adapter to start from,
the optimizer's settings, and cases. A case has the folder of its base, a trainer and its settings,
the documents of each step, and the folder for the results: `losses.json`, and the adapter in PEFT's
format. A document is token ids and, for each, whether it is trained.

A data collator of its own hands over the documents, in order: the trainers' tokenisation runs on
placeholder text that nobody reads.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

Document = dict[str, list[int]]
Group = dict[str, Document]
Inputs = dict[str, torch.Tensor]

IGNORED = -100
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
SINGLE = {"prompt": "a", "completion": "b", "label": True}
COMMON = {
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "train_sampling_strategy": "sequential",
    "remove_unused_columns": False,
    "max_length": None,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
}


def padded(documents: Sequence[Document], prefix: str = "") -> Inputs:
    """Pad documents on the right, as DPOTrainer and KTOTrainer take them."""

    def rows(key: str) -> torch.Tensor:
        return pad_sequence([torch.tensor(each[key]) for each in documents], batch_first=True)

    tokens, trained = rows("tokens"), rows("trained")
    there = pad_sequence([torch.ones(len(each["tokens"])) for each in documents], batch_first=True)
    return {
        f"{prefix}input_ids": tokens,
        f"{prefix}attention_mask": there.long(),
        f"{prefix}completion_mask": trained,
    }


def of_pairs(groups: Sequence[Group]) -> Inputs:
    return padded([group[side] for side in ("chosen", "rejected") for group in groups])


def of_answers(groups: Sequence[Group]) -> Inputs:
    answers = [group.get("chosen") or group["rejected"] for group in groups]
    inputs = padded(answers) | {"label": torch.tensor(["chosen" in group for group in groups])}
    if "kl" in groups[0]:
        inputs |= padded([group["kl"] for group in groups], "KL_")
    return inputs


def of_sides(groups: Sequence[Group]) -> Inputs:
    """As CPOTrainer and ORPOTrainer take them: with labels."""
    inputs: Inputs = {}
    for side in ("chosen", "rejected"):
        made = padded([group[side] for group in groups], f"{side}_")
        trained = made.pop(f"{side}_completion_mask") == 1
        labels = made[f"{side}_input_ids"].where(trained, torch.tensor(IGNORED))
        inputs |= made | {f"{side}_labels": labels}
    return inputs


TRAINERS: dict[str, tuple[type[Any], type[Any], Callable[[Sequence[Group]], Inputs], Any]] = {
    "dpo": (DPOTrainer, DPOConfig, of_pairs, PAIR),
    "kto": (KTOTrainer, KTOConfig, of_answers, SINGLE),
    "cpo": (CPOTrainer, CPOConfig, of_sides, PAIR),
    "orpo": (ORPOTrainer, ORPOConfig, of_sides, PAIR),
}


def recording(kind: type[Any], losses: list[float]) -> type[Any]:
    """The trainer, with the loss of each step kept unrounded."""

    class Recording(kind):
        def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    return Recording


def train(job: dict[str, Any], case: dict[str, Any]) -> None:
    kind, config, collate, placeholder = TRAINERS[case["trainer"]]
    steps: list[list[Group]] = case["steps"]
    groups = [group for step in steps for group in step]
    base = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, job["adapter"], is_trainable=True)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        trainer = recording(kind, losses)(
            model=model,
            args=config(
                output_dir=scratch,
                per_device_train_batch_size=len(steps[0]),
                max_steps=len(steps),
                **COMMON,
                **job["optimizer"],
                **case["settings"],
            ),
            data_collator=lambda rows: collate([groups[row["index"]] for row in rows]),
            train_dataset=Dataset.from_list(
                [{**placeholder, "index": index} for index in range(len(groups))]
            ),
            processing_class=AutoTokenizer.from_pretrained(case["model"]),
        )
        trainer.train()
    out = Path(case["out"])
    model.save_pretrained(out, selected_adapters=["default"])
    (out / "losses.json").write_text(json.dumps(losses))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for case in job["cases"]:
        train(job, case)


if __name__ == "__main__":
    main()
