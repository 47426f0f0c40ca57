"""The models of a server: references as named models on one base, and each adapter verified.

Names, bases, quantisations and an adapter's digest are checked before the model is loaded. After
loading, the adapter of a run must give the log-probabilities that its `probe.json` has from the end
of training; one without that file must change those of a fixed conversation. Neither shows that an
adapter is good.

Shape legend: T probe tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_core.api.generating import AnswerText, Message
from vox_core.api.models import (
    AdapterProbe,
    ModelReference,
    ProbeResult,
    Progress,
    check_probe,
    read_probe,
    resolve_reference,
    token_log_probs,
)
from vox_core.api.rows import Record, Renderer, special_ids
from vox_core.api.tokenizers import load_tokenizer
from vox_core.contract import DType, Model
from vox_core.errors import AdapterError, ConfigError, ProofError
from vox_serve.grammar import Constraint, GuidedText, calls_grammar, matcher, token_trie
from vox_serve.tools import FORMATS, Format, format_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

PROBE = (
    "The quick brown fox jumps over the lazy dog. In 1969, two astronauts walked on the Moon.\n"
    "def add(a, b):\n    return a + b\n"
    "What is 17 + 25? Grüße aus Köln; 東京は日本の首都です。"
)
MAX_PROBE_TOKENS = 256
NOISE = 1e-6
"""Nats. The roundoff of a float32 log-probability; an adapter whose B is zero changes none."""
CONTINUED = 4
"""Tokens of a plain text from which its continuation's first blank is known."""
Mappings: TypeAlias = Sequence[Mapping[str, Any]]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,127}")


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Models to serve, on one base.

    Args:
        source: the base, with the quantisation that it is loaded in.
        models: by name; the base is one.
        probes: of the adapters that have one, by name.
        references: those of the command line, by name.
    """

    source: ModelReference
    models: Mapping[str, ModelReference]
    probes: Mapping[str, AdapterProbe]
    references: Mapping[str, str]

    @property
    def folders(self) -> Mapping[str, Path]:
        """The folders of the adapters, by name."""
        models = self.models.items()
        return {name: each.folder for name, each in models if each.adapter and each.folder}


@dataclass(frozen=True, slots=True)
class Proof:
    """Verification of a loaded adapter.

    Args:
        effect: how far it changes log-probabilities, in nats.
        probe: the comparison with the end of training; None: the adapter has no `probe.json`.
    """

    effect: float
    probe: ProbeResult | None = None

    def __str__(self) -> str:
        moved = f"the adapter changes them by {self.effect:.3g}"
        if (probe := self.probe) is None:
            return f"changes log-probabilities by {self.effect:.3g} nats; no probe.json"
        found = f"log-probabilities within {probe.adapter:.2g} nats of those at the end of training"
        if probe.requantised:
            found = f"changes of log-probabilities, {probe.effect:.3g} nats in training"
            moved = f"in another quantization {self.effect:.3g}"
        if probe.decisive:
            return f"matches training: {found}; {moved}"
        return f"{found}; {moved}, too little for the tolerance {probe.tolerance:.2g} to tell"


class Served:
    """A model that requests name.

    Attributes:
        adapter: name of its adapter in the engine; None: the base.
        parent: name of the base; None: it is the base.
        vocabulary: number of token ids.
        template: chat template; None: there is none.
        stop_tokens: ids of the tokens that end an answer.
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
        self._tokenizer, self._renderer = tokenizer, Renderer(tokenizer, today=True)
        self.template, self.stop_tokens = self._renderer.template, self._renderer.end_of_turn
        # Concurrent calls of one fast tokenizer may raise "Already borrowed".
        self._lock = lock or Lock()

    def prompt(self, messages: Mappings, tools: Mappings = (), *, generation: bool = True) -> str:
        """Return a conversation as its chat template writes it.

        Args:
            messages: with `role`, `content` and what else the template reads.
            tools: JSON schemas of functions.
            generation: up to where the assistant speaks.

        Raises:
            RenderError: the chat template cannot render it, or leaves a part of it out.
            DataError: D005, the template takes too much time or memory.
        """
        chat = tuple(_message(**message) for message in messages)
        record = Record("chat", messages=chat, tools=tuple(tools))
        with self._lock:
            return self._renderer.prompt(record, generation=generation)

    def render(self, messages: Mappings, tools: Mappings = ()) -> list[int]:
        """Return a conversation's token ids, up to where the assistant speaks; without a chat
        template, those of the last message. Raises what `prompt` does."""
        if self.template is not None:
            return self.encode(self.prompt(messages, tools), special=False)
        return self.encode(messages[-1]["content"])

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return a text's token ids, with those that the tokenizer sets around a plain text if
        `special`: a chat template writes its own."""
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def decode(self, token: int) -> str:
        """Return the text of one token; bytes that are no whole character become U+FFFD."""
        return str(self._tokenizer.decode([token]))

    def text(
        self,
        stops: Sequence[str],
        after: Sequence[int] = (),
        matcher: LLMatcher | None = None,
        *,
        calls: bool = False,
    ) -> AnswerText:
        """Return the empty text of an answer, which ends with its turn or before one of `stops`.

        Args:
            after: the tokens of a plain text that it continues.
            matcher: the grammar that it follows.
            calls: it may call tools, whose markers are part of the text.
        """
        given: Any = (self._tokenizer, self.stop_tokens, stops)
        shown: Any = {"after": after[-CONTINUED:], "shown": self._markers.values() if calls else ()}
        if matcher is not None:
            return GuidedText(matcher.deep_copy(), *given, **shown)
        return AnswerText(*given, **shown)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """Compile what an answer must follow.

        Raises:
            GrammarFault: it cannot be followed, or llguidance is not installed.
        """
        with self._lock:
            trie = self._trie
        return matcher(trie, constraint)

    @cached_property
    def call_format(self) -> Format | None:
        """The format of its tool calls; None: one that is not known.

        Raises:
            RenderError: its chat template writes no tools or no calls.
        """
        return format_of(self.prompt, self._renderer.end_of_turn_names())

    def calls_grammar(
        self, form: Format, functions: Sequence[Mapping[str, Any]], *, many: bool, words: bool
    ) -> str:
        """Return the grammar of an answer that calls `functions`; see `calls_grammar`."""
        return calls_grammar(form, functions, many=many, words=words, special=self._markers)

    @cached_property
    def _markers(self) -> dict[str, int]:
        """The markers of calls that are special tokens."""
        special, find = special_ids(self._tokenizer), self._tokenizer.convert_tokens_to_ids
        ids = {text: find(text) for form in FORMATS for text in (form.marker, form.end) if text}
        return {text: id for text, id in ids.items() if isinstance(id, int) and id in special}

    @cached_property
    def _trie(self) -> LLTokenizer:
        return token_trie(self._tokenizer, self.stop_tokens)


def _message(role: Any, content: str, **extra: Any) -> Message:
    return Message(role, content, extra or None)


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
        ProofError: V004, an adapter is not the one that training wrote.
    """
    models: dict[str, ModelReference] = {}
    probes: dict[str, AdapterProbe] = {}
    named: dict[str, str] = {}
    for reference, given in _named(references, names).items():
        source = resolve_reference(reference, progress=progress)
        _add(models, name := given or _default_name(reference, source), source)
        named[name] = reference
        if probe := read_probe(source):
            probes[name] = probe
    adapted = [source for source in models.values() if source.adapter]
    source = (adapted or list(models.values()))[0]
    require_one_base(models)
    if not quant_set:
        _require_one_quant(adapted)
    if len(adapted) == len(models):
        base = replace(source, base=replace(source.base, templated=None), adapter=None)
        own = base.base.id
        _add(models, f"{own}-base" if own in models else own, base)
    return Selection(source, models, probes, named)


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


def prove(
    model: Model,
    served: Served,
    probe: AdapterProbe | None,
    dtype: DType,
    positions: int | None,
    noise: float = NOISE,
    *,
    requantised: bool = False,
) -> Proof:
    """Verify a loaded adapter.

    Args:
        probe: of its training; None: there is none.
        dtype, positions: what `model` computes in, and how many tokens it reads.
        noise: changes of log-probabilities up to this one, in nats, are roundoff.
        requantised: `model` is quantised otherwise than in training.

    Raises:
        ProofError: V004, it does not compute what was trained; V002, it changes nothing.
    """
    assert served.adapter is not None
    if probe is None:
        tokens = served.render([{"role": "user", "content": PROBE}])
        texts = [tokens[: min(MAX_PROBE_TOKENS, positions or MAX_PROBE_TOKENS)]]
        return Proof(_effect(model, served, texts, noise))
    where = f"the model {served.name}"
    result = check_probe(model, served.adapter, probe, dtype, where, requantised=requantised)
    if result.decisive:
        return Proof(result.changed, result)
    return Proof(_effect(model, served, [each.tokens for each in probe.documents], noise), result)


def _effect(model: Model, served: Served, texts: Sequence[Sequence[int]], noise: float) -> float:
    """Return the root mean square of an adapter's changes of log-probabilities.

    Raises:
        ProofError: V002, there are none, or they are not finite.
    """
    import numpy as np

    base_T, adapted_T = (
        np.concatenate([token_log_probs(model, tokens, name) for tokens in texts])
        for name in (None, served.adapter)
    )
    apart_T = np.abs(adapted_T - base_T)
    if apart_T.max() > noise and np.isfinite(apart_T).all():
        return float(np.sqrt(np.mean(apart_T**2)))
    raise ProofError(
        "V002",
        "the adapter changes nothing, or its log-probabilities are not finite",
        where=f"the model {served.name}",
        found=f"over {len(apart_T)} tokens of a probe, log-probabilities up to {apart_T.max():.1e} "
        f"from the base's; means {adapted_T.mean():.4f} and {base_T.mean():.4f}",
        expected=f"a difference above {noise:.0e}",
        remedy="train longer, or look at the losses of the run with `vox runs show`",
    )


def _named(references: Sequence[str], names: Iterable[str]) -> dict[str, str | None]:
    """Return reference -> its name, or None for the default one."""
    found: dict[str, str | None] = dict.fromkeys(references)
    for each in names:
        name, equals, reference = each.partition("=")
        if not equals or not reference or not NAME.fullmatch(name):
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


def require_one_base(models: Mapping[str, ModelReference]) -> None:
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
