"""What a run says of itself: `vox_adapter.json` for programs, `README.md` for people."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from vox_core.contract import ExecutionPlan, Optimizer, Quant
from vox_core.models import LocalModel

_OPTIMIZERS: dict[Optimizer, str] = {
    "adamw": "AdamW",
    "adamw-8bit": "AdamW with moments in 8 bits",
}
_VERSIONED = ("vox-ml", "vox-ml-torch", "torch", "transformers", "peft", "mlx", "mlx-lm", "numpy")


def manifest(plan: ExecutionPlan, model: LocalModel, step: int) -> dict[str, Any]:
    """`vox_adapter.json`: what the adapter is, and what it was made of and with."""
    contract = plan.contract
    return {
        "format": "vox-adapter/1",
        "contract": contract.digest,
        "step": step,
        "quant": contract.quant,
        "base": {
            "id": model.id,
            "hub": model.hub,
            "path": str(model.path.resolve()),
            "revision": model.revision,
            "model_type": model.model_type,
            "weights_digest": contract.model.weights_digest,
            "tokenizer_digest": contract.model.tokenizer_digest,
            "licence": model.licence,
        },
        "data": {"digest": contract.data.digest, "valid_digest": contract.data.valid_digest},
        "backend": {"id": plan.backend, "version": plan.backend_version, "dtype": plan.dtype},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Python and the installed distributions that can change a result."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def card(
    plan: ExecutionPlan, model: LocalModel, *, step: int, before: float | None, after: float | None
) -> str:
    """The model card, with the metadata block that the Hugging Face hub reads."""
    contract, adapter, optimizer = plan.contract, plan.contract.adapter, plan.contract.optimizer
    rows = {
        "base model": f"{model.id} ({model.model_type})",
        "method": f"{adapter.method}, rank {adapter.rank}, alpha {adapter.alpha:g}, "
        f"{len(plan.modules)} modules, {plan.trainable_parameters:,} parameters",
        "data": f"{contract.data.rows} documents, {contract.data.tokens:,} tokens, "
        f"{contract.data.trained_tokens:,} of them trained",
        "steps": f"{step} of {contract.total_steps}, {contract.batch_size} documents each",
        "optimizer": f"{_OPTIMIZERS[optimizer.name]}, "
        f"peak rate {optimizer.lr:g}, {optimizer.schedule}",
        "seed": str(contract.seed),
        "backend": f"{plan.backend} {plan.backend_version}, {plan.dtype}",
        "quantisation of the base": contract.quant,
        "held-out loss": _losses(before, after),
        "contract": f"`{contract.digest}`",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return _CARD.format(
        model=model.id,
        hub=model.hub or model.id,
        weights=_weights(model),
        licence=_licence(model),
        table=table,
        onto=_onto(contract.quant),
    )


def _onto(quant: Quant) -> str:
    """What merges onto the weights that were trained on, where the base was quantised."""
    return "" if quant == "none" else " --onto trained-base"


def _weights(model: LocalModel) -> str:
    """Which weights were trained on, where they are not those that the hub has."""
    if not model.converted:
        return ""
    return (
        f"\nThe adapter was trained on the weights of `{model.id}` in vox's catalog (SHA-256 "
        f"{(model.revision or '')[:12]}…),\na quantised conversion of {model.hub}, whose own "
        "weights differ. vox loads the\nweights of the catalog, `AutoPeftModel` those of the hub. "
        f"`vox model pull {model.id}` names the\nfolder of the weights to give to PEFT.\n"
    )


def _losses(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "not measured"
    return f"{before:.4f} before, {after:.4f} after"


def _licence(model: LocalModel) -> str:
    return f"license: {model.licence.lower()}\n" if model.licence else ""


_CARD = """\
---
base_model: {hub}
library_name: peft
pipeline_tag: text-generation
tags: [lora, vox]
{licence}---

# Adapter for {model}

Trained with vox.

| | |
|---|---|
{table}

## Use it

    vox chat .
    vox merge .{onto}

or with PEFT:

    from peft import AutoPeftModelForCausalLM
    model = AutoPeftModelForCausalLM.from_pretrained(".")
{weights}
`vox_adapter.json` holds the digests of base model and data. `plan.json` holds every setting.
"""
