"""Each function's backward against central finite differences, in float64.

With steps of 1e-6 the differences are off by 1e-12 times a third derivative, and by roundoff: 1e-16
of a value over 1e-6. Seen: 3e-9; a wrong formula is off by 1e-2 or more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from vox_core.adapter.initial import generator
from vox_numpy import functions
from vox_numpy.functions import Array

STEP, NEAR = 1e-6, 1e-7


def drawn(*shape: int, seed: object = 0) -> Array:
    return generator("numpy", seed, *shape).standard_normal(shape)


def rotated(x_KGTD: Array) -> tuple[Array, Callable[[Array], tuple[Array]]]:
    angles_TD = np.tile(drawn(5, 3, seed="angles"), 2)
    cos_TD, sin_TD = np.cos(angles_TD), np.sin(angles_TD)
    y_KGTD = functions.rotate(x_KGTD, cos_TD, sin_TD)
    return y_KGTD, lambda dy_KGTD: (functions.rotate(dy_KGTD, cos_TD, -sin_TD),)


def log_probs(logits_SV: Array) -> tuple[Array, Callable[[Array], tuple[Array]]]:
    found_S, backward = functions.log_probs(logits_SV, np.array([4, 0, 4]))
    return found_S, lambda dy_S: (backward(dy_S),)


_LOW_RANK = drawn(5, 4), drawn(3, 4), drawn(6, 3)
CASES = {
    "rms_norm": (partial(functions.rms_norm, eps=0.3), [drawn(5, 4), drawn(4)]),
    "gated": (functions.gated, [drawn(5, 4), drawn(5, 4, seed=1)]),
    "rotate": (rotated, [drawn(2, 3, 5, 6)]),
    "attention": (functions.attention, [drawn(2, 3, 5, 4), drawn(2, 1, 5, 4), drawn(2, 1, 5, 4)]),
    "log_probs": (log_probs, [drawn(3, 7)]),
    "low_rank": (partial(functions.low_rank, scale=2.0), [*_LOW_RANK]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_backward_is_the_slope(name: str) -> None:
    function, inputs = CASES[name]
    y, backward = function(*inputs)
    dy = drawn(*y.shape, seed="dy")
    for index, gradient in enumerate(backward(dy)):
        np.testing.assert_allclose(gradient, slopes(function, inputs, index, dy), atol=NEAR)


def test_doras_backward_has_a_constant_norm() -> None:
    """Finite differences with the magnitude scaled along, so that the quotient has the old norm."""
    W_OI, scale, magnitude_O = drawn(6, 4, seed="W"), 2.0, drawn(6)
    norm_O = np.linalg.norm(W_OI + scale * _LOW_RANK[2] @ _LOW_RANK[1], axis=1)

    def held(x_TI: Array, A_RI: Array, B_OR: Array, magnitude_O: Array) -> tuple[Array, object]:
        moved_O = np.linalg.norm(W_OI + scale * B_OR @ A_RI, axis=1)
        return functions.dora(x_TI, W_OI, A_RI, B_OR, magnitude_O * moved_O / norm_O, scale)

    inputs = [*_LOW_RANK, magnitude_O]
    y_TO, backward = functions.dora(*inputs[:1], W_OI, *inputs[1:], scale)
    dy_TO = drawn(*y_TO.shape, seed="dy")
    for index, gradient in enumerate(backward(dy_TO)):
        np.testing.assert_allclose(gradient, slopes(held, inputs, index, dy_TO), atol=NEAR)


def slopes(function: Callable[..., object], inputs: list[Array], index: int, dy: Array) -> Array:
    """Return the slope of `sum(dy * function(inputs))` by each element of an input."""
    found = np.empty_like(inputs[index])
    for at in np.ndindex(found.shape):
        sides = []
        for sign in (1, -1):
            moved = [np.array(each) for each in inputs]
            moved[index][at] += sign * STEP
            sides.append(float((dy * function(*moved)[0]).sum()))
        found[at] = (sides[0] - sides[1]) / (2 * STEP)
    return found
