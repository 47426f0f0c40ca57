"""The choice of a token, held against transformers' logits processors."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from vox_core.run.sampling import Sampling, next_token, top_log_probs

torch = pytest.importorskip("torch")
PROMPT = [3, 3, 7, 11, 190]


def scores(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What transformers' own processors, in its own order, make of logits."""
    from transformers import generation as own

    steps = own.LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        steps.append(own.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature:
        steps.append(own.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            steps.append(own.TopKLogitsWarper(sampling.top_k))
        steps.append(own.TopPLogitsWarper(sampling.top_p))
        steps.append(own.MinPLogitsWarper(sampling.min_p))
    return steps(torch.tensor([PROMPT]), torch.tensor(logits_V)[None])[0].double().numpy()


def expected(logits_V: np.ndarray, sampling: Sampling) -> int:
    """The winner of a race in float64: rates are the odds, blocks of 512 tokens race first."""
    scores_V = scores(logits_V, sampling)
    if not sampling.temperature:
        return int(scores_V.argmax())
    odds_V = np.exp(scores_V - scores_V.max())
    bits = np.random.Philox(key=[sampling.seed, sampling.row], counter=[0, len(PROMPT), 0, 0])
    starts = range(0, len(odds_V), 512)
    times = [-math.log1p(-(int(raw) >> 11) / 2**53) for raw in bits.random_raw(512 + len(starts))]

    def winner(rates: list[float], times: list[float]) -> int:
        return min((t / r, n) for n, (t, r) in enumerate(zip(times, rates, strict=False)) if r)[1]

    start = starts[winner([odds_V[at : at + 512].sum() for at in starts], times[512:])]
    return start + winner([*odds_V[start : start + 512]], times)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 1.3},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 5000},
        {"top_p": 0.05},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 3.0},
        {"min_p": 0.2},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "temperature": 0.5},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2, "temperature": 0.8},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers_distribution(options):
    random = np.random.default_rng(0)
    for seed in range(60):
        logits_V = (3 * random.standard_normal(1000)).astype(np.float32)
        logits_V[PROMPT] += np.float32(6)  # so that a penalty matters
        sampling = Sampling(**{"temperature": 1.0, **options}, seed=seed, row=seed % 3)
        before = logits_V.copy()
        assert next_token(logits_V, sampling, PROMPT) == expected(logits_V, sampling)
        assert np.array_equal(logits_V, before)


def test_each_token_is_chosen_with_its_probability() -> None:
    shares = {3: 0.5, 511: 0.1, 512: 0.25, 600: 0.05, 1500: 0.1}
    logits_V = np.full(1600, -np.inf, np.float32)
    logits_V[[*shares]] = np.log([*shares.values()])
    warm, count = Sampling(temperature=1.0), 20_000
    chosen = [next_token(logits_V, replace(warm, seed=seed), [1]) for seed in range(count)]
    for token, share in shares.items():
        sigma = (share * (1 - share) / count) ** 0.5
        assert abs(chosen.count(token) / count - share) < 5 * sigma


def test_padding_of_the_vocabulary_changes_no_token() -> None:
    """Some checkpoints have a padded vocabulary, whose further tokens are never chosen."""
    random, warm = np.random.default_rng(0), Sampling(temperature=1.0)
    for seed, size in enumerate((1, 500, 512, 1000, 32_000) * 20):
        logits_V = 2 * random.standard_normal(size, np.float32)
        padded_V = np.concatenate([logits_V, np.full(1000, -np.inf, np.float32)])
        sampling = replace(warm, seed=seed)
        assert next_token(logits_V, sampling, [1]) == next_token(padded_V, sampling, [1])


def test_roundoff_in_the_logits_changes_no_token() -> None:
    """Backends are 1e-5 apart in float32, 1e-2 in bfloat16. With 1e-3, an inverse of the running
    sum changes 26 of these 200 tokens."""
    random, warm = np.random.default_rng(0), Sampling(temperature=1.0)
    for seed in range(200):
        logits_V = 3 * random.standard_normal(50_000, np.float32)
        near_V = logits_V + np.float32(1e-3) * random.standard_normal(50_000, np.float32)
        sampling = replace(warm, seed=seed)
        assert next_token(logits_V, sampling, [1]) == next_token(near_V, sampling, [1])


def test_seed_row_and_position_each_change_the_choice():
    logits_V, warm = np.zeros(50_000, np.float32), Sampling(temperature=1.0)
    tokens = {
        next_token(logits_V, warm, [1, 2]),
        next_token(logits_V, warm, [1, 2, 3]),
        next_token(logits_V, replace(warm, row=1), [1, 2]),
        next_token(logits_V, replace(warm, seed=1), [1, 2]),
    }
    assert len(tokens) == 4
    assert next_token(logits_V, warm, [8, 9]) in tokens  # which tokens they are says nothing
    assert next_token(logits_V, replace(warm, temperature=1e-46), [1]) == 0


def test_only_allowed_tokens_are_chosen_wherever_they_are() -> None:
    random = np.random.default_rng(0)
    for seed in range(200):
        logits_V = (30 * random.standard_normal(3000)).astype(np.float32)
        allowed_V = np.zeros(3000, bool)
        allowed_V[random.integers(0, 3000, 3)] = True
        sampling = Sampling(temperature=5.0, seed=seed)
        assert allowed_V[next_token(logits_V, sampling, [1], allowed_V=allowed_V)]


def test_penalties_of_the_answer_and_bias_follow_openais_formula() -> None:
    """logit - count * frequency - (count > 0) * presence + bias; the prompt does not count."""
    of_all = {"frequency_penalty": -1.0, "presence_penalty": 0.5, "logit_bias": ((5, 3.0), (0, -9))}
    for seed, options in itertools.product(
        range(20),
        (
            {"frequency_penalty": 0.5},
            {"presence_penalty": -2.0},
            {"logit_bias": ((4, 3.0),)},
            of_all,
        ),
    ):
        logits_V = np.random.default_rng(seed).normal(size=32).astype(np.float32)
        first, second = (int(token) for token in np.argsort(-logits_V)[:2])
        answer = [first] * 3 + [second]
        sampling = Sampling(**options)
        exact_V = logits_V.astype(np.float64)
        for token in set(answer):
            exact_V[token] -= answer.count(token) * sampling.frequency_penalty
            exact_V[token] -= sampling.presence_penalty
        for token, bias in sampling.logit_bias:
            exact_V[token] += bias
        before = [int(exact_V.argmax())] * 3 + answer
        assert next_token(logits_V, sampling, before, len(answer)) == exact_V.argmax(), options


def test_of_equal_tokens_the_likeliest_is_that_of_greedy_decoding() -> None:
    logits_V = np.zeros(1000, np.float32)
    logits_V[[700, 300, 900]] = 5
    assert top_log_probs(logits_V, 1)[0][0] == next_token(logits_V, Sampling(), [0]) == 300


def test_the_most_likely_tokens_have_their_log_probs() -> None:
    logits_V = np.random.default_rng(1).normal(size=300).astype(np.float32)
    logits_V[7] = logits_V[3] = 9
    exact_V = logits_V - np.log(np.exp(logits_V.astype(np.float64)).sum())
    found = top_log_probs(logits_V, 5)
    assert [token for token, _ in found] == [*np.argsort(-logits_V, kind="stable")[:5]]
    assert [p for _, p in found] == pytest.approx([exact_V[token] for token, _ in found])
    assert len(top_log_probs(logits_V, 1000)) == 300
    assert top_log_probs(logits_V, 0) == []
