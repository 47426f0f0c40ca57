"""Compare two adapters: their updates in float64, their logits on two backends.

The update of a module is `scale * B @ A`. Converting may round B once to float32,
where a ratio of scales is folded into it, so

    || scale' B' A' - scale B A ||  <=  (2^-24 + 2^-40) * || scale B || * || A ||    (Frobenius)

must hold; 2^-24 is float32's unit roundoff, 2^-40 leaves room for float64's own arithmetic. Both
products are of low rank, so the norm of their difference is that of two small triangles:
[scale' B', -scale B] = Q R and [A'; A]^T = P S give || R S^T ||. No (O, I) matrix is made.

Logits are compared as `vox merge` does: how far apart they are, and how much of the adapter's
effect arrived (`carried`), which decides.

Shape legend: T probe tokens, V vocabulary; R rank, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vox_core.api.models import (
    MAX_CARRIED,
    MIN_CARRIED,
    Backend,
    Context,
    LocalModel,
    Observe,
    Request,
    Seen,
    carried,
    choose,
    distance,
    probe_logits,
    probe_tokens,
)
from vox_core.api.tokenizers import load_tokenizer
from vox_core.contract import AdapterState, Floats, LoadJob, Method
from vox_core.errors import BackendError, ProofError

ROUNDING = 2.0**-24 + 2.0**-40


@dataclass(frozen=True, slots=True)
class SameLogits:
    """Distance of the logits of two backends, with the source and the converted adapter.

    Args:
        relative: norm of the difference over norm of the first.
        max_difference: largest difference of a logit.
        carried: fraction of the adapter's effect that the second has; None without an effect.
    """

    backends: tuple[str, str]
    relative: float
    max_difference: float
    carried: float | None
    positions: int


def require_same_update(source: AdapterState, other: AdapterState) -> float:
    """Check that every module's update equals the source's, up to one rounding.

    Returns:
        The largest error of a module, relative to `|| scale B || * || A ||`.

    Raises:
        ProofError: V003, naming every module and tensor that differs.
    """
    faults, largest = _differing_parts(source, other), 0.0
    for path in source.modules.keys() & other.modules.keys():
        error = _update_error(source, other, path)
        largest = max(largest, error)
        if not error <= ROUNDING:  # NaN fails
            faults.append(f"{path}: update differs by {error:.1e}, allowed {ROUNDING:.1e}")
    if faults:
        raise _refuted("what was written has another update than the source", sorted(faults))
    return largest


def require_same_state(source: AdapterState, again: AdapterState) -> None:
    """Check that the adapter read back equals the source, bit for bit.

    Raises:
        ProofError: V003, naming everything that differs.
    """
    faults = _other_bits(source.tensors(), again.tensors()) or [
        f"{path}: alpha"
        for path, module in source.modules.items()
        if module.alpha != again.modules[path].alpha
    ]
    faults += ["the method"] * (source.method != again.method)
    if faults:
        raise _refuted("what was written does not read back as the source", faults)


def compare_logits(
    base: LocalModel,
    source: tuple[AdapterState, Backend],
    other: tuple[AdapterState, Backend],
    observe: Observe,
) -> SameLogits:
    """Compare the logits of base + adapter on a fixed text, in float32, on two backends.

    Raises:
        ProofError: V003, the second lacks a tenth of the adapter's effect or more.
    """
    context = Context(observe)
    tokens_T = probe_tokens(load_tokenizer(base.path))

    def logits(adapter: AdapterState | None, backend: Backend) -> Floats:
        job = LoadJob(model=base.path, dtype="fp32", streamed=True)
        return probe_logits(backend, job, context, tokens_T, adapter)

    base_TV, source_TV, other_TV = logits(None, source[1]), logits(*source), logits(*other)
    has_effect = np.linalg.norm(source_TV - base_TV) != 0  # NaN fails
    same = SameLogits(
        backends=(source[1].id, other[1].id),
        relative=distance(other_TV, source_TV),
        max_difference=float(np.abs(other_TV - source_TV).max()),
        carried=carried(base_TV, source_TV, other_TV) if has_effect else None,
        positions=len(tokens_T),
    )
    if same.carried is not None and not MIN_CARRIED <= same.carried <= MAX_CARRIED:
        raise _refuted(
            "the converted adapter does not give the source's logits",
            found=f"{same.carried:.0%} of the adapter's effect on {other[1].id}, held against "
            f"{source[1].id}",
            expected=f"{MIN_CARRIED:.0%} to {MAX_CARRIED:.0%}",
        )
    return same


def usable_backend(
    ids: tuple[str, ...], base: LocalModel, method: Method, seen: Seen
) -> Backend | str:
    """Return the first of `ids` that is installed and can load `base`, or why none can."""
    reasons = []
    for backend_id in ids:
        request = Request(
            operation="load",
            method=method,
            model_type=base.model_type,
            dtype="fp32",
            explicit=backend_id,
            streamed=True,
        )
        try:
            return choose(request, seen=seen)[0]
        except BackendError as error:
            installed = error.code != "VOX-B003"
            reason = error.found or error.what
            reasons.append(f"{backend_id}: {reason if installed else 'not installed'}")
    return "; ".join(reasons)


def _update_error(source: AdapterState, other: AdapterState, path: str) -> float:
    one, two = source.modules[path], other.modules[path]
    if (one.A_RI.shape[1], len(one.B_OR)) != (two.A_RI.shape[1], len(two.B_OR)):
        return float("inf")
    sB_OR = source.scale(path) * one.B_OR.astype(np.float64)
    sB2_OR = other.scale(path) * two.B_OR.astype(np.float64)
    A_RI, A2_RI = one.A_RI.astype(np.float64), two.A_RI.astype(np.float64)
    left = np.asarray(np.linalg.qr(np.hstack([sB2_OR, -sB_OR]), mode="r"))
    right = np.asarray(np.linalg.qr(np.vstack([A2_RI, A_RI]).T, mode="r"))
    size = float(np.linalg.norm(sB_OR) * np.linalg.norm(A_RI))
    error = float(np.linalg.norm(left @ right.T))
    return error / size if size else error


def _differing_parts(source: AdapterState, other: AdapterState) -> list[str]:
    """List modules that only one adapter has, and magnitudes and whole tensors with different
    bits."""
    faults = [f"{p}: in one of them only" for p in source.modules.keys() ^ other.modules.keys()]
    differing = _other_bits(_exact_parts(source), _exact_parts(other))
    return faults + [f"{name}: not the same values" for name in differing]


def _exact_parts(state: AdapterState) -> dict[str, Floats]:
    low_rank = (".lora_A.weight", ".lora_B.weight")
    return {name: v for name, v in state.tensors().items() if not name.endswith(low_rank)}


def _other_bits(before: Mapping[str, Floats], after: Mapping[str, Floats]) -> list[str]:
    """List tensors that only one of them has, or that differ in shape or bits."""
    return [
        name
        for name in sorted(before.keys() | after.keys())
        if name not in before
        or name not in after
        or before[name].shape != after[name].shape
        or before[name].tobytes() != after[name].tobytes()
    ]


def _refuted(
    what: str, faults: Sequence[str] = (), found: str | None = None, expected: str | None = None
) -> ProofError:
    return ProofError(
        "V003",
        what,
        found=found,
        expected=expected,
        faults=faults,
        remedy="nothing was written; please report this with `vox export --debug`",
    )
