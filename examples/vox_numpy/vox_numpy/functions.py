"""The functions of a Llama with adapters, each with its gradient.

Each returns its result and `backward`, which maps the gradient of a loss by the result to the
gradients by the inputs: `dx_TH` is the one by `x_TH`. As an inner function, a backward keeps what
it needs of the forward.

Shape legend: T tokens, S scored ones, P positions attended to (cached ones and the T tokens),
V vocabulary, H hidden size, F size of the feed-forward, K key heads, G query heads for each (1 for
keys and values), D size of a head, I input and O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""float32; in tests float64. Results have the dtype of the inputs."""
DType: TypeAlias = type[np.floating[Any]]
Gradients: TypeAlias = tuple[Array, ...]
Step: TypeAlias = tuple[Array, Callable[[Array], Array]]
"""The result of a function of one input, and its backward."""
Steps: TypeAlias = tuple[Array, Callable[[Array], Gradients]]
"""The result of a function of several inputs, and its backward."""


def rms_norm(x_TH: Array, weight_H: Array, eps: float) -> Steps:
    """`weight * x / rms(x)` (Zhang & Sennrich, arXiv:1910.07467); gradients by x and weight."""
    square_T1 = np.square(x_TH, dtype=np.float64).mean(-1, keepdims=True)
    scale_T1 = (1 / np.sqrt(square_T1 + eps)).astype(x_TH.dtype)
    unit_TH = x_TH * scale_T1

    def backward(dy_TH: Array) -> Gradients:
        dunit_TH = dy_TH * weight_H
        along_T1 = (dunit_TH * unit_TH).mean(-1, keepdims=True)
        return scale_T1 * (dunit_TH - unit_TH * along_T1), (dy_TH * unit_TH).sum(0)

    return weight_H * unit_TH, backward


def gated(gate_TF: Array, up_TF: Array) -> Steps:
    """`silu(gate) * up` (Shazeer, arXiv:2002.05202); gradients by gate and up."""
    sigmoid_TF = 0.5 * (1 + np.tanh(0.5 * gate_TF))
    silu_TF = gate_TF * sigmoid_TF

    def backward(dy_TF: Array) -> Gradients:
        slope_TF = sigmoid_TF + silu_TF * (1 - sigmoid_TF)
        return dy_TF * up_TF * slope_TF, dy_TF * silu_TF

    return silu_TF * up_TF, backward


def rotate(x_KGTD: Array, cos_TD: Array, sin_TD: Array) -> Array:
    """Rotate pairs of features by angles that grow with the position (Su et al., arXiv:2104.09864).

    A pair is feature d and d + D / 2, as in Hugging Face's checkpoints. The gradient is the
    rotation back: `rotate(dy, cos, -sin)`.
    """
    first, second = np.split(x_KGTD, 2, axis=-1)
    return np.asarray(x_KGTD * cos_TD + np.concatenate([-second, first], axis=-1) * sin_TD)


def attention(q_KGTD: Array, k_KGPD: Array, v_KGPD: Array) -> Steps:
    """`softmax(q k' / sqrt(D)) v`, causal; gradients by q, k and v.

    The G query heads of a key head share its keys and values (Ainslie et al., arXiv:2305.13245).
    """
    tokens, positions = q_KGTD.shape[2], k_KGPD.shape[2]
    scale = q_KGTD.shape[3] ** -0.5
    scores_KGTP = scale * (q_KGTD @ k_KGPD.swapaxes(2, 3))
    later_TP = np.triu(np.ones((tokens, positions), bool), 1 + positions - tokens)
    scores_KGTP[..., later_TP] = -np.inf
    shares_KGTP = np.exp(scores_KGTP - scores_KGTP.max(-1, keepdims=True))
    shares_KGTP /= shares_KGTP.sum(-1, keepdims=True)

    def backward(dy_KGTD: Array) -> Gradients:
        dshares_KGTP = dy_KGTD @ v_KGPD.swapaxes(2, 3)
        along_KGT1 = (dshares_KGTP * shares_KGTP).sum(-1, keepdims=True)
        dscores_KGTP = scale * shares_KGTP * (dshares_KGTP - along_KGT1)
        dq_KGTD = dscores_KGTP @ k_KGPD
        dk_KGPD = (dscores_KGTP.swapaxes(2, 3) @ q_KGTD).sum(1, keepdims=True)
        dv_KGPD = (shares_KGTP.swapaxes(2, 3) @ dy_KGTD).sum(1, keepdims=True)
        return dq_KGTD, dk_KGPD, dv_KGPD

    return shares_KGTP @ v_KGPD, backward


def log_probs(logits_SV: Array, targets_S: Array) -> Step:
    """Log-probability of each target; gradient by the logits."""
    at_target = np.arange(len(targets_S)), targets_S
    lower_SV = logits_SV - logits_SV.max(-1, keepdims=True)
    sum_S1 = np.exp(lower_SV).sum(-1, keepdims=True, dtype=np.float64)
    log_sum_S1 = np.log(sum_S1).astype(logits_SV.dtype)

    def backward(dy_S: Array) -> Array:
        dlogits_SV = -np.exp(lower_SV - log_sum_S1)
        dlogits_SV[at_target] += 1
        return np.asarray(dy_S[:, None] * dlogits_SV)

    return lower_SV[at_target] - log_sum_S1[:, 0], backward


def low_rank(x_TI: Array, A_RI: Array, B_OR: Array, scale: float) -> Steps:
    """`scale * B A x`, LoRA's part of a linear layer (Hu et al., arXiv:2106.09685); gradients by x,
    A and B."""
    z_TR = x_TI @ A_RI.T

    def backward(dy_TO: Array) -> Gradients:
        dz_TR = scale * (dy_TO @ B_OR)
        return dz_TR @ A_RI, dz_TR.T @ x_TI, scale * (dy_TO.T @ z_TR)

    return scale * (z_TR @ B_OR.T), backward


def dora(
    x_TI: Array, W_OI: Array, A_RI: Array, B_OR: Array, magnitude_O: Array, scale: float
) -> Steps:
    """`(gain - 1) W x + gain * scale * B A x`, DoRA's part of a linear layer, with
    `gain = magnitude / ||W + scale * B A||` by rows; gradients by x, A, B and magnitude.

    The norm is a constant to the gradient (Liu et al., arXiv:2402.09353, section 4.3).
    """
    norm_O = np.linalg.norm(W_OI + scale * (B_OR @ A_RI), axis=1)
    gain_O = magnitude_O / norm_O
    base_TO = x_TI @ W_OI.T
    update_TO, update_backward = low_rank(x_TI, A_RI, B_OR, scale)

    def backward(dy_TO: Array) -> Gradients:
        dx_TI, dA_RI, dB_OR = update_backward(gain_O * dy_TO)
        dmagnitude_O = (dy_TO * (base_TO + update_TO)).sum(0) / norm_O
        return dx_TI + ((gain_O - 1) * dy_TO) @ W_OI, dA_RI, dB_OR, dmagnitude_O

    return (gain_O - 1) * base_TO + gain_O * update_TO, backward
