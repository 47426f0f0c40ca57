"""Checkpoints: a `TrainState` on disk, the same for every backend, complete or absent.

    step-N/adapter.safetensors     float32, canonical names; with the method `full` the weights
    step-N/moments.safetensors     float32, `<canonical name>.exp_avg` and `.exp_avg_sq`
    step-N/state.json              step, contract digest, backends, losses, the adapter's structure
    step-N/MANIFEST.json           size and SHA-256 of the three

`save` fills and flushes a temporary folder, renames it, flushes its parent and reads everything
back; the digests are those of the bytes that were to be written. `load` returns a state only if
every file matches the manifest; a whole model's tensors are then read on access. `prune` renames a
folder before it removes it, so that a crash never leaves half a checkpoint under a checkpoint's
name. No pickle.

`CheckpointWriter` knows when one is due. The training thread copies the state and goes on; one
thread writes, and there is at most one checkpoint under way: the next one waits for it. Its outcome
is announced on the training thread, at the next step, after it has been written, flushed and read
back and older ones have been pruned.

A whole model's state (method `full`) is not copied: the training thread writes it itself, tensor by
tensor, because a backend need not let another thread read it.

A disk that is full or broken costs a checkpoint and not the run: a warning says so, and the next
one tries again. The last checkpoint of a run is written while the run waits, and has to succeed.
"""

from __future__ import annotations

import hashlib
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_core import files
from vox_core.bounded_json import schema_faults
from vox_core.contract import (
    AdapterState,
    CheckpointWritten,
    Event,
    Floats,
    LazyMapping,
    LowRank,
    Method,
    Notice,
    TrainState,
)
from vox_core.errors import ModelError, PlanError, StorageError, TrainingError, command
from vox_core.run.folder import numbered, step_of
from vox_core.run.progress import Progress
from vox_core.weights import SafetensorsFile, safetensors_bytes

if TYPE_CHECKING:
    from vox_core.config import TrainSettings

ADAPTER = "adapter.safetensors"
MOMENTS = "moments.safetensors"
STATE = "state.json"
MANIFEST = "MANIFEST.json"
FILES = (ADAPTER, MOMENTS, STATE)
_MOMENTS = ("exp_avg", "exp_avg_sq")
LARGEST = 1 << 26
"""Bytes of a JSON file: ten times what the largest model's structure takes."""

Count = Annotated[int, Field(ge=0)]
_Format: TypeAlias = Literal["vox-checkpoint/3"]


# --- the JSON files ---------------------------------------------------------------------------


class _Json(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class BackendUse(_Json):
    """A backend, and the first step that it took."""

    first_step: Count
    backend: str
    device: str
    dtype: str


class Origin(_Json):
    """The run that a checkpoint belongs to, up to its step.

    Args:
        backends: that worked on the run, in order.
        epoch: passes over the data, as a fraction.
        elapsed: seconds of training, over every resume.
        losses: of the applied steps, in order; None where not finite.
        validations: (step, loss), step 0 before training.
        validated: what `validations` measured, as in the contract.
        skipped_in_a_row: steps in a row, up to this one, that were not applied.
    """

    contract: str = ""
    backends: tuple[BackendUse, ...] = ()
    seed: Count = 0
    epoch: Annotated[float, Field(ge=0)] = 0.0
    elapsed: Annotated[float, Field(ge=0)] = 0.0
    versions: dict[str, str] = {}
    losses: tuple[float | None, ...] = ()
    validations: tuple[tuple[Count, float | None], ...] = ()
    validated: str = ""
    skipped_in_a_row: Count = 0


class StateRecord(Origin):
    """`state.json`: the state without its tensors.

    `step` is the data cursor as well, and the random generators are functions of `seed`, step and
    micro-batch, so there is no more of them to keep.

    Args:
        skipped: steps that were not applied because their loss or gradient was not finite.
        alpha: module path -> its alpha.
        saved: names of the parameters that are trained whole.
    """

    format: _Format = "vox-checkpoint/3"
    step: Count
    skipped: Count
    method: Method
    alpha: dict[str, float]
    saved: list[str]


class Entry(_Json):
    """A file as it was written."""

    size: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class CheckpointManifest(_Json):
    """`MANIFEST.json`."""

    format: _Format = "vox-checkpoint/3"
    files: dict[Literal["adapter.safetensors", "moments.safetensors", "state.json"], Entry]


J = TypeVar("J", bound=_Json)


def read_json(folder: Path, name: str, kind: type[J]) -> J:
    """Read a JSON file of a checkpoint; P003 if it is missing, too large, or not of that kind."""
    try:
        if _plain_size(folder / name) > LARGEST:
            raise damaged(folder, f"{name} has more than {LARGEST} bytes")
        return kind.model_validate_json((folder / name).read_bytes())
    except OSError as error:
        raise damaged(folder, f"{name} {_words(error)}") from error
    except ValidationError as error:
        raise damaged(folder, f"{name} is not valid: {schema_faults(error)[0]}") from error


def damaged(folder: Path, why: str) -> PlanError:
    """The error for a checkpoint that cannot be used; `found` says why."""
    what = "a checkpoint is damaged"
    remedy = "go on from an older one: vox train --resume RUN passes over what is damaged"
    return PlanError("P003", what, where=folder, found=why, remedy=remedy)


def _plain_size(path: Path) -> int:
    """Bytes of the file. Raises OSError where it is a link, a folder or a device."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "is not a plain file")
    return status.st_size


def _words(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return str(error.strerror) if not error.errno else f"cannot be read: {error.strerror}"


# --- reading ----------------------------------------------------------------------------------


def load_newest(parent: Path, *, set_aside: bool = True) -> tuple[TrainState, list[str]]:
    """The newest checkpoint that verifies, and why newer ones were passed over.

    Args:
        set_aside: give those another name, so that they neither count nor stand in the way.

    Raises:
        PlanError: P003, none verifies.
        StorageError: a damaged one could not be set aside.
    """
    skipped: dict[Path, str] = {}
    for folder in numbered(parent):
        try:
            state = load(folder)
        except PlanError as error:
            skipped[folder] = f"{folder.name}: {error.found}"
            continue
        for each in skipped if set_aside else ():
            _set_aside(each)
        return state, [*skipped.values()]
    raise PlanError(
        "P003",
        "the run has no checkpoint to go on from",
        where=parent,
        found=None if skipped else "none",
        faults=[*skipped.values()],
        remedy="train again, with another --out",
    )


def load(folder: Path) -> TrainState:
    """The state in one checkpoint folder; P003 if it is not what its manifest says, or no state."""
    record = _verified(folder)
    try:
        whole = record.method == "full"
        named, halves = (_tensors(folder / name, on_access=whole) for name in (ADAPTER, MOMENTS))
    except (ModelError, StorageError) as error:
        raise damaged(folder, "; ".join((error.what, *error.faults))) from error
    return TrainState(
        record.step,
        _adapter(folder, record, named),
        _moments(folder, named, halves),
        record.skipped,
    )


def load_step(parent: Path, step: int) -> TrainState | None:
    """The checkpoint of that step; None if it is not there, or does not verify."""
    try:
        return load(parent / f"step-{step}")
    except PlanError:
        return None


def fault(folder: Path) -> str | None:
    """Why the files are not those that were written; None if they are."""
    try:
        _verified(folder)
    except PlanError as error:
        return error.found
    return None


def read_record(folder: Path) -> StateRecord:
    """Read `state.json` alone (P003)."""
    record = read_json(folder, STATE, StateRecord)
    if record.step != step_of(folder):
        raise damaged(folder, f"{STATE} is of step {record.step}")
    return record


def origin(parent: Path, step: int) -> Origin:
    """The origin that the checkpoint of `step` records; an empty one if it does not exist."""
    folder = parent / f"step-{step}"
    return read_record(folder) if folder.exists() else Origin()


def _verified(folder: Path) -> StateRecord:
    manifest = read_json(folder, MANIFEST, CheckpointManifest)
    wrong = [f"{name} is not in {MANIFEST}" for name in FILES if name not in manifest.files]
    for name, entry in manifest.files.items():
        try:
            if (size := _plain_size(folder / name)) != entry.size:
                wrong.append(f"{name} has {size} bytes, and {MANIFEST} says {entry.size}")
                continue
            with (folder / name).open("rb") as file:
                # Not `digests.file_sha256`: its cache would hide a file that changed.
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    wrong.append(f"{name} is not what {MANIFEST} says")
        except OSError as error:
            wrong.append(f"{name} {_words(error)}")
    if wrong:
        raise damaged(folder, ", ".join(wrong))
    return read_record(folder)


def _adapter(folder: Path, record: StateRecord, named: Mapping[str, Floats]) -> AdapterState:
    matrices = {f"{path}.lora_{half}.weight" for path in record.alpha for half in "AB"}
    magnitudes = {f"{path}.lora_magnitude_vector" for path in record.alpha}
    for name in sorted((matrices | {*record.saved}) - named.keys()):
        raise damaged(folder, f"{ADAPTER} has no {name}")
    for name in sorted(named.keys() - matrices - magnitudes - {*record.saved}):
        raise damaged(folder, f"{ADAPTER} has {name}, which {STATE} does not name")
    for path in record.alpha:
        A, B = named[f"{path}.lora_A.weight"], named[f"{path}.lora_B.weight"]
        if A.ndim != 2 or B.ndim != 2 or A.shape[0] != B.shape[1]:
            raise damaged(folder, f"{ADAPTER}: A {A.shape} and B {B.shape} of {path} do not fit")
    modules = {
        path: LowRank(
            A_RI=named[f"{path}.lora_A.weight"],
            B_OR=named[f"{path}.lora_B.weight"],
            alpha=alpha,
            magnitude_O=named.get(f"{path}.lora_magnitude_vector"),
        )
        for path, alpha in record.alpha.items()
    }
    saved = named if record.method == "full" else {name: named[name] for name in record.saved}
    return AdapterState(record.method, modules, saved)


def _moments(
    folder: Path, named: Mapping[str, Floats], halves: Mapping[str, Floats]
) -> Mapping[str, tuple[Floats, Floats]]:
    stepped = [n for n in named if all(f"{n}.{kind}" in halves for kind in _MOMENTS)]

    def pair(name: str) -> tuple[Floats, Floats]:
        return halves[f"{name}.exp_avg"], halves[f"{name}.exp_avg_sq"]

    moments = LazyMapping(stepped, pair)
    fit = all(m.shape == v.shape == named[name].shape for name, (m, v) in moments.items())
    if not fit or len(halves) != 2 * len(moments):
        raise damaged(folder, f"{MOMENTS} does not hold two moments of tensors in {ADAPTER}")
    return moments


def _tensors(path: Path, *, on_access: bool) -> Mapping[str, Floats]:
    file = SafetensorsFile(path)
    read = LazyMapping(file.tensors, lambda name: np.asarray(file.read(name), np.float32))
    return read if on_access else {name: value.copy() for name, value in read.items()}


def _set_aside(folder: Path) -> None:
    """Take a damaged checkpoint out of the way, under a name that does not count."""
    aside = folder.with_name(f"damaged-{folder.name}-{uuid.uuid4().hex[:8]}")
    with files.storage_errors(folder):
        files.calls.rename(folder, aside)


# --- writing ----------------------------------------------------------------------------------


def save(parent: Path, state: TrainState, origin: Origin) -> Path:
    """Write `parent/step-N`, flush it, and read it back. Returns the new folder.

    A step that is there already and verifies is left alone, unless it was written before its
    validation; one that does not is set aside.

    Raises:
        StorageError: it could not be written; nothing of it is left.
    """
    folder = parent / f"step-{state.step}"
    with files.storage_errors(folder):
        if not parent.is_dir():
            files.calls.mkdir(parent)
            files.sync_folder(parent.parent)
        good = folder.exists() and fault(folder) is None
        if good and read_record(folder).validations == origin.validations:
            files.sync_folder(parent)
            return folder
    if folder.exists() and not good:
        _set_aside(folder)
    with files.atomic_folder(folder, replace=True) as temporary:
        _fill(temporary, state, origin)
    if why := fault(folder):
        _set_aside(folder)
        what = "a checkpoint is not on the disk as it was written"
        remedy = "check the disk; the checkpoints before it are as they were"
        raise StorageError("S002", what, where=folder, found=why, remedy=remedy)
    return folder


def _fill(folder: Path, state: TrainState, origin: Origin) -> None:
    adapter = state.adapter
    values = adapter.tensors()
    shapes = {name: value.shape for name, value in values.items()}
    of_moments = {f"{name}.{kind}": shapes[name] for name in state.moments for kind in _MOMENTS}
    moments = (
        (f"{name}.{kind}", moment)
        for name, pair in state.moments.items()
        for kind, moment in zip(_MOMENTS, pair, strict=True)
    )
    more = {
        "step": state.step,
        "skipped": state.skipped,
        "method": adapter.method,
        "alpha": {path: float(module.alpha) for path, module in adapter.modules.items()},
        "saved": sorted(adapter.saved),
    }
    record = StateRecord.model_validate({**dict(origin), **more})
    entries = {
        ADAPTER: _write(folder / ADAPTER, _stored(shapes, values.items())),
        MOMENTS: _write(folder / MOMENTS, _stored(of_moments, moments)),
        STATE: _write(folder / STATE, [record.model_dump_json(indent=2).encode()]),
    }
    manifest = CheckpointManifest.model_validate({"files": entries})
    _write(folder / MANIFEST, [manifest.model_dump_json(indent=2).encode()])


def _stored(
    shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, Floats]]
) -> Iterable[bytes | memoryview]:
    return safetensors_bytes({name: ("F32", shape) for name, shape in shapes.items()}, tensors)


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> Entry:
    """Write a file, with the digest of what it should hold: reading it back proves the disk."""
    digest, size = hashlib.sha256(), 0
    with files.new_file(path) as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
    return Entry(size=size, sha256=digest.hexdigest())


def prune(parent: Path, keep: int, every: int = 0, best: int | None = None) -> None:
    """Remove what need not be kept. Only to be called when the newest one has been verified.

    Args:
        keep: number of newest checkpoints to keep.
        every: keep each step that this divides, too; 0: none.
        best: a step to keep whatever its age.

    Raises:
        StorageError: a checkpoint could not be taken away; none is there in part.
    """
    gone: dict[Path, Path] = {}
    for folder in numbered(parent)[keep:]:
        step = step_of(folder)
        if step != best and not (every and step % every == 0):
            gone[folder] = files.temporary_beside(folder)
    if not gone:
        return
    with files.storage_errors(parent):
        for folder, going in gone.items():
            files.calls.rename(folder, going)
        files.sync_folder(parent)
    for going in gone.values():
        files.remove(going)


LOWER_RATE = ("--allow-change", "lr", "--lr", "LOWER")
_Written: TypeAlias = tuple[Path, float, str | None]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A checkpoint that the thread writes.

    Args:
        asked: when the training thread began to copy the state.
        held: seconds that this took.
        work: the folder, when it was there, and a warning.
    """

    step: int
    asked: float
    held: float
    work: Future[_Written]


class CheckpointWriter:
    """The checkpoints of one run in one process. Its methods are the training thread's.

    Args:
        emit: receives the outcome of each.
        settings: when to save, beside the end, and how many to keep.
        origin: of the run; its `elapsed` is what went before this process.
        progress: losses and validations so far; the step of the best one is saved and kept.
        epoch_of: passes over the data after a step, as a fraction.
    """

    def __init__(
        self,
        parent: Path,
        emit: Callable[[Event], None],
        settings: TrainSettings,
        *,
        origin: Origin | None = None,
        progress: Progress | None = None,
        epoch_of: Callable[[int], float] = lambda _step: 0.0,
    ) -> None:
        self._parent, self._emit, self._settings = parent, emit, settings
        self._origin, self._epoch_of = origin or Origin(), epoch_of
        self._began = self._saved = time.monotonic()
        self._asked: float | None = None
        self._pool = ThreadPoolExecutor(1, "vox-checkpoint")
        self._under_way: _UnderWay | None = None
        self._announced: int | None = None
        self._good = next(iter(numbered(parent)), None)
        self._progress = progress or Progress()
        self._kept_best = self._progress.best_step

    def due(self, step: int) -> bool:
        """Whether to save after `step`. Announces the one before, too, if it is there by now."""
        self.poll()
        settings, now = self._settings, time.monotonic()
        ends_epoch = int(self._epoch_of(step)) > int(self._epoch_of(step - 1))
        due = (
            (settings.save_every and step % settings.save_every == 0)
            or (settings.save_minutes and now - self._saved >= 60 * settings.save_minutes)
            or (settings.save_epochs and ends_epoch)
            or step == self._progress.best_step
        )
        if due:
            self._asked = now
        return bool(due)

    def submit(self, state: TrainState, *, last: bool = False) -> None:
        """Have `state` written: a copy of it, so that training may go on; the `last`, and a whole
        model's, as it is."""
        asked = self._asked or time.monotonic()
        _require_finite(state, self._parent)
        self.settle()
        self._saved, self._asked = time.monotonic(), None
        elapsed = round(self._origin.elapsed + time.monotonic() - self._began, 3)
        epoch, best = self._epoch_of(state.step), self._progress.best_step
        now = {"epoch": epoch, "elapsed": elapsed, **self._progress.saved()}
        origin = self._origin.model_copy(update=now)
        if state.adapter.method == "full":
            work = Future[_Written]()
            try:
                work.set_result(self._write(state, origin, best))
            except StorageError as error:
                work.set_exception(error)
        else:
            owned = state if last else state.copy()
            work = self._pool.submit(self._write, owned, origin, best)
        self._under_way = _UnderWay(state.step, asked, time.monotonic() - asked, work)

    def poll(self) -> None:
        """Announce the checkpoint under way, if it is done."""
        if self._under_way and self._under_way.work.done():
            self.settle()

    def settle(self, *, last: bool = False) -> None:
        """Wait for the checkpoint under way, and announce its outcome.

        Args:
            last: it has to succeed; otherwise a warning says that it could not be written.
        """
        if (done := self._under_way) is None:
            return
        self._under_way = None
        try:
            path, at, warning = done.work.result()
        except StorageError as error:
            if last:
                what = f"the last checkpoint could not be written: {error.what}"
                raise error.but(what=what, faults=[self._last_good()]) from error
            text = f"the checkpoint after step {done.step} could not be written: {error.what}"
            text = f"{text} ({error.found}); training goes on, and {self._last_good()}"
            self._emit(Notice(text, "warning"))
            return
        self._announced, self._good = done.step, path
        seconds, held = round(at - done.asked, 4), round(done.held, 4)
        self._emit(CheckpointWritten(done.step, str(path), seconds, held))
        if warning:
            self._emit(Notice(warning, "warning"))

    def finish(self, state: TrainState) -> None:
        """Write the last checkpoint of the run, and wait for it. If it cannot be written, the
        StorageError names the last good one."""
        self.settle()
        if self._announced != state.step:
            self.submit(state, last=True)
            self.settle(last=True)

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and end the thread."""
        try:
            self.settle()
        finally:
            self._pool.shutdown()

    def _write(self, state: TrainState, origin: Origin, best: int | None) -> _Written:
        path = save(self._parent, state, origin)
        if best is not None and (self._parent / f"step-{best}").is_dir():
            self._kept_best = best  # else the disk was full for it, and the one before stays
        try:
            keep, every = self._settings.keep, self._settings.keep_every
            prune(self._parent, keep, every, self._kept_best)
        except StorageError as error:
            warning = f"an older checkpoint could not be removed: {error.what} ({error.found})"
            return path, time.monotonic(), warning
        return path, time.monotonic(), None

    def _last_good(self) -> str:
        return f"the last good one is {self._good}" if self._good else "there is none yet"


class NoCheckpoints(CheckpointWriter):
    """Writes nothing: the checkpoints of a process that is not rank 0."""

    def due(self, step: int) -> bool:
        return False

    def submit(self, state: TrainState, *, last: bool = False) -> None:
        pass


def _require_finite(state: TrainState, checkpoints: Path) -> None:
    """Refuse to keep NaN or infinite values (T001)."""
    bad = [name for name, value in state.adapter.tensors().items() if not np.isfinite(value).all()]
    if bad:
        raise TrainingError(
            "T001",
            "the trained weights are not finite",
            where=checkpoints,
            found=f"after step {state.step}: {bad[0]}, and {len(bad) - 1} more tensors",
            remedy="go on from the checkpoint before it: "
            + command("vox", "train", "--resume", checkpoints.parent, *LOWER_RATE),
        )
