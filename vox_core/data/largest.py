"""The largest micro-batch that data and settings will give, for what is predicted of memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vox_core.contract import Packing
from vox_core.data.batching import documents_in_step, micro_batches
from vox_core.data.dataset import Dataset
from vox_core.data.documents import Documents
from vox_core.data.encode import Document

_STEPS_LOOKED_AT = 200
"""Steps whose micro-batches are made; the longest document is looked at in any case."""


class Largest(NamedTuple):
    """The most of each, over the micro-batches of training.

    Args:
        laid: tokens, documents end to end.
        padded: positions, documents as rows as long as the longest.
        trained: positions whose loss is computed.
        longest: tokens of a document.
    """

    laid: int
    padded: int
    trained: int
    longest: int


def largest_micro_batch(
    dataset: Dataset,
    *,
    steps: int,
    batch_size: int,
    micro_batch_tokens: int,
    seed: int,
    packing: Packing = "rows",
) -> Largest:
    """Over the first 200 steps, and the longest document by itself.

    `padded` is that of rows, whatever the packing: a backend that pads cuts what it is given anew.
    """
    documents = dataset.documents
    found = [_largest([documents[documents.longest_at]])]
    for step in range(1, min(steps, _STEPS_LOOKED_AT) + 1):
        indices = documents_in_step(dataset, batch_size, seed, step)
        chosen = [documents[index] for index in indices]
        rows = micro_batches(chosen, micro_batch_tokens)
        padded = max(len(group) * len(chosen[group[0]]) for group in rows)
        groups = micro_batches(chosen, micro_batch_tokens, packing)
        laid = [_largest([chosen[index] for index in group]) for group in groups]
        found += [each._replace(padded=padded) for each in laid]
    return Largest(*(max(column) for column in zip(*found, strict=True)))


def assumed_dataset(documents: int, length: int) -> Dataset:
    """So many documents of `length` tokens, all trained, in place of data that is not there yet."""
    weights = np.ones(length, np.float32)
    weights[0] = 0  # which nothing precedes
    document = Document(np.zeros(length, np.int32), weights, Path(), 0, 1)
    return Dataset(Documents.of((document,) * documents), documents, {}, {})


def _largest(documents: Sequence[Document]) -> Largest:
    lengths = [len(document) for document in documents]
    trained = sum(int(np.count_nonzero(document.weights_T)) for document in documents)
    return Largest(sum(lengths), len(lengths) * max(lengths), trained, max(lengths))
