"""Checkpoints whose language model sits beside a vision tower: text training must find it there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from vox_core.config import MergeSettings
from vox_core.run.merge import merge
from vox_core.run.train import train
from vox_core.weights import WeightFolder
from vox_testing.tiny import FAMILIES, write_tokenizer

TOKENS = torch.arange(40, 72)[None]
GEMMA_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
}


def make(family: str, folder: Path, spread: float | None = None) -> Path:
    """A model of `family` in `folder`; `spread` is the standard deviation of its language model's
    weights, instead of the family's own."""
    text = FAMILIES[family.removesuffix("_moe")][1]
    if spread is not None:
        text = {**text, "initializer_range": spread}
    torch.manual_seed(0)
    if family == "gemma3":
        vision = {"vision_config": GEMMA_VISION, "mm_tokens_per_image": 4}
        model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, **vision))
    elif family == "qwen3_5_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        text = {**text, **experts, "shared_expert_intermediate_size": 24}
        config = Qwen3_5MoeConfig(text_config=text, vision_config=QWEN_VISION)
        model = Qwen3_5MoeForConditionalGeneration(config)
    else:
        config = Qwen3_5Config(text_config=text, vision_config=QWEN_VISION)
        model = Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits[0].float().numpy()


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "qwen3_5_moe"])
def test_text_training_leaves_the_vision_tower_alone(settings, tmp_path, family):
    folder = make(family, tmp_path / "base")
    report = train(settings(folder))
    assert report.valid_after < report.valid_before
    trained = json.loads((report.run / "plan.json").read_text())["modules"]
    assert len(trained) == {"gemma3": 14, "qwen3_5": 31, "qwen3_5_moe": 19}[family]
    assert not [path for path in trained if "vis" in path]

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, report.run)
    assert not [name for name, _ in peft.named_parameters() if "vis" in name and "lora" in name]
    expected = logits(peft)
    merge(str(report.run), MergeSettings(out=tmp_path / "merged"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    assert np.linalg.norm(merged - expected) / np.linalg.norm(expected) < 2e-5

    before, after = WeightFolder(folder), WeightFolder(tmp_path / "merged")
    assert before.tensors.keys() == after.tensors.keys()
    vision = [name for name in before.tensors if "vis" in name]
    assert vision
    assert all(np.array_equal(before.read(name), after.read(name)) for name in vision)
