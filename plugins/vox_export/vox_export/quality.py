"""Compare an exported model with base + adapter, on rows of the run.

The reference is base + adapter in float32, on an installed backend. The exported file is computed
by llama.cpp where that is installed, and otherwise by the same backend, from the file's tensors
dequantised; `Quality.engine` says which. Compared are the last tokens of each row:

    mean KL      mean of sum_v p(v) log(p(v) / q(v)) over positions, p the reference, in nats
    top-1        share of positions with the same most likely token
    perplexity   of the rows' own tokens, the file's beside the reference's
    greedy       share of greedily generated tokens before the first that differs
    carried      share of the adapter's effect on the log-probabilities that is in the file

llama.cpp gives the log-probabilities of its 1,000 most likely tokens and the row's own, and the KL
divergence is over those.

For files without quantisation, `KL_BOUND` and `carried` refuse: the difference must be rounding. In
a mixture of experts, rounding sends a token or two to other experts, which changes all that follows
in them: there, the medians over the positions count.

Shape legend: N positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from gguf.quants import dequantize

from vox_core.api.models import (
    MAX_CARRIED,
    MIN_CARRIED,
    Backend,
    Context,
    ModelReference,
    Observe,
    Request,
    Seen,
    TensorInfo,
    Weights,
    choose,
    plain_copy,
    probe_tokens,
    read_probe,
    write_checkpoint,
)
from vox_core.api.tokenizers import load_tokenizer
from vox_core.contract import Floats, LoadJob, Model, Notice
from vox_core.errors import BackendError, ProofError
from vox_export import llama_cpp
from vox_export.child import full_config
from vox_formats.gguf_layout import experts, rounds_yarn
from vox_formats.gguf_model import GgufSource

if TYPE_CHECKING:
    from vox_export.gguf_file import ModelFile, Target
    from vox_export.vocabulary import Vocabulary
    from vox_formats.gguf_layout import Config

POSITIONS = 64
"""Positions that are compared, over all rows."""
GENERATED = 16
"""Tokens that are generated greedily, for each row."""

KL_BOUND: Mapping[str, float] = {"f32": 1e-6, "f16": 1e-3, "bf16": 2e-2}
"""Largest mean KL of a file that is not quantised, chosen with a margin: SmolLM2's in float16 has
1.9e-7, and five faults of an export (tests/test_gguf.py) more than the bound."""
BROKEN = 100.0
"""Mean KL that no format explains, such as infinity."""
ROUNDED_CARRIED = (0.1, 2.0)
"""As in `vox merge`: in 16 bits, most updates are smaller than the spacing of the weights."""


class Scorer(Protocol):
    """A model's log-probabilities, computed by vox or by llama.cpp."""

    @property
    def name(self) -> str: ...

    def log_probs(self, tokens: Sequence[int], last: int, vocabulary: int) -> Floats:
        """Return log-probabilities (last, vocabulary) of the positions of the `last` tokens; NaN
        where they are not known."""
        ...

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens; one that ends the answer may be the last."""
        ...


@dataclass(frozen=True, slots=True)
class Quality:
    """The measured figures; see the module.

    Args:
        engine: what computed the file; `reference`: what computed the source.
        source: what the file was made of, in words: base + adapter, or the model.
        rows: what texts they are.
        max_difference: of one log-probability, of a token that the engine gives.
        carried: None without an adapter; of a mixture of experts, the median over positions.
        median_kl: over positions, of a mixture of experts; else None.
        rounded_rope: the engine rounds the bounds of YaRN's ramp, and the model does not.
    """

    engine: str
    reference: str
    source: str
    rows: str
    positions: int
    mean_kl: float
    top1: float
    perplexity: float
    reference_perplexity: float
    greedy: float
    max_difference: float
    carried: float | None
    median_kl: float | None = None
    rounded_rope: bool = False


class BackendScorer:
    """A model on a backend of vox; `stops` end an answer."""

    def __init__(self, name: str, model: Model, adapter: str | None, stops: frozenset[int]) -> None:
        self.name, self._model, self._adapter, self._stops = name, model, adapter, stops

    def log_probs(self, tokens: Sequence[int], last: int, vocabulary: int) -> Floats:
        read_T = np.asarray(tokens[:-1], np.int64)
        logits_NV = self._model.logits(read_T, self._adapter, len(read_T) - last)
        return _log_softmax(logits_NV[:, :vocabulary].astype(np.float64))

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        made: list[int] = []
        self._model.insert(0, np.asarray(tokens, np.int64), self._adapter)
        try:
            given: dict[int, int] = {}
            while len(made) < count:
                if not (logits := self._model.advance(given)):
                    continue
                token = int(np.argmax(logits[0]))
                if token in self._stops:
                    break
                made.append(token)
                given = {0: token}
        finally:
            self._model.remove(0)
        return made


@dataclass(frozen=True, slots=True)
class Row:
    """A text, and what base + adapter make of it.

    Args:
        last: number of its last tokens that are compared; those before are the greedy prompt.
        adapted_NV, base_NV: log-probabilities; `base_NV` None without an adapter.
    """

    tokens: tuple[int, ...]
    last: int
    adapted_NV: Floats
    base_NV: Floats | None
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Reference:
    """The source on the rows: base + adapter, or a model alone; `source` says which.

    Args:
        streamed: the backend reads weights from the files as it computes.
    """

    name: str
    source: str
    texts: str
    rows: Sequence[Row]
    backend: Backend
    context: Context
    stops: frozenset[int]
    config: Config
    streamed: bool

    @property
    def vocabulary(self) -> int:
        return int(self.rows[0].adapted_NV.shape[1])

    @property
    def longest(self) -> int:
        """Tokens that an engine must have room for."""
        return max(len(row.tokens) for row in self.rows) + GENERATED


def make_reference(
    source: ModelReference,
    named: str | None,
    stops: frozenset[int],
    scratch: Path,
    observe: Observe,
) -> Reference:
    """Compute base + adapter in float32.

    Args:
        named: backend to use; None: any.

    Raises:
        BackendError: no installed backend can load the base.
    """
    adapter, context = source.adapter, Context(observe)
    backend, streamed = _backend(source, named, observe)
    texts, documents = _texts(source)
    with (
        plain_copy(source.weights, scratch / "base") as plain,
        closing(backend.load(_job(plain, streamed=streamed), context)) as model,
    ):
        if adapter:
            model.add_adapter("adapter", adapter)
        base = BackendScorer(backend.id, model, None, stops) if adapter else None
        adapted = BackendScorer(backend.id, model, "adapter" if adapter else None, stops)
        vocabulary = model.logits(np.asarray(documents[0], np.int64)).shape[1]
        last = max(1, POSITIONS // len(documents))
        rows = [_row(each, last, vocabulary, base, adapted) for each in documents]
    name, what = f"{backend.id}, float32", source_name(source)
    config = full_config(source.base.path)
    return Reference(name, what, texts, rows, backend, context, stops, config, streamed)


def _backend(source: ModelReference, named: str | None, observe: Observe) -> tuple[Backend, bool]:
    """Return a backend, and whether it reads weights from the files as it computes: if the model
    does not fit into memory in float32, and the backend can."""
    request = Request(
        operation="load",
        method=source.adapter.method if source.adapter else "lora",
        model_type=source.base.model_type,
        dtype="fp32",
        explicit=named,
    )
    backend, selection = choose(request, seen=(seen := Seen()))
    free = selection.hardware.devices[0].available_bytes
    if free is None or float32_bytes(source) <= free:
        return backend, False
    try:
        backend, _ = choose(replace(request, streamed=True), seen=seen)
    except BackendError:
        return backend, False
    observe(Notice("the model does not fit into memory in float32: computing from its files"))
    return backend, True


def float32_bytes(source: ModelReference) -> int:
    return 4 * sum(math.prod(tensor.shape) for tensor in source.weights.tensors.values())


def _job(model: Path, *, streamed: bool) -> LoadJob:
    return LoadJob(model=model, dtype="fp32", streamed=streamed)


def source_name(source: ModelReference) -> str:
    return "base + adapter" if source.adapter else "the model"


def _texts(source: ModelReference) -> tuple[str, list[tuple[int, ...]]]:
    if probe := read_probe(source):
        documents = [document.tokens for document in probe.documents]
        return f"{len(documents)} rows of the run", documents
    fixed = probe_tokens(load_tokenizer(source.base.tokenizer))
    return "a fixed text", [tuple(int(token) for token in fixed)]


def _row(
    tokens: tuple[int, ...], last: int, vocabulary: int, base: Scorer | None, adapted: Scorer
) -> Row:
    last = min(last, len(tokens) - 1)
    return Row(
        tokens,
        last,
        adapted.log_probs(tokens, last, vocabulary),
        base.log_probs(tokens, last, vocabulary) if base else None,
        adapted.greedy(tokens[: len(tokens) - last], GENERATED),
    )


# --- what computes the file -----------------------------------------------------------------------


@contextmanager
def scorer_of(
    path: Path, model: ModelFile | None, reference: Reference, lora: Path | None = None
) -> Iterator[Scorer]:
    """Load a GGUF file in llama.cpp, or else dequantised on the reference's backend.

    Args:
        model: what was written; None where only llama.cpp can load it.
        lora: adapter file to apply to it, in llama.cpp.
    """
    if llama_cpp.engine():
        with llama_cpp.served(path, reference.longest + 1, lora) as server:
            yield server
        return
    assert model is not None
    plain = path.with_name(f"{path.stem}-dequantised")
    plain.mkdir()
    write_checkpoint(plain, dequantised(path, model))
    name = f"vox's own reader, on {reference.name}"
    job = _job(plain, streamed=reference.streamed)
    with closing(reference.backend.load(job, reference.context)) as loaded:
        yield BackendScorer(name, loaded, None, reference.stops)


def dequantised(path: Path, model: ModelFile) -> Weights:
    """Return the tensors of a GGUF file under their names in the base, in float32."""
    file, base = GgufSource(path), model.source
    pieces: dict[str, list[tuple[Target, Any]]] = {}
    for target in model.targets.values():
        made_of = target.source
        for place, parameter in enumerate(made_of.parameters if made_of else ()):
            row = place if made_of and made_of.is_stack else slice(None)
            pieces.setdefault(base.parameters[parameter], []).append((target, row))
    stored = base.weights.tensors
    tensors = {name: TensorInfo("F32", stored[name].shape) for name in stored if name in pieces}

    def read(name: str) -> Any:
        whole = np.empty(tensors[name].shape, np.float32)
        for target, row in pieces[name]:
            assert target.source is not None
            blocks, kind = file.blocks(target.name)
            change = target.source.change
            change.part(whole)[...] = change.undo(dequantize(blocks[row], kind))
        return whole

    where = {name: base.weights.where[name] for name in tensors}
    return Weights(base.weights.folder, tensors, where, read)


# --- figures --------------------------------------------------------------------------------------


def measure(reference: Reference, scorer: Scorer) -> Quality:
    """Compare what `scorer` computes with the reference."""
    found = [scorer.log_probs(row.tokens, row.last, reference.vocabulary) for row in reference.rows]
    expected_NV = np.concatenate([row.adapted_NV for row in reference.rows])
    found_NV = np.concatenate(found)
    targets_N = np.concatenate([np.asarray(row.tokens[-row.last :]) for row in reference.rows])
    known_NV = ~np.isnan(found_NV)
    rest_N = _log_rest(found_NV, known_NV)
    filled_NV = np.where(known_NV, found_NV, rest_N[:, None])
    at_N = np.arange(len(targets_N))
    difference_NV = np.where(known_NV, found_NV - expected_NV, 0.0)
    kl_N = _kl(expected_NV, found_NV, known_NV)
    return Quality(
        engine=scorer.name,
        reference=reference.name,
        source=reference.source,
        rows=reference.texts,
        positions=len(targets_N),
        mean_kl=_finite(kl_N.mean()),
        top1=float(np.mean(filled_NV.argmax(-1) == expected_NV.argmax(-1))),
        perplexity=_finite(np.exp(-filled_NV[at_N, targets_N].mean())),
        reference_perplexity=float(np.exp(-expected_NV[at_N, targets_N].mean())),
        greedy=_greedy(reference, scorer),
        max_difference=_finite(np.abs(difference_NV).max()),
        carried=_carried(reference, difference_NV, known_NV),
        median_kl=_finite(np.median(kl_N)) if experts(reference.config) else None,
        rounded_rope=rounds_yarn(reference.config) and isinstance(scorer, llama_cpp.LlamaCpp),
    )


def _log_softmax(x_NV: Floats) -> Floats:
    x_NV = x_NV - x_NV.max(-1, keepdims=True)
    log_NV: Floats = x_NV - np.log(np.exp(x_NV).sum(-1, keepdims=True))
    return log_NV


def _finite(value: Any) -> float:
    return float(value) if math.isfinite(value) else math.inf


def _log_rest(found_NV: Floats, known_NV: Any) -> Any:
    """Return, per position, the log-probability of a token that the engine did not give: an equal
    share of the remaining probability."""
    left_N = 1 - np.where(known_NV, np.exp(found_NV), 0).sum(-1)
    count_N = np.maximum(1, (~known_NV).sum(-1))
    return np.log(np.maximum(left_N, 1e-12) / count_N)


def _kl(expected_NV: Floats, found_NV: Floats, known_NV: Any) -> Any:
    """Return the KL divergence of each position over the known tokens, each side normalised to
    them: a server's normaliser may be off by float32's rounding, for all tokens alike."""
    if not np.isfinite(np.where(known_NV, found_NV, 0)).all():
        return np.full(len(known_NV), math.inf)
    sides = (expected_NV, found_NV)
    p_NV, q_NV = (_log_softmax(np.where(known_NV, each, -np.inf)) for each in sides)
    difference_NV = np.where(known_NV, p_NV, 0) - np.where(known_NV, q_NV, 0)
    return np.maximum((np.exp(p_NV) * difference_NV).sum(-1), 0.0)


def _carried(reference: Reference, difference_NV: Any, known_NV: Any) -> float | None:
    effects = [row.adapted_NV - row.base_NV for row in reference.rows if row.base_NV is not None]
    if not effects:
        return None
    effect_NV = np.concatenate(effects)
    effect_NV = np.where(known_NV, effect_NV, 0)
    size_N, in_file_N = (effect_NV**2).sum(-1), (difference_NV * effect_NV).sum(-1)
    if not size_N.any():
        return None
    if experts(reference.config):
        return 1 + _finite(np.median(in_file_N[size_N > 0] / size_N[size_N > 0]))
    return 1 + _finite(in_file_N.sum() / size_N.sum())


def _greedy(reference: Reference, scorer: Scorer) -> float:
    same = wanted = 0
    for row in reference.rows:
        said = scorer.greedy(row.tokens[: len(row.tokens) - row.last], GENERATED)
        made = list(takewhile(lambda token: token not in reference.stops, said))
        pairs = zip(made, row.answer, strict=False)
        same += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        wanted += max(len(made), len(row.answer))
    return same / wanted if wanted else 1.0


# --- what is refused ------------------------------------------------------------------------------


def require_kept(quality: Quality, quant: str, max_kl: float | None) -> None:
    """Refuse a file that differs from its source by more than its format explains.

    Raises:
        ProofError: V006.
    """
    allowed = KL_BOUND.get(quant, BROKEN)
    if quality.rounded_rope:
        allowed = max(allowed, KL_BOUND["bf16"])
    low, high = ROUNDED_CARRIED if allowed > KL_BOUND["f32"] else (MIN_CARRIED, MAX_CARRIED)
    carried, mean = quality.carried, quality.mean_kl
    held = mean if quality.median_kl is None else quality.median_kl
    lost = quant in KL_BOUND and carried is not None and not low <= carried <= high
    if held <= allowed and mean <= (max_kl or math.inf) and not lost:
        return
    raise ProofError(
        "V006",
        f"the exported model differs from {quality.source}",
        where=f"--quant {quant}",
        found=f"a mean KL divergence of {mean:.2g} nats"
        + ("" if held == mean else f", a median of {held:.2g}")
        + ("" if carried is None else f", {carried:.0%} of the adapter's effect")
        + f", by {quality.engine}",
        expected=f"at most {min(allowed, max_kl or math.inf):.3g} nats"
        + (f", {low:.0%} to {high:.0%}" if lost else ""),
        remedy="nothing was written; try --quant f32, and please report this"
        if lost or held > allowed
        else "nothing was written; set a larger --max-kl, or choose another --quant",
    )


def require_vocabulary(path: Path, vocabulary: Vocabulary, stops: frozenset[int]) -> None:
    """Check the tokenizer, the chat template and the stop tokens in a written file.

    Args:
        stops: tokens that end an answer.

    Raises:
        ProofError: V006.
    """
    found = GgufSource(path).metadata
    key = "tokenizer.ggml."
    expected: dict[str, Any] = {
        f"{key}model": vocabulary.model,
        f"{key}pre": vocabulary.pre,
        f"{key}tokens": list(vocabulary.tokens),
        f"{key}token_type": list(map(int, vocabulary.types)),
        f"{key}scores": list(vocabulary.scores) or None,
        f"{key}merges": list(vocabulary.merges) or None,
        f"{key}add_bos_token": vocabulary.add_bos,
        f"{key}add_eos_token": vocabulary.add_eos,
    }
    if not isinstance(vocabulary.template, Mapping):
        expected["tokenizer.chat_template"] = vocabulary.template
    faults = [name for name, value in expected.items() if found.get(name) != value]
    named = {found.get(f"{key}{kind}_token_id") for kind in ("eos", "eot", "eom")}
    faults += [f"stop token {vocabulary.tokens[stop]}" for stop in sorted(stops - named)]
    if faults:
        raise ProofError(
            "V006",
            "the exported file does not have the model's tokenizer, template or stop tokens",
            where=path.name,
            faults=faults,
            remedy="nothing was written; please report this with `vox export --debug`",
        )
