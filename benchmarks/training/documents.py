"""Token ids and weights for the steps of a cell: a function of shape, vocabulary and seed.

    chat    mean 60 tokens, the answer trained (the last 40 to 80 %)
    mixed   log-normal up to 2048, mean 330, the last 40 to 80 % trained
    rows-N  N tokens, all trained

Ids are random; a token repeats the one before it with a probability of the document's own, so that
documents differ in loss (models.py says why). A model with real weights is given pieces of text
instead: at random ids its bfloat16 losses are 1 % from its float32 ones, which is the gate's width.

Shape legend: T tokens of a document, N tokens of a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from vox_core.adapter.initial import generator
from vox_core.data.encode import Document

if TYPE_CHECKING:
    from numpy.typing import NDArray

Data: TypeAlias = Literal["chat", "mixed", "rows-128", "rows-1024", "rows-4096"]
Steps: TypeAlias = Sequence[Sequence[Document]]

# Location and width of the logarithm, then the bounds. Means after the bounds: 60 and 330.
_LOG_NORMAL = {"chat": (3.98, 0.5, 16, 256), "mixed": (5.38, 0.95, 32, 2048)}


# Steps of the data set that a run's documents are drawn from.
_POOL = 100


def make_steps(
    data: Data, vocabulary: int, steps: int, per_step: int, text_N: NDArray[np.int64] | None = None
) -> Steps:
    """`steps` optimizer steps of `per_step` documents; pieces of `text_N` if there is one.

    The first step, which is not counted, is drawn by itself. The documents of the others are those
    that a loop over a data set of `_POOL` steps, sorted by length, would have together: every so
    many of its steps, in the middle of equal parts. So the sorted steps of a short run pad as
    little as those of a long one. They are shuffled here.
    """
    random = generator("benchmark", data)

    def ids(length: int) -> NDArray[np.int64]:
        if text_N is None:
            return _repeating(random.integers(0, vocabulary, length), random.random(), random)
        return np.take(text_N, random.integers(len(text_N)) + np.arange(length), mode="wrap")

    def step() -> list[Document]:
        return [_document(data, ids, random) for _ in range(per_step)]

    first = step()
    pool = sorted((document for _ in range(_POOL) for document in step()), key=len)
    middles = [int((part + 0.5) * _POOL / (steps - 1)) for part in range(steps - 1)]
    chosen = [d for at in middles for d in pool[at * per_step : (at + 1) * per_step]]
    order = random.permutation(len(chosen)).reshape(steps - 1, per_step)
    return [first, *([chosen[i] for i in row] for row in order)]


def sorted_by_length(steps: Steps) -> Steps:
    """Return the first step as it is, and the documents of the others in steps of about one length,
    in random order."""
    first, *others = steps
    documents = sorted((d for step in others for d in step), key=len)
    made = [documents[at : at + len(first)] for at in range(0, len(documents), len(first))]
    return [first, *(made[i] for i in generator("benchmark", "sorted").permutation(len(made)))]


def _document(
    data: Data, ids: Callable[[int], NDArray[np.int64]], random: np.random.Generator
) -> Document:
    length = _length(data, random)
    prompt = 1 if data.startswith("rows") else max(1, int(length * random.uniform(0.2, 0.6)))
    weights_T = (np.arange(length) >= prompt).astype(np.float32)
    return Document(ids(length).astype(np.int32), weights_T, Path(data), 0, 0)


def _length(data: Data, random: np.random.Generator) -> int:
    if data.startswith("rows"):
        return int(data.removeprefix("rows-"))
    mean, width, shortest, longest = _LOG_NORMAL[data]
    return int(np.clip(random.lognormal(mean, width), shortest, longest))


def _repeating(
    ids_T: NDArray[np.int64], share: float, random: np.random.Generator
) -> NDArray[np.int64]:
    fresh_T = random.random(len(ids_T)) >= share
    fresh_T[0] = True
    return ids_T[np.maximum.accumulate(np.where(fresh_T, np.arange(len(ids_T)), 0))]


def write(file: Path, steps: Steps) -> None:
    """As `[[[tokens, weights], …], …]`, which needs nothing of vox to be read."""
    lists = [[[d.tokens_T.tolist(), d.weights_T.astype(int).tolist()] for d in s] for s in steps]
    file.write_text(json.dumps(lists))


def read(file: Path) -> list[list[tuple[list[int], list[int]]]]:
    """Tokens and weights of each document of each step."""
    return [[(tokens, weights) for tokens, weights in s] for s in json.loads(file.read_text())]


def tokens(steps: Steps) -> list[int]:
    """Real tokens of each step."""
    return [sum(len(document) for document in step) for step in steps]
