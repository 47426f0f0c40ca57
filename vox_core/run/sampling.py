"""Choose the next token: one numpy implementation for every backend.

The logits' processors are those of transformers, in its order: repetition penalty, temperature,
top-k, top-p, min-p. Before the temperature stand OpenAI's: frequency and presence penalty, logit
bias, and before these the mask of a grammar. Greedy decoding (`temperature` 0) uses only the mask,
the penalties and the bias. Random numbers are functions of seed, row, position and token, so a row
gives the same text on every backend and beside any other rows.

generate.py runs the batch, load.py decides which tokens and texts end an answer.

Shape legend: V vocabulary, B blocks of it, S tokens of a block, K candidates, R = 512 + B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vox_core.contract import Bools, Floats

_BLOCK = 512
"""Tokens that race one another."""
_GREEDY = 1e-6
"""A temperature below this is as good as 0, and float32 could not divide by all of them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one row.

    Args:
        max_tokens: maximum number of new tokens.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set with at least this total probability (arXiv:1904.09751).
        min_p: keep tokens with at least this probability relative to the top token
            (arXiv:2407.01082).
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that
            occur in the prompt or the answer (arXiv:1909.05858); 1 changes nothing.
        frequency_penalty: subtracted from a token's logit for each time it occurs in the answer.
        presence_penalty: subtracted from a token's logit if it occurs in the answer.
        logit_bias: token ids with what is added to their logits; each id once.
        seed: seed of the random numbers.
        row: index of the prompt or the answer, for random numbers of its own.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    row: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()


def next_token(
    logits_V: Floats,
    sampling: Sampling,
    before: Sequence[int],
    generated: int = 0,
    allowed_V: Bools | None = None,
) -> int:
    """Choose a token from the logits of the last position.

    Args:
        logits_V: float32, of the last position; not changed.
        before: every token of the row so far, prompt included.
        generated: how many of them, at the end, are the answer.
        allowed_V: tokens that may be chosen; None: all.
    """
    if allowed_V is not None:
        logits_V = np.where(allowed_V, logits_V, -np.inf)
    if sampling.repetition_penalty != 1:
        logits_V = _penalised(logits_V, sampling.repetition_penalty, before)
    if sampling.frequency_penalty or sampling.presence_penalty or sampling.logit_bias:
        logits_V = _shifted(logits_V, sampling, before[len(before) - generated :])
    if sampling.temperature < _GREEDY:
        return int(logits_V.argmax())
    # In place from here on: allocating memory costs more than exp.
    odds_V = logits_V - logits_V.max()
    odds_V /= sampling.temperature
    np.exp(odds_V, out=odds_V)
    if (least := _least_odds(odds_V, sampling)) > 0:
        odds_V *= odds_V >= least
    # Salmon et al. 2011. numpy keeps raw bits over versions, not a Generator's numbers (NEP 19).
    bits = np.random.Philox(key=[sampling.seed, sampling.row], counter=[0, len(before), 0, 0])
    return _first(odds_V, bits)


def log_prob(logits_V: Floats, token: int) -> float:
    """Return log p(token) without temperature, penalty and filters, summed in float64."""
    most = logits_V.max()
    return float(logits_V[token]) - float(most) - _log_of_sum(logits_V, most)


def top_log_probs(logits_V: Floats, count: int) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens with their `log_prob`, the likeliest first."""
    if count == 0:
        return []
    size = len(logits_V)
    count = min(count, size)
    ids_K = np.sort(np.argpartition(logits_V, size - count)[size - count :])
    if count == 1:  # of equal ones that of greedy decoding
        ids_K = np.array([logits_V.argmax()])
    ids_K = ids_K[np.argsort(-logits_V[ids_K], kind="stable")]
    most = logits_V.max()
    found_K = logits_V[ids_K].astype(np.float64) - most - _log_of_sum(logits_V, most)
    return list(zip(ids_K.tolist(), found_K.tolist(), strict=True))


def _log_of_sum(logits_V: Floats, most: Floats) -> float:
    """Return log(sum(exp(logits - most))), with the terms in float32, of which each is off by at
    most 2^-23 of itself and of its distance from `most`, and their sum in float64."""
    odds_V = logits_V - most
    return float(np.log(np.exp(odds_V, out=odds_V).sum(dtype=np.float64)))


def _first(odds_V: Floats, bits: np.random.Philox) -> int:
    """Return the winner of a race: a token's time is exponential with its odds as the rate, so each
    wins with its probability (the Gumbel-max trick). Blocks race, then the tokens of one: few
    numbers, and those of blocks come last, so that padding changes none. With one number and the
    running sum of the odds, roundoff would change ten times as many tokens."""
    odds_B = np.add.reduceat(odds_V, np.arange(0, len(odds_V), _BLOCK), dtype=np.float64)
    times_R = -np.log1p((bits.random_raw(_BLOCK + len(odds_B)) >> 11) * -(2.0**-53))
    start = int((odds_B / times_R[_BLOCK:]).argmax()) * _BLOCK
    odds_S = odds_V[start : start + _BLOCK]
    return start + int((odds_S / times_R[: len(odds_S)]).argmax())


def _penalised(logits_V: Floats, penalty: float, before: Sequence[int]) -> Floats:
    seen, changed_V = np.asarray(before), logits_V.copy()
    found = logits_V[seen]
    changed_V[seen] = np.where(found < 0, found * penalty, found / penalty)
    return changed_V


def _shifted(logits_V: Floats, sampling: Sampling, answer: Sequence[int]) -> Floats:
    """Apply OpenAI's penalties to the tokens of the answer, and the bias."""
    changed_V = logits_V.copy()
    seen_K, counts_K = np.unique(np.asarray(answer, np.int64), return_counts=True)
    changed_V[seen_K] -= sampling.frequency_penalty * counts_K + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        changed_V[token] += bias
    return changed_V


def _least_odds(odds_V: Floats, sampling: Sampling) -> float:
    """Return the lowest odds, relative to the top token's, that a token is kept with."""
    least, size = 0.0, len(odds_V)
    if 0 < sampling.top_k < size:
        least = float(np.partition(odds_V, size - sampling.top_k)[size - sampling.top_k])
    if sampling.top_p < 1:
        least = max(least, _nucleus(odds_V[odds_V >= least] if least else odds_V, sampling.top_p))
    return max(least, sampling.min_p)


def _nucleus(odds_V: Floats, top_p: float) -> float:
    """Return the lowest odds in the nucleus. All odds below the mean of those outside of it are
    outside, which leaves few to sort."""
    whole = odds_V.sum(dtype=np.float64)
    odds_K = np.sort(odds_V[odds_V >= (1 - top_p) * whole / len(odds_V)])[::-1]
    before_K = odds_K.cumsum(dtype=np.float64) - odds_K
    inside = int(before_K.searchsorted(top_p * whole))
    return float(odds_K[max(inside, 1) - 1])
