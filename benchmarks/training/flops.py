"""The arithmetic that training needs, whoever does it.

With LoRA the base is frozen: a weight costs two FLOP a token in the forward pass and two for the
gradient of its input, none for a gradient of its own. So, of a document of L tokens with S trained
ones,

    4 N_body L  +  4 d V S  +  6 layers heads head_dim L (L + 1)

The first term is the linear modules of the body, the second the output head, which is needed where
a token is trained; the third is causal attention, 2 heads head_dim L (L + 1) a layer forward (two
products, half of the square) and twice that backward. Where all weights are trained, each costs two
FLOP more for its own gradient: 6 N_body L + 6 d V S. Left out: the adapter (at rank 16
1 % of an 8B model, 7 % of SmolLM2-135M),
norms, activations, optimizers, and everything that a trainer computes twice or for padding.
"""

from __future__ import annotations

from benchmarks.training.documents import Steps
from benchmarks.training.shapes import Shape
from vox_core.contract import Method

FORMULA = "4 N_body L + 4 d V S + 6 layers heads head_dim L (L + 1)"


def document_flop(shape: Shape, length: int, trained: int, method: Method = "lora") -> int:
    """FLOP for one document of `length` tokens, `trained` of which have a weight."""
    each = 6 if method == "full" else 4
    body = each * shape.body * length
    head = each * shape.hidden * shape.vocabulary * trained
    attention = 6 * shape.layers * shape.heads * shape.head_dim * length * (length + 1)
    return body + head + attention


def step_flop(shape: Shape, steps: Steps, method: Method = "lora") -> list[int]:
    """FLOP of each step."""
    return [
        sum(document_flop(shape, len(d), int((d.weights_T > 0).sum()), method) for d in step)
        for step in steps
    ]
