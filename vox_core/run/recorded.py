"""What a resume reads of a run's own files, checked before anything is made of it.

Only the keys that are read are looked at: `plan.json` has more, and may have more still.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_core.errors import AdapterError
from vox_core.run.folder import MANIFEST, PLAN, RunFolder

Count = Annotated[int, Field(ge=0)]


class _Json(BaseModel):
    model_config = ConfigDict(strict=True)


class _File(_Json):
    path: str
    sha256: str


class _Contract(_Json):
    total_steps: Count


class _Plan(_Json):
    settings: dict[str, Any]
    contract: _Contract
    digest: str
    dtype: str
    backend: str
    micro_batch_tokens: Count
    tuning: dict[str, Any] = {}
    sources: dict[str, list[_File]] = {}
    changes: list[Any] = []


class _Ended(_Json):
    last_step: Count


def plan_of(run: RunFolder) -> dict[str, Any]:
    """`plan.json`, in which every key that is read is there, and of its type.

    Raises:
        AdapterError: A001.
    """
    return _checked(_Plan, run, PLAN, run.read(PLAN))


def last_step(run: RunFolder) -> int:
    """The step with which a run ended, as its manifest says.

    Raises:
        AdapterError: A001.
    """
    manifest = run.read(MANIFEST)
    # Without `last_step` the adapter is the last step's.
    said = {"last_step": manifest["step"], **manifest} if "step" in manifest else manifest
    return int(_checked(_Ended, run, MANIFEST, said)["last_step"])


def _checked(kind: type[_Json], run: RunFolder, name: str, value: dict[str, Any]) -> dict[str, Any]:
    try:
        kind.model_validate(value)
        return value
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
            for each in error.errors(include_url=False, include_input=False)
        ]
    raise AdapterError(
        "A001",
        "a run's own file does not say what a resume needs",
        where=run.path / name,
        faults=faults,
        expected="the file as `vox train` wrote it",
        remedy="put the file back, or train anew with another --out",
    )
