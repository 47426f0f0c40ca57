"""Rows that say nearly the same: MinHash signatures, brought together by locality-sensitive hashing
(Broder 1997; Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, ch. 3).

Two rows are near duplicates if the sets of their three-word sequences have a Jaccard similarity of
at least a threshold, as the signatures estimate it: with 128 permutations to some 0.04. A row
that is nearly the same as an earlier one goes, unless that has gone itself.

The index takes some 400 bytes a row, as it keeps for each bucket the first rows only.

Shape legend: K rows that are compared; S sequences of a row; H permutations; B bands; P pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes: TypeAlias = NDArray[np.uint32]
    Pairs: TypeAlias = NDArray[np.int64]

_PERMUTATIONS = 128
_SEED = 1
_WORDS = 3
_MISSED_IS_WORSE = (0.1, 0.9)
"""Weights of false and of missed candidates: signatures are compared before anything goes."""
_DEPTH = 8
"""Rows of a bucket that later ones are compared with."""
_AT_A_TIME = 4096
# Scripts without spaces between words: each sign is one.
_WORD = re.compile(r"[^\W\u2e80-\U0010ffff]+|\w")
_FACTORS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D], np.uint64)
_PRIME = np.uint64(0x9E3779B97F4A7C15)


def near_duplicates(texts: Iterable[str], count: int, threshold: float) -> Pairs:
    """Texts that say nearly the same as an earlier one.

    Args:
        texts: `count` of them.
        threshold: Jaccard similarity, estimated.

    Returns:
        int64 [P, 2]: the number of the text, and of the earlier one, which stays.
    """
    bands = _bands(threshold)
    part_KH = np.zeros((count, _PERMUTATIONS), np.uint16)
    bucket_KB = np.zeros((count, len(bands)), np.uint64)
    done = 0
    for hashes_KH in _signatures(texts):
        some = slice(done, done + len(hashes_KH))
        # 16 mixed bits, equal by chance once in 65,536: equal low bits stay equal if permuted.
        part_KH[some] = hashes_KH * np.uint32(0x9E3779B1) >> 16
        for number, band in enumerate(bands):
            bucket_KB[some, number] = _mixed(hashes_KH[:, band])
        done += len(hashes_KH)
    assert done == count
    return _compare(part_KH, _shared(bucket_KB), threshold)


def sequences(text: str) -> Hashes:
    """Hashes of the sequences of three words in a text; of all its words, if it has fewer."""
    words = _WORD.findall(text.lower()) or [text]
    hash_S = np.array([crc32(word.encode("utf-8", "replace")) for word in words], np.uint64)
    size = min(_WORDS, len(words))
    mixed_S = np.zeros(len(words) - size + 1, np.uint64)
    for offset in range(size):
        mixed_S ^= hash_S[offset : offset + len(mixed_S)] * _FACTORS[offset]
        mixed_S *= _PRIME
    return np.unique((mixed_S >> np.uint64(32)).astype(np.uint32))


def _signatures(texts: Iterable[str]) -> Iterator[Hashes]:
    """uint32 [some, H] of some thousand texts after another."""
    draw = partial(np.random.default_rng(_SEED).integers, 0, 2**32, _PERMUTATIONS, np.uint32)
    a_H, b_H = draw() | 1, draw()  # with an odd a, x -> a x + b mod 2^32 is a permutation
    rest = iter(texts)
    while some := list(islice(rest, _AT_A_TIME)):
        hashes_KH = np.full((len(some), _PERMUTATIONS), 2**32 - 1, np.uint32)
        for least_H, text in zip(hashes_KH, some, strict=True):
            hash_S = sequences(text)
            for part in range(0, len(hash_S), _AT_A_TIME):
                permuted_SH = hash_S[part : part + _AT_A_TIME, None] * a_H + b_H
                np.minimum(least_H, permuted_SH.min(axis=0), out=least_H)
        yield hashes_KH


def _bands(threshold: float) -> list[slice]:
    """Which hashes have to agree for two rows to be compared: all of one band.

    B bands of R hashes let a pair of similarity s through with probability 1 - (1 - s^R)^B. The
    two that are chosen have the least weighted area on the wrong side of the threshold.
    """
    s = np.linspace(0, 1, 1001)

    def wrong(shape: tuple[int, int]) -> float:
        through = 1 - (1 - s ** shape[1]) ** shape[0]
        false, missed = through[s < threshold].sum(), (1 - through[s >= threshold]).sum()
        return float(np.dot(_MISSED_IS_WORSE, (false, missed)))

    sizes = range(1, _PERMUTATIONS + 1)
    B, R = min(((B, R) for R in sizes for B in range(1, _PERMUTATIONS // R + 1)), key=wrong)
    return [slice(n * R, (n + 1) * R) for n in range(B)]


def _mixed(hashes_KH: Hashes) -> NDArray[np.uint64]:
    """Combine the hashes of a band into one."""
    mixed_K = np.zeros(len(hashes_KH), np.uint64)
    for column_K in hashes_KH.T.astype(np.uint64):
        mixed_K = (mixed_K ^ column_K) * _PRIME
        mixed_K ^= mixed_K >> np.uint64(29)
    return mixed_K


def _shared(bucket_KB: NDArray[np.uint64]) -> NDArray[np.int32]:
    """Buckets numbered from 0 in each band; -1 for one that has a single row."""
    number_KB = np.zeros(bucket_KB.shape, np.int32)
    for band, bucket_K in enumerate(bucket_KB.T):
        _, inverse_K, count = np.unique(bucket_K, return_inverse=True, return_counts=True)
        number = np.where(count > 1, np.cumsum(count > 1) - 1, -1)
        number_KB[:, band] = number[inverse_K]
    return number_KB


def _compare(part_KH: NDArray[np.uint16], number_KB: NDArray[np.int32], threshold: float) -> Pairs:
    """Each row with the first rows of its buckets that are still there."""
    bands = range(number_KB.shape[1])
    first = [np.full((number_KB[:, b].max(initial=-1) + 1, _DEPTH), -1, np.int32) for b in bands]
    pairs: list[tuple[int, int]] = []
    for row in np.flatnonzero((number_KB >= 0).any(axis=1)).tolist():
        buckets = [first[b][n] for b, n in enumerate(number_KB[row].tolist()) if n >= 0]
        others = np.unique(np.concatenate(buckets))
        others = others[others >= 0]
        alike = (part_KH[others] == part_KH[row]).mean(axis=1) >= threshold
        if alike.any():
            pairs.append((row, int(others[alike.argmax()])))
            continue
        for bucket in buckets:
            if (free := bucket == -1).any():
                bucket[free.argmax()] = row
    return np.array(pairs, np.int64).reshape(-1, 2)
