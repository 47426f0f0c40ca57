"""Tolerances of the conformance suite for each dtype.

The right values are float64's on the weights as they are stored, so in a short dtype the rounding
of the weights is in these numbers too. float32's losses and adapters are the design's ("The seam").
Everything else is two to five times the most that the torch engine showed on a CPU:

              loss     gradient  adapter  logits   families
    float32   1.2e-7   2e-7      2e-7     1.6e-6   1.6e-6
    float16   3.4e-4   1.8e-3    4.6e-3   3.3e-3   4.5e-3
    bfloat16  2.5e-3   2.2e-2    1.1e-2   2.6e-2   0.12

Losses and adapters were held against float32 over 20 steps, as no two backends round alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vox_core.contract import DType


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The tolerances of one dtype, all relative.

    Args:
        loss: loss of a step.
        gradient: its norm against the slope of the float64 loss.
        adapter: distance of two adapters after the same steps, in the Frobenius norm.
        logits: distance of a text's logits, in the Frobenius norm.
        families: the same for every family; a recurrent state is rounded once a token.
    """

    loss: float
    gradient: float
    adapter: float
    logits: float
    families: float


_TOLERANCES: dict[DType, Tolerance] = {
    "fp32": Tolerance(1e-5, gradient=1e-4, adapter=1e-3, logits=2e-5, families=2e-5),
    "fp16": Tolerance(1e-3, gradient=4e-3, adapter=2e-2, logits=1.5e-2, families=2e-2),
    "bf16": Tolerance(5e-3, gradient=4e-2, adapter=5e-2, logits=1e-1, families=3e-1),
}


def tolerance(dtype: DType, *, on_cpu: bool) -> Tolerance:
    """Return the tolerances; on a CPU, with a fixed order of sums, a float32 loss has one digit
    more."""
    found = _TOLERANCES[dtype]
    return found if on_cpu else replace(found, loss=max(found.loss, 1e-4))
