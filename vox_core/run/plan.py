"""Settings, model, data and backend -> contract and plan, or every reason why not. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vox_core.adapter.targets import (
    BUFFER,
    HasShape,
    experts,
    format_of,
    leaf_names,
    linear_modules,
    parameter_names,
    quantised_modules,
    select_targets,
    trained_parameters,
)
from vox_core.cache import file_sha256
from vox_core.config.sections import RewardSource
from vox_core.contract import (
    AdapterSpec,
    DataIdentity,
    DType,
    ExecutionPlan,
    FineTuneContract,
    ModelIdentity,
    ModuleShape,
    OptimizerSpec,
    OrderSpec,
    Quant,
    RolloutSpec,
)
from vox_core.data.audit import vocabulary_of
from vox_core.data.batching import steps_for
from vox_core.data.rows import learns_from_answers
from vox_core.errors import PlanError
from vox_formats.quant import CODECS

if TYPE_CHECKING:
    from vox_core.config import TrainSettings
    from vox_core.host.probe import Hardware
    from vox_core.run.inputs import Datasets, RunInputs

_TIED = ("lm_head", "embed_tokens", "wte")
_IS_TIED = "its weights are the embedding's (tied)"

# `num_experts`, `num_local_experts`, `n_routed_experts`; not `num_experts_per_tok`.
_HOW_MANY_EXPERTS = re.compile(r"experts$")


def sequence_length(settings: TrainSettings, config: Mapping[str, Any]) -> int:
    """`--seq-len`; its default gives way to a model with fewer positions."""
    longest = positions(config)
    if "seq_len" in settings.model_fields_set or longest is None:
        return settings.seq_len
    return min(settings.seq_len, longest)


def settled_quant(asked: Quant, stored: Quant) -> Quant:
    """`--quant`, for a model whose files are quantised to `stored`: `none` leaves them as they are,
    and another one is refused (P001)."""
    if asked in ("none", stored):
        return stored
    if stored == "none":
        return asked
    what = "the model's weights are quantised already"
    remedy = "leave out --quant, or name the full-precision model"
    raise PlanError("P001", what, where=f"--quant {asked}", found=stored, remedy=remedy)


def make_plan(
    settings: TrainSettings, inputs: RunInputs, data: Datasets, model: ModelIdentity
) -> ExecutionPlan:
    """The contract, free of paths, clock and machine, and how the chosen backend carries it out.

    Raises:
        PlanError: P002 for unknown target modules; P001 with every other reason why not.
    """
    train, valid = data.train, data.valid
    rows, batch_size = train.groups, settings.batch_size
    contract = FineTuneContract(
        model=model,
        data=DataIdentity(
            digest=train.digest,
            rows=rows,
            tokens=train.tokens,
            trained_tokens=train.trained_tokens,
            valid_digest=valid.digest if valid else None,
        ),
        adapter=_adapter_spec(settings, inputs),
        quant=inputs.quant,
        optimizer=OptimizerSpec(
            lr=settings.lr,
            schedule=settings.schedule,
            warmup=settings.warmup,
            weight_decay=settings.weight_decay,
            clip=settings.clip,
            name=settings.optimizer,
        ),
        batch_size=batch_size,
        seq_len=inputs.seq_len,
        total_steps=settings.max_steps
        or settings.updates * steps_for(rows, batch_size, settings.epochs),
        seed=settings.seed,
        policy=settings.policy(),
        order=train.ordering.spec() if train.ordering else OrderSpec(),
        objective=settings.objective_spec,
        rollouts=rollout_spec(settings, inputs),
    )
    saved, trained = _modules(contract, inputs)
    backend, hardware = inputs.backend, inputs.selection.hardware
    # A model with linear attention is padded by every backend.
    pads = backend.manifest.memory.padded_rows or has_linear_attention(inputs.config)
    return ExecutionPlan(
        contract=contract,
        backend=backend.id,
        backend_version=backend.found.shown_version,
        device=hardware.devices[0].name,
        dtype=resolve_dtype(settings.dtype, hardware),
        micro_batch_tokens=settings.micro_batch_tokens,
        modules=trained,
        eval_every=settings.eval_every,
        save_every=settings.save_every,
        saved=saved,
        gradient_checkpointing=settings.gradient_checkpointing,
        longest=max(each.longest for each in (train, valid) if each) + contract.rollouts.tokens,
        packing="rows" if pads else "end-to-end",
    )


def _adapter_spec(settings: TrainSettings, inputs: RunInputs) -> AdapterSpec:
    if settings.method == "full":
        return AdapterSpec("full", 0, 0.0, 0.0, settings.targets)
    return AdapterSpec(
        method=settings.method,
        rank=settings.rank,
        alpha=settings.alpha,
        dropout=settings.dropout,
        targets=settings.targets,
        modules_to_save=settings.modules_to_save,
        start=inputs.start.digest if inputs.start else None,
    )


def rollout_spec(settings: TrainSettings, inputs: RunInputs) -> RolloutSpec:
    """Return the rollout settings of a run, and its teacher's digest."""
    teacher = inputs.teacher.digest() if inputs.teacher else ""
    if not learns_from_answers(inputs.objective):
        return RolloutSpec(teacher=teacher)
    return RolloutSpec(
        tuple(_reward_spec(RewardSource.of(each)) for each in settings.reward),
        settings.rollouts,
        settings.rollout_tokens,
        settings.rollout_temperature,
        settings.updates,
        teacher,
    )


def _reward_spec(source: RewardSource) -> str:
    """Describe a reward by its name and weight, and a file by its SHA-256."""
    if source.file is None:
        return str(source)
    return f"{source._replace(file=Path(source.file.name))} {file_sha256(source.file)}"


def data_size(contract: FineTuneContract) -> str:
    """Describe the training data; answers in it are not trained on if the model samples its own."""
    data, plural = contract.data, "s" * (contract.data.rows != 1)
    if contract.rollouts.answers:
        return f"{data.rows} prompt{plural}"
    trained = f"{data.tokens:,} tokens, {data.trained_tokens:,} of them trained"
    return f"{data.rows} example{plural}, {trained}"


def _modules(
    contract: FineTuneContract, inputs: RunInputs
) -> tuple[dict[str, str], dict[str, ModuleShape]]:
    """Parameters that are trained whole, and modules with an adapter; or every fault."""
    tensors, stored = inputs.weights.tensors, inputs.weights.quantised
    if contract.adapter.method == "full":
        return _whole_model(contract, inputs), {}
    model_type, quant = contract.model.model_type, contract.quant
    modules = select_targets(linear_modules(tensors, model_type), contract.adapter.targets)
    saved = {
        name: tensor
        for name, tensor in parameter_names(tensors, model_type).items()
        if _owner_in(name, contract.adapter.modules_to_save) and not BUFFER.search(name)
    }
    quantised = {} if stored else quantised_modules(tensors, model_type, quant)
    trained = {path: shape for path, shape in modules.items() if f"{path}.weight" not in saved}
    faults = [
        *_rank_faults(contract.adapter.rank, trained),
        *_reasons_why_not(contract, saved, inputs.config),
        *width_faults(quant, quantised),
        *(
            f"--modules-to-save {name.rpartition('.')[0]}: quantised weights ({quant}) "
            "cannot be trained"
            for name, tensor in saved.items()
            if tensor in {*stored, *(module.tensor for module in quantised.values())}
        ),
    ]
    _require_none(faults)
    return saved, trained


def _whole_model(contract: FineTuneContract, inputs: RunInputs) -> dict[str, str]:
    """Parameters that the method `full` trains; or every fault."""
    config, weights = inputs.config, inputs.weights
    model_type, targets = contract.model.model_type, contract.adapter.targets
    faults = [*_reasons_why_not(contract, {}, config)]
    if weights.quant != "none":
        faults.append(
            f"--method full: the model's weights are quantised ({weights.quant}) and cannot be "
            "trained; name the full-precision model"
        )
    if found := find_experts(config, weights.tensors):
        faults.append(f"--method full: a mixture of experts ({found}) needs an adapter")
    _require_none(faults)
    return trained_parameters(weights.tensors, model_type, targets, tied=has_tied_head(config))


def _require_none(faults: Collection[str]) -> None:
    if faults:
        what = "these settings cannot be trained with this model"
        remedy = "change these settings and run again"
        raise PlanError("P001", what, faults=tuple(faults), remedy=remedy)


def has_tied_head(config: Mapping[str, Any]) -> bool:
    """Whether the output head has the weights of the token embedding, by `config.json` or else by
    transformers' default for the `model_type`."""
    key, model_type = "tie_word_embeddings", str(config.get("model_type"))
    if (said := text_config(config).get(key, config.get(key))) is not None:
        return bool(said)
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[model_type](), key, False))


def resolve_dtype(choice: DType | Literal["auto"], hardware: Hardware) -> DType:
    """`auto` is what the probe calls best for the device; float32 where it says nothing."""
    return (hardware.devices[0].best_dtype or "fp32") if choice == "auto" else choice


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a `config.json`; multimodal ones nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def has_linear_attention(config: Mapping[str, Any]) -> bool:
    """Whether layers pass a state from token to token, so that documents lie in padded rows."""
    return "linear_attention" in (text_config(config).get("layer_types") or ())


def vocabulary_size(config: Mapping[str, Any], tensors: Mapping[str, HasShape]) -> int:
    """Rows of the output head; the most rows of a matrix where `config.json` is silent."""
    if size := vocabulary_of(config):
        return size
    names = parameter_names(tensors, str(config.get("model_type"))).values()
    shapes = [tensors[name].shape for name in names]
    return max((shape[0] for shape in shapes if len(shape) == 2), default=0)


def _reasons_why_not(
    contract: FineTuneContract, saved: Mapping[str, str], config: Mapping[str, Any]
) -> Iterator[str]:
    longest = positions(config)
    if longest is not None and contract.seq_len > longest:
        yield f"--seq-len {contract.seq_len}: the model has positions for {longest} tokens"
    for target in contract.adapter.targets:
        if target in _TIED and has_tied_head(config):
            yield f"--targets {target}: {_IS_TIED}"
    for module in contract.adapter.modules_to_save:
        there = any(_owner_in(name, (module,)) for name in saved)
        tied = module.rpartition(".")[2] in _TIED and has_tied_head(config)
        if tied and there:
            why = "the model ties its embedding and its output head; training one unties them"
        elif there:
            continue
        else:
            why = _IS_TIED if tied else "no such module"
        yield f"--modules-to-save {module}: {why}"


def _rank_faults(rank: int, modules: Mapping[str, ModuleShape]) -> Iterator[str]:
    """B @ A has at most the rank of the module's smaller side; beyond it, parameters are wasted."""
    side = {path: min(each.out_features, each.in_features) for path, each in modules.items()}
    narrow = [path for path in modules if side[path] < rank]
    if not narrow:
        return
    path = min(narrow, key=lambda each: side[each])
    shape = f"{modules[path].out_features} x {modules[path].in_features}"
    fault = f"--rank {rank}: {path} is {shape}; the largest rank that fits is {side[path]}"
    rest = {*leaf_names(modules)} - {*leaf_names(narrow)}
    others = " ".join(f"--targets {name}" for name in sorted(rest))
    yield fault + (f", or train other modules alone: {others}" if others else "")


def width_faults(quant: Quant, modules: Mapping[str, ModuleShape]) -> Iterator[str]:
    """Yield modules that a quantisation's blocks do not fit."""
    for path, module in modules.items():
        codec = CODECS.get(format_of(path, quant))
        if codec and (fault := codec.fault(module.in_features)):
            yield f"--quant {quant}: {path}: {fault}"


def positions(config: Mapping[str, Any]) -> int | None:
    """Return the model's context length in tokens; None if its configuration has no limit.

    LongRoPE (arXiv:2402.13753) has other frequencies beyond the original length. transformers takes
    them for a whole batch by its longest row, so a row would depend on its neighbours, and a cached
    beginning on what follows. The original length is the limit.
    """
    text = text_config(config)
    longest = text.get("max_position_embeddings") or text.get("n_positions")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for each in (rope, *rope.values()):
        if isinstance(each, dict) and each.get("rope_type", each.get("type")) in ("longrope", "su"):
            original = "original_max_position_embeddings"
            longest = each.get(original) or text.get(original) or longest
    return longest if isinstance(longest, int) else None


def find_experts(config: Mapping[str, Any], tensors: Mapping[str, HasShape]) -> str | None:
    """Return the evidence for a mixture of experts, a key or a tensor; None if there is none."""
    for key, value in {**config, **text_config(config)}.items():
        if _HOW_MANY_EXPERTS.search(key) and isinstance(value, int) and value > 0:
            return f"{key} = {value} in config.json"
    found = [each.tensor for each in experts(tensors, str(config.get("model_type"))).values()]
    return f"{found[0]} {list(tensors[found[0]].shape)}" if found else None


def _owner_in(parameter: str, modules: tuple[str, ...]) -> bool:
    owner = parameter.rpartition(".")[0]
    return any(owner == module or owner.endswith(f".{module}") for module in modules)
