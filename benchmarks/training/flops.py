"""The arithmetic that LoRA training needs, whoever does it.

The base is frozen: a weight costs two FLOP a token in the forward pass and two for the gradient of
its input, none for a gradient of its own. So, of a document of L tokens with S trained ones,

    4 N_body L  +  4 d V S  +  6 layers heads head_dim L (L + 1)

The first term is the linear modules of the body, the second the output head, which is needed where
a token is trained; the third is causal attention, 2 heads head_dim L (L + 1) a layer forward (two
products, half of the square) and twice that backward. Left out: the adapter (about 1 % at rank 16),
norms, activations, and everything that a trainer computes twice or for padding.
"""

from __future__ import annotations

from benchmarks.training.documents import Steps
from benchmarks.training.shapes import Shape

FORMULA = "4 N_body L + 4 d V S + 6 layers heads head_dim L (L + 1)"


def document_flop(shape: Shape, length: int, trained: int) -> int:
    """FLOP for one document of `length` tokens, `trained` of which have a weight."""
    body = 4 * shape.body * length
    head = 4 * shape.hidden * shape.vocabulary * trained
    attention = 6 * shape.layers * shape.heads * shape.head_dim * length * (length + 1)
    return body + head + attention


def step_flop(shape: Shape, steps: Steps) -> list[int]:
    """FLOP of each step."""
    return [
        sum(document_flop(shape, len(d), int((d.weights_T > 0).sum())) for d in step)
        for step in steps
    ]
