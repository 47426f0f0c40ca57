"""Count what layers keep for the backward and need during it, per token.

A general rule over linear modules and norms, in place of a formula for each family:

- An RMS norm keeps its input in float32, whatever is computed with (transformers' own widens it
  first); a `LayerNorm`, and a fused RMS norm, keep it as it is. So the residual stream is counted,
  where norms read it.
- Modules that read the same tensor (q, k, v; gate, up) keep it once, if any of them has an adapter:
  the gradient of A needs it, and a frozen weight's own gradient is never taken.
- What they write is kept: by attention (q, k, v), by the gate's product (gate, up), by the
  non-linearity. What a block writes back to the residual stream is not; the next norm reads it.
- A gated feed-forward keeps the non-linearity of its gate as well, for the product, if it is not
  fused.
- What the last module of a block reads is kept for that module's adapter; a fused LoRA layer
  computes the product of a fused gate again. Attention keeps what it gives by itself; on its way to
  the last module it is laid out anew, which is a copy.

The rule is held against what autograd really keeps, byte by byte, for every family of the tests in
tests/test_kept_activations.py.

Elements are counted in the compute dtype and in float32 apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from vox_core.contract import ModuleShape
from vox_plan.architecture import Architecture, Layer

_WRITER = re.compile(r"^(o_proj|out_proj|c_proj|down_proj|dense|dense_4h_to_h|fc2|fc_out|wo|w2)$")
_ATTENTION = re.compile(r"att")
_LINEAR_ATTENTION = re.compile(r"linear_att")

# Non-linearities that a fused feed-forward has (vox_torch/fused_modules.py).
_FUSED = ("silu", "swish", "gelu_pytorch_tanh")

# transformers' gelu_new is written out: beside its input it keeps a tanh and two factors.
_WRITTEN_OUT: Mapping[str, int] = {"gelu_new": 3}

# transformers' gated delta rule, as it is written out for machines without flash-linear-attention,
# works on chunks of 64 tokens. How often what is as wide as a chunk, a key, a value (a head, in
# float32) and as the input of its convolution is kept: a least-squares fit to what autograd kept of
# fourteen tiny models with other numbers of heads and other widths; it meets each within 8 %.
_STATE_CHUNK = 64
_CHUNKS_KEPT, _KEYS_KEPT, _VALUES_KEPT, _MIXED_KEPT = 5.0, 7.5, 4.0, 3.0

Paths = Collection[str]


class Elements(NamedTuple):
    """Numbers a token, in the compute dtype and in float32."""

    compute: float = 0.0
    float32: float = 0.0

    def plus(self, other: Elements) -> Elements:
        return Elements(self.compute + other.compute, self.float32 + other.float32)

    def bytes(self, number: int) -> float:
        """Bytes, where a number of the compute dtype has `number`."""
        return self.compute * number + self.float32 * 4


class _Block(NamedTuple):
    """The linear modules under one parent: those that read its input, and those that write what
    goes back to the residual stream."""

    path: str
    readers: Mapping[str, ModuleShape]
    writers: Mapping[str, ModuleShape]


def kept_by_layer(
    model: Architecture, layer: Layer, adapted: Paths, *, fused: bool = False, lora: Paths = ()
) -> Elements:
    """Count the activations that a layer keeps; `fused`: its norms and feed-forwards are, and of
    the adapters those in `lora`."""
    total = _kept_by_norms(model, layer, fused).plus(Elements(compute=layer.feed_forward))
    for block in _blocks(model, layer):
        total = total.plus(_kept_by_block(model, block, adapted, fused, lora))
        total = total.plus(_kept_by_state(model, block))
    return total


def working_of_layer(model: Architecture, layer: Layer) -> Elements:
    """Count a layer's temporary gradients in the backward pass: those of its largest block, and of
    the residual stream."""
    widest = max(layer.feed_forward, *map(_width, _blocks(model, layer)), 0)
    return Elements(compute=widest + 2 * model.hidden)


def kept_beside(layer: Layer, adapted: Collection[str], dora: bool, dropout: bool) -> float:
    """Numbers a token, in the compute dtype, that dropout and DoRA keep besides LoRA's: what
    dropout left, in place of the input, and its mask (in the compute dtype on a CPU, bytes on a
    GPU); the outputs of base and adapter for the magnitude's gradient."""
    modules = [module for path, module in layer.linear.items() if path in adapted]
    dropped = 2 * sum(module.in_features for module in modules) if dropout else 0
    return dropped + (2 * sum(module.out_features for module in modules) if dora else 0)


def _kept_by_norms(model: Architecture, layer: Layer, fused: bool) -> Elements:
    total = Elements()
    for path, norm in layer.norms.items():
        width = norm.width if norm.width == model.hidden else _width_before(path, layer, norm.width)
        as_it_is = norm.bias or fused
        total = total.plus(Elements(compute=width) if as_it_is else Elements(float32=width))
    return total


def _width_before(norm: str, layer: Layer, width: int) -> int:
    """Return the input width of a norm inside attention: all heads of `q_proj` for `q_norm`."""
    parent, _, name = norm.rpartition(".")
    before = layer.linear.get(f"{parent}.{name.partition('_')[0]}_proj")
    return before.out_features if before else width


def _kept_by_block(
    model: Architecture, block: _Block, adapted: Paths, fused: bool, lora: Paths
) -> Elements:
    read = max((m.in_features for p, m in block.readers.items() if p in adapted), default=0)
    written = sum(module.out_features for module in block.readers.values())
    writers = {path for path in block.writers if path in adapted}
    if _ATTENTION.search(block.path):
        inside: float = sum(module.in_features for module in block.writers.values())
    elif fused and model.activation in _FUSED and len(block.readers) > 1:
        inside, writers = 0, writers - {*lora}
    else:
        inside = _kept_by_activation(model, block, written)
    passed = sum(block.writers[path].in_features for path in writers)
    return Elements(compute=read + written + passed + inside)


def _kept_by_activation(model: Architecture, block: _Block, written: int) -> float:
    """Numbers a token that the non-linearity of a block keeps."""
    through = sum(module.in_features for module in block.writers.values())
    gate = through if written >= 2 * through else 0
    return gate + _WRITTEN_OUT.get(model.activation, 0) * (written - gate)


def _kept_by_state(model: Architecture, block: _Block) -> Elements:
    """Count the states that a layer of linear attention keeps."""
    state = model.state
    if state is None or not _LINEAR_ATTENTION.search(block.path):
        return Elements()
    mixed = max((module.out_features for module in block.readers.values()), default=0)
    head = _CHUNKS_KEPT * _STATE_CHUNK + _KEYS_KEPT * state.key + _VALUES_KEPT * state.value
    return Elements(compute=_MIXED_KEPT * mixed, float32=state.heads * head)


def _blocks(model: Architecture, layer: Layer) -> Iterator[_Block]:
    parents = dict.fromkeys(path.rpartition(".")[0] for path in layer.linear)
    for parent in parents:
        inside = {p: m for p, m in layer.linear.items() if p.rpartition(".")[0] == parent}
        writers = {
            path: module
            for path, module in inside.items()
            if _WRITER.match(path.rpartition(".")[2]) and module.out_features == model.hidden
        }
        readers = {path: module for path, module in inside.items() if path not in writers}
        yield _Block(parent, readers, writers)


def _width(block: _Block) -> int:
    written = sum(module.out_features for module in block.readers.values())
    return written + sum(module.in_features for module in block.writers.values())
