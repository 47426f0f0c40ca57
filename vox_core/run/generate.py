"""Generate many rows in the running batch of a model.

Rows enter when there is room and leave when they end, at any step. A row's tokens depend on its
prompt, its `Sampling` and the model. They do not depend on the other rows, except through the
roundoff of the backend's logits.

What ends a row besides its length is the caller's to say (`Prompt.ended`); text is load.py's.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vox_core.contract import DType, Model
from vox_core.run.plan import text_config
from vox_core.run.sampling import Sampling, log_prob, next_token

if TYPE_CHECKING:
    from vox_core.contract import Floats
    from vox_core.host.probe import Hardware

ROWS_ON_CPU = 8
ROWS_ON_ACCELERATOR = 32
CACHE_SHARE = 0.25
"""Share of the memory that the model leaves free, for the KV cache of all rows."""
_BYTES: dict[DType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

Finish: TypeAlias = Literal["stop", "length"]


def _never(_token: int) -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A row to generate.

    Args:
        tokens: at least one.
        ended: called once with each token of the row, in order; true ends the row with it.
        adapter: name of the adapter; None: the base.
    """

    tokens: Sequence[int]
    sampling: Sampling
    ended: Callable[[int], bool] = _never
    adapter: str | None = None

    @property
    def longest(self) -> int:
        """Tokens of the row if nothing but its length ends it."""
        return len(self.tokens) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token.

    Args:
        row: index of the prompt.
        log_prob: log-softmax of the model's logits, before any sampling parameter; None unless
            requested.
        finish: `stop` if `Prompt.ended` ended the row with this token, `length` if it is the last
            of `max_tokens`; None if the row goes on.
    """

    row: int
    id: int
    log_prob: float | None
    finish: Finish | None


class Generator:
    """The running batch of one model; nothing else may call its `insert`, `advance` and `remove`.

    Args:
        rows: maximum number of rows in the batch.
        cache_tokens: maximum sum of the rows' greatest lengths; None: no maximum. A single row
            always has room.
    """

    def __init__(self, model: Model, rows: int = ROWS_ON_CPU, cache_tokens: int | None = None):
        self.model, self._most_rows, self._cache_tokens = model, rows, cache_tokens
        self._numbers = itertools.count()
        self._inside: set[int] = set()
        # Of rows of another call of `generate`, whose prompt was computed along.
        self._logits: dict[int, Floats] = {}

    def generate(self, prompts: Iterable[Prompt], *, log_probs: bool = False) -> Iterator[Token]:
        """Yield the tokens of all rows, step by step. Several iterators may be read in turns; rows
        leave the batch when theirs is closed.

        Args:
            prompts: entered in this order, and read when there is room.
            log_probs: compute each token's log-probability.
        """
        coming = enumerate(prompts)
        following = next(coming, None)
        rows: dict[int, _Row] = {}
        chosen: dict[int, int] = {}
        try:
            while rows or following:
                while following and self._has_room(rows, following[1]):
                    self._enter(rows, *following)
                    following = next(coming, None)
                for number, logits_V in self._advance(rows, chosen).items():
                    token = rows[number].choose(logits_V, log_probs)
                    if token.finish:
                        self._leave(number)
                        del rows[number]
                    else:
                        chosen[number] = token.id
                    yield token
        finally:
            for number in rows:
                self._leave(number)

    def close(self) -> None:
        """Remove all rows. Iterators that have not ended must not be read any more."""
        for number in list(self._inside):
            self._leave(number)

    def _has_room(self, rows: Mapping[int, _Row], prompt: Prompt) -> bool:
        if not rows or self._cache_tokens is None:
            return len(rows) < self._most_rows
        tokens = prompt.longest + sum(row.prompt.longest for row in rows.values())
        return len(rows) < self._most_rows and tokens <= self._cache_tokens

    def _enter(self, rows: dict[int, _Row], index: int, prompt: Prompt) -> None:
        import numpy as np

        number = next(self._numbers)
        self.model.insert(number, np.asarray(prompt.tokens, np.int64), prompt.adapter)
        self._inside.add(number)
        rows[number] = _Row(index, prompt)

    def _leave(self, number: int) -> None:
        if number in self._inside:
            self._inside.remove(number)
            self._logits.pop(number, None)
            self.model.remove(number)

    def _advance(self, rows: Mapping[int, _Row], chosen: dict[int, int]) -> dict[int, Floats]:
        """Return the logits of at least one of `rows`; empty `chosen`, which is appended."""
        while chosen or not self._logits.keys() & rows.keys():
            self._logits.update(self.model.advance(dict(chosen)))
            chosen.clear()
        return {number: self._logits.pop(number) for number in rows if number in self._logits}


class _Row:
    """A row inside the batch, with its tokens."""

    def __init__(self, index: int, prompt: Prompt) -> None:
        self.index, self.prompt = index, prompt
        self.tokens = [int(token) for token in prompt.tokens]

    def choose(self, logits_V: Floats, log_probs: bool) -> Token:
        """Choose the next token and append it."""
        token = next_token(logits_V, self.prompt.sampling, self.tokens)
        self.tokens.append(token)
        finish: Finish | None = None
        if self.prompt.ended(token):
            finish = "stop"
        elif len(self.tokens) >= self.prompt.longest:
            finish = "length"
        return Token(self.index, token, log_prob(logits_V, token) if log_probs else None, finish)


def most_rows(hardware: Hardware) -> int:
    """Return how many rows are generated at once on the first device."""
    on_cpu = not hardware.devices or hardware.devices[0].tag == "cpu"
    return ROWS_ON_CPU if on_cpu else ROWS_ON_ACCELERATOR


def cache_bytes(config: Mapping[str, Any], dtype: DType) -> int | None:
    """Return the bytes of KV cache for one token; None if `config.json` does not say.

    Two vectors per attention layer and key-value head. Layers with linear attention have a state of
    constant size, which is not counted.
    """
    text = text_config(config)

    def first(*keys: str) -> int | None:
        return next((text[key] for key in keys if isinstance(text.get(key), int)), None)

    heads = first("num_attention_heads", "n_head")
    hidden, layers = first("hidden_size", "n_embd"), first("num_hidden_layers", "n_layer")
    if not heads or not hidden or not layers:
        return None
    if kinds := text.get("layer_types"):
        layers = sum(kind != "linear_attention" for kind in kinds)
    key_value_heads = first("num_key_value_heads") or heads
    head_size = first("head_dim") or hidden // heads
    return 2 * layers * key_value_heads * head_size * _BYTES[dtype]
