"""Settings, model, data and backend -> contract and plan, or every reason why not.

Pure: what is read (headers, configuration, data) comes in, what will be done goes out. Nothing is
loaded, nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vox_core.adapter.targets import HasShape, linear_modules, parameter_names, select_targets
from vox_core.contract import (
    AdapterSpec,
    DataIdentity,
    DType,
    ExecutionPlan,
    FineTuneContract,
    ModelIdentity,
    OptimizerSpec,
)
from vox_core.data.order import steps_for
from vox_core.errors import PlanError

if TYPE_CHECKING:
    from vox_core.config import TrainSettings
    from vox_core.data.dataset import Dataset
    from vox_core.host import Selection
    from vox_core.host.probe import Hardware

_TIED = ("lm_head", "embed_tokens", "wte")


def sequence_length(settings: TrainSettings, config: Mapping[str, Any]) -> int:
    """`--seq-len`; its default gives way to a model with fewer positions."""
    longest = positions(config)
    if "seq_len" in settings.model_fields_set or longest is None:
        return settings.seq_len
    return min(settings.seq_len, longest)


def make_contract(
    settings: TrainSettings,
    model: ModelIdentity,
    train: Dataset,
    valid: Dataset | None,
    seq_len: int,
) -> FineTuneContract:
    """What was asked for, free of paths, clock and machine."""
    documents = len(train.documents)
    return FineTuneContract(
        model=model,
        data=DataIdentity(
            digest=train.digest,
            rows=documents,
            tokens=train.tokens,
            trained_tokens=train.trained_tokens,
            valid_digest=valid.digest if valid else None,
        ),
        adapter=AdapterSpec(
            method=settings.method,
            rank=settings.rank,
            alpha=settings.alpha,
            dropout=settings.dropout,
            targets=settings.targets,
            modules_to_save=settings.modules_to_save,
        ),
        quant="none",
        optimizer=OptimizerSpec(
            lr=settings.lr,
            schedule=settings.schedule,
            warmup=settings.warmup,
            weight_decay=settings.weight_decay,
            clip=settings.clip,
        ),
        batch_size=settings.batch_size,
        seq_len=seq_len,
        total_steps=settings.max_steps
        or steps_for(documents, settings.batch_size, settings.epochs),
        seed=settings.seed,
    )


def make_plan(
    contract: FineTuneContract,
    settings: TrainSettings,
    selection: Selection,
    tensors: Mapping[str, HasShape],
    config: Mapping[str, Any],
) -> ExecutionPlan:
    """How the chosen backend will carry out the contract.

    Args:
        tensors: of the base's files, by name.
        config: the base's `config.json`.

    Raises:
        PlanError: P002 for unknown target modules; P001 with every other reason why not.
    """
    modules = select_targets(
        linear_modules(tensors, contract.model.model_type), contract.adapter.targets
    )
    saved = {
        name: tensor
        for name, tensor in parameter_names(tensors, contract.model.model_type).items()
        if _owner_in(name, contract.adapter.modules_to_save)
    }
    if faults := list(_reasons_why_not(contract, saved, config)):
        raise PlanError(
            "P001",
            "the contract cannot be carried out",
            faults=faults,
            remedy="change these settings and run again",
        )
    chosen = next(v for v in selection.verdicts if v.id == selection.chosen)
    return ExecutionPlan(
        contract=contract,
        backend=selection.chosen,
        backend_version=chosen.version,
        device=selection.hardware.devices[0].name if selection.hardware.devices else "unknown",
        dtype=resolve_dtype(settings.dtype, selection.hardware),
        micro_batch_tokens=settings.micro_batch_tokens,
        modules={path: shape for path, shape in modules.items() if f"{path}.weight" not in saved},
        eval_every=settings.eval_every,
        save_every=settings.save_every,
        saved=saved,
    )


def resolve_dtype(choice: str, hardware: Hardware) -> DType:
    """`auto` is what the probe calls best for the device; float32 where it says nothing."""
    best = hardware.devices[0].best_dtype if hardware.devices else None
    asked: dict[str, DType] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    return asked.get(choice) or best or "fp32"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a `config.json`; multimodal ones nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _reasons_why_not(
    contract: FineTuneContract, saved: Mapping[str, str], config: Mapping[str, Any]
) -> Iterator[str]:
    longest = positions(config)
    if longest is not None and contract.seq_len > longest:
        yield f"--seq-len {contract.seq_len}: the model has positions for {longest} tokens"
    for module in contract.adapter.modules_to_save:
        if not any(_owner_in(name, (module,)) for name in saved):
            tied = config.get("tie_word_embeddings") and module.rpartition(".")[2] in _TIED
            why = (
                "its weights are the embedding's (tied)" if tied else "the model has no such module"
            )
            yield f"--modules-to-save {module}: {why}"
        elif config.get("tie_word_embeddings") and module.rpartition(".")[2] in _TIED:
            yield (
                f"--modules-to-save {module}: the model ties its embedding and its output head, "
                "and training one whole would untie them"
            )


def positions(config: Mapping[str, Any]) -> int | None:
    """How many tokens the model has positions for; None where its configuration names no limit."""
    text = text_config(config)
    longest = text.get("max_position_embeddings") or text.get("n_positions")
    return longest if isinstance(longest, int) else None


def _owner_in(parameter: str, modules: tuple[str, ...]) -> bool:
    owner = parameter.rpartition(".")[0]
    return any(owner == module or owner.endswith(f".{module}") for module in modules)
