"""The proof that a merged model is base + adapter: their logits on a fixed text.

Both are computed in float32 from what is on the disk, so the only difference left is the rounding
of merged weights to the base's dtype. Three figures decide:

    relative   ||merged - adapted|| / ||adapted||    must stay within the dtype's tolerance
    effect     ||adapted - base|| / ||adapted||      zero: the adapter changes nothing
    carried    <merged - base, adapted - base> / ||adapted - base||^2
               how much of the adapter's effect the merged model has: about 1; 0 if it was dropped

`carried` catches a lost adapter even where its effect is smaller than the tolerance.

Shape legend: T probe tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vox_core.errors import ProofError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vox_core.contract import Floats, Ints

PROBE = (
    "The quick brown fox jumps over the lazy dog. In 1969, two astronauts walked on the Moon.\n"
    "def add(a, b):\n    return a + b\n"
    "Question: what is 17 + 25? Answer: 42. Grüße aus Köln; 東京は日本の首都です。"
)
MAX_PROBE_TOKENS = 32

# Largest relative error of the logits, in units of the square root of the number of linear layers,
# by the dtype that merged weights were rounded to. Origin: benchmarks/proof_tolerance.py, over the
# eight families of the tests; the largest seen are 1.6 and 1.2 times the unit roundoff. In float32,
# where the order of summation counts as well, 6, and 16 after the steep training of tests/run.
# SmolLM2 with a trained adapter: 0.1 in bfloat16.
TOLERANCE = {"BF16": 2 * 2.0**-8, "F16": 2 * 2.0**-11, "F32": 32 * 2.0**-24}
# Rounding loses what is smaller than the dtype's spacing: 2 % of the effect after ten steps on
# SmolLM2 in bfloat16. A model with less than half of the effect is not the one that was trained.
MIN_CARRIED, MAX_CARRIED = 0.5, 1.5


@dataclass(frozen=True, slots=True)
class Proof:
    """The measured figures; see the module. `max_difference` is that of a single logit."""

    relative: float
    tolerance: float
    adapter_effect: float
    carried: float
    max_difference: float
    positions: int


def probe_tokens(tokenizer: PreTrainedTokenizerBase) -> Ints:
    """The fixed text as token ids, int64 (T,)."""
    import numpy as np

    return np.asarray(tokenizer(PROBE)["input_ids"][:MAX_PROBE_TOKENS], np.int64)


def prove(base_TV: Floats, adapted_TV: Floats, merged_TV: Floats, dtype: str, layers: int) -> Proof:
    """Hold a merged model against base + adapter.

    Args:
        dtype: safetensors name of what merged weights are stored as.
        layers: number of linear layers of the model, over whose depth rounding adds up.

    Raises:
        ProofError: V002, the adapter changes nothing; V001, the merged model is not base + adapter.
    """
    import numpy as np

    scale = float(np.linalg.norm(adapted_TV))
    effect_TV, merged_effect_TV = adapted_TV - base_TV, merged_TV - base_TV
    effect = float(np.linalg.norm(effect_TV))
    if effect == 0:
        raise ProofError(
            "V002",
            "the adapter changes nothing: with it and without it the logits are the same",
            remedy="train longer, or look at the losses in telemetry.jsonl; nothing was written",
        )
    proof = Proof(
        relative=float(np.linalg.norm(merged_TV - adapted_TV)) / scale,
        tolerance=TOLERANCE[dtype] * layers**0.5,
        adapter_effect=effect / scale,
        carried=float(np.vdot(merged_effect_TV, effect_TV)) / effect**2,
        max_difference=float(np.abs(merged_TV - adapted_TV).max()),
        positions=len(adapted_TV),
    )
    if not (proof.relative <= proof.tolerance and MIN_CARRIED <= proof.carried <= MAX_CARRIED):
        raise _refuted(proof)
    return proof


def _refuted(proof: Proof) -> ProofError:
    return ProofError(
        "V001",
        "the merged model does not reproduce base + adapter",
        found=f"relative difference {proof.relative:.2e}, {proof.carried:.0%} of the effect",
        expected=f"at most {proof.tolerance:.2e}, and about 100%",
        remedy="nothing was written; if the adapter is barely trained, its effect may be smaller "
        "than the base's dtype can hold: train longer, or keep base and adapter apart",
    )
