"""The models of a server: references as named models on one base, and each adapter verified.

Names, bases and quantisations are checked before the model is loaded. After loading, an adapter
must change the log-probabilities of a probe: an adapter that loads and does nothing is refused.
This does not show that the adapter is good, or that it is whole.

Shape legend: T probe tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from vox_core.api.generating import (
    AnswerText,
    end_of_turn_ids,
    load_tokenizer,
    prompt_tokens,
    template_source,
)
from vox_core.api.models import ModelReference, Progress, resolve_reference
from vox_core.contract import Batch, Model
from vox_core.errors import AdapterError, ConfigError, ProofError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = (
    "The quick brown fox jumps over the lazy dog. In 1969, two astronauts walked on the Moon.\n"
    "def add(a, b):\n    return a + b\n"
    "What is 17 + 25? Grüße aus Köln; 東京は日本の首都です。"
)
MAX_PROBE_TOKENS = 256
NOISE = 1e-6
"""Nats. The roundoff of a float32 log-probability; an adapter whose B is zero changes none."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,127}")


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Models to serve, on one base.

    Args:
        source: the base, with the quantisation that it is loaded in.
        models: by name; the base is one.
    """

    source: ModelReference
    models: Mapping[str, ModelReference]


class Served:
    """A model that requests name.

    Attributes:
        adapter: name of its adapter in the engine; None: the base.
        parent: name of the base; None: it is the base.
        vocabulary: number of token ids.
    """

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        parent: str | None = None,
        lock: Lock | None = None,
    ) -> None:
        self.name, self.parent = name, parent
        self.adapter = name if parent else None
        self.vocabulary = len(tokenizer)
        self.has_template = template_source(tokenizer) is not None
        self._tokenizer, self._stop_tokens = tokenizer, end_of_turn_ids(tokenizer)
        # Concurrent calls of one fast tokenizer may raise "Already borrowed".
        self._lock = lock or Lock()

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return a conversation's token ids, up to where the assistant speaks.

        Raises:
            DataError: D005, the chat template cannot render it.
        """
        with self._lock:
            return prompt_tokens(self._tokenizer, messages, None)

    def encode(self, text: str) -> list[int]:
        """Return a plain text's token ids, with the tokens that the tokenizer sets before it."""
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    def decode(self, token: int) -> str:
        """Return the text of one token; bytes that are no whole character become U+FFFD."""
        return str(self._tokenizer.decode([token]))

    def text(self, stops: Sequence[str]) -> AnswerText:
        """Return the empty text of an answer, which ends with its turn or before one of `stops`."""
        return AnswerText(self._tokenizer, self._stop_tokens, stops)


def select(
    references: Sequence[str],
    names: Iterable[str],
    *,
    quant_set: bool = False,
    progress: Progress | None = None,
) -> Selection:
    """Find the models of a command line.

    Args:
        references: runs and models, named after their folder or their id.
        names: `NAME=RUN` of further ones, or of some of these.
        quant_set: a flag says how the base is quantised.

    Raises:
        ConfigError: C002 or C004, a name or the choice of models is wrong.
        AdapterError: an adapter cannot be used, or the models have different bases.
        ModelError: a base cannot be found or used.
    """
    models: dict[str, ModelReference] = {}
    for reference, name in _named(references, names).items():
        source = resolve_reference(reference, progress=progress)
        _add(models, name or _default_name(reference, source), source)
    adapted = [source for source in models.values() if source.adapter]
    source = (adapted or list(models.values()))[0]
    _require_one_base(models)
    if not quant_set:
        _require_one_quant(adapted)
    if len(adapted) == len(models):
        base = replace(source, base=replace(source.base, templated=None), adapter=None)
        _add(models, base.base.id, base)
    return Selection(source, models)


def served_models(selection: Selection) -> dict[str, Served]:
    """Load the tokenizer of each model.

    Raises:
        DataError: D005, it cannot be used.
    """
    base = next(name for name, source in selection.models.items() if not source.adapter)
    tokenizers = {
        folder: load_tokenizer(folder)
        for folder in {source.base.tokenizer for source in selection.models.values()}
    }
    locks = {folder: Lock() for folder in tokenizers}
    return {
        name: Served(
            name,
            tokenizers[source.base.tokenizer],
            base if source.adapter else None,
            locks[source.base.tokenizer],
        )
        for name, source in selection.models.items()
    }


def effect(model: Model, served: Served, positions: int | None = None) -> float:
    """Return how far an adapter changes a probe's log-probabilities: the mean of the absolute
    differences, in nats.

    Raises:
        ProofError: V002, they do not change, or are not finite.
    """
    import numpy as np

    tokens_T = np.asarray(served.render([{"role": "user", "content": PROBE}]), np.int64)
    tokens_T = tokens_T[: min(MAX_PROBE_TOKENS, positions or MAX_PROBE_TOKENS)]
    scored_T = np.arange(len(tokens_T)) < len(tokens_T) - 1
    targets_T = np.roll(tokens_T, -1) * scored_T
    zeros_T = np.zeros(len(tokens_T), np.float32)
    batch = Batch(tokens_T, targets_T, zeros_T, np.zeros(1, np.int64), scored_T)
    base_T = model.log_probs(batch, None)[scored_T]
    adapted_T = model.log_probs(batch, served.adapter)[scored_T]
    apart_T = np.abs(adapted_T - base_T)
    if apart_T.max() > NOISE and np.isfinite(apart_T).all():
        return float(apart_T.mean())
    raise ProofError(
        "V002",
        "the adapter changes nothing, or its log-probabilities are not finite",
        where=f"the model {served.name}",
        found=f"over {len(apart_T)} tokens of a probe, log-probabilities up to {apart_T.max():.1e} "
        f"from the base's; means {adapted_T.mean():.4f} and {base_T.mean():.4f}",
        expected=f"a difference above {NOISE:.0e}",
        remedy="train longer, or look at the losses of the run with `vox runs show`",
    )


def _named(references: Sequence[str], names: Iterable[str]) -> dict[str, str | None]:
    """Return reference -> its name, or None for the default one."""
    found: dict[str, str | None] = dict.fromkeys(references)
    for each in names:
        name, equals, reference = each.partition("=")
        if not equals or not reference or not _NAME.fullmatch(name):
            raise ConfigError(
                "C002",
                "a model's name cannot be used",
                where="--name",
                found=each,
                expected="NAME=RUN, with letters, digits and . _ : / + - in the name",
                remedy="for example --name support=runs/mine",
            )
        if found.get(reference):
            raise _taken_twice(reference, f"the names {found[reference]} and {name}")
        found[reference] = name
    if not found:
        raise ConfigError(
            "C004",
            "there is nothing to serve",
            where="vox serve",
            remedy="name a run or a model: vox serve runs/mine",
        )
    return found


def _default_name(reference: str, source: ModelReference) -> str:
    if source.adapter is None:
        return source.base.id
    name = Path(reference).resolve().name
    return re.sub(r"[^A-Za-z0-9._:+-]", "-", name).lstrip("._:+-") or "adapter"


def _add(models: dict[str, ModelReference], name: str, source: ModelReference) -> None:
    if name in models:
        raise _taken_twice(f"the name {name}", "two models")
    models[name] = source


def _taken_twice(what: str, found: str) -> ConfigError:
    return ConfigError(
        "C002",
        "each model has one name, and each name one model",
        where=what,
        found=found,
        remedy="give them different names: --name NAME=RUN",
    )


def _require_one_base(models: Mapping[str, ModelReference]) -> None:
    if len({source.base.path for source in models.values()}) == 1:
        return
    digests = {name: replace(each, adapter=None).digest() for name, each in models.items()}
    if len(set(digests.values())) == 1:
        return
    raise AdapterError(
        "A002",
        "the models have different bases, and one server loads one base",
        faults=[
            f"{name}: {models[name].base.id}, weights {digest[:12]}…"
            for name, digest in digests.items()
        ],
        remedy="start one server for each base, with a --port of its own",
    )


def _require_one_quant(adapted: Sequence[ModelReference]) -> None:
    found = {source.quant for source in adapted}
    if len(found) > 1:
        raise ConfigError(
            "C004",
            "the runs were trained on different quantisations of the base",
            where="--quant",
            found=", ".join(sorted(found)),
            remedy="choose one with --quant, or start a server for each",
        )
