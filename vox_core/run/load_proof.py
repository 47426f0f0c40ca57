"""`probe.json`: log-probabilities at the end of training, which the adapter must give wherever it
is loaded.

    {"digest": SHA-256 of the adapter, "backend": "cpu", "dtype": "bf16", "documents": [
     {"tokens": [T ids], "base": [T-1 log-probabilities, of the tokens from the second on],
      "adapter": [the same with the adapter]}]}

The documents are the first of the run's validation rows, or of its training rows; the numbers are
those of the model that trained, not of one that read the files. Another backend or dtype moves the
base's log-probabilities by its rounding, and the adapter's by as much: so the base says, on the
same tokens, how far apart two right computations are.

Shape legend: T tokens of a document, N scored tokens of all documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from vox_core.bounded_json import read, schema_faults
from vox_core.contract import AdapterState, Batch, DType, ExecutionPlan, Floats, Model
from vox_core.data.audit import vocabulary_of
from vox_core.digests import CONFIG_FILE
from vox_core.errors import AdapterError, ProofError
from vox_core.run.folder import PROBE
from vox_core.run.plan import positions
from vox_core.run.reference import ModelReference, adapter_digest

DOCUMENTS, TOKENS = 4, 128
"""Enough for an effect to show, and less than a second of work."""

NOISE = 3.0
"""Largest distance of the adapter's log-probabilities, in units of the base's. Origin:
benchmarks/load_proof_tolerance.py: 0.8 to 1.5 over backends, dtypes and 8 bits."""
FLOOR: dict[DType, float] = {"fp32": 1e-4, "bf16": 0.02, "fp16": 0.005}
"""Distances in nats that are always allowed, where the base's are smaller by chance: ten times the
largest distance between backends in float32, and a fifth of that in bfloat16."""
OTHER_BASE = 1.0
"""Nats. Rounding moves the base by 0.1 in bfloat16 and 0.2 in 8 bits (SmolLM2). A base quantised
otherwise than in training may move by more: 4 bits by 2.1 to 2.6."""
REQUANTISED = 0.3
"""Nats. With such a base the adapter's effect is compared instead: it must differ by less than
this, or than half of what it was. 4 bits change an effect of 0.91 by 0.03; zeroing B by 0.91."""


RESTORE = "restore the folder as `vox train` wrote it; its checkpoints hold the adapter too"


class ProbeDocument(BaseModel):
    """Tokens of a row, and the log-probability of each but the first."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    tokens: Annotated[tuple[NonNegativeInt, ...], Field(min_length=2, max_length=TOKENS)]
    base: tuple[float, ...]
    adapter: tuple[float, ...]


class AdapterProbe(BaseModel):
    """Content of `probe.json`."""

    model_config = ConfigDict(frozen=True)

    digest: str
    backend: str
    dtype: DType
    documents: Annotated[tuple[ProbeDocument, ...], Field(min_length=1, max_length=DOCUMENTS)]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A loaded adapter compared with the trained one; root mean squares in nats.

    Args:
        effect: of the adapter on the log-probabilities, at the end of training.
        changed: the same, as loaded.
        base: distance of the base's log-probabilities from those at the end of training.
        adapter: the same, with the adapter.
        tolerance: what `adapter` may be; of `changed` from `effect` if `requantised`.
        requantised: the base is quantised otherwise than in training.
    """

    effect: float
    changed: float
    base: float
    adapter: float
    tolerance: float
    requantised: bool = False

    @property
    def decisive(self) -> bool:
        """Whether a missing adapter would have been refused: its effect exceeds the tolerance."""
        return self.effect > self.tolerance

    @property
    def matches(self) -> bool:
        """Whether the adapter computes what was trained, as far as the tolerance shows."""
        if self.requantised:
            return abs(self.changed - self.effect) <= self.tolerance
        return self.base <= OTHER_BASE and self.adapter <= self.tolerance


def scored(tokens: Sequence[int]) -> Batch:
    """Return one document, int64 (T,), of which every token but the first is scored."""
    tokens_T = np.asarray(tokens, np.int64)
    scored_T = np.arange(len(tokens_T)) < len(tokens_T) - 1
    zeros_T = np.zeros(len(tokens_T), np.float32)
    return Batch(
        tokens_T, np.roll(tokens_T, -1) * scored_T, zeros_T, np.zeros(1, np.int64), scored_T
    )


def token_log_probs(model: Model, tokens: Sequence[int], adapter: str | None) -> Floats:
    """Return the log-probability of each token but the first, float32 (T-1,)."""
    return model.log_probs(scored(tokens), adapter)[:-1]


def take_probe(
    model: Model,
    name: str,
    adapter: AdapterState,
    rows: Iterable[Sequence[int]],
    plan: ExecutionPlan,
) -> AdapterProbe | None:
    """Score the first rows with a model that has trained.

    Args:
        name: of `adapter` in `model`.

    Returns:
        None if no row has two tokens, or a log-probability is not finite.
    """
    documents = []
    for row in islice((row for row in rows if len(row) > 1), DOCUMENTS):
        tokens = [int(each) for each in row[:TOKENS]]
        base, adapted = (
            [round(float(each), 6) for each in token_log_probs(model, tokens, each_name)]
            for each_name in (None, name)
        )
        if not all(map(math.isfinite, (*base, *adapted))):
            return None
        documents.append(ProbeDocument(tokens=tokens, base=base, adapter=adapted))
    if not documents:
        return None
    digest = adapter_digest("", adapter)
    return AdapterProbe(digest=digest, backend=plan.backend, dtype=plan.dtype, documents=documents)


def read_probe(source: ModelReference) -> AdapterProbe | None:
    """Return the probe beside an adapter; None if there is no adapter, or it has no probe.

    Raises:
        AdapterError: A001, the file is damaged, or its tokens are not for the base.
        ProofError: V004, it is of another adapter.
    """
    if not (source.folder and source.adapter and (source.folder / PROBE).is_file()):
        return None
    path = source.folder / PROBE
    try:
        probe = AdapterProbe.model_validate(read(path))
        _require_fit(probe, read(source.base.path / CONFIG_FILE))
    except (OSError, ValueError) as error:
        raise AdapterError(
            "A001",
            "the run's probe cannot be used",
            where=path,
            found=schema_faults(error)[0] if isinstance(error, ValidationError) else error,
            remedy="restore the file, or delete it to go without the comparison",
        ) from error
    if (digest := adapter_digest("", source.adapter)) == probe.digest:
        return probe
    raise ProofError(
        "V004",
        "the adapter is not the one that training wrote",
        where=source.folder,
        found=f"tensors and scales with the SHA-256 {digest[:12]}…",
        expected=f"{probe.digest[:12]}…, by {PROBE}",
        remedy=RESTORE,
    )


def _require_fit(probe: AdapterProbe, config: Any) -> None:
    """Check that a model with this configuration can score the documents."""
    vocabulary, most = vocabulary_of(config) or math.inf, positions(config) or math.inf
    for each in probe.documents:
        count, largest = len(each.tokens), max(each.tokens)
        if not count - 1 == len(each.base) == len(each.adapter):
            raise ValueError("a document whose tokens and log-probabilities do not match")
        if count > most or largest >= vocabulary:
            found = f"{count} tokens with ids up to {largest}"
            raise ValueError(f"{found}; the base reads {most} with ids below {vocabulary}")


def check_probe(
    model: Model,
    adapter: str,
    probe: AdapterProbe,
    dtype: DType,
    where: object,
    *,
    requantised: bool = False,
) -> ProbeResult:
    """Compare a loaded model with the one that trained (V004).

    Args:
        adapter: its name in `model`.
        requantised: the base is quantised otherwise than in training.
    """

    def joined(parts: Iterable[object]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.concatenate([np.asarray(part, np.float64) for part in parts])

    documents = probe.documents
    then_N, trained_N = joined(d.base for d in documents), joined(d.adapter for d in documents)
    now_N = joined(token_log_probs(model, d.tokens, None) for d in documents)
    loaded_N = joined(token_log_probs(model, d.tokens, adapter) for d in documents)
    base_apart, effect = _rms(now_N - then_N), _rms(trained_N - then_N)
    nearby = max(NOISE * base_apart, FLOOR[dtype], FLOOR[probe.dtype])
    result = ProbeResult(
        effect=effect,
        changed=_rms(loaded_N - now_N),
        base=base_apart,
        adapter=_rms(loaded_N - trained_N),
        tolerance=max(REQUANTISED, effect / 2) if requantised else nearby,
        requantised=requantised,
    )
    if result.matches:
        return result
    other = not requantised and not result.base <= OTHER_BASE
    allowed = f"the base at most {OTHER_BASE:.2g}" if other else f"at most {result.tolerance:.2g}"
    raise ProofError(
        "V004",
        "the base is not the one that was trained on"
        if other
        else "the adapter does not compute what was trained",
        where=where,
        found=f"log-probabilities of {len(now_N)} tokens of the run's rows: {result.adapter:.2g} "
        f"nats (root mean square) from those at the end of training, the base's {result.base:.2g}; "
        f"the adapter's whole effect was {result.effect:.2g} and is {result.changed:.2g}",
        expected=f"{allowed}{' between the effects' if requantised else ''} "
        f"({probe.backend}, {probe.dtype} in training)",
        remedy=f"name another --backend and report this, or {RESTORE}",
    )


def _rms(values_N: Any) -> float:
    """Root mean square; infinite if a value is not finite."""
    value = float(np.sqrt(np.mean(np.square(values_N))))
    return value if math.isfinite(value) else math.inf
