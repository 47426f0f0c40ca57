"""Generate many rows in the running batch of a model.

Rows enter when there is room and leave when they end, at any step. A row that begins as another one
takes the cache of these tokens from it, where the backend can: several answers to a prompt compute
it once. A row's tokens depend on its prompt, its `Sampling` and the model. They do not depend on
the other rows, except through the roundoff of the backend's logits.

What ends a row besides its length is the caller's to say (`Prompt.ended`); text is load.py's.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from vox_core.contract import Bools, DType, Floats, Model
from vox_core.errors import TrainingError
from vox_core.run.plan import text_config
from vox_core.run.sampling import Sampling, log_prob, next_token, top_log_probs

if TYPE_CHECKING:
    from vox_core.host.probe import Hardware

ROWS_ON_CPU = 16
ROWS_ON_ACCELERATOR = 32
CACHE_SHARE = 0.25
"""Share of the memory that the model leaves free, for the KV cache of all rows."""
LEAST_SHARED = 16
"""Tokens that two rows must share before one takes them from the cache of the other."""
MOST_KEPT = 64
"""Ended rows that are kept. Buffers of a backend have whole blocks of 256 tokens: 8,192 tokens
in rows of 16 would take 16 times their memory."""
_BYTES: dict[DType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

Finish: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A row to generate.

    Args:
        tokens: at least one.
        ended: called once with each token of the row, in order; true ends the row with it.
        adapter: name of the adapter; None: the base.
        top: compute each token's log-probability, and those of this many most likely tokens.
        allowed: called before each token with the number of logits; returns which tokens may be
            chosen (a grammar's mask), at least one, or None for all.
    """

    tokens: Sequence[int]
    sampling: Sampling
    ended: Callable[[int], bool] = lambda _token: False
    adapter: str | None = None
    top: int | None = None
    allowed: Callable[[int], Bools | None] | None = None

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
        top: the `Prompt.top` most likely tokens with their log-probabilities, the likeliest first.
        error: why the row ends without this token; its `id` has no meaning.
    """

    row: int
    id: int
    log_prob: float | None
    finish: Finish | None
    top: Sequence[tuple[int, float]] = ()
    error: TrainingError | None = None


class Generator:
    """The running batch of one model; nothing else may call its `insert`, `advance` and `remove`.

    Args:
        rows: maximum number of rows in the batch.
        cache_tokens: maximum sum of the rows' greatest lengths; None: no maximum. A single row
            always has room.

    Attributes:
        model, most_rows: as given.
        keep: cached tokens of rows that have ended, for new rows that begin alike; with 0 they take
            tokens only from rows inside. The kept ones count among `cache_tokens`.
    """

    def __init__(self, model: Model, rows: int = ROWS_ON_CPU, cache_tokens: int | None = None):
        self.model, self.most_rows, self._cache_tokens = model, rows, cache_tokens
        self.keep = 0
        self._lock = threading.RLock()
        self._reuses = True  # until it does not
        self._numbers = itertools.count()
        self._inside: dict[int, _Row] = {}
        self._kept: dict[int, _Row] = {}  # the least recently used one first
        # Of rows of another call of `generate`, whose prompt was computed along.
        self._logits: dict[int, Floats] = {}

    def generate(self, prompts: Iterable[Prompt], *, log_probs: bool = False) -> Iterator[Token]:
        """Yield the tokens of all rows, step by step. Several iterators may be read in turns, also
        by threads; rows leave the batch when theirs is closed.

        Args:
            prompts: entered in this order, and read when there is room.
            log_probs: compute each token's log-probability.

        Raises:
            TrainingError: T001, the logits of a row are not numbers.
        """
        coming, rows = enumerate(prompts), self.rows(log_probs=log_probs)
        following = next(coming, None)
        try:
            while rows or following:
                with self._lock:
                    while (
                        following
                        and rows.has_room(following[1])
                        and not rows.worth_waiting(following[1])
                    ):
                        rows.enter(*following)
                        following = next(coming, None)
                    tokens = rows.step()
                for token in tokens:
                    if token.error:
                        raise token.error
                    yield token
        finally:
            with self._lock:
                rows.close()

    def complete(
        self, prompts: Iterable[Prompt], *, log_probs: bool = False
    ) -> Iterator[tuple[int, list[Token]]]:
        """Yield index and tokens of each row when it ends; arguments, errors as for `generate`."""
        begun = defaultdict[int, list[Token]](list)
        for token in self.generate(prompts, log_probs=log_probs):
            begun[token.row].append(token)
            if token.finish:
                yield token.row, begun.pop(token.row)

    def rows(self, *, log_probs: bool = False) -> Rows:
        """Return an empty set of rows that the caller lets enter, steps and removes itself."""
        return Rows(self, log_probs)

    def close(self) -> None:
        """Remove all rows. Iterators that have not ended must not be read any more."""
        for number in list(self._inside):
            self._leave(number)
        self._keep_at_most(0)

    def forget(self, adapter: str) -> None:
        """Drop the kept rows of an adapter, before it is removed."""
        for number in [n for n, row in self._kept.items() if row.prompt.adapter == adapter]:
            del self._kept[number]
            self.model.remove(number)

    def _has_room(self, rows: Collection[_Row], prompt: Prompt) -> bool:
        if not rows or self._cache_tokens is None:
            return len(rows) < self.most_rows
        tokens = prompt.longest + sum(row.prompt.longest for row in rows)
        return len(rows) < self.most_rows and tokens <= self._cache_tokens

    def _beginning(self, prompt: Prompt) -> tuple[int, int]:
        """Return how many first tokens of a prompt, but for its last one, are in a row's cache, at
        most, and that row's number."""
        others = itertools.chain(self._kept.items(), self._inside.items())
        found = (
            (min(_common(prompt.tokens[:-1], row.tokens), row.computed), number)
            for number, row in others
            if row.prompt.adapter == prompt.adapter
        )
        return max(found, default=(0, 0))

    def _enter(self, row: _Row) -> int:
        number, prompt = next(self._numbers), row.prompt
        self.model.insert(number, np.asarray(prompt.tokens, np.int64), prompt.adapter)
        try:
            self._begin_as_another(number, row)
        except BaseException:
            self.model.remove(number)
            raise
        self._inside[number] = row
        if self._cache_tokens is not None:
            inside = sum(each.prompt.longest for each in self._inside.values())
            self._keep_at_most(self._cache_tokens - inside)
        return number

    def _begin_as_another(self, number: int, row: _Row) -> None:
        """Copy the first tokens' cache of the row that shares most, if any shares enough."""
        count, source = self._beginning(row.prompt)
        if count >= LEAST_SHARED:
            self._reuses = self.model.reuse(number, source, count)
            row.computed = count if self._reuses else 0
            if source in self._kept:
                self._kept[source] = self._kept.pop(source)

    def _leave(self, number: int) -> None:
        if row := self._inside.pop(number, None):
            self._logits.pop(number, None)
            if LEAST_SHARED <= row.computed <= self.keep:
                self._kept[number] = row
                self._keep_at_most(self.keep)
            else:
                self.model.remove(number)

    def _keep_at_most(self, tokens: int) -> None:
        while self._kept and (
            len(self._kept) > MOST_KEPT or sum(row.computed for row in self._kept.values()) > tokens
        ):
            number = next(iter(self._kept))
            del self._kept[number]
            self.model.remove(number)

    def _advance(self, rows: Mapping[int, _Row], chosen: dict[int, int]) -> dict[int, Floats]:
        """Return the logits of `rows` after one step, none for a prompt that needs more steps;
        empty `chosen`, which is appended."""
        if chosen or not self._logits.keys() & rows.keys():
            found = self.model.advance(dict(chosen))
            for number in found:
                self._inside[number].computed = len(self._inside[number].tokens)
            self._logits.update(found)
            chosen.clear()
        return {number: self._logits.pop(number) for number in rows if number in self._logits}


class Rows:
    """A caller's rows in the running batch of a `Generator`."""

    def __init__(self, generator: Generator, log_probs: bool) -> None:
        self._generator, self._log_probs = generator, log_probs
        self._rows: dict[int, _Row] = {}
        self._chosen: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def has_room(self, prompt: Prompt) -> bool:
        """Whether `prompt` may enter now; with no rows inside there is always room for one."""
        return self._generator._has_room(self._rows.values(), prompt)

    def worth_waiting(self, prompt: Prompt) -> bool:
        """Whether a row inside computes most of `prompt` now, which is in no cache yet: it takes
        these tokens from there if it enters later."""
        return (
            self._generator._reuses
            and any(row.will_have(prompt) for row in self._rows.values())
            and self._generator._beginning(prompt)[0] < _worth(prompt)
        )

    def enter(self, index: int, prompt: Prompt) -> None:
        """Let a row enter; its tokens have `index` as their row."""
        row = _Row(index, prompt)
        self._rows[self._generator._enter(row)] = row

    def step(self) -> list[Token]:
        """Return the next token of each row whose prompt is computed, none if a long prompt needs
        more steps; rows that end, or fail (`Token.error`), leave. There must be rows."""
        tokens = []
        for number, logits_V in self._generator._advance(self._rows, self._chosen).items():
            token = self._rows[number].choose(logits_V, self._log_probs)
            if token.finish or token.error:
                self._leave(number)
            else:
                self._chosen[number] = token.id
            tokens.append(token)
        return tokens

    def leave(self, index: int) -> None:
        """Remove the row of `index`, if it is inside."""
        for number in [number for number, row in self._rows.items() if row.index == index]:
            self._leave(number)

    def close(self) -> None:
        """Remove all rows."""
        for number in list(self._rows):
            self._leave(number)

    def _leave(self, number: int) -> None:
        del self._rows[number]
        self._chosen.pop(number, None)
        self._generator._leave(number)


class _Row:
    """A row inside the batch, with its tokens; `computed` of them are in its cache."""

    def __init__(self, index: int, prompt: Prompt) -> None:
        self.index, self.prompt, self.computed = index, prompt, 0
        self.tokens = [int(token) for token in prompt.tokens]

    def will_have(self, prompt: Prompt) -> bool:
        """Whether it still computes its prompt, half of which is half of another one."""
        own, least = self.prompt.tokens, _worth(self.prompt, prompt)
        if self.computed >= len(own) or prompt.adapter != self.prompt.adapter:
            return False
        return _common(own, prompt.tokens[:-1]) >= least

    def choose(self, logits_V: Floats, log_probs: bool) -> Token:
        """Choose the next token and append it."""
        if math.isnan(logits_V.max()):  # argmax would choose such a token
            self.computed = 0  # no other row begins with this cache
            return Token(self.index, 0, None, None, error=no_numbers(self.tokens))
        generated = len(self.tokens) - len(self.prompt.tokens)
        allowed_V = self.prompt.allowed(len(logits_V)) if self.prompt.allowed else None
        token = next_token(logits_V, self.prompt.sampling, self.tokens, generated, allowed_V)
        self.tokens.append(token)
        finish: Finish | None = None
        if self.prompt.ended(token):
            finish = "stop"
        elif len(self.tokens) >= self.prompt.longest:
            finish = "length"
        if not log_probs and self.prompt.top is None:
            return Token(self.index, token, None, finish)
        top = top_log_probs(logits_V, self.prompt.top or 0)
        return Token(self.index, token, log_prob(logits_V, token), finish, top)


def _worth(*prompts: Prompt) -> int:
    """Return how many common first tokens are worth waiting for: half of the longest prompt."""
    return max(LEAST_SHARED, *(len(prompt.tokens) // 2 for prompt in prompts))


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first tokens are equal."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def no_numbers(tokens: Sequence[int]) -> TrainingError:
    """Return the error for NaN logits behind these tokens of a row."""
    return TrainingError(
        "T001",
        "the model's logits are not numbers",
        found=f"NaN after {len(tokens)} tokens of a row",
        remedy="use a dtype with a larger range (--dtype bf16 or --dtype fp32); if it is fp32 "
        "already, the weights are damaged",
    )


def most_rows(hardware: Hardware) -> int:
    """Return how many rows are generated at once on the first device."""
    return ROWS_ON_CPU if hardware.devices[0].tag == "cpu" else ROWS_ON_ACCELERATOR


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
