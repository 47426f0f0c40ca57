"""What the JSON files of a checkpoint say, and nothing that they don't.

Whatever is read is checked field by field, within limits on its size; what is wrong is an error
of vox's own. Names in a manifest are compared with the three that there are, never opened.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_core.contract import Method
from vox_core.errors import PlanError

ADAPTER = "adapter.safetensors"
MOMENTS = "moments.safetensors"
STATE = "state.json"
MANIFEST = "MANIFEST.json"
FILES = (ADAPTER, MOMENTS, STATE)

FORMAT: Final = "vox-checkpoint/2"
# A thousand times what the manifest has, and ten what the largest model's structure would take.
LARGEST = {MANIFEST: 1 << 20, STATE: 1 << 26}

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class _Json(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class BackendUse(_Json):
    """A backend, and the first step that it took."""

    first_step: Count
    backend: str
    device: str
    dtype: str


class Entry(_Json):
    """A file as it was written."""

    size: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(_Json):
    """`MANIFEST.json`."""

    format: Literal["vox-checkpoint/2"] = FORMAT
    files: dict[str, Entry]


class Record(_Json):
    """`state.json`.

    Args:
        skipped: steps that were not applied, their loss or gradient not being finite.
        epoch: passes over the data that are done, as a fraction.
        backends: that worked on the run, in order.
        losses: of the steps that were applied, in order; None where not finite.
        validations: (step, loss), step 0 before training.
        valid_digest: of the rows that `validations` are of, as the contract has it.
        elapsed: seconds of training up to here, over every resume.
        alpha: module path -> its alpha.
        saved: parameters that are trained whole.

    The data cursor is `step`, and the random generators are functions of `seed`, step and
    micro-batch: there is no more of them to keep.
    """

    format: Literal["vox-checkpoint/2"] = FORMAT
    step: Count
    skipped: Count
    epoch: Annotated[float, Field(ge=0)]
    elapsed: Seconds
    seed: Count
    contract: str
    backends: tuple[BackendUse, ...]
    versions: dict[str, str]
    losses: tuple[float | None, ...]
    validations: tuple[tuple[Count, float | None], ...]
    valid_digest: str | None
    method: Method
    alpha: dict[str, float]
    saved: list[str]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a checkpoint says of the run that it is from, beside its state; see `Record`."""

    contract: str = ""
    backends: tuple[BackendUse, ...] = ()
    seed: int = 0
    epoch: float = 0.0
    elapsed: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    losses: tuple[float | None, ...] = ()
    validations: tuple[tuple[int, float | None], ...] = ()
    valid_digest: str | None = None


def damaged(folder: Path, why: str) -> PlanError:
    """The error for a checkpoint that cannot be used; `found` says why."""
    return PlanError(
        "P003",
        "a checkpoint is damaged",
        where=folder,
        found=why,
        remedy="go on from an older one: vox train --resume RUN passes over what is damaged",
    )


J = TypeVar("J", bound=_Json)


def read_json(folder: Path, name: str, kind: type[J]) -> J:
    """The file `name` of a checkpoint.

    Raises:
        PlanError: P003, it is missing, too large, or not what its kind says.
    """
    try:
        content = read_limited(folder / name, LARGEST[name])
        if not content.endswith(b"\n"):
            raise damaged(folder, f"{name} has no end")
        return kind.model_validate_json(content)
    except OSError as error:
        raise damaged(folder, f"{name} {_what(error)}") from error
    except ValidationError as error:
        raise damaged(folder, f"{name} {_first_of(error)}") from error


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a plain file, no link, of no more than `limit` bytes.

    Raises:
        OSError: it is another kind of file, or larger, or cannot be read.
    """
    require_plain(path)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(0, f"has more than {limit} bytes")
    return content


def require_plain(path: Path) -> os.stat_result:
    """The file's status. Raises OSError where it is a link, a folder or a device."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "is not a plain file")
    return status


def _what(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return str(error.strerror) if not error.errno else f"cannot be read: {error.strerror}"


def _first_of(error: ValidationError) -> str:
    (first, *_) = error.errors(include_url=False, include_input=False)
    where = ".".join(map(str, first["loc"]))
    return f"is not valid: {f'{where}: ' if where else ''}{first['msg']}"
