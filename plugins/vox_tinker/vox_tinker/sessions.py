"""The bases that are served, and the sessions of clients, which outlive the server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from tinker import types

from vox_core.api.files import write_text
from vox_core.api.models import positions
from vox_core.api.plans import has_tied_head
from vox_tinker.futures import Futures, Refused

if TYPE_CHECKING:
    from vox_core.api.training import TrainingBase
    from vox_tinker.checkpoints import Record, Store
    from vox_tinker.engine import Engine
    from vox_tinker.sampling import Adapters


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


class Sessions:
    """Bases, sessions, saved weights and results, which all requests share.

    Args:
        models: by name.
        local: clients are on this machine, and can read the model's folder.
    """

    def __init__(self, models: Mapping[str, Served], store: Store, *, local: bool) -> None:
        self.models, self.store, self.local = models, store, local
        self.futures = Futures()
        self._sessions: dict[str, Session] = {}
        self._seen: dict[str, float] = {}

    def create(self, request: types.CreateSessionRequest) -> types.CreateSessionResponse:
        made = Session(
            session_id=str(uuid.uuid4()),
            user_metadata=request.user_metadata,
            display_name=request.display_name,
        )
        self.keep(made)
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

    def seen(self, session_id: str) -> float:
        """Return when a session's client was last there, of `time.monotonic`."""
        return self._seen.get(session_id, 0.0)

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

    def keep(self, session: Session) -> None:
        """Write a changed session to the disk."""
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

    def served(self, name: str | None) -> Served:
        """Return a base by one of its names.

        Raises:
            Refused: 404, it is not served.
        """
        for each in self.models.values():
            if name is not None and name in each.names:
                return each
        raise Refused(f"base_model={name!r} is not served here; use {', '.join(self.models)}", 404)

    def require_base(self, served: Served, record: Record, where: str) -> None:
        """Refuse weights of another base than this one, by the name of the field."""
        if served is not self.served(record.base_model):
            raise Refused(f"{where}: the weights belong to {record.base_model!r}")

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
