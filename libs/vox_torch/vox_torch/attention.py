"""Attention over concatenated documents, each of which attends only to itself.

It is registered as `DOCUMENTS` among transformers' attention functions. On an accelerator in half
precision one variable-length kernel of torch computes all documents; elsewhere each document goes
through scaled dot product attention separately, or, on a CPU with AVX512-BF16 and without AMX, all
through matrix products (cpu_attention.py).

This module imports torch; import it lazily.

Shape legend: H heads, T tokens, D features of a head, L tokens of a document.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from vox_torch.cpu_attention import CausalAttention
from vox_torch.layout import Extents

DOCUMENTS = "vox_documents"

# Arguments of transformers' attention interface that are implemented here, or have no effect.
_KNOWN = {
    "dropout",
    "is_causal",
    "output_attentions",
    "output_router_logits",
    "position_ids",
    "use_cache",
}


def register() -> None:
    """Register `DOCUMENTS` with transformers; repeated calls do no harm."""
    from transformers import AttentionInterface

    AttentionInterface.register(DOCUMENTS, attend)


def attend(
    module: nn.Module,
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    documents: Extents,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface; returns (1, T, H, D), and no weights.

    Raises:
        NotImplementedError: the model needs more than causal attention with a window.
    """
    require_known(module, attention_mask, others)
    documents.windows.add(sliding_window)
    scale = query_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window if sliding_window and sliding_window < documents.longest else None
    if softcap is None and has_varlen(query_1HTD, key_1HTD):
        qkv = (each[0].transpose(0, 1) for each in (query_1HTD, key_1HTD, value_1HTD))
        bounds, longest = (documents.bounds_N1,) * 2, (documents.longest,) * 2
        return varlen(*qkv, bounds, longest, scale, window)[None], None
    qkv = (query_1HTD, key_1HTD, value_1HTD)
    by_products = query_1HTD.is_cpu and query_1HTD.dtype == torch.bfloat16 and _bf16_without_amx()
    if softcap is None and by_products and not documents.back:
        return CausalAttention.apply(*qkv, documents.bounds, scale, window), None
    return _one_by_one(*qkv, documents, scale, window, softcap), None


def require_known(module: nn.Module, mask: object, others: dict[str, Any]) -> None:
    """Raise NotImplementedError for arguments of attention that would be ignored."""
    strange = [name for name, value in others.items() if name not in _KNOWN and value is not None]
    if mask is not None:
        strange.append("attention_mask")
    if strange or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"attention with {', '.join(strange) or 'is_causal=False'}")


def has_varlen(query_1HTD: torch.Tensor, key_1HTD: torch.Tensor) -> bool:
    """Whether the variable-length kernel supports tensors like these, forward and backward."""
    if query_1HTD.is_cpu or query_1HTD.element_size() != 2:
        return False
    heads, _, features = query_1HTD.shape[1:]
    return _varlen_works(heads, key_1HTD.shape[1], features, query_1HTD.dtype, query_1HTD.device)


@functools.cache
def _varlen_works(
    heads: int, key_heads: int, features: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Test the kernel on two tiny documents, since support depends on GPU, torch and head size."""
    with torch.inference_mode(False), torch.enable_grad():
        tried = [
            torch.zeros((3, n, features), dtype=dtype, device=device, requires_grad=True)
            for n in (heads, key_heads, key_heads)
        ]
        bounds = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
        try:
            varlen(*tried, (bounds, bounds), (2, 2), 1.0, 1).sum().backward()
        except (ImportError, TypeError, ValueError, RuntimeError, NotImplementedError):
            return False
    return True


def varlen(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return (T, H, D) of torch's variable-length kernel, causal from each last position.

    Args:
        bounds: offsets of each document's queries, and of its keys.
        longest: most queries, and most keys, of a document.
    """
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": query_THD.shape[1] != key_THD.shape[1]} if _asks_for_groups() else {}
    out_THD: torch.Tensor = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        *bounds,
        *longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    return out_THD


@functools.cache
def _asks_for_groups() -> bool:
    """Whether the kernel's function has an argument for grouped heads; torch 2.11's takes them as
    they are."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _one_by_one(
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    documents: Extents,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    out, lengths = [], documents.lengths()
    # Split, because the gradient of a slice is as large as the whole.
    parts = [each.split(lengths, dim=2) for each in (query_1HTD, key_1HTD, value_1HTD)]
    for number, (length, *qkv) in enumerate(zip(lengths, *parts, strict=True)):
        seen_LL = None
        if number in documents.back:
            back_LL = documents.back[number]
            seen_LL = (back_LL >= 0) & (back_LL < (window or documents.longest))
        elif window and length > window:
            seen_LL = within(length, length, window, query_1HTD)
        if softcap is None:
            out.append(sdpa(*qkv, scale, seen_LL))
        else:
            out.append(capped(*qkv, scale, seen_LL, softcap))
    return torch.cat([each.transpose(1, 2) for each in out], dim=1)


@functools.cache
def _bf16_without_amx() -> bool:
    """Whether the processor multiplies bfloat16, and torch's attention kernel does not use it."""
    has = getattr(torch.cpu, "get_capabilities", dict)()  # not in torch 2.10
    return bool(has.get("avx512_bf16")) and not has.get("amx_tile")


def sdpa(
    query_1HLD: torch.Tensor,
    key_1HLD: torch.Tensor,
    value_1HLD: torch.Tensor,
    scale: float,
    seen_LL: torch.Tensor | None,
    causal: bool = True,
) -> torch.Tensor:
    """Return (1, H, L, D). Without a mask, `causal` aligns the first positions.

    On a CPU torch's kernel wants keys and values of one width, and its formula for others keeps all
    scores: the narrower ones (DeepSeek's values) get zeros.
    """
    from torch.nn.functional import pad, scaled_dot_product_attention

    width, wide = value_1HLD.shape[-1], query_1HLD.shape[-1]
    if query_1HLD.is_cpu and width != wide:
        value_1HLD = pad(value_1HLD, (0, max(0, wide - width)))
        query_1HLD, key_1HLD = (
            pad(each, (0, max(0, width - wide))) for each in (query_1HLD, key_1HLD)
        )
    grouped = query_1HLD.shape[1] != key_1HLD.shape[1]
    if grouped and not query_1HLD.is_cpu:
        # Grouped heads or a mask would each select the kernel that saves all scores.
        groups = query_1HLD.shape[1] // key_1HLD.shape[1]
        key_1HLD = key_1HLD.repeat_interleave(groups, dim=1)
        value_1HLD = value_1HLD.repeat_interleave(groups, dim=1)
        grouped = False
    found_1HLD = scaled_dot_product_attention(
        query_1HLD,
        key_1HLD,
        value_1HLD,
        attn_mask=seen_LL,
        is_causal=causal and seen_LL is None,
        scale=scale,
        enable_gqa=grouped,
    )
    return found_1HLD[..., :width]


def capped(
    query_1HLD: torch.Tensor,
    key_1HLD: torch.Tensor,
    value_1HLD: torch.Tensor,
    scale: float,
    seen_LL: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """Attention with soft-capped scores, as in Gemma 2 (arXiv:2408.00118, section 2)."""
    groups = query_1HLD.shape[1] // key_1HLD.shape[1]
    key_1HLD = key_1HLD.repeat_interleave(groups, dim=1)
    value_1HLD = value_1HLD.repeat_interleave(groups, dim=1)
    scores_1HLL = (query_1HLD @ key_1HLD.transpose(2, 3)) * scale
    scores_1HLL = torch.tanh(scores_1HLL / softcap) * softcap
    if seen_LL is None:
        length = query_1HLD.shape[2]
        seen_LL = within(length, length, None, query_1HLD)
    scores_1HLL = scores_1HLL.masked_fill(~seen_LL, float("-inf"))
    weights_1HLL = scores_1HLL.softmax(dim=-1, dtype=torch.float32)
    return weights_1HLL.to(query_1HLD.dtype) @ value_1HLD


def within(count: int, length: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Return bool (count, length) for the last `count` of `length` positions: each sees itself and
    at most `window - 1` before it."""
    before = length - count
    seen_NL = torch.ones((count, length), dtype=torch.bool, device=like.device).tril(before)
    return seen_NL if window is None else seen_NL.triu(before + 1 - window)
