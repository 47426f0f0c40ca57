"""The proof that a merged model is base + adapter: their logits on a fixed text.

Both are computed in float32 from what is on the disk, so the only difference left is the rounding
of merged weights to the base's dtype. Three figures decide:

    relative   ||merged - adapted|| / ||adapted||    must stay within the dtype's tolerance
    effect     ||adapted - base|| / ||adapted||      zero: the adapter changes nothing
    carried    <merged - base, adapted - base> / ||adapted - base||^2
               how much of the adapter's effect the merged model has: about 1; 0 if it was dropped

`carried` catches a lost adapter even where its effect is smaller than the tolerance.

The base is the one that the adapter was added to. Where the run was trained on a quantised one,
what was trained is something else again: `from_trained` says how far the merged model is from that.
It is a figure and decides nothing, for the noise of a quantisation is no fault of the merge.

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
# Rounding loses what is smaller than the dtype's spacing: in bfloat16 on SmolLM2, 2 % of the effect
# of an adapter that changes the logits by 20 %, and a third of one that changes them by 2 %. What
# has lost a tenth is not the model that was trained.
MIN_CARRIED, MAX_CARRIED = 0.9, 1.1


@dataclass(frozen=True, slots=True)
class Proof:
    """The measured figures; see the module. `max_difference` is that of a single logit;
    `from_trained` is None where the base was not quantised."""

    relative: float
    tolerance: float
    adapter_effect: float
    carried: float
    max_difference: float
    positions: int
    from_trained: float | None = None


def probe_tokens(tokenizer: PreTrainedTokenizerBase) -> Ints:
    """The fixed text as token ids, int64 (T,)."""
    import numpy as np

    return np.asarray(tokenizer(PROBE)["input_ids"][:MAX_PROBE_TOKENS], np.int64)


def distance(merged_TV: Floats, other_TV: Floats) -> float:
    """||merged - other|| / ||other||."""
    import numpy as np

    return float(np.linalg.norm(merged_TV - other_TV) / np.linalg.norm(other_TV))


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
        relative=distance(merged_TV, adapted_TV),
        tolerance=TOLERANCE[dtype] * layers**0.5,
        adapter_effect=effect / scale,
        carried=float(np.vdot(merged_effect_TV, effect_TV)) / effect**2,
        max_difference=float(np.abs(merged_TV - adapted_TV).max()),
        positions=len(adapted_TV),
    )
    if proof.relative > proof.tolerance or not MIN_CARRIED <= proof.carried <= MAX_CARRIED:
        raise _refuted(proof, dtype)
    return proof


def not_merged(tensor: str) -> ProofError:
    """The error for a tensor that is not base + update (vox_core/adapter/merged.py)."""
    return ProofError(
        "V001",
        "a merged tensor is not base + update",
        where=tensor,
        remedy="nothing was written; merge with another backend, with --backend, and report this "
        "to the authors of this one",
    )


def _refuted(proof: Proof, dtype: str) -> ProofError:
    small = proof.relative <= proof.tolerance and dtype != "F32"
    return ProofError(
        "V001",
        f"the adapter's effect is too small for {dtype}, and would be rounded away"
        if small
        else "the merged model does not reproduce base + adapter",
        found=f"{proof.carried:.0%} of the adapter's effect, logits {proof.relative:.1e} apart",
        expected=f"at least {MIN_CARRIED:.0%} of it, at most {proof.tolerance:.1e} apart",
        remedy="nothing was written; merge with --dtype fp32, or train longer"
        if small
        else "nothing was written; please report this with `vox merge --debug`",
    )
