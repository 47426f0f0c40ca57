"""Sessions, their training clients and samplers, and the order of requests.

A client numbers the requests of a training client (`seq_id`, from 1; making it is 0). They are
carried out in that order, however they arrive, and one that arrives again is the same request.

Everything here runs on the event loop's thread, except the functions that are queued for a base.
"""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from tinker import types

from vox_core.api.files import write_text
from vox_core.api.models import positions
from vox_core.api.plans import has_tied_head
from vox_tinker.checkpoints import Kind, Record, Store
from vox_tinker.engine import Engine, Row
from vox_tinker.futures import Answer, Futures, Refused, outcome
from vox_tinker.sampling import Adapters, SampleWork
from vox_tinker.training import Training, planned, saved_state

if TYPE_CHECKING:
    from vox_core.api.training import TrainingBase

IDLE_SECONDS = 1800.0
"""After this time without a heartbeat, which the SDK sends every 10 s, a session's training clients
leave the memory once another one is made."""
SAMPLER_SECONDS = 24 * 3600
"""After this, weights that were saved for one sampling client, without a name, expire."""
WAITING = 1024
"""Requests for samples that may be unfinished; more get status 429."""
OUT_OF_ORDER = 4096
"""How far `seq_id` may run ahead of the next one."""
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A base model that is served under a name."""

    name: str
    base: TrainingBase
    engine: Engine
    adapters: Adapters

    @property
    def names(self) -> set[str | None]:
        """Everything that clients may call it."""
        model = self.base.inputs.model
        return {self.name, model.id, model.hub, str(model.path)}


class Session(BaseModel):
    """A client's session.

    Args:
        samplers: number of a sampling client -> its base, and the path of its weights, if any.
        finished: nothing more is done in it.
    """

    session_id: str
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    samplers: dict[int, tuple[str, str | None]] = {}
    finished: bool = False


@dataclass(slots=True, eq=False)
class Client:
    """A training client, and the order of its requests."""

    served: Served
    record: Record
    training: Training | None = None
    next: int = 0
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)


class Sessions:
    """Everything that clients have made.

    Args:
        models: by name.
        local: clients are on this machine, and can read the model's folder.
    """

    def __init__(self, models: Mapping[str, Served], store: Store, *, local: bool) -> None:
        self.models, self.store, self.local = models, store, local
        self.futures = Futures()
        self._clients: dict[str, Client] = {}
        self._sessions: dict[str, Session] = {}
        self._seen: dict[str, float] = {}
        self._samples: dict[str, list[Row]] = {}
        self._unfinished = 0

    # --- sessions ---------------------------------------------------------------------------------

    def create(self, request: types.CreateSessionRequest) -> types.CreateSessionResponse:
        made = Session(
            session_id=str(uuid.uuid4()),
            user_metadata=request.user_metadata,
            display_name=request.display_name,
        )
        self._keep(made)
        self.beat(made.session_id)
        return types.CreateSessionResponse(
            session_id=made.session_id, warning_message=self._tied_heads()
        )

    def session(self, session_id: str) -> Session:
        """Return a session, also of a server before this one.

        Raises:
            Refused: 404, there is none.
        """
        if session_id not in self._sessions:
            try:
                path = self._path(str(uuid.UUID(session_id)))
                self._sessions[session_id] = Session.model_validate_json(path.read_bytes())
            except (OSError, ValueError, ValidationError) as error:
                raise Refused(f"there is no session {session_id!r}", 404) from error
        return self._sessions[session_id]

    def beat(self, session_id: str) -> None:
        """Note that a session's client is there.

        Raises:
            Refused: 404, there is no such session; 410, it was finished.
        """
        if self.session(session_id).finished:
            raise Refused(f"session {session_id!r} was finished", 410)
        self._seen[session_id] = time.monotonic()

    def finish(self, session_id: str) -> None:
        """End a session: its training clients leave the memory."""
        session = self.session(session_id)
        session.finished = True
        self._keep(session)
        self._free(session_id)

    def _free(self, session_id: str) -> None:
        for model_id, client in [*self._clients.items()]:
            if client.record.session_id == session_id:
                self.unload(types.UnloadModelRequest(model_id=model_id))

    def ids(self) -> list[str]:
        """Return the ids of all sessions, the newest first."""
        found = self.store.root.glob(".sessions/*.json")
        return [p.stem for p in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)]

    def describe(self, session_id: str) -> types.GetSessionResponse:
        found = self.session(session_id)
        models = [r.model_id for r in self.store.records() if r.session_id == session_id]
        samplers = [f"{session_id}:sample:{number}" for number in found.samplers]
        metadata = found.user_metadata
        return types.GetSessionResponse(
            training_run_ids=models,
            sampler_ids=samplers,
            user_metadata=None if metadata is None else {k: str(v) for k, v in metadata.items()},
            display_name=found.display_name,
        )

    def _keep(self, session: Session) -> None:
        self._sessions[session.session_id] = session
        path = self._path(session.session_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, session.model_dump_json())

    def _path(self, session_id: str) -> Path:
        return self.store.root / ".sessions" / f"{session_id}.json"

    def _tied_heads(self) -> str | None:
        tied = [n for n, each in self.models.items() if has_tied_head(each.base.inputs.config)]
        if not tied:
            return None
        return (
            f"train_unembed has no effect on {', '.join(tied)}: the output head is the embedding's "
            "(tied), and has no weights of its own"
        )

    # --- models -----------------------------------------------------------------------------------

    def served(self, name: str | None) -> Served:
        """Return a base by one of its names.

        Raises:
            Refused: 404, it is not served.
        """
        for each in self.models.values():
            if name is not None and name in each.names:
                return each
        raise Refused(f"base_model={name!r} is not served here; use {', '.join(self.models)}", 404)

    def capabilities(self) -> types.GetServerCapabilitiesResponse:
        return types.GetServerCapabilitiesResponse(
            supported_models=[
                types.SupportedModel(
                    model_name=name,
                    max_context_length=positions(each.base.inputs.config),
                    trainable=True,
                    sampleable=True,
                )
                for name, each in self.models.items()
            ]
        )

    def info(self, model_id: str) -> types.GetInfoResponse:
        client = self.client(model_id)
        model = client.served.base.inputs.model
        tokenizer = str(model.tokenizer) if self.local or not model.hub else model.hub
        return types.GetInfoResponse(
            type="get_info",
            model_data=types.ModelData(
                arch=model.model_type, model_name=client.record.base_model, tokenizer_id=tokenizer
            ),
            model_id=model_id,
            is_lora=True,
            lora_rank=client.record.lora.rank,
            model_name=client.record.base_model,
        )

    def client(self, model_id: str) -> Client:
        """Return a training client that is in memory.

        Raises:
            Refused: 404, there is none.
        """
        if model_id not in self._clients:
            record = self.store.record(model_id)  # says that there is none
            raise Refused(
                f"the training client {record.model_id!r} is not in memory any more; make one of "
                "its saved weights with create_training_client_from_state_with_optimizer",
                404,
            )
        return self._clients[model_id]

    # --- training ---------------------------------------------------------------------------------

    def create_model(self, request: types.CreateModelRequest, body: bytes) -> Any:
        lora, optimizer = request.lora_config, request.optimizer_config
        if lora is None:
            raise Refused("lora_config: full fine-tuning is not supported; pass a LoraConfig")
        if optimizer.type != "adamw":
            raise Refused(f"optimizer_config.type={optimizer.type!r} is not supported; use adamw")
        served = self.served(request.base_model)
        return self._new(
            request.session_id, request.model_seq_id, served, request.base_model, lora,
            request.user_metadata, body,
        )  # fmt: skip

    def load_weights(self, request: types.LoadWeightsRequest, body: bytes) -> Any:
        if request.weights_access_token:
            raise Refused("weights_access_token is not supported")
        if request.optimizer_config is not None and request.optimizer_config.type != "adamw":
            raise Refused(f"optimizer_config.type={request.optimizer_config.type!r}: use adamw")
        if request.session_id is None:
            if request.model_id is None or request.seq_id is None:
                raise Refused("model_id and seq_id, or session_id and model_seq_id, are required")
            return self.accept(request.model_id, request.seq_id, body, partial(self._load, request))
        if request.model_seq_id is None:
            raise Refused("model_seq_id is required with session_id")
        record, _, folder = self.store.find(request.path)
        name = request.base_model or record.base_model
        served = self.served(name)
        if served is not self.served(record.base_model):
            raise Refused(f"base_model={name!r}: the weights belong to {record.base_model!r}")
        return self._new(
            request.session_id, request.model_seq_id, served, name, record.lora,
            request.user_metadata, body, (request.path, folder, request.optimizer),
        )  # fmt: skip

    def _new(
        self,
        session_id: str,
        number: int,
        served: Served,
        name: str,
        lora: types.LoraConfig,
        metadata: Mapping[str, Any] | None,
        body: bytes,
        start: tuple[str, Path, bool] | None = None,
    ) -> types.UntypedAPIFuture:
        """Make a training client; `start` is its path, folder, and whether with optimizer state."""
        self.beat(session_id)
        model_id = f"{session_id}:train:{number}"
        if model_id not in self._clients:
            for other in {each.record.session_id for each in self._clients.values()}:
                if time.monotonic() - self._seen.get(other, 0.0) > IDLE_SECONDS:
                    self._free(other)
            if self.store.folder(model_id).exists():
                raise Refused(f"model_seq_id={number} of this session was used before")
            seed = secrets.randbelow(2**31) if lora.seed is None else lora.seed
            record = Record(
                model_id=model_id,
                session_id=session_id,
                base_model=name,
                lora=lora.model_copy(update={"seed": seed}),
                created=datetime.now(UTC),
                user_metadata=None if not metadata else {k: str(v) for k, v in metadata.items()},
            )
            self._clients[model_id] = Client(served, record)

        def make(client: Client) -> Answer:
            record = client.record
            state = saved_state(start[1], optimizer=start[2]) if start else None
            folder = self.store.folder(model_id)
            planned(client.served.base, record.lora)  # refuses before anything is written
            client.training = Training(client.served.base, model_id, folder, record.lora, state)
            self.store.write_record(record)
            if start:
                found = types.LoadWeightsResponse(
                    path=start[0], model_id=model_id, type="load_weights"
                )
                return Answer.of(found)
            return Answer.of(types.CreateModelResponse(model_id=model_id))

        return self._queue(self._clients[model_id], 0, body, make)

    def accept(
        self, model_id: str, seq_id: int | None, body: bytes, compute: Callable[[Training], Answer]
    ) -> types.UntypedAPIFuture:
        """Queue a request of a training client, in its order.

        Raises:
            Refused: there is no such client, or the number is taken by another request.
        """

        def of_training(client: Client) -> Answer:
            if client.training is None:
                raise Refused(f"the training client {model_id!r} was not made, or was unloaded")
            return compute(client.training)

        client = self.client(model_id)
        if seq_id is None or not 1 <= seq_id < client.next + OUT_OF_ORDER:
            raise Refused(f"seq_id={seq_id}: the next one is {client.next}")
        return self._queue(client, seq_id, body, of_training)

    def _queue(
        self, client: Client, seq_id: int, body: bytes, compute: Callable[[Client], Answer]
    ) -> types.UntypedAPIFuture:
        request_id = f"{client.record.model_id}:{seq_id}"
        digest = hashlib.sha256(body).digest()
        if client.digests.setdefault(seq_id, digest) != digest:
            raise Refused(
                f"seq_id={seq_id} was sent before with another content; two clients must not share "
                "a training client"
            )
        if seq_id >= client.next and seq_id not in client.waiting:
            self.futures.create(request_id)
            client.waiting[seq_id] = self._job(request_id, partial(compute, client))
        while job := client.waiting.pop(client.next, None):
            client.served.engine.run(job)
            client.next += 1
        return types.UntypedAPIFuture(request_id=request_id, model_id=client.record.model_id)

    def _job(self, request_id: str, compute: Callable[[], Answer]) -> Callable[[], None]:
        return lambda: self.futures.resolve_soon(request_id, outcome(compute))

    def unload(self, request: types.UnloadModelRequest) -> types.UntypedAPIFuture:
        """Free the memory of a training client, after the requests that came before."""
        client = self._clients.pop(self.client(request.model_id).record.model_id)
        request_id = f"{request.model_id}:unload"

        def close() -> Answer:
            if client.training:
                client.training.close()
            return Answer.of(types.UnloadModelResponse(model_id=request.model_id))

        self.futures.create(request_id)
        client.served.engine.run(self._job(request_id, close))
        return types.UntypedAPIFuture(request_id=request_id, model_id=request.model_id)

    def close(self) -> None:
        """End every run; the engines are closed before."""
        for client in self._clients.values():
            if client.training:
                client.training.close()
        self._clients.clear()

    # --- saved weights ----------------------------------------------------------------------------

    def save(
        self, kind: Kind, request: Any, body: bytes, answer: type[M]
    ) -> types.UntypedAPIFuture:
        """Save the weights of a training client under a name."""
        name = request.path
        if name is None:
            raise Refused("path: a name is required")

        def compute(training: Training) -> Answer:
            path = self._write(training, kind, name, request)
            return Answer.of(answer(path=path))

        return self.accept(request.model_id, request.seq_id, body, compute)

    def save_for_sampler(
        self, request: types.SaveWeightsForSamplerRequest, body: bytes
    ) -> types.UntypedAPIFuture:
        """Save weights under a name, or make a sampler of them."""
        if request.path is not None:
            kind: type[BaseModel] = types.SaveWeightsForSamplerResponseInternal
            return self.save("sampler_weights", request, body, kind)
        if request.kind != "snapshot":
            raise Refused(f"kind={request.kind!r} is not supported; use snapshot")
        number, client = request.sampling_session_seq_id, self.client(request.model_id)
        if number is None:
            raise Refused("path or sampling_session_seq_id is required")
        session, name = self.session(client.record.session_id), f"sampler-{number}"
        path = f"tinker://{request.model_id}/sampler_weights/{name}"
        session.samplers[number] = (client.record.base_model, path)
        self._keep(session)

        def compute(training: Training) -> Answer:
            ttl = request.ttl_seconds or SAMPLER_SECONDS
            self._write(training, "sampler_weights", name, request, ttl)
            made = types.SaveWeightsForSamplerResponseInternal(
                path=path, sampling_session_id=f"{session.session_id}:sample:{number}"
            )
            return Answer.of(made)

        return self.accept(request.model_id, request.seq_id, body, compute)

    def _write(
        self, training: Training, kind: Kind, name: str, request: Any, ttl: int | None = None
    ) -> str:
        return self.store.save(
            request.model_id,
            kind,
            name,
            partial(training.write, with_state=kind == "weights"),
            ttl_seconds=ttl or request.ttl_seconds,
            user_metadata=getattr(request, "user_metadata", None),
            overwrite=getattr(request, "overwrite", False),
        )

    def _load(self, request: types.LoadWeightsRequest, training: Training) -> Answer:
        _, _, folder = self.store.find(request.path)
        training.load(folder, optimizer=request.optimizer)
        found = types.LoadWeightsResponse(
            path=request.path, model_id=request.model_id, type="load_weights"
        )
        return Answer.of(found)

    # --- sampling ---------------------------------------------------------------------------------

    def create_sampler(
        self, request: types.CreateSamplingSessionRequest
    ) -> types.CreateSamplingSessionResponse:
        session, number = self.session(request.session_id), request.sampling_session_seq_id
        name = request.base_model
        if request.model_path is not None:
            record, _, _ = self.store.find(request.model_path)
            if name is not None and self.served(name) is not self.served(record.base_model):
                raise Refused(f"base_model={name!r}: the weights belong to {record.base_model!r}")
            name = record.base_model
        self.served(name)
        assert name is not None
        if session.samplers.setdefault(number, found := (name, request.model_path)) != found:
            raise Refused(f"sampling_session_seq_id={number} of this session was used before")
        self._keep(session)
        return types.CreateSamplingSessionResponse(
            sampling_session_id=f"{session.session_id}:sample:{number}"
        )

    def sampler(self, sampler_id: str) -> types.GetSamplerResponse:
        session_id, _, number = sampler_id.partition(":sample:")
        found = self.session(session_id).samplers.get(int(number) if number.isdecimal() else -1)
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
        request_id = f"sample:{uuid.uuid4()}"
        if request.sampling_session_id is not None:
            if request.seq_id is None:
                raise Refused("seq_id is required with sampling_session_id")
            known = self.sampler(request.sampling_session_id)
            name, path = known.base_model, known.model_path
            request_id = f"{request.sampling_session_id}:{request.seq_id}"
        ids = [f"{request_id}:{index}" for index in range(request.num_samples)]
        made = types.UntypedAPIFuture(request_id=request_id, sample_sequence_ids=ids)
        if request_id in self.futures:
            return made
        if self._unfinished >= WAITING:
            raise Refused(f"{self._unfinished} requests for samples wait already", 429)
        folder: Path | None = None
        if path is not None:
            record, _, folder = self.store.find(path)
            name = record.base_model
        served = self.served(name)
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4], "little")
        self.futures.create(request_id)
        self._unfinished += 1
        try:
            work = SampleWork.of(served.base, folder, request, seed)
        except Refused as error:
            self._finish(request_id, outcome(partial(_raise, error)))
        else:
            served.engine.run(partial(self._start, request_id, served, work))
        return made

    def _start(self, request_id: str, served: Served, work: SampleWork) -> None:
        """Begin sampling, on the engine's thread."""

        def resolve(answer: Answer) -> None:
            self._samples.pop(request_id, None)
            self._finish(request_id, answer)

        def begin() -> Answer:
            rows = work.start(served.engine, served.adapters, resolve)
            self._samples[request_id] = rows
            return Answer(b"")

        if (answer := outcome(begin)).content:
            resolve(answer)

    def _finish(self, request_id: str, answer: Answer) -> None:
        """End a request for samples, from any thread."""
        self.futures.resolve_soon(request_id, answer, self._finished)

    def _finished(self) -> None:
        self._unfinished -= 1

    def cancel(self, request_id: str) -> None:
        """Stop sampling for a request; nothing for others."""
        for row in self._samples.get(request_id, ()):
            row.cancelled = True


def _raise(error: Exception) -> Answer:
    raise error
