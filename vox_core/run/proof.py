"""Verify that a merged model is base + adapter: tensor by tensor, and by the logits of a text.

`require_merged` checks some rows of each merged tensor in float64, so that not one module can be
left out or scaled wrongly. `prove` compares the logits of the merged model and of base + adapter on
a fixed text. Both are computed in float32 from the files on the disk, so they differ only by the
rounding of merged weights to the output dtype. Three figures decide:

    relative   ||merged - adapted|| / ||adapted||    median of positions, within the tolerance
    effect     ||adapted - base|| / ||adapted||      zero: the adapter changes nothing
    carried    <merged - base, adapted - base> / ||adapted - base||^2
               share of the adapter's effect in the merged model: 1 without rounding, 0 if dropped

Rounding explains `relative` and, in 16 bits, a `carried` well below 1: most weights' updates are
smaller than the spacing of bfloat16 there. Such a merge is written and the share reported.

The base is the one that the adapter was added to. After training on a quantised base,
`from_trained` says how far the merged model is from adapter + quantised base. It decides nothing,
for the noise of a quantisation is no fault of the merge.

Shape legend: T probe tokens, V vocabulary; R rank, I input features, O output features, P rows that
are checked.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vox_core.contract import AdapterState, DType, Floats, Ints, LoadJob, MergeTarget, RunContext
from vox_core.errors import ProofError
from vox_core.host.load import Backend
from vox_core.weights import STORED_AS, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


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
# Bounds of `carried` where float32 holds the result: what is beyond them is no rounding.
MIN_CARRIED, MAX_CARRIED = 0.9, 1.1
# The same for weights rounded to 16 bits. With less than a tenth of its adapter a merged model
# answers as its base does, which nobody merges for: --dtype fp32 serves them. Ordinary runs are far
# from that: after 19 steps of SmolLM2 on 150 examples bfloat16 keeps 86 %. The other way, rounding
# turns an update of just over half a spacing into a whole one: it at most doubles an effect.
MIN_ROUNDED, MAX_ROUNDED = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Proof:
    """The measured figures; see the module.

    Args:
        dtype: what merged weights are stored as.
        max_difference: of a single logit.
        from_trained: None where the base was not quantised.
    """

    dtype: DType
    relative: float
    tolerance: float
    adapter_effect: float
    carried: float
    max_difference: float
    positions: int
    from_trained: float | None = None


def probe_tokens(tokenizer: PreTrainedTokenizerBase) -> Ints:
    """The fixed text as token ids, int64 (T,)."""
    return np.asarray(tokenizer(PROBE)["input_ids"][:MAX_PROBE_TOKENS], np.int64)


def probe_logits(
    backend: Backend,
    job: LoadJob,
    context: RunContext,
    tokens_T: Ints,
    adapter: AdapterState | None = None,
) -> Floats:
    """Load a model, return its float32 logits (T, V), and close it."""
    with closing(backend.load(job, context)) as model:
        if adapter is None:
            return model.logits(tokens_T)
        model.add_adapter("adapter", adapter)
        return model.logits(tokens_T, "adapter")


def distance(merged_TV: Floats, other_TV: Floats) -> float:
    """The median of ||merged - other|| / ||other|| over the positions."""
    apart_T = np.linalg.norm(merged_TV - other_TV, axis=1) / np.linalg.norm(other_TV, axis=1)
    return float(np.median(apart_T))


def carried(base_TV: Floats, adapted_TV: Floats, other_TV: Floats) -> float:
    """Share of the adapter's effect, which is not zero, in the other model."""
    effect_TV = adapted_TV - base_TV
    return float(np.vdot(other_TV - base_TV, effect_TV)) / float(np.linalg.norm(effect_TV)) ** 2


def prove(base_TV: Floats, adapted_TV: Floats, merged_TV: Floats, dtype: str, layers: int) -> Proof:
    """Hold a merged model against base + adapter.

    Args:
        dtype: safetensors name of what merged weights are stored as.
        layers: number of linear layers of the model, over whose depth rounding adds up.

    Raises:
        ProofError: V002, the adapter changes nothing; V001, the merged model is not base + adapter,
            or next to nothing of the adapter survives the rounding.
    """
    scale = float(np.linalg.norm(adapted_TV))
    effect = float(np.linalg.norm(adapted_TV - base_TV))
    if scale == 0 or not np.isfinite(effect):
        raise ProofError(
            "V002",
            "the adapter leaves no logits to compare: they are all the same, or not finite",
            remedy="the training has diverged: train again with a lower --lr; nothing was written",
        )
    if effect == 0:
        raise ProofError(
            "V002",
            "the adapter changes nothing: with it and without it the logits are the same",
            remedy="see losses and rewards in telemetry.jsonl; train longer; nothing was written",
        )
    proof = Proof(
        dtype=next(name for name, stored in STORED_AS.items() if stored == dtype),
        relative=distance(merged_TV, adapted_TV),
        tolerance=TOLERANCE[dtype] * layers**0.5,
        adapter_effect=effect / scale,
        carried=carried(base_TV, adapted_TV, merged_TV),
        max_difference=float(np.abs(merged_TV - adapted_TV).max()),
        positions=len(adapted_TV),
    )
    low, high = (MIN_CARRIED, MAX_CARRIED) if dtype == "F32" else (MIN_ROUNDED, MAX_ROUNDED)
    if proof.relative <= proof.tolerance and low <= proof.carried <= high:
        return proof
    lost = proof.relative <= proof.tolerance and proof.carried < low and dtype != "F32"
    raise ProofError(
        "V001",
        f"next to nothing of the adapter survives rounding to {proof.dtype}"
        if lost
        else "the merged model does not reproduce base + adapter",
        found=f"{proof.carried:.0%} of the adapter's effect, logits {proof.relative:.1e} apart",
        expected=f"{low:.0%} to {high:.0%} of it, at most {proof.tolerance:.1e} apart",
        remedy="nothing was written; train longer, or merge with --dtype fp32, which keeps all"
        if lost
        else "nothing was written; please report this with `vox merge --debug`",
    )


# --- tensors --------------------------------------------------------------------------------------

ROWS = 4
# Unit roundoff of what is stored, by safetensors' names; and what float32 arithmetic may add to it,
# relative to the size of the terms: 2^-24 times the square root of a rank of 64, and then tenfold.
ROUNDOFF = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24}
ARITHMETIC = 10 * 8 * 2.0**-24
SMALLEST = {"BF16": 2.0**-133, "F16": 2.0**-24, "F32": 2.0**-149}


def require_merged(
    merged: NDArray[Any], W: NDArray[Any], adapter: AdapterState, target: MergeTarget, dtype: str
) -> None:
    """Check that rows of `merged`, spread over it, are base + update up to rounding (V001).

    Another shape is not this check's to refuse.

    Args:
        merged, W: as stored, (I, O) where the shape says transposed.
        dtype: safetensors' name of what `merged` was rounded to.
    """
    if (saved := adapter.saved.get(target.path)) is not None:
        same = merged.shape != saved.shape or not (merged != saved.astype(numpy_dtype(dtype))).any()
    elif merged.shape != W.shape:
        return
    else:
        rows_P = np.linspace(0, target.shape.out_features - 1, ROWS).astype(int)
        W_OI, merged_OI = (W.T, merged.T) if target.shape.transposed else (W, merged)
        W_PI = W_OI[rows_P].astype(np.float64)
        exact_PI, terms_PI = _exact(W_PI, adapter, target.path, rows_P)
        allowed_PI = ROUNDOFF[dtype] * np.abs(exact_PI) + ARITHMETIC * terms_PI + SMALLEST[dtype]
        apart_PI = np.abs(merged_OI[rows_P].astype(np.float64) - exact_PI)
        same = bool(np.all(apart_PI <= allowed_PI))  # NaN fails
    if not same:
        raise ProofError(
            "V001",
            "a merged tensor is not base + update",
            where=target.shape.tensor,
            remedy="nothing was written; merge with another backend, with --backend, and report "
            "this to the authors of this one",
        )


def _exact(
    W_PI: NDArray[np.float64], adapter: AdapterState, path: str, rows_P: NDArray[np.int_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The merged rows, and the size of the terms that were added up for them."""
    module, scale = adapter.modules[path], adapter.scale(path)
    A_RI, B_PR = module.A_RI.astype(np.float64), module.B_OR[rows_P].astype(np.float64)
    exact_PI = W_PI + scale * (B_PR @ A_RI)
    terms_PI = np.abs(W_PI) + abs(scale) * (np.abs(B_PR) @ np.abs(A_RI))
    if module.magnitude_O is not None:
        factor_P = module.magnitude_O[rows_P] / np.linalg.norm(exact_PI, axis=1)
        exact_PI, terms_PI = exact_PI * factor_P[:, None], terms_PI * np.abs(factor_P)[:, None]
    return exact_PI, terms_PI
