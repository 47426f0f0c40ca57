"""Test generation against the logits of the same model, token by token.

Shape legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from vox_core.adapter.initial import generator
from vox_core.contract import LoadedModel, Sampling, next_token
from vox_testing.jobs import stirred
from vox_testing.subject import Subject
from vox_testing.suite.load import TOKENS
from vox_testing.suite.requirements import loads, needs

if TYPE_CHECKING:
    from vox_core.contract import Ints

# Of the 512 positions that the tiny models have.
LONG = 450
# Longer than the context or the cache that a backend may have made for itself.
MANY = 80
WARM = Sampling(max_tokens=24, temperature=1.0, seed=3)


@loads
def test_greedy_generation_takes_the_likeliest_token(vox_subject: Subject) -> None:
    """Greedy decoding takes the top token, for 80 tokens with an adapter, and repeatably."""
    method = vox_subject.declared.manifest.capabilities.methods[0]
    adapter = stirred(vox_subject.start(vox_subject.plan(method=method))).adapter
    for model, count in ((vox_subject.load(), 12), (vox_subject.load(adapter), MANY)):
        said = list(model.generate(TOKENS, Sampling(max_tokens=count)))
        assert len(said) == count
        assert all(isinstance(token, int) for token in said)
        _require_likeliest(vox_subject, model, TOKENS, said)
        assert list(model.generate(TOKENS, Sampling(max_tokens=12))) == said[:12]


@loads
def test_generation_ends_at_the_limit(vox_subject: Subject) -> None:
    model = vox_subject.load()
    for limit in (0, 1, 5):
        assert len(list(model.generate(TOKENS, Sampling(max_tokens=limit)))) == limit


@loads
def test_tokens_come_as_they_are_made(vox_subject: Subject) -> None:
    """The first few of 300 tokens take a small part of the total time; 1 % when nothing else runs.

    The last of them is still the likeliest.
    """
    model = vox_subject.load()
    long = Sampling(max_tokens=300)
    started = time.perf_counter()
    some = list(itertools.islice(model.generate(TOKENS, long), 3))
    between = time.perf_counter()
    everything = list(model.generate(TOKENS, long))
    ended = time.perf_counter()
    assert some == everything[:3]
    assert between - started < (ended - between) / 2
    _require_likeliest(vox_subject, model, TOKENS, everything)


@loads
def test_a_sampling_seed_gives_the_same_tokens_again(vox_subject: Subject) -> None:
    model = vox_subject.load()
    first, again, other = (
        list(model.generate(TOKENS, replace(WARM, seed=seed))) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


@loads
@needs(dtype="fp32")
def test_tokens_are_those_the_core_chooses(vox_subject: Subject) -> None:
    """Tokens equal `next_token` of the logits of the prompt and the answer so far.

    In a short dtype a step's logits and those of the whole text are too far apart to tell.
    """
    model = vox_subject.load()
    for sampling in (
        replace(WARM, temperature=0.0, repetition_penalty=1.3),
        replace(WARM, temperature=100.0),
        replace(WARM, top_p=0.5),
        replace(WARM, top_k=3, seed=5),
        replace(WARM, min_p=0.3, row=2),
        replace(WARM, temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.2),
    ):
        said = list(model.generate(TOKENS, sampling))
        row = [*TOKENS.tolist(), *said]
        for at, logits_V in enumerate(_after(model, said), len(TOKENS)):
            assert next_token(logits_V, sampling, row[:at]) == row[at]


@loads
@pytest.mark.parametrize(
    "text", ["a", "Grüße aus Köln; 東京 \N{SLIGHTLY SMILING FACE}", "long " * 60]
)
def test_any_text_can_be_continued(vox_subject: Subject, text: str) -> None:
    """Prompts of one byte, several scripts and 300 tokens work."""
    tokens_T = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    model = vox_subject.load()
    said = list(model.generate(tokens_T, Sampling(max_tokens=4)))
    _require_likeliest(vox_subject, model, tokens_T, said)


@loads
def test_a_long_prompt_is_read_whole(vox_subject: Subject) -> None:
    """All of a prompt of 450 distinct tokens is read, from its first."""
    model = vox_subject.load()
    for seed in range(3):
        prompt_T = generator("prompt", seed).integers(0, 256, LONG)
        said = list(model.generate(prompt_T, Sampling(max_tokens=16)))
        _require_likeliest(vox_subject, model, prompt_T, said)


def _require_likeliest(
    subject: Subject, model: LoadedModel, prompt_T: Ints, said: list[int]
) -> None:
    for logits_V, token in zip(_after(model, said, prompt_T), said, strict=True):
        assert logits_V[token] >= logits_V.max() - subject.tolerance.tie


def _after(model: LoadedModel, said: list[int], prompt_T: Ints = TOKENS) -> list[np.ndarray]:
    """Return the logits from which each token of `said` was chosen."""
    logits_TV = model.logits(np.concatenate([prompt_T, said]).astype(np.int64))
    return list(logits_TV[len(prompt_T) - 1 : -1])
