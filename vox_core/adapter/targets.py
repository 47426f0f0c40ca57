"""Find the linear modules of a model from its safetensors headers alone.

A module is named by its path in the Hugging Face model (`model.layers.0.self_attn.q_proj`); the
files may call it something else (GPT-2's old checkpoints lack `transformer.`, multimodal ones nest
the language model). `FAMILIES` holds the differences, one row per family; everything else follows
the rule "a two-dimensional `*.weight` that is no embedding is a linear module". A backend checks
the result against the model it builds, before the first step.

`require_fit` reports every mismatch between an adapter and a base.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vox_core.contract import AdapterState, Floats, ModuleShape, Quant
from vox_core.errors import AdapterError, PlanError
from vox_core.text import did_you_mean

ALL_LINEAR = "all-linear"
BASE = ".base_layer"  # in PEFT's names of the base's own weights, saved beside a head's update
_EMBEDDING = re.compile(r"(^|\.)(embed\w*|\w*_embed\w*|wte|wpe|word_embeddings)\.weight$")
_HEAD = re.compile(r"^(lm_head|embed_out|output)$")
_TOKENS = re.compile(r"(^|\.)(embed_tokens|embed_in|embeddings|word_embeddings|wte)\.weight$")


class HasShape(Protocol):
    """A stored tensor's shape, as `vox_core.weights.TensorInfo` has it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


# Stored, and no parameters: masks, frequencies, and what balances the use of experts.
BUFFER = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.inv_freq$|(correction|expert)_bias$")

# Mamba multiplies with the weight of `dt_proj` itself, past an adapter, and of these families PEFT
# adapts no `out_proj`.
_MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
# Experts are stacks of matrices, and routers modules of their own. Where experts are stored one by
# one, PEFT takes the names of their matrices for those of the stacks in other modules, too.
_ROUTED = re.compile(r"\.(experts|router|shared_expert_gate|dt_proj)\.|\.gate\.(wg\.)?weight$")
_AN_EXPERT = re.compile(r"\.experts\.\d+\.(\w+)\.weight$")

# Modules of multimodal models and speculative decoding beside the language model.
_BESIDE = re.compile(
    r"^(model\.)?(mtp|visual|(vision|audio)_(tower|embedder)|embed_(vision|audio)"
    r"|multi_modal_projector)\."
)


@dataclass(frozen=True, slots=True)
class Family:
    """Differences between a family's tensor names and its module names.

    Args:
        renames: (pattern, replacement) pairs that turn a tensor name into a parameter name.
        absent: tensors that belong to no module of the causal language model.
        transposed: weights are stored (I, O), as in GPT-2's `Conv1D`.
        turned: stacks of experts are stored (E, I, O).
    """

    renames: tuple[tuple[str, str], ...] = ()
    absent: str = r"^(model\.)?mtp\."
    transposed: bool = False
    turned: bool = False


# Its causal language model has no vision tower; gemma3's has.
_QWEN3_5 = Family(
    renames=((r"^model\.language_model\.", "model."),), absent=r"^(model\.)?(mtp|visual)\."
)

FAMILIES: dict[str, Family] = {
    "gpt2": Family(renames=((r"^(?=(h|wte|wpe|ln_f)\.)", "transformer."),), transposed=True),
    "llama4": Family(
        renames=((r"^language_model\.", ""),), absent=r"^(vision_model|multi_modal_projector)\."
    ),
    "granitemoe": Family(renames=((r"\.router\.layer\.", ".router."),)),
    "mixtral": Family(renames=((r"\.block_sparse_moe\.", ".mlp."),)),
    "gpt_oss": Family(turned=True),
    "nemotron_h": Family(renames=((r"^backbone\.", "model."),)),
    "gpt_neox": Family(renames=((r"^embed_out\.", "lm_head."),)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"), _QWEN3_5),
    "gemma3": Family(
        renames=(
            (r"^language_model\.model\.", "model.language_model."),
            (r"^language_model\.lm_head\.", "lm_head."),
            (r"^vision_tower\.(vision_model\.)?", "model.vision_tower."),
            (r"^multi_modal_projector\.", "model.multi_modal_projector."),
        )
    ),
}


def parameter_names(tensors: Iterable[str], model_type: str) -> dict[str, str]:
    """Return parameter name in the Hugging Face model -> tensor name in the files."""
    family = FAMILIES.get(model_type, Family())
    names = {}
    for tensor in tensors:
        if re.match(family.absent, tensor):
            continue
        name = tensor
        for pattern, replacement in family.renames:
            name = re.sub(pattern, replacement, name)
        names[name] = tensor
    return names


def linear_modules(tensors: Mapping[str, HasShape], model_type: str) -> dict[str, ModuleShape]:
    """Return every linear module by its path, output head included, in file order."""
    transposed = FAMILIES.get(model_type, Family()).transposed
    modules, names = {}, parameter_names(tensors, model_type)
    taken = {it[1] for name in names if (it := _AN_EXPERT.search(name))}
    taken |= {"out_proj"} if model_type in _MAMBA else set()
    for name, tensor in names.items():
        shape, path = tensors[tensor].shape, name.removesuffix(".weight")
        is_matrix = len(shape) == 2 and path != name and not _EMBEDDING.search(name)
        if not is_matrix or _ROUTED.search(name) or path.rpartition(".")[2] in taken:
            continue
        stored_transposed = transposed and not _HEAD.match(path)
        out_features, in_features = reversed(shape) if stored_transposed else shape
        modules[path] = ModuleShape(tensor, out_features, in_features, stored_transposed)
    return modules


def select_targets(
    modules: Mapping[str, ModuleShape], targets: Iterable[str]
) -> dict[str, ModuleShape]:
    """Return the modules that `targets` names.

    Args:
        modules: result of `linear_modules`.
        targets: `all-linear` (every one but the output head), the last components of paths
            (`q_proj`, `mlp.down_proj`), or whole paths. Only a whole path reaches a module beside
            the language model, such as one of a vision tower.

    Raises:
        PlanError: P002, listing every target that names no module.
    """
    targets = tuple(targets)
    unknown = [t for t in targets if t != ALL_LINEAR and not any(_named(p, t) for p in modules)]
    if unknown:
        raise _unknown_targets(unknown, modules)
    return {
        path: module
        for path, module in modules.items()
        if any(_named(path, target) for target in targets)
        or (ALL_LINEAR in targets and not _HEAD.match(path) and not _BESIDE.match(path))
    }


def trained_parameters(
    tensors: Mapping[str, HasShape], model_type: str, targets: Iterable[str], *, tied: bool
) -> dict[str, str]:
    """Return parameter name -> tensor name of the weights that the method `full` trains.

    Args:
        targets: linear modules, as `select_targets` takes them, weights and biases; none: every
            parameter of the language model.
        tied: the output head has the weights of the embedding, which are trained once.

    Raises:
        PlanError: P002, a target names no module.
    """
    chosen = select_targets(linear_modules(tensors, model_type), targets := tuple(targets))

    def is_trained(name: str) -> bool:
        owner = name.rpartition(".")[0]
        if targets:
            return owner in chosen
        return not (is_beside(name) or BUFFER.search(name) or (tied and _HEAD.match(owner)))

    names = parameter_names(tensors, model_type)
    return {name: tensor for name, tensor in names.items() if is_trained(name)}


def is_beside(path: str) -> bool:
    """Whether a module or parameter lies beside the language model, as a vision tower does."""
    return bool(_BESIDE.match(path))


def tied_head(tensors: Mapping[str, HasShape], model_type: str) -> dict[str, str]:
    """Return the stored tensor of an output head -> that of the token embedding."""
    found = _token_embedding(tensors, model_type).values()
    embedding = next((module.tensor for module in found), "")
    linear = linear_modules(tensors, model_type)
    return {m.tensor: embedding for path, m in linear.items() if embedding and _HEAD.match(path)}


def quantised_modules(
    tensors: Mapping[str, HasShape], model_type: str, quant: Quant
) -> dict[str, ModuleShape]:
    """Return what `quant` quantises: the language model's linear modules, its experts, and with
    `nf4-embeddings` its token embedding and output head."""
    linear = {**linear_modules(tensors, model_type), **experts(tensors, model_type)}
    if quant == "none":
        return {}
    reached = {path: module for path, module in linear.items() if not _HEAD.match(path)}
    if quant == "nf4-embeddings":
        reached = {**_token_embedding(tensors, model_type), **linear}
    return {path: module for path, module in reached.items() if not _BESIDE.match(path)}


def experts(tensors: Mapping[str, HasShape], model_type: str) -> dict[str, ModuleShape]:
    """Return a mixture's experts by path: the matrix of one, or a stack with one for each."""
    found, turned = {}, FAMILIES.get(model_type, Family()).turned
    for name, tensor in parameter_names(tensors, model_type).items():
        shape = tensors[tensor].shape
        # A convolution and positions (1, T, C) are no stacks.
        is_stack = len(shape) == 3 and min(shape) > 1 and "conv" not in name
        if (is_stack or _AN_EXPERT.search(name)) and not is_beside(name):
            rows, width = reversed(shape[-2:]) if turned else shape[-2:]
            found[name.removesuffix(".weight")] = ModuleShape(tensor, rows, width, turned)
    return found


def format_of(path: str, quant: Quant) -> Quant:
    """Return the format of a quantised module: INT8 for token embedding and output head, which lose
    more in four bits (SmolLM2 starts at 5.50 nats instead of 5.31)."""
    if quant != "nf4-embeddings":
        return quant
    return "int8" if _HEAD.match(path) or _TOKENS.search(f"{path}.weight") else "nf4"


def _token_embedding(tensors: Mapping[str, HasShape], model_type: str) -> dict[str, ModuleShape]:
    """Return the token embedding as a linear module with one output feature per token."""
    found = {}
    for name, tensor in parameter_names(tensors, model_type).items():
        if _TOKENS.search(name):
            rows, width = tensors[tensor].shape
            found[name.removesuffix(".weight")] = ModuleShape(tensor, rows, width)
    return found


def leaf_names(paths: Iterable[str]) -> list[str]:
    """Return the distinct last components of module paths, sorted."""
    return sorted({path.rpartition(".")[2] for path in paths})


def _named(path: str, target: str) -> bool:
    return path == target or (path.endswith(f".{target}") and not _BESIDE.match(path))


def _unknown_targets(unknown: list[str], modules: Mapping[str, ModuleShape]) -> PlanError:
    known, several = leaf_names(modules), "several names; repeat the option, or give a list"
    hints = {name: several if "," in name else did_you_mean(name, known) for name in unknown}
    return PlanError(
        "P002",
        "a target module does not exist in the model",
        where="--targets",
        found=", ".join(unknown),
        expected=f"{ALL_LINEAR}, or some of: {', '.join(known)}",
        faults=[f"{name}: {hint}" for name, hint in hints.items() if hint],
        remedy=f"choose modules of this model, or --targets {ALL_LINEAR}",
    )


# --- an adapter against a base --------------------------------------------------------------------


def require_fit(
    state: AdapterState,
    modules: Mapping[str, ModuleShape],
    parameters: Mapping[str, tuple[int, ...]],
    where: object,
    *,
    tied: bool = False,
    read: Callable[[str], Floats] | None = None,
) -> None:
    """Check that an adapter fits a base.

    Args:
        parameters: the shapes of its stored parameters; `read` returns the values of one.
        tied: the base's output head has the weights of its token embedding.

    Raises:
        AdapterError: A002, listing every module and whole tensor that is unknown or has another
            shape.
    """
    names = (*state.modules, *state.saved)
    shared = [name for name in names if tied and _is_tied(name.replace(BASE, ""))]
    faults = [f"{name}: in the base, token embedding and output head share it" for name in shared]
    own = [path for path in state.modules if path not in shared]
    faults += [fault for path in own if (fault := _misfit(state, path, modules))]
    for stored, value in state.saved.items():
        name = stored.replace(BASE, "")
        if stored in shared:
            continue
        if name not in parameters:
            faults.append(f"{name}: the base stores no such weights of their own (are they tied?)")
        elif value.shape != parameters[name]:
            faults.append(f"{name}: the adapter has {value.shape}, the base {parameters[name]}")
        elif name != stored and not (read and np.allclose(value, read(name), 2**-8, 1e-6)):
            faults.append(f"{stored}: the base has other values")
    if state.modules and not faults:
        return
    raise AdapterError(
        "A002",
        "the adapter does not belong to this base model",
        where=where,
        found=None if faults else "no module with low-rank matrices",
        faults=faults,
        remedy="train it without them, or on a base in which they do not share their weights"
        if shared
        else "name the base model it was trained on, with --model",
    )


def _is_tied(name: str) -> bool:
    return bool(_TOKENS.search(name) or _HEAD.match(name.rpartition(".")[0] or name))


def _misfit(state: AdapterState, path: str, modules: Mapping[str, ModuleShape]) -> str | None:
    module = state.modules[path]
    if path not in modules:
        return f"{path}: the base has no such linear module"
    base = modules[path]
    found = (module.B_OR.shape[0], module.A_RI.shape[1])
    expected = (base.out_features, base.in_features)
    if found != expected:
        return f"{path}: the adapter is for (O, I) = {found}, the base has {expected}"
    if module.B_OR.shape[1] != module.rank:
        return f"{path}: A has rank {module.rank}, B has rank {module.B_OR.shape[1]}"
    if (state.method == "dora") != (module.magnitude_O is not None):
        return f"{path}: the method is {state.method}, but DoRA's magnitude is " + (
            "missing" if state.method == "dora" else "there"
        )
    return None
