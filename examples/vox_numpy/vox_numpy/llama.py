"""Llama, forward and backward: one document at a time.

    x <- x + attention(norm(x))        x <- x + down(silu(gate(norm(x))) * up(norm(x)))

Touvron et al., arXiv:2302.13971. As in functions.py, each method returns its result and `backward`,
which maps the gradient by the result to the one by the input, and adds those by trained weights to
the adapter.

Shape legend: T tokens, S scored ones, V vocabulary, H hidden size, F size of the feed-forward,
K key heads, G query heads for each (1 for keys and values), D size of a head, I input and O output
features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from vox_numpy.adapter import Adapter, Seed
from vox_numpy.config import EMBEDDING, HEAD, Llama
from vox_numpy.functions import Array, Step, attention, gated, log_probs, rms_norm, rotate

Past: TypeAlias = dict[str, tuple[Array, ...]]
"""Layer -> rotated keys and values of the tokens so far."""


@dataclass
class Pass:
    """A document's pass through the model with an adapter.

    Args:
        seed: of the dropout.
        past: of the tokens before the document's; the pass adds the document's own, and has no
            backward.
        recompute: keep only the input of each layer, and compute the layer again in the backward
            (Chen et al., arXiv:1604.06174).
    """

    llama: Llama
    adapter: Adapter
    tokens_T: Array
    seed: Seed = None
    past: Past | None = None
    recompute: bool = True

    def __post_init__(self) -> None:
        start = next(iter(self.past.values()))[0].shape[2] if self.past else 0
        positions_T = start + np.arange(len(self.tokens_T))
        angles_TD = np.outer(positions_T, np.tile(self.llama.frequencies, 2))
        self._cos_TD = np.cos(angles_TD).astype(self.llama.dtype)
        self._sin_TD = np.sin(angles_TD).astype(self.llama.dtype)

    def logits(self, first: int = 0) -> Array:
        """Return logits (T - first, V), of the positions from `first` on."""
        x_TH, _ = self._body()
        return self._linear(HEAD, x_TH[first:])[0]

    def log_probs(self, scored_S: Array, targets_S: Array) -> tuple[Array, Callable[[Array], None]]:
        """Return the log-probabilities (S,) of targets at the positions `scored_S`."""
        x_TH, body_backward = self._body()
        logits_SV, head_backward = self._linear(HEAD, x_TH[scored_S])
        log_probs_S, loss_backward = log_probs(logits_SV, targets_S)

        def backward(dy_S: Array) -> None:
            dx_TH = np.zeros_like(x_TH)
            dx_TH[scored_S] = head_backward(loss_backward(dy_S))
            body_backward(dx_TH)

        return log_probs_S, backward

    def _body(self) -> tuple[Array, Callable[[Array], None]]:
        embedding = f"{EMBEDDING}.weight"
        x_TH, backwards = self._weight(embedding)[self.tokens_T], []
        for number in range(self.llama.config.num_hidden_layers):
            layer = partial(self._layer, f"model.layers.{number}", x_TH)
            x_TH, layer_backward = _recomputed(layer) if self.recompute else layer()
            backwards.append(layer_backward)
        x_TH, norm_backward = self._norm("model.norm", x_TH)
        backwards.append(norm_backward)

        def backward(dx_TH: Array) -> None:
            for each in reversed(backwards):
                dx_TH = each(dx_TH)
            if self.adapter.trains(embedding):
                dweight_VH = np.zeros(self.llama.shapes[embedding], dx_TH.dtype)
                np.add.at(dweight_VH, self.tokens_T, dx_TH)
                self.adapter.add(embedding, dweight_VH)

        return x_TH, backward

    def _layer(self, path: str, x_TH: Array) -> Step:
        x_TH, first = self._residual(path, "input_layernorm", self._attention, x_TH)
        x_TH, second = self._residual(path, "post_attention_layernorm", self._mlp, x_TH)
        return x_TH, lambda dy_TH: first(second(dy_TH))

    def _residual(
        self, path: str, norm: str, block: Callable[[str, Array], Step], x_TH: Array
    ) -> Step:
        y_TH, norm_backward = self._norm(f"{path}.{norm}", x_TH)
        y_TH, block_backward = block(path, y_TH)
        return x_TH + y_TH, lambda dy_TH: dy_TH + norm_backward(block_backward(dy_TH))

    def _attention(self, path: str, x_TH: Array) -> Step:
        q_TO, q_backward = self._linear(f"{path}.self_attn.q_proj", x_TH)
        k_TO, k_backward = self._linear(f"{path}.self_attn.k_proj", x_TH)
        v_TO, v_backward = self._linear(f"{path}.self_attn.v_proj", x_TH)
        q_KGTD = rotate(self._heads(q_TO), self._cos_TD, self._sin_TD)
        k_KGTD = rotate(self._heads(k_TO), self._cos_TD, self._sin_TD)
        k_KGPD, v_KGPD = self._with_past(path, k_KGTD, self._heads(v_TO))
        seen_KGTD, seen_backward = attention(q_KGTD, k_KGPD, v_KGPD)
        y_TH, o_backward = self._linear(f"{path}.self_attn.o_proj", _flat(seen_KGTD))

        def backward(dy_TH: Array) -> Array:
            dq_KGTD, dk_KGTD, dv_KGTD = seen_backward(self._heads(o_backward(dy_TH)))
            dq_KGTD = rotate(dq_KGTD, self._cos_TD, -self._sin_TD)
            dk_KGTD = rotate(dk_KGTD, self._cos_TD, -self._sin_TD)
            dq_TO, dk_TO, dv_TO = _flat(dq_KGTD), _flat(dk_KGTD), _flat(dv_KGTD)
            return q_backward(dq_TO) + k_backward(dk_TO) + v_backward(dv_TO)

        return y_TH, backward

    def _with_past(self, path: str, *new: Array) -> tuple[Array, ...]:
        """Return the keys and values of all tokens so far, and keep them."""
        if self.past is not None:
            if path in self.past:
                pairs = zip(self.past[path], new, strict=True)
                new = tuple(np.concatenate(pair, axis=2) for pair in pairs)
            self.past[path] = new
        return new

    def _heads(self, x_TO: Array) -> Array:
        """(T, K * G * D) -> (K, G, T, D)."""
        shape = len(x_TO), self.llama.config.num_key_value_heads, -1, self.llama.config.head_dim
        return x_TO.reshape(shape).transpose(1, 2, 0, 3)

    def _mlp(self, path: str, x_TH: Array) -> Step:
        gate_TF, gate_backward = self._linear(f"{path}.mlp.gate_proj", x_TH)
        up_TF, up_backward = self._linear(f"{path}.mlp.up_proj", x_TH)
        inner_TF, inner_backward = gated(gate_TF, up_TF)
        y_TH, down_backward = self._linear(f"{path}.mlp.down_proj", inner_TF)

        def backward(dy_TH: Array) -> Array:
            dgate_TF, dup_TF = inner_backward(down_backward(dy_TH))
            return gate_backward(dgate_TF) + up_backward(dup_TF)

        return y_TH, backward

    def _norm(self, path: str, x_TH: Array) -> Step:
        name = f"{path}.weight"
        y_TH, inner_backward = rms_norm(x_TH, self._weight(name), self.llama.config.rms_norm_eps)

        def backward(dy_TH: Array) -> Array:
            dx_TH, dweight_H = inner_backward(dy_TH)
            self.adapter.add(name, dweight_H)
            return dx_TH

        return y_TH, backward

    def _linear(self, path: str, x_TI: Array) -> Step:
        """`W x + b`, and what the adapter adds to it."""
        tied = path == HEAD and self.llama.config.tie_word_embeddings
        weight, bias = f"{EMBEDDING if tied else path}.weight", f"{path}.bias"
        W_OI = self._weight(weight)
        y_TO = x_TI @ W_OI.T
        if bias in self.llama.shapes:
            y_TO += self._weight(bias)
        update_TO, update_backward = self.adapter.update(path, W_OI, x_TI, self.seed)
        y_TO += update_TO

        def backward(dy_TO: Array) -> Array:
            if self.adapter.trains(weight):
                self.adapter.add(weight, dy_TO.T @ x_TI)
            self.adapter.add(bias, dy_TO.sum(0))
            return dy_TO @ W_OI + update_backward(dy_TO)

        return y_TO, backward

    def _weight(self, name: str) -> Array:
        """Return a weight of the adapter, or the base's."""
        return self.adapter.values[name] if self.adapter.trains(name) else self.llama.weight(name)


def _recomputed(run: Callable[[], Step]) -> Step:
    """Keep what `run` needs, and nothing that it computes."""

    def backward(dy: Array) -> Array:
        return run()[1](dy)

    return run()[0], backward


def _flat(x_KGTD: Array) -> Array:
    """(K, G, T, D) -> (T, K * G * D)."""
    return x_KGTD.transpose(2, 0, 1, 3).reshape(x_KGTD.shape[2], -1)
