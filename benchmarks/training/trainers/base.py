"""Base model, adapter and optimizer of the torch peers, as a user of PEFT sets them up."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks.training.task import Task

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def learner(task: Task, dtype: str, *, adapter_as_base: bool) -> PreTrainedModel | PeftModel:
    """The base on the device, with the adapter to start from; alone with the method `full`.

    Args:
        dtype: of the base's weights; of a quantised base, of those that are not quantised.
        adapter_as_base: the adapter in that dtype too; PEFT's default is float32.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    kind: torch.dtype = getattr(torch, _DTYPES[dtype])
    base = AutoModelForCausalLM.from_pretrained(
        task.model,
        dtype=kind,
        attn_implementation=_attention(task),
        device_map={"": task.device},
        **_quantised(task),
    )
    if task.method == "full":
        return base
    return PeftModel.from_pretrained(
        base, task.adapter, is_trainable=True, autocast_adapter_dtype=not adapter_as_base
    )


def adamw(task: Task, model: PreTrainedModel | PeftModel) -> torch.optim.AdamW:
    """Return torch's fused AdamW, the default of transformers, too."""
    import torch

    spec = task.optimizer
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=task.lrs[0],
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=True,
    )


def groups_by_length(lengths: list[int], row_tokens: int, *, padded: bool) -> list[list[int]]:
    """Indices of a step's documents in groups, longest first, each within `row_tokens`.

    Args:
        padded: each document counts as long as the longest of its group.
    """
    groups: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        cost = lengths[groups[-1][0]] if groups and padded else lengths[index]
        if not groups or cost > room:
            groups.append([])
            cost, room = lengths[index], max(row_tokens, lengths[index])
        groups[-1].append(index)
        room -= cost
    return groups


def cut_to(groups: list[list[int]], count: int) -> list[list[int]]:
    """The groups, with those of most documents halved until there are `count`.

    transformers accumulates as many passes in each step as in any other. There have to be as many
    documents as groups.
    """
    cut = list(groups)
    while len(cut) < count:
        at = max(range(len(cut)), key=lambda i: len(cut[i]))
        half = (len(cut[at]) + 1) // 2
        cut[at : at + 1] = [cut[at][:half], cut[at][half:]]
    return cut


def padding_free(task: Task) -> bool:
    """Whether a trainer at its best has its documents end to end.

    On a GPU without flash attention they would go through a dense mask of all tokens by all tokens,
    and padding is faster.
    """
    return task.device == "cpu" or _attention(task) == "flash_attention_2"


def attention_of(model: PreTrainedModel | PeftModel) -> str:
    """Return the attention that the base was loaded with."""
    return str(model.config._attn_implementation)


def quantisation(task: Task) -> dict[str, Any]:
    """NF4 as QLoRA has it (Dettmers et al., arXiv:2305.14314), double, as vox has it.

    It computes in the cell's dtype, whatever the other weights have. Empty for a plain base.
    """
    if task.quant == "none":
        return {}
    if task.quant != "nf4":
        raise ValueError(f"the peers' settings for {task.quant} are not here")
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": _DTYPES[task.dtype],
    }


def _attention(task: Task) -> str:
    flash = task.device == "cuda" and task.dtype == "bf16" and find_spec("flash_attn")
    return "flash_attention_2" if flash else "sdpa"


def _quantised(task: Task) -> dict[str, Any]:
    settings = quantisation(task)
    if not settings:
        return {}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(**settings)  # type: ignore[no-untyped-call]
    return {"quantization_config": config}
