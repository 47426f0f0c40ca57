"""Documents and objectives of a loop of one's own (open_trainer.py).

Shape legend: T tokens of a document, K its trained positions.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vox_core.contract import Batch, Group, Objective, ObjectiveSpec, Place, Totals, Weighed
from vox_core.contract import probe_document as shortened
from vox_core.data import encode
from vox_core.data.batching import to_batch
from vox_core.data.dataset import encode_rows, require_trained
from vox_core.data.encode import Encoder
from vox_core.data.faults import RowError
from vox_core.data.rows import examples_by, objective_of, rows_of
from vox_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from vox_core.contract import Floats, Ints
    from vox_core.run.load import Reply

ROLLOUT = "rollout"
ROWS = Path("rows")
"""Stands for a file's name in errors about rows."""
_PROBE = (
    "How do I train a model on my own data? Write each example as a line of JSON, with what the "
    "user asks and what the assistant answers. Then run the trainer, look at the loss while it "
    "falls, and talk to the result: 1, 2, 3, 5, 8, 13, 21. "
)

Documents: TypeAlias = "Sequence[Document] | Sequence[Mapping[str, object]]"
OwnObjective: TypeAlias = "str | Objective | Callable[[Sequence[Floats]], Sequence[Floats]]"


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Tokens to train on, or to score.

    Args:
        tokens: (T,) token ids, at least two.
        weights: (T,), of each token as a target; 0: not trained. The first token, which nothing
            precedes, never is. None: 1 for all others.
    """

    tokens: Sequence[int] | Ints
    weights: Sequence[float] | Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sample(Document):
    """A prompt with a sampled completion, whose tokens are the trained ones.

    Args:
        text: the completion, up to its end-of-turn token or stop text.
        log_probs: float32 (K,), of the completion's tokens when it was sampled, at temperature 1.
        finish_reason: `stop` once the model ended its turn or a stop text came, else `length`.
        group: number of the prompt, another one for each prompt of each call.
    """

    text: str = ""
    log_probs: Sequence[float] | Floats = ()
    finish_reason: str = "length"
    group: int = 0

    @classmethod
    def of(cls, prompt: Sequence[int], reply: Reply, group: int) -> Sample:
        weights_T = np.repeat(np.array([0, 1], np.float32), [len(prompt), len(reply.tokens)])
        log_probs_K = np.array(reply.log_probs, np.float32)
        tokens_T = np.array([*prompt, *reply.tokens], np.int64)
        return cls(tokens_T, weights_T, reply.text, log_probs_K, reply.finish_reason, group)


class Function(Objective):
    """Maximises log-probabilities by the weights that a function makes of them: the loss is
    `-sum(weights * log_probs)`."""

    separable = False
    foreign = False

    def __init__(self, function: Callable[[Sequence[Floats]], Sequence[float | Floats]]) -> None:
        self._function = function

    def weigh(self, groups: Sequence[Group], totals: Totals) -> Weighed:
        log_probs = [side.log_probs_K for (side,) in groups]
        given = self._function(log_probs)
        several = isinstance(given, Sized) and getattr(given, "shape", None) != ()  # type: ignore[redundant-expr]
        size = len(given) if several else -1
        if size != len(log_probs):
            raise _wrong_weights(f"{given!r:.60} for {len(log_probs)} documents")
        loss, weights = 0.0, []
        for number, (each, logs_K) in enumerate(zip(given, log_probs, strict=True), 1):
            if np.shape(each) not in ((), logs_K.shape):
                found = f"shape {np.shape(each)} for document {number}, which has {len(logs_K)}"
                raise _wrong_weights(f"{found} trained")
            if not np.isfinite(each).all():
                raise _wrong_weights(f"one of document {number} is not finite")
            weights.append(np.full(len(logs_K), each, np.float32))
            loss -= float(np.dot(weights[-1].astype(np.float64), logs_K))
        return Weighed(loss, [[weights_K] for weights_K in weights])


class Given(Function):
    """Maximises log-probabilities by weights that are known before they are.

    Args:
        weights: of each document, a factor of its own weights or one for each trained token.
    """

    def __init__(self, weights: Sequence[float | Floats]) -> None:
        super().__init__(lambda _: weights)


def _wrong_weights(found: str) -> ConfigError:
    return ConfigError(
        "C002",
        "the weights do not belong to the documents",
        where="forward_backward",
        found=found,
        expected="for each document a number, or an array with one for each trained token",
        remedy="correct them; a text longer than seq_len makes several documents",
    )


def objective_named(
    objective: OwnObjective, weights: Sequence[float | Floats] | None, options: Mapping[str, object]
) -> Objective | None:
    """Return what the arguments of `forward_backward` name; None for supervised training.

    Raises:
        ConfigError: they exclude each other, or an option is wrong.
        BackendError: B013, no plugin provides the objective.
    """
    if weights is not None and objective != "sft":
        raise _exclude("weights", "an objective computes them")
    if options and not isinstance(objective, str):
        raise _exclude("options", "they are of an objective named")
    if weights is not None:
        return Given(weights)
    chosen: Objective | None
    if isinstance(objective, str):
        chosen = objective_of(ObjectiveSpec(objective, {k: str(v) for k, v in options.items()}))
    else:
        chosen = objective if isinstance(objective, Objective) else Function(objective)
    if chosen is not None and "teacher" in chosen.needs:
        raise ConfigError(
            "C004",
            "the objective learns from a teacher, and an open trainer has none",
            where="forward_backward",
            found=type(chosen).__name__,
            remedy="give weights= made of the teacher's log_probs, or use vox train --teacher",
        )
    return chosen


def _exclude(what: str, why: str) -> ConfigError:
    fault = f"{what} and this objective exclude each other: {why}"
    remedy = f"leave out {what}, or the objective"
    return ConfigError("C004", fault, where="forward_backward", remedy=remedy)


def documents_of(
    items: Documents, objective: Objective | None, encoder: Encoder
) -> list[encode.Document]:
    """Make documents of rows; the documents of a group are neighbours. Those of a function are as
    in supervised training."""
    if not isinstance(items, Sized) or not len(items):  # type: ignore[redundant-expr]
        raise _unusable("D006", "there is no list of documents", f"{items!r:.60}")
    compared = None if isinstance(objective, Function) else objective
    if all(isinstance(item, Document) for item in items):
        return _as_they_are(items, compared)  # type: ignore[arg-type]
    if not all(isinstance(item, Mapping) for item in items):
        found = ", ".join(sorted({type(item).__name__ for item in items}))
        raise _unusable("D003", "these are neither rows nor documents", found)
    return _encoded(items, compared, encoder)  # type: ignore[arg-type]


def _encoded(
    rows: Sequence[Mapping[str, object]], objective: Objective | None, encoder: Encoder
) -> list[encode.Document]:
    if objective is not None and "rollouts" in objective.needs:
        raise _no_rollouts("rows")
    examples = None if objective is None else examples_by(objective)
    try:
        lines = [(number, json.dumps(dict(row)).encode()) for number, row in enumerate(rows, 1)]
        read = [*rows_of(lines, ROWS, examples)]
    except (RowError, TypeError) as error:
        raise _unusable("D003", "rows are malformed", str(error)) from error
    dataset = encode_rows(encoder, read, {})
    require_trained(dataset.stats, lambda: encoder)
    if dropped := dataset.stats.dropped:
        found = ", ".join(f"{count} with {reason}" for reason, count in dropped.items())
        raise _unusable("D006", "rows were dropped", found)
    return list(dataset)


def _as_they_are(items: Sequence[Document], objective: Objective | None) -> list[encode.Document]:
    made = [_checked(item, number) for number, item in enumerate(items, 1)]
    if objective is None:
        return made
    groups = itertools.groupby(
        zip(items, made, strict=True), lambda pair: getattr(pair[0], "group", -1)
    )
    return [
        replace(document, side=side, label=ROLLOUT)
        for _, members in groups
        for side, (_, document) in enumerate(members)
    ]


def _checked(item: Document, number: int) -> encode.Document:
    what = f"document {number} cannot be trained on"
    try:
        tokens_T = np.array([*map(operator.index, item.tokens)], np.int32)
    except (TypeError, OverflowError) as error:
        raise _unusable("D003", what, "tokens that are no ids") from error
    weights = np.ones(len(tokens_T)) if item.weights is None else item.weights
    weights_T = np.array(weights, np.float32)
    fault = ""
    if len(tokens_T) < 2:
        fault = f"tokens of shape {tokens_T.shape}, expected two or more"
    elif weights_T.shape != tokens_T.shape:
        fault = f"{len(tokens_T)} tokens with weights of shape {weights_T.shape}"
    elif not np.isfinite(weights_T).all() or not weights_T[1:].any():
        fault = "weights that are not finite, or all zero"
    if fault:
        raise _unusable("D003", what, fault)
    weights_T[0] = 0
    return encode.Document(tokens_T, weights_T, ROWS, number, 0)


def with_samples(
    groups: Sequence[Sequence[Place]],
    items: Documents,
    objective: Objective | None,
    rewards: Sequence[float] | None,
) -> list[tuple[Place, ...]]:
    """Add what an objective needs to know of rollouts; each must have a reward (C004)."""
    if objective is None or "rollouts" not in objective.needs:
        if rewards is not None:
            raise _exclude("rewards", "it does not learn from rollouts")
        return [tuple(group) for group in groups]
    samples = [item for item in items if isinstance(item, Sample)]
    given = np.array([] if rewards is None else rewards, float)
    if given.shape != (len(items),) or len(samples) < len(items) or not np.isfinite(given).all():
        raise _no_rollouts(f"{len(samples)} samples, rewards {given.tolist()!r:.60}")
    told = zip(samples, given.tolist(), strict=True)
    return [
        tuple(
            replace(place, sampled_K=np.array(sample.log_probs, np.float32), reward=reward)
            for place, (sample, reward) in zip(group, told, strict=False)
        )
        for group in groups
    ]


def require_readable(
    documents: Sequence[encode.Document], positions: int | None, vocabulary: int
) -> None:
    """Refuse documents longer than the model's positions (D007), or with tokens outside its
    vocabulary (D003)."""
    for number, document in enumerate(documents, 1):
        if positions is not None and len(document) > positions:
            found = f"{len(document)} tokens, and the model has positions for {positions}"
            raise _unusable("D007", f"document {number} is too long", found)
        low, high = int(document.tokens_T.min()), int(document.tokens_T.max())
        if low < 0 or (vocabulary and high >= vocabulary):
            found = f"tokens from {low} to {high}, and the vocabulary has {vocabulary}"
            raise _unusable("D003", f"document {number} has unknown tokens", found)


def _no_rollouts(found: str) -> ConfigError:
    return ConfigError(
        "C004",
        "the objective learns from rollouts, each with its reward",
        where="forward_backward",
        found=found,
        expected="the result of sample(), and rewards= with a number for each",
        remedy="sample from this trainer, and give rewards",
    )


def probe(encoder: Encoder) -> Batch:
    """Return a text for a backend to verify its computation."""
    ids = encoder.tokenizer(4 * _PROBE)["input_ids"][: encoder.seq_len]
    return shortened([to_batch([_checked(Document(ids), 0)])])


def _unusable(code: str, what: str, found: str) -> DataError:
    return DataError(
        code,
        what,
        where="the documents of this call",
        found=found,
        expected="a list of rows as in a data file, or of vox.Document, with something to train",
        remedy="correct them or leave them out",
    )
