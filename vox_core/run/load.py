"""`vox generate` and `vox chat`: a model, its chat template and its voice."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from vox_core import bounded_json, models
from vox_core.config import SamplingSettings
from vox_core.contract import LoadedModel, LoadJob, Notice, Sampling
from vox_core.data.template import ChatTemplate, TemplateFault, takes_too_much
from vox_core.data.tokenizer import end_of_turn_ids, load_tokenizer, template_source
from vox_core.errors import DataError
from vox_core.host import Origin, Request
from vox_core.run.backend import choose_for
from vox_core.run.context import Context, Observe, ignore
from vox_core.run.plan import positions, resolve_dtype, settled_quant
from vox_core.run.reference import resolve_reference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Answer:
    """The text of an answer, in pieces as they come; the end-of-turn token is not part of it.

    Attributes:
        prompt_tokens: length of the rendered conversation.
        completion_tokens: how many tokens were generated so far, the end-of-turn token not counted.
        finish_reason: `stop` once the model ended its turn or a stop text came, else `length`.
    """

    def __init__(self, prompt_tokens: int, pieces: Callable[[Answer], Iterator[str]]) -> None:
        self.prompt_tokens, self.completion_tokens = prompt_tokens, 0
        self.finish_reason: Literal["stop", "length"] = "length"
        self._pieces = pieces(self)

    def __iter__(self) -> Iterator[str]:
        return self._pieces


class OpenModel:
    """A loaded model that answers conversations.

    Attributes:
        title: what is loaded, for people.
    """

    def __init__(
        self,
        title: str,
        model: LoadedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: SamplingSettings,
        positions: int | None = None,
    ) -> None:
        self.title, self._positions = title, positions
        self._model, self._tokenizer = model, tokenizer
        self._stop_tokens, self._settings = end_of_turn_ids(tokenizer), settings

    def reply(
        self,
        messages: Sequence[Mapping[str, str]],
        row: int = 0,
        settings: SamplingSettings | None = None,
    ) -> Answer:
        """The answer; another one for another row, unless it is greedy.

        Args:
            settings: of sampling, where they differ from those that the model was loaded with.

        Raises:
            DataError: D005, the chat template refuses the conversation; D007, it is too long.
        """
        import numpy as np

        chosen = settings or self._settings
        prompt = prompt_tokens(self._tokenizer, messages, chosen.system)
        sampling = self._sampling(chosen, len(prompt), row)
        tokens = self._model.generate(np.asarray(prompt, np.int64), sampling)

        def pieces(answer: Answer) -> Iterator[str]:
            return _before_stop(self._decoded(tokens, answer), chosen.stop, answer)

        return Answer(len(prompt), pieces)

    def _decoded(self, tokens: Iterator[int], answer: Answer) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        backend = cast("Any", self._tokenizer).backend_tokenizer
        for token in tokens:
            if token in self._stop_tokens:
                answer.finish_reason = "stop"
                return
            answer.completion_tokens += 1
            if piece := stream.step(backend, token):
                yield piece

    def _sampling(self, settings: SamplingSettings, prompt_tokens: int, row: int) -> Sampling:
        """With no more tokens than the model has positions for."""
        room = settings.max_tokens
        if self._positions is not None and (room := self._positions - prompt_tokens) < 1:
            raise DataError(
                "D007",
                "the conversation is longer than the model can read",
                found=f"{prompt_tokens} tokens",
                expected=f"fewer than {self._positions}",
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


def _before_stop(pieces: Iterator[str], stops: Sequence[str], answer: Answer) -> Iterator[str]:
    """`pieces` up to the first of `stops`."""
    held = ""
    for piece in pieces:
        held += piece
        if found := [at for stop in stops if (at := held.find(stop)) >= 0]:
            answer.finish_reason = "stop"
            held = held[: min(found)]
            break
        # What may be the beginning of a stop text is held back.
        begun = [n for stop in stops for n in range(len(stop)) if held.endswith(stop[:n])]
        kept = max(begun, default=0)
        if ready := held[: len(held) - kept]:
            yield ready
        held = held[len(held) - kept :]
    if held:
        yield held


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], system: str | None
) -> list[int]:
    """Token ids of a conversation up to where the assistant speaks.

    Without a chat template the model continues the last message as plain text.
    """
    source = template_source(tokenizer)
    if source is None and system:
        raise DataError(
            "D005",
            "the model has no chat template, and so no place for a system message",
            where="--system",
            remedy="put it at the beginning of the prompt",
        )
    if source is None:
        return list(tokenizer(messages[-1]["content"])["input_ids"])
    whole = [{"role": "system", "content": system}] if system else []
    try:
        template = ChatTemplate(source, tokenizer.special_tokens_map)
        text = template.render([*whole, *messages], generation_prompt=True)
    except TemplateFault as error:
        if error.too_much:
            raise takes_too_much(error, tokenizer.name_or_path) from error
        raise DataError(
            "D005",
            "the chat template cannot render the conversation",
            found=error,
            remedy="leave out --system; some templates have no place for it",
        ) from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@contextmanager
def open_model(
    reference: str,
    settings: SamplingSettings,
    *,
    observe: Observe = ignore,
    backend_origin: Origin | None = None,
    progress: models.Progress | None = None,
) -> Iterator[OpenModel]:
    """Load what `reference` names, for as long as the block lasts.

    Raises:
        InputError: it cannot be found, or no installed backend can load it.
    """
    source = resolve_reference(reference, adapter=settings.adapter, progress=progress)
    tokenizer = load_tokenizer(source.base.tokenizer)
    quant = source.quant
    if settings.quant is not None:
        quant = settled_quant(settings.quant, source.weights.quant)
    request = Request(
        operation="load",
        quant=quant,
        method=source.adapter.method if source.adapter else None,
        model_type=source.base.model_type,
        dtype=None if settings.dtype == "auto" else settings.dtype,
        explicit=settings.backend,
        explicit_origin=(backend_origin or "--backend") if settings.backend else None,
    )
    backend, selection = choose_for(request, source.weights)
    observe(Notice(selection.why))
    job = LoadJob(
        model=source.base.path,
        dtype=resolve_dtype(settings.dtype, selection.hardware),
        adapter=source.adapter,
        quant=quant,
    )
    with tempfile.TemporaryDirectory(prefix="vox-") as scratch:
        model = backend.load(job, Context(settings.seed, Path(scratch), observe))
        try:
            title = source.base.id + (" + adapter" if source.adapter else "")
            longest = positions(bounded_json.read(source.base.path / "config.json"))
            yield OpenModel(title, model, tokenizer, settings, longest)
        finally:
            model.close()
