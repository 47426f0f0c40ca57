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
"""

from __future__ import annotations

import hashlib
import stat
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_core import disk, files
from vox_core.contract import AdapterState, LazyMapping, LowRank, Method, TrainState
from vox_core.errors import ModelError, PlanError, StorageError
from vox_core.run.folder import numbered, step_of
from vox_core.weights import SafetensorsFile
from vox_core.weights.file import safetensors_bytes

if TYPE_CHECKING:
    from vox_core.contract import Floats

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
        valid_digest: of the rows of `validations`, as in the contract.
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
    valid_digest: str | None = None
    skipped_in_a_row: Count = 0


class Record(Origin):
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


class Manifest(_Json):
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
        (first, *_) = error.errors(include_url=False, include_input=False)
        where = ".".join(map(str, first["loc"]))
        raise damaged(folder, f"{name} is not valid: {where}: {first['msg']}") from error


def damaged(folder: Path, why: str) -> PlanError:
    """The error for a checkpoint that cannot be used; `found` says why."""
    return PlanError(
        "P003",
        "a checkpoint is damaged",
        where=folder,
        found=why,
        remedy="go on from an older one: vox train --resume RUN passes over what is damaged",
    )


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


def load_newest(parent: Path) -> tuple[TrainState, list[str]]:
    """The newest checkpoint that verifies, and why newer ones were passed over.

    Those are set aside under another name, so that they neither count nor stand in the way.

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
        for each in skipped:
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


def read_record(folder: Path) -> Record:
    """Read `state.json` alone (P003)."""
    record = read_json(folder, STATE, Record)
    if record.step != step_of(folder):
        raise damaged(folder, f"{STATE} is of step {record.step}")
    return record


def origin(parent: Path, step: int) -> Origin:
    """The origin that the checkpoint of `step` records; an empty one if it does not exist."""
    folder = parent / f"step-{step}"
    return read_record(folder) if folder.exists() else Origin()


def _verified(folder: Path) -> Record:
    manifest = read_json(folder, MANIFEST, Manifest)
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


def _adapter(folder: Path, record: Record, named: Mapping[str, Floats]) -> AdapterState:
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
    import numpy as np

    file = SafetensorsFile(path)
    read = LazyMapping(file.tensors, lambda name: np.asarray(file.read(name), np.float32))
    return read if on_access else {name: value.copy() for name, value in read.items()}


def _set_aside(folder: Path) -> None:
    """Take a damaged checkpoint out of the way, under a name that does not count."""
    aside = folder.with_name(f"damaged-{folder.name}-{uuid.uuid4().hex[:8]}")
    with files.storage_errors(folder):
        disk.calls.rename(folder, aside)


# --- writing ----------------------------------------------------------------------------------


def save(parent: Path, state: TrainState, origin: Origin) -> Path:
    """Write `parent/step-N`, flush it, and read it back. Returns the new folder.

    A step that is there already and verifies is left alone; if it does not, it is set aside.

    Raises:
        StorageError: it could not be written; nothing of it is left.
    """
    folder = parent / f"step-{state.step}"
    with files.storage_errors(folder):
        if not parent.is_dir():
            disk.calls.mkdir(parent)
            files.sync_folder(parent.parent)
        if folder.exists() and fault(folder) is None:
            files.sync_folder(parent)
            return folder
    if folder.exists():
        _set_aside(folder)
    with files.atomic_flat_folder(folder) as temporary:
        _fill(temporary, state, origin)
    if why := fault(folder):
        _set_aside(folder)
        raise StorageError(
            "S002",
            "a checkpoint is not on the disk as it was written",
            where=folder,
            found=why,
            remedy="check the disk; the checkpoints before it are as they were",
        )
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
    record = Record.model_validate({**dict(origin), **more})
    entries = {
        ADAPTER: _write(folder / ADAPTER, _stored(shapes, values.items())),
        MOMENTS: _write(folder / MOMENTS, _stored(of_moments, moments)),
        STATE: _write(folder / STATE, [record.model_dump_json(indent=2).encode()]),
    }
    manifest = Manifest.model_validate({"files": entries})
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


@dataclass(frozen=True, slots=True)
class Retention:
    """Checkpoints to keep: the newest `last`, and every step that `every` divides (0: none)."""

    last: int = 2
    every: int = 0


def prune(parent: Path, retention: Retention, best: int | None = None) -> None:
    """Remove what need not be kept. Only to be called when the newest one has been verified.

    Args:
        best: a step to keep whatever its age.

    Raises:
        StorageError: a checkpoint could not be taken away; none is there in part.
    """
    gone: dict[Path, Path] = {}
    for folder in numbered(parent)[retention.last :]:
        step = step_of(folder)
        if step != best and not (retention.every and step % retention.every == 0):
            gone[folder] = files.temporary_beside(folder)
    if not gone:
        return
    with files.storage_errors(parent):
        for folder, going in gone.items():
            disk.calls.rename(folder, going)
        files.sync_folder(parent)
    for going in gone.values():
        files.remove(going)
