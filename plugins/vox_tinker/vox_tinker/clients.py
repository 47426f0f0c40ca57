"""Training clients, and the order of their requests.

A client numbers the requests of a training client (`seq_id`, from 1; making it is 0). They are
carried out in that order, however they arrive, and one that arrives again is the same request. The
journal has them all: a training client that is not in memory, because the server was restarted or
the client was away for long, is made again of its resume point and the requests after it.

Everything here runs on the event loop's thread, except the functions that are queued for a base.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pydantic import BaseModel, ValidationError
from tinker import types

from vox_tinker.checkpoints import Kind, Record, Shape, state_folder
from vox_tinker.futures import DIGITS, Answer, Refused, failure, outcome
from vox_tinker.journal import Journal, Kept
from vox_tinker.training import Training, planned, saved_state
from vox_tinker.wire import read_json, read_pass

if TYPE_CHECKING:
    from vox_tinker.engine import Steps
    from vox_tinker.sessions import Served, Sessions
    from vox_tinker.training import Passing

IDLE_SECONDS = 1800.0
"""After this time without a heartbeat, which the SDK sends every 10 s, a session's training clients
leave the memory once another one is made."""
SAMPLER_SECONDS = 24 * 3600
"""After this, weights that were saved for one sampling client, without a name, expire."""
OUT_OF_ORDER = 4096
"""How far `seq_id` may run ahead of the next one."""
_REPEATED = {"create_model", "load_weights", "forward_backward", "optim_step"}
"""Requests that are computed again after a restart although their results are known."""
_PASSES = {"forward", "forward_backward"}
Computed: TypeAlias = "Answer | Passing[Answer]"
Queued: TypeAlias = types.UntypedAPIFuture
_Handle: TypeAlias = "Callable[[Any, Sent], Queued]"
log = logging.getLogger("vox_tinker")


class Sent(NamedTuple):
    """A request as it was sent.

    Args:
        content: what a request of the same number must have in common with it; empty: the body.
    """

    verb: str
    body: bytes
    content: bytes = b""

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.content or self.body).digest()


class _Numbered(BaseModel):
    model_id: str
    seq_id: int


@dataclass(slots=True, eq=False)
class Client:
    """A training client, and the order of its requests.

    Args:
        next: the `seq_id` that is computed next.
        fault: why it could not be made again; its later requests fail, and stay in the journal.
    """

    served: Served
    record: Record
    training: Training | None = None
    next: int = 0
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)
    fault: str = ""


class Clients:
    """Training clients, in memory and in the journal.

    Attributes:
        verbs: requests in JSON that are numbered and kept, with their type and what queues them.
    """

    def __init__(self, sessions: Sessions) -> None:
        self.sessions, self.store, self.futures = sessions, sessions.store, sessions.futures
        self._journal = Journal(sessions.store.root / ".sessions" / "requests.sqlite")
        self._clients: dict[str, Client] = {}
        self._opening: set[str] = set()
        self.verbs: dict[str, tuple[type[BaseModel], _Handle]] = {
            "create_model": (types.CreateModelRequest, self._create_model),
            "optim_step": (types.OptimStepRequest, self._optim_step),
            "load_weights": (types.LoadWeightsRequest, self._load_weights),
            "save_weights": (types.SaveWeightsRequest, self._save_weights),
            "save_weights_external": (types.SaveWeightsExternalRequest, self._save_external),
            "save_weights_for_sampler": (
                types.SaveWeightsForSamplerRequest, self._save_for_sampler,
            ),
        }  # fmt: skip

    def submit(self, verb: str, body: bytes) -> Queued:
        """Take a request of a training client, or one that makes a training client.

        Raises:
            Refused: it cannot be carried out, and is not kept.
        """
        if verb not in self.verbs:
            return self._pass(body)
        (kind, handle), sent = self.verbs[verb], Sent(verb, body)
        try:
            return handle(read_json(kind, body), sent)
        except Refused as error:
            return self._fail(sent, error)

    def _fail(self, sent: Sent, error: Refused) -> Queued:
        """Answer a numbered request with its error: the next ones wait for its number."""

        def compute(_: Training) -> Answer:
            raise error

        try:
            found = _Numbered.model_validate_json(sent.body)
        except ValidationError:
            raise error from None
        return self._accept(found.model_id, found.seq_id, sent, compute)

    def finish(self, session_id: str) -> None:
        """End a session: its training clients leave the memory, and cannot be made again."""
        session = self.sessions.session(session_id)
        for model_id, client in [*self._clients.items()]:
            if client.record.session_id == session_id:
                self.unload(types.UnloadModelRequest(model_id=model_id))
        session.finished = True
        self.sessions.keep(session)
        for model_id in self._journal.models(session_id):
            if model_id not in self._clients:
                self._forget(model_id)

    def _make_room(self) -> None:
        """Take training clients of sessions without heartbeats out of the memory."""
        for model_id, client in [*self._clients.items()]:
            idle = time.monotonic() - self.sessions.seen(client.record.session_id) > IDLE_SECONDS
            if idle and all(each.answer for each in self._journal.since(model_id)):
                del self._clients[model_id]
                if client.training:
                    client.served.engine.run(client.training.close, model_id)

    def info(self, request: types.GetInfoRequest) -> types.GetInfoResponse:
        client = self.client(request.model_id)
        model = client.served.base.inputs.model
        tokenizer = str(model.tokenizer) if self.sessions.local or not model.hub else model.hub
        return types.GetInfoResponse(
            type="get_info",
            model_data=types.ModelData(
                arch=model.model_type, model_name=client.record.base_model, tokenizer_id=tokenizer
            ),
            model_id=request.model_id,
            is_lora=True,
            lora_rank=client.record.lora.rank,
            model_name=client.record.base_model,
        )

    def client(self, model_id: str) -> Client:
        """Return a training client; one that is not in memory is made again.

        Raises:
            Refused: 404, there is none, or it was unloaded; 400, the server computes otherwise.
        """
        if model_id not in self._clients:
            self._reopen(model_id)
        return self._clients[model_id]

    def _reopen(self, model_id: str) -> None:
        if model_id not in self._journal:
            self.store.record(model_id)  # says that there is none
            raise Refused(
                f"the training client {model_id!r} was unloaded; make one of its saved "
                "weights with create_training_client_from_state_with_optimizer",
                404,
            )
        self.sessions.beat(model_id.partition(":")[0])
        kept, point = self._journal.since(model_id), self._journal.resume_point(model_id)
        if (record := self.store.made(model_id)) is not None:
            served = self.sessions.served(record.base_model)
            if record.computed != (now := _computed(served, record)):
                raise Refused(
                    f"the training client {model_id!r} was computed with {record.computed}, and "
                    f"this server computes with {now}; start it with the same settings"
                )
            if point is not None:
                client = self._clients[model_id] = Client(served, record, next=point + 1)
                served.engine.run(partial(self._resume, client, point), model_id)
        self._opening.add(model_id)
        try:
            for each in kept:
                self.submit(each.verb, each.body)
        finally:
            self._opening.remove(model_id)

    def _resume(self, client: Client, point: int) -> None:
        """Load a resume point, on the engine's thread."""
        record, folder = client.record, self.store.folder(client.record.model_id)
        try:
            state = saved_state(self.store.resume_point(record.model_id, point), optimizer=True)
            client.training = Training(client.served.base, record.model_id, folder, record, state)
        except Exception as error:  # the next server may be able to
            log.exception("a training client could not be made again")
            client.fault = f"the training client could not be made again: {error}"

    # --- training ---------------------------------------------------------------------------------

    def _create_model(self, request: types.CreateModelRequest, sent: Sent) -> Queued:
        lora, optimizer = request.lora_config, request.optimizer_config
        if lora is None:
            raise Refused("lora_config: full fine-tuning is not supported; pass a LoraConfig")
        if optimizer.type != "adamw":
            raise Refused(f"optimizer_config.type={optimizer.type!r} is not supported; use adamw")
        served = self.sessions.served(request.base_model)
        return self._new(
            request.session_id, request.model_seq_id, served, request.base_model, Shape(lora=lora),
            request.user_metadata, sent,
        )  # fmt: skip

    def _load_weights(self, request: types.LoadWeightsRequest, sent: Sent) -> Queued:
        if request.weights_access_token:
            raise Refused("weights_access_token is not supported")
        if request.optimizer_config is not None and request.optimizer_config.type != "adamw":
            raise Refused(f"optimizer_config.type={request.optimizer_config.type!r}: use adamw")
        if request.session_id is None:
            if request.model_id is None or request.seq_id is None:
                raise Refused("model_id and seq_id, or session_id and model_seq_id, are required")
            load = partial(self._load, request, self.client(request.model_id).served)
            return self._accept(request.model_id, request.seq_id, sent, load)
        if request.model_seq_id is None:
            raise Refused("model_seq_id is required with session_id")
        record, _, folder = self.store.find(request.path)
        name = request.base_model or record.base_model
        served = self.sessions.served(name)
        self.sessions.require_base(served, record, f"base_model={name!r}")
        return self._new(
            request.session_id, request.model_seq_id, served, name, record,
            request.user_metadata, sent, (request.path, folder, request.optimizer),
        )  # fmt: skip

    def _new(
        self,
        session_id: str,
        number: int,
        served: Served,
        name: str,
        shape: Shape,
        metadata: Mapping[str, Any] | None,
        sent: Sent,
        start: tuple[str, Path, bool] | None = None,
    ) -> Queued:
        """Make a training client; `start` is its path, folder, and whether with optimizer state."""
        self.sessions.beat(session_id)
        model_id = f"{session_id}:train:{number}"
        if model_id not in self._clients:
            if model_id in self._journal and model_id not in self._opening:
                self._reopen(model_id)
            else:
                self._make_room()
                self._clients[model_id] = Client(
                    served, self._recorded(model_id, name, shape, metadata)
                )

        def make(client: Client) -> Answer:
            record = client.record
            state = saved_state(state_folder(start[1]), optimizer=start[2]) if start else None
            folder = self.store.folder(model_id)
            computed = _computed(served, record)  # refuses before anything is written
            client.training = Training(client.served.base, model_id, folder, record, state)
            self.store.write_record(record.model_copy(update={"computed": computed}))
            if start:
                return _loaded(start[0], model_id)
            return Answer.of(types.CreateModelResponse(model_id=model_id))

        return self._queue(self._clients[model_id], 0, sent, make)

    def _recorded(
        self,
        model_id: str,
        name: str,
        shape: Shape,
        metadata: Mapping[str, Any] | None,
    ) -> Record:
        if model_id not in self._journal and self.store.folder(model_id).exists():
            raise Refused(f"there was a training client {model_id!r} before")
        seed = int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:4], "little") >> 1
        lora = shape.lora
        return Record(
            alpha=shape.alpha,
            targets=shape.targets,
            model_id=model_id,
            session_id=model_id.partition(":")[0],
            base_model=name,
            lora=lora.model_copy(update={"seed": seed if lora.seed is None else lora.seed}),
            created=datetime.now(UTC),
            user_metadata=None if not metadata else {k: str(v) for k, v in metadata.items()},
        )

    def _pass(self, body: bytes) -> Queued:
        asked = read_pass(body)
        verb = "forward" if asked.forward_only else "forward_backward"
        return self._accept(
            asked.model_id, asked.seq_id, Sent(verb, body), lambda each: each.run_pass(asked)
        )

    def _optim_step(self, request: types.OptimStepRequest, sent: Sent) -> Queued:
        return self._accept(
            request.model_id, request.seq_id, sent, lambda each: each.step(request.optim_params)
        )

    def _accept(
        self, model_id: str, seq_id: int | None, sent: Sent, compute: Callable[[Training], Computed]
    ) -> Queued:
        """Queue a request of a training client, in its order.

        Raises:
            Refused: there is no such client, or the number is taken by another request.
        """

        def of_training(client: Client) -> Computed:
            if client.fault or client.training is None:
                raise Refused(client.fault or f"the training client {model_id!r} was not made")
            return compute(client.training)

        client = self.client(model_id)
        if seq_id is None or not 1 <= seq_id < client.next + OUT_OF_ORDER:
            raise Refused(f"seq_id={seq_id}: the next one is {client.next}")
        return self._queue(client, seq_id, sent, of_training)

    def _queue(
        self, client: Client, seq_id: int, sent: Sent, compute: Callable[[Client], Computed]
    ) -> Queued:
        model_id = client.record.model_id
        kept = self._journal.find(model_id, seq_id)
        if kept is not None and kept.digest != sent.digest:
            raise Refused(
                f"seq_id={seq_id} was sent before with another content; two clients must not share "
                "a training client"
            )
        if seq_id >= client.next and seq_id not in client.waiting:
            if kept is None:
                self._journal.add(model_id, seq_id, sent.verb, sent.digest, sent.body)
            client.waiting[seq_id] = self._job(client, seq_id, sent.verb, kept, compute)
        while start := client.waiting.pop(client.next, None):
            start()
            client.next += 1
        return Queued(request_id=f"{model_id}:{seq_id}", model_id=model_id)

    def _job(
        self,
        client: Client,
        seq_id: int,
        verb: str,
        kept: Kept | None,
        compute: Callable[[Client], Computed],
    ) -> Callable[[], None]:
        """Begin the result of a request; return what starts its computation."""
        model_id = client.record.model_id
        request_id = f"{model_id}:{seq_id}"
        if kept is not None and kept.answer:
            self.futures.put(request_id, kept.answer)
            if verb not in _REPEATED or (verb == "load_weights" and kept.answer.failed):
                return lambda: None
            settle = partial(self._compare, client, kept)
        else:
            self.futures.create(request_id)
            settle = partial(self._finish, client, seq_id)
        joins = verb in _PASSES
        run: Any = self._pass_steps if joins else self._compute
        job = partial(run, partial(compute, client), settle)
        return partial(client.served.engine.run, job, model_id, joins=joins)

    def _compute(self, compute: Callable[[], Answer], settle: Callable[[Answer], None]) -> None:
        """Compute a request on the engine's thread."""
        settle(outcome(compute))

    def _pass_steps(
        self, compute: Callable[[], Passing[Answer]], settle: Callable[[Answer], None]
    ) -> Steps:
        """Compute a pass on the engine's thread, beside those of other clients."""
        try:
            answer = yield from compute()
        except Exception as error:  # noqa: BLE001 - it ends this request, not the server
            answer = failure(error)
        settle(answer)

    def _finish(self, client: Client, seq_id: int, answer: Answer) -> None:
        """Answer a request, and write a resume point now and then, on the engine's thread."""
        model_id = client.record.model_id
        resumes, training = False, client.training
        if training is not None and training.worth_saving and not client.fault:
            try:
                training.save(self.store.resume_point(model_id, seq_id))
                resumes = True
            except Exception:  # more has to be computed again after a restart
                log.exception("a resume point was not written")

        def keep() -> None:
            if not client.fault:
                self._journal.answer(model_id, seq_id, answer, resumes=resumes)
            if resumes:
                self.store.remove_resume_points(model_id, before=seq_id)

        self.futures.resolve_soon(f"{model_id}:{seq_id}", answer, keep)

    def _compare(self, client: Client, kept: Kept, answer: Answer) -> None:
        """Compare what was computed again: from another result on, the learner is another. Words of
        errors may be those of other versions."""
        if kept.answer and kept.answer.failed and answer.failed:
            return
        if answer != kept.answer and not client.fault:
            client.fault = (
                f"the training client {client.record.model_id!r} could not be made again: "
                f"seq_id={kept.seq_id} had another result than before the restart; restart the "
                "server, or make a client of its saved weights"
            )
            log.error(client.fault)

    def unload(self, request: types.UnloadModelRequest) -> Queued:
        """Free the memory of a training client, after the requests that came before."""
        model_id = request.model_id
        client = self.client(model_id)
        del self._clients[model_id]
        request_id = f"{model_id}:unload"

        def close() -> None:
            def work() -> Answer:
                if client.training:
                    client.training.close()
                return Answer.of(types.UnloadModelResponse(model_id=model_id))

            self.futures.resolve_soon(request_id, outcome(work), partial(self._forget, model_id))

        self.futures.create(request_id)
        client.served.engine.run(close, model_id)
        return Queued(request_id=request_id, model_id=model_id)

    def _forget(self, model_id: str) -> None:
        self._journal.forget(model_id)
        self.store.remove_resume_points(model_id)

    async def retrieve(self, request_id: str, seconds: float) -> Answer | None:
        """Wait for a result, also of a request to a server before this one; None: not in time.

        Raises:
            Refused: 410, there is no such request.
        """
        if request_id not in self.futures:
            self._recover(request_id)
        return await self.futures.retrieve(request_id, seconds)

    def _recover(self, request_id: str) -> None:
        model_id, _, number = request_id.rpartition(":")
        if number == "unload":
            if model_id in self._journal:
                self.unload(types.UnloadModelRequest(model_id=model_id))
            elif self.store.made(model_id):
                answer = Answer.of(types.UnloadModelResponse(model_id=model_id))
                self.futures.put(request_id, answer)
        elif DIGITS.fullmatch(number) and (kept := self._journal.find(model_id, int(number))):
            if kept.answer:
                self.futures.put(request_id, kept.answer)
            else:
                self.client(model_id)

    def close(self) -> None:
        """End every run; the engines are closed before."""
        for client in self._clients.values():
            if client.training:
                client.training.close()
        self._clients.clear()
        self._journal.close()

    # --- saved weights ----------------------------------------------------------------------------

    def _save_weights(self, request: types.SaveWeightsRequest, sent: Sent) -> Queued:
        return self._save("weights", request, sent, types.SaveWeightsResponse)

    def _save_external(self, request: types.SaveWeightsExternalRequest, sent: Sent) -> Queued:
        if request.age_encryption_recipients:
            raise Refused("age_encryption_recipients is not supported")
        kind = types.SaveWeightsExternalResponseInternal
        return self._save("external_weights", request, sent, kind)

    def _save(self, kind: Kind, request: Any, sent: Sent, answer: type[BaseModel]) -> Queued:
        """Save the weights of a training client under a name."""
        name = request.path
        if name is None:
            raise Refused("path: a name is required")

        def compute(training: Training) -> Answer:
            path = self._write(training, kind, name, request)
            return Answer.of(answer(path=path))

        return self._accept(request.model_id, request.seq_id, sent, compute)

    def _save_for_sampler(self, request: types.SaveWeightsForSamplerRequest, sent: Sent) -> Queued:
        """Save weights under a name, or make a sampler of them."""
        if request.path is not None:
            kind: type[BaseModel] = types.SaveWeightsForSamplerResponseInternal
            return self._save("sampler_weights", request, sent, kind)
        if request.kind != "snapshot":
            raise Refused(f"kind={request.kind!r} is not supported; use snapshot")
        number, client = request.sampling_session_seq_id, self.client(request.model_id)
        if number is None:
            raise Refused("path or sampling_session_seq_id is required")
        session, name = self.sessions.session(client.record.session_id), f"sampler-{number}"
        path = f"tinker://{request.model_id}/sampler_weights/{name}"
        # The SDK counts on when it sends the request again; the first number is the right one.
        same = request.model_dump_json(exclude={"sampling_session_seq_id"}).encode()
        if self._journal.find(request.model_id, request.seq_id or 0) is None:
            session.samplers[number] = (client.record.base_model, path)
            self.sessions.keep(session)

        def compute(training: Training) -> Answer:
            ttl = request.ttl_seconds or SAMPLER_SECONDS
            self._write(training, "sampler_weights", name, request, ttl)
            made = types.SaveWeightsForSamplerResponseInternal(
                path=path, sampling_session_id=f"{session.session_id}:sample:{number}"
            )
            return Answer.of(made)

        return self._accept(request.model_id, request.seq_id, sent._replace(content=same), compute)

    def _write(
        self, training: Training, kind: Kind, name: str, request: Any, ttl: int | None = None
    ) -> str:
        return self.store.save(
            request.model_id,
            kind,
            name,
            partial(training.write, with_state=kind == "weights"),
            request.seq_id,
            ttl_seconds=ttl or request.ttl_seconds,
            user_metadata=getattr(request, "user_metadata", None),
            overwrite=getattr(request, "overwrite", False),
        )

    def _load(
        self, request: types.LoadWeightsRequest, served: Served, training: Training
    ) -> Answer:
        record, _, folder = self.store.find(request.path)
        self.sessions.require_base(served, record, "path")
        training.load(state_folder(folder), optimizer=request.optimizer)
        return _loaded(request.path, request.model_id)


def _loaded(path: str, model_id: str | None) -> Answer:
    return Answer.of(types.LoadWeightsResponse(path=path, model_id=model_id, type="load_weights"))


def _computed(served: Served, shape: Shape) -> str:
    """Return backend, device, dtype and contract of a training client, which decide its numbers.

    Raises:
        Refused, PlanError: it cannot be trained so.
    """
    plan = planned(served.base, shape)
    return f"{plan.backend}, {plan.device}, {plan.dtype}, contract {plan.contract.digest}"
