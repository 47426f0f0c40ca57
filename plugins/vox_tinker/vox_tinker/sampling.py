"""Samplers, and their requests as rows of the running batch.

A sampler is a base model, or saved weights on one. Adapters are read when they are needed; the
least recently used ones leave the memory.

Everything but `SampleWork.of` runs on the engine's thread.

Shape legend: P tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tinker import types

from vox_core.api.generating import AnswerText, Prompt, Sampling, top_log_probs
from vox_core.api.models import positions, resolve_reference
from vox_core.api.plans import vocabulary_size
from vox_core.api.rows import special_ids
from vox_core.api.tokenizers import end_of_turn_ids
from vox_core.contract import AdapterState, Batch, Floats
from vox_tinker.engine import Engine, Row
from vox_tinker.futures import DIGITS, Answer, Refused, failure, outcome
from vox_tinker.training import require_tokens
from vox_tinker.wire import prompt_tokens, sample_answer

if TYPE_CHECKING:
    from vox_core.api.training import TrainingBase
    from vox_tinker.sessions import Served, Sessions

LOADED = 8
"""Adapters of samplers that are in memory at once, unless more are in use."""
WAITING = 1024
"""Requests for samples that may be unfinished; more get status 429."""
MOST_SAMPLES = 1024
MOST_TOP = 100


class Adapters:
    """Adapters of samplers in the memory of a base."""

    def __init__(self, base: TrainingBase) -> None:
        self._base = base
        self._uses: dict[str, int] = {}  # of the loaded ones, the least recently used one first

    def acquire(self, folder: Path | None) -> str | None:
        """Load an adapter, unless it is there, and keep it until `release`; return its name."""
        if folder is None:
            return None
        name = f"{folder} {folder.stat().st_mtime_ns}"  # it may be replaced under its name
        if name not in self._uses:
            self._make_room()
            self._base.trainer.add_adapter(name, self._read(folder))
        self._uses[name] = self._uses.pop(name, 0) + 1
        return name

    def release(self, name: str | None) -> None:
        """Let go of an adapter."""
        if name is not None:
            self._uses[name] -= 1

    def _make_room(self) -> None:
        for name in [name for name, uses in self._uses.items() if not uses]:
            if len(self._uses) < LOADED:
                return
            del self._uses[name]
            self._base.generator.forget(name)
            self._base.trainer.remove_adapter(name)

    def _read(self, folder: Path) -> AdapterState:
        found = resolve_reference(str(folder), base=str(self._base.inputs.model.path)).adapter
        if found is None:
            raise Refused(f"{folder.name}: the saved weights are not readable", 404)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class SampleWork:
    """A request for samples, checked.

    Args:
        folder: of the sampler's weights; None: the base.
        tokens: of the prompt.
        scored: number of the prompt's last tokens that are scored.
    """

    base: TrainingBase
    folder: Path | None
    request: types.SampleRequest
    tokens: list[int]
    sampling: Sampling
    scored: int

    @classmethod
    def of(
        cls, base: TrainingBase, folder: Path | None, request: types.SampleRequest, seed: int
    ) -> SampleWork:
        """Check a request.

        Args:
            seed: for a request without one.

        Raises:
            Refused: naming the field.
        """
        tokens, params = prompt_tokens(request.prompt), request.sampling_params
        inputs = base.inputs
        vocabulary = vocabulary_size(inputs.config, inputs.weights.tensors)
        if not tokens:
            raise Refused("prompt: it has no token")
        require_tokens(np.array(tokens), vocabulary, "prompt")
        _require_supported(request)
        room = positions(inputs.config)
        most = params.max_tokens
        if room is not None:
            if len(tokens) > room:
                raise Refused(f"prompt: {len(tokens)} tokens; the model can read {room}")
            room += 1 - len(tokens)  # the last sampled token is not read
            most = room if most is None else most
            if most > room:
                asked = f"sampling_params.max_tokens={most}"
                raise Refused(f"{asked}: after this prompt the model can give {room} tokens")
        if most is None or most < 1:
            raise Refused("sampling_params.max_tokens: it must be 1 or more")
        sampling = Sampling(
            max_tokens=most,
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            seed=seed if params.seed is None else params.seed % 2**63,
        )
        last = request.prompt_logprobs_last_n
        wanted = bool(request.prompt_logprobs or request.topk_prompt_logprobs)
        if last is not None and not 1 <= last < len(tokens):
            raise Refused(f"prompt_logprobs_last_n={last}: it must be 1 to {len(tokens) - 1}")
        scored = (last or len(tokens) - 1) if wanted else 0
        return cls(base, folder, request, tokens, sampling, scored)

    def start(
        self, engine: Engine, adapters: Adapters, resolve: Callable[[Answer], None]
    ) -> list[Row]:
        """Score the prompt, and queue the rows; `resolve` is called when all have ended."""
        name, asked = adapters.acquire(self.folder), self.request
        try:
            scores_P = self._prompt_scores(name) if self.scored else None
            best = self._prompt_best(name) if asked.topk_prompt_logprobs else None
        except BaseException:
            adapters.release(name)
            raise
        left, top = asked.num_samples, asked.topk_sample_logprobs

        def finished() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                adapters.release(name)
                resolve(outcome(lambda: _answer(rows, scores_P, best, top)))

        rows = []
        for index in range(asked.num_samples):
            own = replace(self.sampling, row=index)
            rows.append(Row(Prompt(self.tokens, own, self._ended(), name, top), finished))
        engine.sample(rows)
        return rows

    def _ended(self) -> Callable[[int], bool]:
        """Return what ends a row: the end of the turn, and the stops of the request."""
        stop, tokenizer = self.request.sampling_params.stop, self.base.encoder.tokenizer
        if stop is not None and not stop:
            return lambda _: False
        asked = [stop] if isinstance(stop, str) else list(stop or ())
        ids = {each for each in asked if isinstance(each, int)}
        texts = [each for each in asked if isinstance(each, str)]
        ends = ids | set(end_of_turn_ids(tokenizer))
        return AnswerText(tokenizer, ends, texts, shown=special_ids(tokenizer)).add

    def _prompt_scores(self, adapter: str | None) -> Floats:
        """Return log-probabilities of the prompt's tokens, float32 (P,); NaN where not scored."""
        tokens_P = np.array(self.tokens, np.int64)
        targets_P = np.append(tokens_P[1:], 0)
        scored_P = np.zeros(len(tokens_P), bool)
        scored_P[len(tokens_P) - 1 - self.scored : -1] = True
        batch = Batch(
            tokens_P,
            targets_P,
            np.zeros(len(tokens_P), np.float32),
            np.zeros(1, np.int64),
            scored_P,
        )
        found_P = self.base.trainer.log_probs(batch, adapter)
        return np.append(np.nan, np.where(scored_P, found_P, np.nan)[:-1]).astype(np.float32)

    def _prompt_best(self, adapter: str | None) -> list[list[tuple[int, float]]]:
        """Return the most likely tokens at each of the prompt's tokens that is scored."""
        tokens_P, first = np.array(self.tokens[:-1], np.int64), len(self.tokens) - 1 - self.scored
        found: list[list[tuple[int, float]]] = [[] for _ in range(first + 1)]
        if not self.scored:
            return found
        for logits_V in self.base.trainer.logits(tokens_P, adapter, first).astype(np.float64):
            found.append(top_log_probs(logits_V, self.request.topk_prompt_logprobs))
        return found


class Samplers:
    """Sampling clients, and their requests that are unfinished."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._rows: dict[str, list[Row]] = {}
        self._unfinished = 0

    def create(
        self, request: types.CreateSamplingSessionRequest
    ) -> types.CreateSamplingSessionResponse:
        session = self._sessions.session(request.session_id)
        number, name = request.sampling_session_seq_id, request.base_model
        if request.model_path is not None:
            record, _, _ = self._sessions.store.find(request.model_path)
            if name is not None:
                served = self._sessions.served(name)
                self._sessions.require_base(served, record, f"base_model={name!r}")
            name = record.base_model
        self._sessions.served(name)
        assert name is not None
        if session.samplers.setdefault(number, found := (name, request.model_path)) != found:
            raise Refused(f"sampling_session_seq_id={number} of this session was used before")
        self._sessions.keep(session)
        return types.CreateSamplingSessionResponse(
            sampling_session_id=f"{session.session_id}:sample:{number}"
        )

    def find(self, sampler_id: str) -> types.GetSamplerResponse:
        session_id, _, number = sampler_id.partition(":sample:")
        found = self._sessions.session(session_id).samplers.get(
            int(number) if DIGITS.fullmatch(number) else -1
        )
        if found is None:
            raise Refused(f"there is no sampler {sampler_id!r}", 404)
        return types.GetSamplerResponse(
            sampler_id=sampler_id, base_model=found[0], model_path=found[1]
        )

    def sample(self, request: types.SampleRequest) -> types.UntypedAPIFuture:
        """Queue a request for samples.

        Raises:
            Refused: naming the field; 429, too many wait.
        """
        name, path = request.base_model, request.model_path
        seed = request.sampling_params.seed
        if seed is not None and not -(2**63) <= seed < 2**63:
            raise Refused(f"sampling_params.seed={seed}: it must be an integer of 64 bits")
        request_id = f"sample:{uuid.uuid4()}"
        if request.sampling_session_id is not None:
            if request.seq_id is None:
                raise Refused("seq_id is required with sampling_session_id")
            known = self.find(request.sampling_session_id)
            name, path = known.base_model, known.model_path
            request_id = f"{request.sampling_session_id}:{request.seq_id}"
        count = min(request.num_samples, MOST_SAMPLES)  # more are refused below
        ids = [f"{request_id}:{index}" for index in range(count)]
        made = types.UntypedAPIFuture(request_id=request_id, sample_sequence_ids=ids)
        if request_id in self._sessions.futures:
            return made
        if self._unfinished >= WAITING:
            raise Refused(f"{self._unfinished} requests for samples wait already", 429)
        folder: Path | None = None
        if path is not None:
            record, _, folder = self._sessions.store.find(path)
            name = record.base_model
        served = self._sessions.served(name)
        own_seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4], "little")
        self._sessions.futures.create(request_id)
        self._unfinished += 1
        try:
            work = SampleWork.of(served.base, folder, request, own_seed)
        except Refused as error:
            self._finish(request_id, failure(error))
        else:
            served.engine.run(partial(self._start, request_id, served, work))
        return made

    def _start(self, request_id: str, served: Served, work: SampleWork) -> None:
        """Begin sampling, on the engine's thread."""

        def resolve(answer: Answer) -> None:
            self._rows.pop(request_id, None)
            self._finish(request_id, answer)

        try:
            self._rows[request_id] = work.start(served.engine, served.adapters, resolve)
        except Exception as error:  # noqa: BLE001 - it ends this request, not the server
            resolve(failure(error))

    def _finish(self, request_id: str, answer: Answer) -> None:
        """End a request for samples, from any thread."""
        self._sessions.futures.resolve_soon(request_id, answer, self._finished)

    def _finished(self) -> None:
        self._unfinished -= 1

    def cancel(self, request_id: str) -> None:
        """Stop sampling for a request; nothing for others."""
        for row in self._rows.get(request_id, ()):
            row.cancelled = True


def _answer(
    rows: Sequence[Row],
    scores_P: Floats | None,
    best: Sequence[Sequence[tuple[int, float]]] | None,
    top: int,
) -> Answer:
    if failed := [row.failed for row in rows if row.failed]:
        raise RuntimeError(failed[0])
    if any(row.cancelled for row in rows):
        raise Refused("the request was cancelled")
    return sample_answer([row.tokens for row in rows], scores_P, best, top)


def _require_supported(request: types.SampleRequest) -> None:
    params = request.sampling_params
    if request.target_prompt_logprobs is not None:
        raise Refused("target_prompt_logprobs is not supported")
    if request.prompt_alt_tokens_k:
        raise Refused("prompt_alt_tokens_k is not supported")
    if request.record_stability_info:
        raise Refused("record_stability_info is not supported, as is loss_fn='stable_reinforce'")
    for name, value, least, most in (
        ("num_samples", request.num_samples, 1, MOST_SAMPLES),
        ("topk_sample_logprobs", request.topk_sample_logprobs, 0, MOST_TOP),
        ("topk_prompt_logprobs", request.topk_prompt_logprobs, 0, MOST_TOP),
    ):
        if not least <= value <= most:
            raise Refused(f"{name}={value}: it must be {least} to {most}")
    if not 0 <= params.temperature < np.inf:
        raise Refused(f"sampling_params.temperature={params.temperature}: it must be 0 or more")
    if not 0 < params.top_p <= 1:
        raise Refused(f"sampling_params.top_p={params.top_p}: it must be above 0, and at most 1")
    if params.stop == "" or (not isinstance(params.stop, str) and "" in (params.stop or ())):
        raise Refused("sampling_params.stop: an empty text; stop=[] lets samples run to max_tokens")
    if params.top_k == 0 or params.top_k < -1:
        raise Refused(f"sampling_params.top_k={params.top_k}: it must be -1, or 1 or more")
