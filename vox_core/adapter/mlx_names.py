"""Where mlx-lm's model has what the Hugging Face model calls by another path.

The rule is "the same path". `FAMILIES` holds the differences, one row per `model_type`: beginnings
of paths, read from `sanitize` and the module tree of mlx-lm's models. Paths of modules and names
of parameters begin alike, so both can be translated.

What mlx-lm leaves out (a vision tower) or stores with other values (the norms of Qwen3.5) has no
counterpart; `counterpart_fault` says so. `targets.FAMILIES` is the other table: what Hugging Face's
*files* call the same modules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MlxNames:
    """How a family's paths differ.

    Args:
        beginnings: (in the Hugging Face model, in mlx-lm's model); the first that fits counts.
        absent: paths in the Hugging Face model that mlx-lm's model does not have.
        changed: parameters that mlx-lm stores with other values or in another layout.
    """

    beginnings: tuple[tuple[str, str], ...] = ()
    absent: str | None = None
    changed: str | None = None


_BESIDE = r"(model\.)?(vision_tower|multi_modal_projector|visual|mtp)\."

# `AutoModelForCausalLM` makes the text model of it; mlx-lm nests that for both types.
_QWEN3_5 = MlxNames(
    beginnings=(("model.", "language_model.model."), ("lm_head", "language_model.lm_head")),
    absent=_BESIDE,
    # Weights are 1 + w, but for the gated norm's; the convolution is (channel, width, 1).
    changed=r".*(layernorm|model\.norm|[qk]_norm)\.weight$|.*\.conv1d\.weight$",
)

# `sanitize` splits the matrix by heads, for attention on the latents.
_LATENT = MlxNames(absent=r".*\.kv_b_proj(\.|$)")
# mlx-lm stacks the experts of a layer in one tensor, for every family.
_EXPERT = re.compile(r"\.experts\.\d+\.")

FAMILIES: dict[str, MlxNames] = {
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm4_moe_lite": _LATENT,
    # mlx-lm always ties the head to the embedding.
    "gpt2": MlxNames(beginnings=(("transformer.", "model."),), absent=r"lm_head(\.|$)"),
    "gpt_neox": MlxNames(
        beginnings=(
            ("lm_head", "model.embed_out"),
            ("gpt_neox.layers.", "model.h."),
            ("gpt_neox.", "model."),
        ),
    ),
    "gptj": MlxNames(beginnings=(("transformer.", "model."),)),
    # `AutoModelForCausalLM` makes the multimodal model.
    "gemma3": MlxNames(
        beginnings=(
            ("model.language_model.", "language_model.model."),
            ("lm_head", "language_model.lm_head"),
        ),
        absent=_BESIDE,
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
}


def mlx_path(hf_path: str, model_type: str) -> str:
    """Where mlx-lm's model has the module or parameter `hf_path` of the Hugging Face model."""
    return _translated(hf_path, _row(model_type).beginnings)


def hf_path(mlx_path: str, model_type: str) -> str:
    """Where the Hugging Face model has the module or parameter `mlx_path` of mlx-lm's model."""
    beginnings = tuple((mlx, hf) for hf, mlx in _row(model_type).beginnings)
    return _translated(mlx_path, beginnings)


def counterpart_fault(path: str, model_type: str) -> str | None:
    """Why `path` of the Hugging Face model has no equal in mlx-lm's model; None if it has one."""
    row = _row(model_type)
    if _EXPERT.search(path):
        return "mlx-lm keeps all experts of a layer in one switch layer"
    if row.absent and re.match(row.absent, path):
        return "mlx-lm's model has no such module"
    if row.changed and re.match(row.changed, path):
        return "mlx-lm stores this parameter with other values"
    if hf_path(mlx_path(path, model_type), model_type) != path:
        return f"no path of a {model_type} model begins like this"
    return None


def _row(model_type: str) -> MlxNames:
    return FAMILIES.get(model_type, MlxNames())


def _translated(path: str, beginnings: tuple[tuple[str, str], ...]) -> str:
    for beginning, other in beginnings:
        if path.startswith(beginning):
            return other + path.removeprefix(beginning)
    return path
