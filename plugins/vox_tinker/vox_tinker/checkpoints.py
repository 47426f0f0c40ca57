"""Run folders and saved weights on the disk.

    OUT/SESSION-train-N/          a training client: a run folder of vox
        plan.json, telemetry.jsonl
        tinker.json               what the client asked for
        weights/NAME/             an adapter, as `vox merge` and PEFT load it, and its state
            state/step-N/         with AdamW's moments
            checkpoint.json
        sampler_weights/NAME/     an adapter alone
        external_weights/NAME/    the same, for clients to download

The path `tinker://SESSION:train:N/weights/NAME` names one of them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from pydantic import BaseModel, ValidationError
from tinker import types

from vox_core.api.files import atomic_folder, write_text
from vox_tinker.futures import Refused

Kind: TypeAlias = Literal["weights", "sampler_weights", "external_weights"]
STATE = "state"
_TYPES: Mapping[Kind, types.CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
_MODEL = re.compile(r"[0-9a-f-]{36}:train:[0-9]{1,9}", re.ASCII)
_RECORD, _CHECKPOINT = "tinker.json", "checkpoint.json"
_SHORTEST, _LONGEST = 3600, 10 * 366 * 24 * 3600


class Record(BaseModel):
    """`tinker.json`: a training client."""

    model_id: str
    session_id: str
    base_model: str
    lora: types.LoraConfig
    created: datetime
    user_metadata: dict[str, str] | None = None


class Store:
    """The folder that all training clients have theirs in."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, model_id: str) -> Path:
        """Return the run folder of a training client.

        Raises:
            Refused: 404, the id is none.
        """
        if not _MODEL.fullmatch(model_id):
            raise Refused(f"there is no training client {model_id!r}", 404)
        return self.root / model_id.replace(":", "-")

    def record(self, model_id: str) -> Record:
        """Read the record of a training client.

        Raises:
            Refused: 404, there is none.
        """
        try:
            return Record.model_validate_json((self.folder(model_id) / _RECORD).read_bytes())
        except (OSError, ValidationError) as error:
            raise Refused(f"there is no training client {model_id!r}", 404) from error

    def write_record(self, record: Record) -> None:
        write_text(self.folder(record.model_id) / _RECORD, record.model_dump_json())

    def records(self) -> list[Record]:
        """Return all training clients, the newest first."""
        found = []
        for path in self.root.glob(f"*-train-*/{_RECORD}"):
            try:
                found.append(Record.model_validate_json(path.read_bytes()))
            except (OSError, ValidationError):
                continue
        return sorted(found, key=lambda each: each.created, reverse=True)

    # --- checkpoints ------------------------------------------------------------------------------

    def save(
        self,
        model_id: str,
        kind: Kind,
        name: str,
        write: Callable[[Path], None],
        *,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> str:
        """Write a checkpoint, whole or not at all; return its path.

        Raises:
            Refused: a field is wrong, or there is a checkpoint of that name.
        """
        if not _NAME.fullmatch(name):
            raise Refused(f"path={name!r}: use letters, digits, '.', '_' and '-', 128 at most")
        if ttl_seconds is not None and not _SHORTEST <= ttl_seconds <= _LONGEST:
            raise Refused(f"ttl_seconds={ttl_seconds}: it must be between 1 hour and 10 years")
        folder = self.folder(model_id) / kind / name
        if folder.exists() and not overwrite:
            raise Refused(f"path={name!r}: it exists; choose another name, or pass overwrite=True")
        now = datetime.now(UTC)
        about = types.Checkpoint(
            checkpoint_id=f"{kind}/{name}",
            checkpoint_type=_TYPES[kind],
            time=now,
            tinker_path=f"tinker://{model_id}/{kind}/{name}",
            user_metadata=None if user_metadata is None else dict(user_metadata),
            expires_at=now + timedelta(seconds=ttl_seconds) if ttl_seconds else None,
        )
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder, replace=overwrite) as made:
            write(made)
            size = sum(each.stat().st_size for each in made.rglob("*.*"))
            about = about.model_copy(update={"size_bytes": size})
            write_text(made / _CHECKPOINT, about.model_dump_json())
        return about.tinker_path

    def find(self, tinker_path: str) -> tuple[Record, Kind, Path]:
        """Return the training client, kind and folder of a checkpoint.

        Raises:
            Refused: 404, there is none.
        """
        missing = Refused(f"there is no checkpoint {tinker_path!r}", 404)
        model_id, kind, name = [*tinker_path.removeprefix("tinker://").split("/"), "", ""][:3]
        if not tinker_path.startswith("tinker://") or kind not in get_args(Kind):
            raise missing
        chosen: Kind = kind  # type: ignore[assignment]
        if not _NAME.fullmatch(name) or not _MODEL.fullmatch(model_id):
            raise missing
        record, folder = self.record(model_id), self.folder(model_id) / kind / name
        if _live(folder) is None:
            raise missing
        return record, chosen, folder

    def checkpoints(self, model_id: str) -> list[types.Checkpoint]:
        """Return those of a training client, the newest first; expired ones are removed."""
        folders = [p for kind in get_args(Kind) for p in (self.folder(model_id) / kind).glob("*")]
        found = [about for folder in folders if (about := _live(folder))]
        return sorted(found, key=lambda each: each.time, reverse=True)

    def delete(self, model_id: str, checkpoint_id: str) -> None:
        """Remove a checkpoint (404 if there is none)."""
        shutil.rmtree(self.find(f"tinker://{model_id}/{checkpoint_id}")[2])

    def expire(self, model_id: str, checkpoint_id: str, ttl_seconds: int | None) -> None:
        """Change when a checkpoint expires; None: never."""
        folder = self.find(f"tinker://{model_id}/{checkpoint_id}")[2]
        about = _live(folder)
        assert about is not None
        end = None if ttl_seconds is None else datetime.now(UTC) + timedelta(seconds=ttl_seconds)
        changed = about.model_copy(update={"expires_at": end})
        write_text(folder / _CHECKPOINT, changed.model_dump_json())

    def files(self, folder: Path) -> Iterator[Path]:
        """Yield the files of a checkpoint that clients download."""
        return (p for p in sorted(folder.iterdir()) if p.is_file() and p.name != _CHECKPOINT)


def _live(folder: Path) -> types.Checkpoint | None:
    """Return what a folder's record says; None if there is none, or it has expired."""
    try:
        about = types.Checkpoint.model_validate_json((folder / _CHECKPOINT).read_bytes())
    except (OSError, ValidationError):
        return None
    if about.expires_at is not None and about.expires_at < datetime.now(UTC):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return about
