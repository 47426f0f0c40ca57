"""Run folders and saved weights on the disk.

    OUT/SESSION-train-N/          a training client: a run folder of vox
        plan.json, telemetry.jsonl
        tinker.json               what the client asked for
        resume/N/                 the state behind request N, for a server that was killed
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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from pydantic import BaseModel, ValidationError
from tinker import types

from vox_core.api.files import atomic_folder, write_text
from vox_core.api.runs import PLAN, RunFolder, is_run
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
_PATH = re.compile(
    rf"tinker://(?P<owner>[A-Za-z0-9][\w.:-]{{0,127}})/(?P<kind>{'|'.join(get_args(Kind))})/"
    rf"(?P<name>{_NAME.pattern})",
    re.ASCII,
)
MANIFEST = "vox_adapter.json"
_RECORD, _CHECKPOINT, _RESUME = "tinker.json", "checkpoint.json", "resume"
_SHORTEST, _LONGEST = 3600, 10 * 366 * 24 * 3600


class Shape(BaseModel):
    """An adapter to train.

    Args:
        alpha: of LoRA; the API has no field for it.
        targets: module paths, of a run of `vox train`; None: those that `lora` says.
    """

    lora: types.LoraConfig
    alpha: float = 32.0
    targets: tuple[str, ...] | None = None


class Record(Shape):
    """`tinker.json`: a training client.

    Args:
        computed: backend, device, dtype and contract, which decide its numbers.
    """

    model_id: str
    session_id: str
    base_model: str
    created: datetime
    user_metadata: dict[str, str] | None = None
    computed: str = ""


class _Saved(types.Checkpoint):
    """`checkpoint.json`; `seq_id` is the request that it was saved by."""

    seq_id: int | None = None


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
        if (found := self.made(model_id)) is None:
            raise Refused(f"there is no training client {model_id!r}", 404)
        return found

    def made(self, model_id: str) -> Record | None:
        """Read the record of a training client; None if there is none."""
        return _record(self.folder(model_id)) if _MODEL.fullmatch(model_id) else None

    def write_record(self, record: Record) -> None:
        write_text(self.folder(record.model_id) / _RECORD, record.model_dump_json())

    def records(self) -> list[Record]:
        """Return all training clients, the newest first."""
        found = filter(None, map(_record, self.root.glob("*-train-*")))
        return sorted(found, key=lambda each: each.created, reverse=True)

    # --- resume points ----------------------------------------------------------------------------

    def resume_point(self, model_id: str, seq_id: int) -> Path:
        """Return the folder of the state behind a request; its parent is there."""
        parent = self.folder(model_id) / _RESUME
        parent.mkdir(exist_ok=True)
        return parent / str(seq_id)

    def remove_resume_points(self, model_id: str, before: int = sys.maxsize) -> None:
        """Remove those of a training client that are behind requests before this one."""
        for each in (self.folder(model_id) / _RESUME).glob("*"):
            if int(each.name) < before:
                shutil.rmtree(each, ignore_errors=True)

    # --- checkpoints ------------------------------------------------------------------------------

    def save(
        self,
        model_id: str,
        kind: Kind,
        name: str,
        write: Callable[[Path], None],
        seq_id: int | None,
        *,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> str:
        """Write a checkpoint, whole or not at all; return its path.

        One that the same request wrote before a restart stays.

        Raises:
            Refused: a field is wrong, or there is a checkpoint of that name.
        """
        if not _NAME.fullmatch(name):
            raise Refused(f"path={name!r}: use letters, digits, '.', '_' and '-', 128 at most")
        end = _end(ttl_seconds)
        folder = self.folder(model_id) / kind / name
        before = _live(folder)
        if before is not None and seq_id is not None and before.seq_id == seq_id:
            return before.tinker_path
        if folder.exists() and not overwrite:
            raise Refused(f"path={name!r}: it exists; choose another name, or pass overwrite=True")
        about = _Saved(
            seq_id=seq_id,
            checkpoint_id=f"{kind}/{name}",
            checkpoint_type=_TYPES[kind],
            time=datetime.now(UTC),
            tinker_path=f"tinker://{model_id}/{kind}/{name}",
            user_metadata=None if user_metadata is None else dict(user_metadata),
            expires_at=end,
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

        `tinker://NAME/weights/final` is the run NAME of `vox train`, in the same folder.

        Raises:
            Refused: 404, there is none.
        """
        path = _PATH.fullmatch(tinker_path)
        if path and path["kind"] != "external_weights" and path["name"] == "final":
            folder = self.root / path["owner"]
            if is_run(folder) and not (folder / _RECORD).exists():
                return _trained(folder), cast("Kind", path["kind"]), folder
        return self.saved(tinker_path)

    def saved(self, tinker_path: str) -> tuple[Record, Kind, Path]:
        """Return those of a checkpoint that a client has saved.

        Raises:
            Refused: 404, there is none.
        """
        path = _PATH.fullmatch(tinker_path)
        if path and _MODEL.fullmatch(path["owner"]):
            folder = self.folder(path["owner"]) / path["kind"] / path["name"]
            if _live(folder) is not None:
                return self.record(path["owner"]), cast("Kind", path["kind"]), folder
        raise Refused(f"there is no checkpoint {tinker_path!r}", 404)

    def checkpoints(self, model_id: str) -> Sequence[types.Checkpoint]:
        """Return those of a training client, the newest first; expired ones are removed."""
        folders = [p for kind in get_args(Kind) for p in (self.folder(model_id) / kind).glob("*")]
        found = [about for folder in folders if (about := _live(folder))]
        return sorted(found, key=lambda each: each.time, reverse=True)

    def delete(self, model_id: str, checkpoint_id: str) -> None:
        """Remove a checkpoint (404 if there is none)."""
        shutil.rmtree(self.saved(f"tinker://{model_id}/{checkpoint_id}")[2])

    def expire(self, model_id: str, checkpoint_id: str, ttl_seconds: int | None) -> None:
        """Change when a checkpoint expires; None: never.

        Raises:
            Refused: 404, there is none; 400, the time is too short or too long.
        """
        folder = self.saved(f"tinker://{model_id}/{checkpoint_id}")[2]
        about = _live(folder)
        assert about is not None
        changed = about.model_copy(update={"expires_at": _end(ttl_seconds)})
        write_text(folder / _CHECKPOINT, changed.model_dump_json())

    def files(self, folder: Path) -> Iterator[Path]:
        """Yield the files of a checkpoint that clients download."""
        return (p for p in sorted(folder.iterdir()) if p.is_file() and p.name != _CHECKPOINT)


def _record(folder: Path) -> Record | None:
    try:
        return Record.model_validate_json((folder / _RECORD).read_bytes())
    except (OSError, ValidationError):
        return None


def _end(ttl_seconds: int | None) -> datetime | None:
    if ttl_seconds is None:
        return None
    if not _SHORTEST <= ttl_seconds <= _LONGEST:
        raise Refused(f"ttl_seconds={ttl_seconds}: it must be between 1 hour and 10 years")
    return datetime.now(UTC) + timedelta(seconds=ttl_seconds)


def _trained(folder: Path) -> Record:
    """Describe a run of `vox train` as a training client.

    Raises:
        Refused: it does not train an adapter alone.
    """
    run = RunFolder(folder)
    plan, base = run.read(PLAN), run.read(MANIFEST)["base"]
    adapter = plan["contract"]["adapter"]
    if adapter["method"] != "lora" or adapter["modules_to_save"] or adapter["dropout"]:
        raise Refused(f"the run {folder.name!r} is no LoRA without dropout and saved modules")
    return Record(
        model_id=folder.name,
        session_id="",
        base_model=base["path"],
        created=datetime.fromtimestamp((folder / PLAN).stat().st_mtime, UTC),
        lora=types.LoraConfig(rank=adapter["rank"], seed=plan["contract"]["seed"]),
        alpha=adapter["alpha"],
        targets=tuple(plan["modules"]),
    )


def state_folder(folder: Path) -> Path:
    """Return where the states of saved weights, or of a run of `vox train`, are."""
    return folder / (STATE if (folder / _CHECKPOINT).exists() else "checkpoints")


def _live(folder: Path) -> _Saved | None:
    """Return what a folder's record says; None if there is none, or it has expired."""
    try:
        about = _Saved.model_validate_json((folder / _CHECKPOINT).read_bytes())
    except (OSError, ValidationError):
        return None
    if about.expires_at is not None and about.expires_at < datetime.now(UTC):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return about
