"""Load a model with its chat template, and answer conversations, one or many at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np

from vox_core import bounded_json, models
from vox_core.config import ChatSettings, GenerateSettings, LoadSettings, SamplingSettings
from vox_core.contract import AdapterState, Batch, DType, LoadJob, Model, Notice, padded_groups
from vox_core.data.audit import vocabulary_of
from vox_core.data.messages import answerable
from vox_core.data.template import TemplateFault
from vox_core.data.tokenizer import chat_template, end_of_turn_ids, load_tokenizer, template_source
from vox_core.digests import CONFIG_FILE, config_digest, folder_digest, tokenizer_digest
from vox_core.errors import DataError
from vox_core.host import Request, Seen
from vox_core.host.load import Backend, Context, Observe, ignore
from vox_core.host.probe import Hardware
from vox_core.run.artifacts import versions
from vox_core.run.generate import (
    CACHE_SHARE,
    Finish,
    Generator,
    Prompt,
    cache_bytes,
    most_rows,
    no_numbers,
)
from vox_core.run.inputs import RunInputs, choose_for
from vox_core.run.plan import positions, resolve_dtype, settled_quant
from vox_core.run.reference import ModelReference, adapter_digest, resolve_reference
from vox_core.run.sampling import Sampling, log_prob
from vox_core.weights import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vox_core.contract import Bools, ExecutionPlan, Floats

ADAPTER = "adapter"
GIVEN_TOKENS = 256
"""Max tokens of a pass over given answers with their prompts. A CPU computes as many at full
speed, and the logits of all of the answers' tokens exist at once."""
Given: TypeAlias = "tuple[Sequence[int], Sequence[int]]"
"""A prompt and an answer to it, as tokens."""
Message: TypeAlias = "Mapping[str, Any]"
"""`role` and `content`, and what else the chat template reads."""


class Answer(Iterator[str]):
    """The text of an answer, in pieces as they come; the end-of-turn token is not part of it.

    Attributes:
        prompt_tokens: length of the rendered conversation.
        completion_tokens: how many tokens were generated so far, the end-of-turn token not counted.
        finish_reason: `stop` once the model ended its turn or a stop text came, else `length`.
        model: kept from being collected, which closes it, while the answer is read.
    """

    model: object = None

    def __init__(self, prompt_tokens: int, pieces: Iterator[tuple[str, int, Finish]]) -> None:
        self.prompt_tokens, self.completion_tokens = prompt_tokens, 0
        self.finish_reason: Finish = "length"
        self._pieces = pieces

    def __next__(self) -> str:
        piece = ""
        while not piece:
            piece, self.completion_tokens, self.finish_reason = next(self._pieces)
        return piece


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer; the counts are those of `Answer`.

    Args:
        tokens: every generated token, the end-of-turn token included.
        log_probs: of each of `tokens`, before any sampling parameter; empty unless requested.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: Finish
    tokens: Sequence[int] = ()
    log_probs: Sequence[float] = ()


def _only(tokens: Sequence[int]) -> Callable[[int], Bools]:
    """Return a mask for each token in turn, which allows nothing else."""
    left = iter(tokens)

    def allowed(count: int) -> Bools:
        return np.isin(np.arange(count), [next(left)])

    return allowed


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A conversation as tokens, with everything that decides the answer except the model."""

    tokens: Sequence[int]
    sampling: Sampling
    stop: Sequence[str]


class OpenModel:
    """A loaded model that answers conversations.

    Args:
        title: base model and adapter, for display.
        positions: tokens that the model can read; None: no limit.
        identity: returns the digest of weights, adapter and precision.
        computed_by: backend, device, dtype, quantisation, versions, the digests of tokenizer and
            config.json, and of the contract that the adapter was trained under.
    """

    def __init__(
        self,
        title: str,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        settings: SamplingSettings,
        *,
        adapter: str | None = None,
        positions: int | None = None,
        identity: Callable[[], str] = str,
        computed_by: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.title, self.identity, self.computed_by = title, identity, computed_by
        self.tokenizer, self.positions = tokenizer, positions
        self._generator, self._adapter, self._settings = generator, adapter, settings
        self._stop_tokens = end_of_turn_ids(tokenizer)

    def question(
        self, messages: Sequence[Message], row: int = 0, settings: SamplingSettings | None = None
    ) -> Question:
        """Render a conversation.

        Args:
            row: gives the answer random numbers of its own.
            settings: of sampling, where they differ from those that the model was loaded with.

        Raises:
            DataError: D003, it is none; D005, the chat template refuses it; D007, it is too long.
        """
        chosen = settings or self._settings
        tokens = prompt_tokens(self.tokenizer, answerable(messages), chosen.system)
        return Question(tokens, self._sampling(chosen, len(tokens), row), chosen.stop)

    def reply(
        self, messages: Sequence[Message], row: int = 0, settings: SamplingSettings | None = None
    ) -> Answer:
        """Answer a conversation while the answer is read; see `question`."""
        question = self.question(messages, row, settings)
        text = self._text(question)

        def pieces() -> Iterator[tuple[str, int, Finish]]:
            for token in self._generator.generate([self._prompt(question, text)]):
                piece = text.take(everything=token.finish is not None)
                yield piece, text.tokens, token.finish or "length"

        return Answer(len(question.tokens), pieces())

    def replies(
        self, questions: Sequence[Question], *, log_probs: bool = False
    ) -> Iterator[tuple[int, Reply]]:
        """Answer many conversations together; yield index and answer, in the order in which the
        answers end."""
        texts = [self._text(question) for question in questions]
        prompts = map(self._prompt, questions, texts)
        for row, tokens in self._generator.complete(prompts, log_probs=log_probs):
            reply = Reply(
                texts[row].take(everything=True),
                len(questions[row].tokens),
                texts[row].tokens,
                tokens[-1].finish or "length",
                tuple(each.id for each in tokens),
                tuple(each.log_prob for each in tokens if each.log_prob is not None),
            )
            yield row, reply

    def given(self, pairs: Sequence[Given]) -> list[tuple[list[float], bool]]:
        """Return, for each prompt with a given answer, log p of the answer's tokens, and whether
        each of them is the most likely one.

        Short ones are computed together, in one pass. Long ones are generated, so that common
        beginnings are computed once and few logits exist at once.

        Raises:
            DataError: D003, a prompt or an answer is empty; D007, they are longer than the model
                can read.
        """
        for tokens, answer in pairs:
            self._require_given(tokens, answer)
        lengths = [len(tokens) + len(answer) for tokens, answer in pairs]
        short = [index for index, length in enumerate(lengths) if length <= GIVEN_TOKENS]
        found = dict(zip(short, self._given_together([pairs[at] for at in short]), strict=True))
        long = [index for index in range(len(pairs)) if index not in found]
        found |= zip(long, self._given_by_row([pairs[at] for at in long]), strict=True)
        return [found[index] for index in range(len(pairs))]

    def _require_given(self, tokens: Sequence[int], answer: Sequence[int]) -> None:
        found = f"{len(tokens)} tokens of a prompt and {len(answer)} of an answer"
        if not (tokens and answer):
            what = "a prompt or a given answer is empty"
            remedy = "leave the row out, or begin the prompt with a token such as BOS"
            raise DataError("D003", what, found=found, expected="a token of each", remedy=remedy)
        if self.positions is not None and len(tokens) + len(answer) - 1 > self.positions:
            raise DataError(
                "D007",
                "a prompt with its given answer is longer than the model can read",
                found=found,
                expected=f"at most {self.positions}, without the answer's last",
                remedy="shorten the prompt",
            )

    def _given_together(self, pairs: Sequence[Given]) -> list[tuple[list[float], bool]]:
        documents = [np.array([*tokens, *answer[:-1]], np.int64) for tokens, answer in pairs]
        found: dict[int, tuple[list[float], bool]] = {}
        for group in padded_groups([len(each) for each in documents], GIVEN_TOKENS):
            together = [(documents[index], len(pairs[index][0]) - 1) for index in group]
            scores = self._generator.model.logits_all(together, self._adapter)
            for index, logits_KV in zip(group, scores, strict=True):
                tokens, answer = pairs[index]
                if np.isnan(logits_KV.max()):
                    raise no_numbers(tokens)
                log_probs = list(map(log_prob, logits_KV, answer))
                found[index] = log_probs, bool((logits_KV.argmax(1) == answer).all())
        return [found[index] for index in range(len(pairs))]

    def _given_by_row(self, pairs: Sequence[Given]) -> list[tuple[list[float], bool]]:
        prompts = (
            Prompt(
                tokens,
                Sampling(max_tokens=len(answer)),
                adapter=self._adapter,
                top=1,
                allowed=_only(answer),
            )
            for tokens, answer in pairs
        )
        found = {
            row: ([t.log_prob or 0.0 for t in tokens], all(t.id == t.top[0][0] for t in tokens))
            for row, tokens in self._generator.complete(prompts, log_probs=True)
        }
        return [found[row] for row in range(len(pairs))]

    def log_probs(self, batch: Batch) -> Floats:
        """Return log p(target), float32 (T,): where `batch.scored_T`, and 0 elsewhere."""
        return self._generator.model.log_probs(batch, self._adapter)

    def _text(self, question: Question) -> AnswerText:
        return AnswerText(self.tokenizer, self._stop_tokens, question.stop)

    def _prompt(self, question: Question, text: AnswerText) -> Prompt:
        return Prompt(question.tokens, question.sampling, text.add, self._adapter)

    def _sampling(self, settings: SamplingSettings, prompt_tokens: int, row: int) -> Sampling:
        """With no more tokens than the model has positions for."""
        room = settings.max_tokens
        if self.positions is not None and (room := self.positions - prompt_tokens) < 1:
            raise DataError(
                "D007",
                "the conversation is longer than the model can read",
                found=f"{prompt_tokens} tokens",
                expected=f"fewer than {self.positions}",
                remedy="shorten the prompt; in a chat, /reset forgets what was said",
            )
        return Sampling(
            max_tokens=min(settings.max_tokens, room),
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            repetition_penalty=settings.repetition_penalty,
            seed=settings.seed,
            row=row,
        )


class AnswerText:
    """The text of an answer, from its tokens, up to the end of the turn or the first stop text.

    Args:
        stop_tokens: tokens that end it, as `end_of_turn_ids` gives them.
        stops: texts that end it.
        after: the last tokens of a plain text that the answer continues, so that a blank before its
            first word is not lost.
        shown: special tokens that are part of the text; others are left out.

    Attributes:
        tokens: number of tokens, the end-of-turn token not counted.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: Collection[int],
        stops: Sequence[str],
        *,
        after: Sequence[int] = (),
        shown: Collection[int] = (),
    ) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(list(after), skip_special_tokens=True)
        self._tokenizer, self._shown = cast("Any", tokenizer), shown
        self._stop_tokens, self._stops = stop_tokens, stops
        self._held = ""
        self.tokens = 0

    def add(self, token: int) -> bool:
        """Append a token; return whether the answer ends with it."""
        if token in self._stop_tokens:
            return True
        self.tokens += 1
        self._held += self._step(token)
        if found := [at for stop in self._stops if (at := self._held.find(stop)) >= 0]:
            self._held = self._held[: min(found)]
            return True
        return False

    def take(self, *, everything: bool) -> str:
        """Return the text that was not taken yet.

        Args:
            everything: also its end, if a stop text may begin there.
        """
        begun = [
            n
            for stop in self._stops
            for n in range(min(len(stop), len(self._held) + 1))
            if self._held.endswith(stop[:n])
        ]
        kept = 0 if everything else max(begun, default=0)
        ready = self._held[: len(self._held) - kept]
        self._held = self._held[len(ready) :]
        return ready

    def _step(self, token: int) -> str:
        from tokenizers.decoders import DecodeStream

        if token in self._shown:
            return str(self._tokenizer.decode([token]))
        try:
            return self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        except Exception as error:  # of no class of its own: bytes that are no UTF-8
            if "Invalid prefix" not in str(error):
                raise
        self._stream = DecodeStream(skip_special_tokens=True)
        return self._stream.step(self._tokenizer.backend_tokenizer, token) or ""


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], system: str | None
) -> list[int]:
    """Token ids of a conversation up to where the assistant speaks; see `prompt_text`."""
    text, special = prompt_text(tokenizer, messages, system)
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def prompt_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], system: str | None = None
) -> tuple[str, bool]:
    """Text of a conversation up to where the assistant speaks, and whether the tokenizer adds its
    special tokens to it: a chat template writes its own.

    Without a chat template the model continues the last message as plain text.
    """
    source = template_source(tokenizer)
    if source is None and system:
        what = "the model has no chat template, and so no place for a system message"
        remedy = "put it at the beginning of the prompt"
        raise DataError("D005", what, where="--system", remedy=remedy)
    if source is None:
        return messages[-1]["content"], True
    whole = [{"role": "system", "content": system}] if system else []
    try:
        template = chat_template(tokenizer, source)
        return template.render([*whole, *messages], generation_prompt=True), False
    except TemplateFault as error:
        what = "the chat template cannot render the conversation"
        remedy = "leave out --system; some templates have no place for it"
        raise DataError("D005", what, found=error, remedy=remedy) from error


@contextmanager
def open_model(
    reference: str,
    settings: SamplingSettings,
    *,
    observe: Observe = ignore,
    progress: models.Progress | None = None,
) -> Iterator[OpenModel]:
    """Load what `reference` names, for as long as the block lasts.

    Raises:
        InputError: it cannot be found, or no installed backend can load it.
    """
    # Before a model is fetched, so that a missing backend is found in a second.
    seen = Seen()
    seen.select(_request(settings))
    source = resolve_reference(reference, adapter=settings.adapter, progress=progress)
    observe(Notice("loading the tokenizer …"))
    tokenizer = load_tokenizer(source.base.tokenizer)
    if isinstance(settings, ChatSettings) and template_source(tokenizer) is None:
        what = "the model has no chat template: it continues each line, without those before"
        how = "to chat, train it with --template chatml, or use an -instruct model"
        observe(Notice(f"{what}; {how}"))
    adapters = {ADAPTER: source.adapter} if source.adapter else {}
    with open_base(source, adapters, settings, observe=observe, seen=seen) as opened:
        yield OpenModel(
            source.base.id + (" + adapter" if source.adapter else ""),
            opened.generator,
            tokenizer,
            settings,
            adapter=ADAPTER if source.adapter else None,
            positions=opened.positions,
            identity=lambda: _identity(opened.job, source.adapter),
            computed_by=opened.computed_by,
        )


@contextmanager
def open_trained(
    inputs: RunInputs, plan: ExecutionPlan, trainer: Model, adapter: AdapterState, step: int
) -> Iterator[OpenModel]:
    """Let the model of a run answer while it is trained.

    Args:
        adapter: values of the trainer's learner `ADAPTER`, for the model's identity.
    """
    base, hardware = inputs.model, inputs.selection.hardware
    job = LoadJob(base.path, plan.dtype, inputs.quant)
    # How many rows at once decides the last bits, so it does not go by the memory that is free.
    with closing(Generator(trainer, most_rows(hardware))) as generator:
        yield OpenModel(
            f"{base.id} after step {step}",
            generator,
            load_tokenizer(base.tokenizer),
            GenerateSettings(),
            adapter=ADAPTER,
            positions=positions(inputs.config),
            identity=lambda: _identity(job, adapter),
            computed_by={  # a trainer may compute otherwise in the last bits
                **_computed_by(inputs.backend, hardware, job, base, plan.contract.digest),
                "trainer": True,
            },
        )


def _computed_by(
    backend: Backend, hardware: Hardware, job: LoadJob, model: models.LocalModel, contract: object
) -> dict[str, object]:
    return {
        "backend": backend.id,
        "device": hardware.devices[0].tag,
        "dtype": job.dtype,
        "quant": job.quant,
        "versions": versions(backend),
        "tokenizer": tokenizer_digest(model.tokenizer),
        "config": config_digest(model.path),
        "contract": contract,
    }


@dataclass(frozen=True, slots=True, eq=False)
class OpenBase:
    """A base model in memory, with adapters by name.

    Args:
        generator: has the running batch of `model` for itself.
        positions: tokens that the model can read; None: no limit.
        vocabulary: ids that it has embeddings for; None if it does not say.
        computed_by: as of `OpenModel`.
    """

    model: Model
    generator: Generator
    positions: int | None
    vocabulary: int | None
    job: LoadJob
    computed_by: Mapping[str, object]


@contextmanager
def open_base(
    source: ModelReference,
    adapters: Mapping[str, AdapterState],
    settings: LoadSettings,
    *,
    rows: int | None = None,
    observe: Observe = ignore,
    seen: Seen | None = None,
) -> Iterator[OpenBase]:
    """Load the base of `source` once, and `adapters` beside it, for as long as the block lasts.

    Args:
        adapters: those that were checked to belong to the base.
        rows: maximum number of rows in the running batch; by default what suits the device.

    Raises:
        InputError: no installed backend can load it.
    """
    quant = source.quant
    if settings.quant is not None:
        quant = settled_quant(settings.quant, source.weights.quant)
    methods = {adapter.method for adapter in adapters.values()}
    request = replace(
        _request(settings),
        quant=quant,
        # Of several methods the one that the fewest backends have.
        method=next((each for each in ("dora", "rslora", "lora") if each in methods), None),
        model_type=source.base.model_type,
    )
    backend, selection = choose_for(request, source.weights, seen)
    observe(Notice(selection.why))
    dtype = resolve_dtype(settings.dtype, selection.hardware)
    observe(Notice(f"loading the model in {dtype} …"))
    job = LoadJob(model=source.base.path, dtype=dtype, quant=quant)
    config = bounded_json.read(source.base.path / CONFIG_FILE)
    with (
        closing(backend.load(job, Context(observe))) as model,
        closing(
            batch_generator(model, config, dtype, selection.hardware, source.weights, rows)
        ) as generator,
    ):
        for name, adapter in adapters.items():
            model.add_adapter(name, adapter)
        contract = source.manifest.get("contract")
        computed_by = _computed_by(backend, selection.hardware, job, source.base, contract)
        yield OpenBase(model, generator, positions(config), vocabulary_of(config), job, computed_by)


Loaded = TypeVar("Loaded")


@contextmanager
def apart(opening: AbstractContextManager[Loaded]) -> Iterator[Loaded]:
    """Enter `opening` in a thread that then ends, for a model that another thread computes with.

    OpenMP keeps a pool for each living thread that has computed. With more threads in pools than
    cores all of them sleep between products, which makes small ones up to four times as slow.
    """
    with ExitStack() as stack:
        with ThreadPoolExecutor(1) as thread:
            entering = thread.submit(copy_context().run, stack.enter_context, opening)
        yield entering.result()


def _request(settings: LoadSettings) -> Request:
    return Request(
        operation="load",
        quant=settings.quant,
        dtype=None if settings.dtype == "auto" else settings.dtype,
        explicit=settings.backend,
    )


def batch_generator(
    model: Model,
    config: Mapping[str, Any],
    dtype: DType,
    hardware: Hardware,
    weights: Weights,
    rows: int | None = None,
) -> Generator:
    """Return a generator whose KV cache has `CACHE_SHARE` of the memory that the weights leave."""
    device, rows = hardware.devices[0], rows or most_rows(hardware)
    free = device.available_bytes or device.memory_bytes
    each = cache_bytes(config, dtype)
    if not free or not each:
        return Generator(model, rows)
    return Generator(model, rows, int(CACHE_SHARE * max(0, free - weights.nbytes)) // each)


def _identity(job: LoadJob, adapter: AdapterState | None) -> str:
    """Return the digest of everything of a loaded model that decides its answers."""
    base = f"{folder_digest(job.model)} {job.dtype} {job.quant}"
    return adapter_digest(base, adapter) if adapter else hashlib.sha256(base.encode()).hexdigest()
