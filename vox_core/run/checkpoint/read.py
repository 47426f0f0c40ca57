"""Reading a checkpoint back: all of it as it was written, or not at all."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core import disk, files
from vox_core.contract import AdapterState, LowRank, TrainState
from vox_core.errors import ModelError, PlanError, StorageError
from vox_core.run.checkpoint.record import (
    ADAPTER,
    FILES,
    MANIFEST,
    MOMENTS,
    STATE,
    Entry,
    Manifest,
    Origin,
    Record,
    damaged,
    read_json,
    require_plain,
)
from vox_core.run.folder import numbered, step_of
from vox_core.weights import SafetensorsFile

if TYPE_CHECKING:
    from vox_core.contract import Floats


def load_newest(parent: Path) -> tuple[TrainState, list[str]]:
    """The newest checkpoint that verifies, and why newer ones were passed over.

    Those are set aside under another name, so that they neither count nor stand in the way.

    Raises:
        PlanError: P003, none verifies.
        StorageError: a damaged one could not be set aside.
    """
    skipped: list[str] = []
    bad: list[Path] = []
    for folder in numbered(parent):
        try:
            state = load(folder)
        except PlanError as error:
            skipped.append(f"{folder.name}: {error.found}")
            bad.append(folder)
            continue
        for each in bad:
            set_aside(each)
        return state, skipped
    raise PlanError(
        "P003",
        "the run has no checkpoint to go on from",
        where=parent,
        found="none" if not skipped else None,
        faults=skipped,
        remedy="train again, with another --out",
    )


def load(folder: Path) -> TrainState:
    """The state in one checkpoint folder.

    Raises:
        PlanError: P003, it is not what its manifest says, or not a state; `found` says why.
    """
    if why := fault(folder):
        raise damaged(folder, why)
    try:
        return _state(folder)
    except (ModelError, StorageError) as error:
        raise damaged(folder, "; ".join((error.what, *error.faults))) from error


def load_step(parent: Path, step: int) -> TrainState | None:
    """The checkpoint of that step; None if it is not there, or does not verify."""
    try:
        return load(parent / f"step-{step}")
    except PlanError:
        return None


def fault(folder: Path) -> str | None:
    """Why the files are not those that were written; None if they are."""
    try:
        manifest = read_json(folder, MANIFEST, Manifest)
        if surplus := manifest.files.keys() - set(FILES):
            return f"{MANIFEST} names {', '.join(sorted(surplus))}"
        wrong = [why for name in FILES if (why := _wrong(folder / name, manifest.files.get(name)))]
        if wrong:
            return ", ".join(wrong)
        read_record(folder)
    except PlanError as error:
        return error.found
    return None


def read_record(folder: Path) -> Record:
    """What `state.json` says.

    Raises:
        PlanError: P003.
    """
    record = read_json(folder, STATE, Record)
    if record.step != step_of(folder):
        raise damaged(folder, f"{STATE} is of step {record.step}")
    return record


def origin(parent: Path, step: int) -> Origin:
    """What the checkpoint of `step` says of its run; nothing if there is none of that step."""
    folder = parent / f"step-{step}"
    if not folder.exists():
        return Origin()
    record = read_record(folder)
    return Origin(**{field.name: getattr(record, field.name) for field in fields(Origin)})


def set_aside(folder: Path) -> None:
    """Take a damaged checkpoint out of the way, under a name that does not count.

    Raises:
        StorageError: it stays where it is.
    """
    aside = folder.with_name(f"damaged-{folder.name}-{uuid.uuid4().hex[:8]}")
    with files.storage_errors(folder):
        disk.calls.rename(folder, aside)


def _wrong(path: Path, entry: Entry | None) -> str | None:
    """The fault of one file, in words that begin with its name; None if it is whole."""
    if entry is None:
        return f"{path.name} is not in {MANIFEST}"
    try:
        size = require_plain(path).st_size
        if size != entry.size:
            return f"{path.name} has {size} bytes, and {MANIFEST} says {entry.size}"
        with path.open("rb") as file:
            # Not `digests.file_sha256`: its memory of hashes would hide a file that changed.
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None if digest == entry.sha256 else f"{path.name} is not what {MANIFEST} says"


def _state(folder: Path) -> TrainState:
    record = read_record(folder)
    named = _read(folder / ADAPTER)
    if faults := [*_misfits(record, named)]:
        raise damaged(folder, f"{ADAPTER}: {faults[0]}")
    halves = _read(folder / MOMENTS)
    if faults := [*_unpaired(named, halves)]:
        raise damaged(folder, f"{MOMENTS}: {faults[0]}")
    modules = {
        path: LowRank(
            A_RI=named[f"{path}.lora_A.weight"],
            B_OR=named[f"{path}.lora_B.weight"],
            alpha=alpha,
            magnitude_O=named.get(f"{path}.lora_magnitude_vector"),
        )
        for path, alpha in record.alpha.items()
    }
    saved = {name: named[name] for name in record.saved}
    moments = {
        name: (halves[f"{name}.exp_avg"], halves[f"{name}.exp_avg_sq"])
        for name in named
        if f"{name}.exp_avg" in halves
    }
    adapter = AdapterState(record.method, modules, saved)
    return TrainState(record.step, adapter, moments, record.skipped)


def _misfits(record: Record, named: Mapping[str, Floats]) -> Iterator[str]:
    """What the adapter's structure names and its file has not, and the other way round."""
    expected = set(record.saved)
    for path in record.alpha:
        A_RI, B_OR = (named.get(f"{path}.lora_{half}.weight") for half in "AB")
        if A_RI is None or B_OR is None:
            yield f"it has no A and B of {path}"
        elif A_RI.ndim != 2 or B_OR.ndim != 2 or A_RI.shape[0] != B_OR.shape[1]:
            yield f"A {A_RI.shape} and B {B_OR.shape} of {path} do not fit"
        expected |= {f"{path}.lora_A.weight", f"{path}.lora_B.weight"}
        expected.add(f"{path}.lora_magnitude_vector")
    for name in record.saved:
        if name not in named:
            yield f"it has no {name}"
    for name in named.keys() - expected:
        yield f"it has {name}, of which {STATE} says nothing"


def _unpaired(named: Mapping[str, Floats], halves: Mapping[str, Floats]) -> Iterator[str]:
    """Moments that are not those of a tensor, or have lost their other half."""
    for key, value in halves.items():
        name, _, kind = key.rpartition(".")
        other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}.get(kind)
        if name not in named or other is None:
            yield f"{key} is no tensor's"
        elif f"{name}.{other}" not in halves:
            yield f"{name} has no {other}"
        elif value.shape != named[name].shape:
            yield f"{key} is {value.shape}, and the tensor {named[name].shape}"


def _read(path: Path) -> dict[str, Floats]:
    import numpy as np

    file = SafetensorsFile(path)
    return {name: np.array(file.read(name), np.float32) for name in file.tensors}
